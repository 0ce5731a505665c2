"""Register layouts: the 4 x 4 exchange that turns accumulator pairs into 16-byte rows."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def store_rows(
    values: cute.Tensor, line: cute.Tensor, lane: Int32, inside, columns: Int32 | None = None
) -> None:
    """Store one accumulator row that four lanes hold, 16 bytes per lane and step.

    `values` (2, vectors) 16-bit: columns 8 v + 2 (lane % 4) + e of the row, v < vectors (a multiple of 4), in
    registers; `line` (columns,): the row, contiguous, 16-byte aligned. All lanes of the warp must call;
    `inside` false: the row does not exist and is not written; `columns`: so many exist, if not all. Lane q of
    four ends up with the whole vectors q, q + 4, ...; the pairs change hands in two butterfly rounds (lanes 1
    apart, then 2 apart).
    """
    words = transposed_words(values, lane)
    if inside:
        for step in cutlass.range_constexpr(cute.size(values) // 8):
            target = cute.local_tile(line, (8,), (4 * step + lane % 4,))
            source = cute.recast_tensor(words[None, step], values.element_type)
            if cutlass.const_expr(columns is None):
                cute.autovec_copy(source, target)
            else:
                if 8 * (4 * step + lane % 4) < columns:
                    cute.autovec_copy(source, target)


def converted_rows(values, vectors: int, dtype):
    """(2, vectors) values, converted, in registers as `store_rows` takes them: rounded up to whole fours of
    vectors. Those that are too many are 0, and not stored."""
    rows = cute.make_rmem_tensor((2, -(-vectors // 4) * 4), dtype)
    there = rows
    if vectors % 4:
        rows.fill(0.0)
        there = cute.make_tensor(rows.iterator, cute.make_layout((2, vectors)))
    there.store(values.to(dtype))
    return rows


def columns_from(config, tensor, first, wanted: int) -> Int32 | None:
    """How many of `wanted` columns from `first` on a (B, S, H, D) tensor has, for `store_rows`; None where it
    has them all and these are whole fours of vectors."""
    there = tensor.shape[3] - first if config.padded else None
    if wanted % 32 == 0:
        return there
    return Int32(wanted) if there is None else cutlass.min(there, wanted)


@cute.jit
def transposed_words(values: cute.Tensor, lane: Int32):
    """Exchange among four lanes: word (v % 4) of lane q becomes word q of lane v % 4.

    Returns (4, vectors / 4) words.
    """
    words = cute.make_rmem_tensor((4, cute.size(values) // 8), Int32)
    source = cute.recast_tensor(values, Int32)
    words.store(source.load().reshape(words.shape))
    for distance in cutlass.range_constexpr(1, 3):
        upper = (lane & distance) != 0
        for step in cutlass.range_constexpr(cute.size(words) // 4):
            for i in cutlass.range_constexpr(4):
                if cutlass.const_expr(i & distance == 0):
                    low, high = words[i, step], words[i + distance, step]
                    other = cute.arch.shuffle_sync_bfly(low if upper else high, offset=distance)
                    words[i, step] = other if upper else low
                    words[i + distance, step] = high if upper else other
    return words

"""The kernel that folds segments of keys which programs of the forward left apart."""

import triton
import triton.language as tl

from .cached_parts import load_group_head, store_group_head
from .forward_parts import LOG2E, folded, lse_of, output_of, tile_of, with_sink
from .parts import row_interval, zeros


@triton.jit(
    do_not_specialize=[
        "sums_batch", "sums_row", "sums_head", "out_batch", "out_row", "out_head", "lse_batch", "lse_head",
        "parts", "tiles", "group", "left", "right", "batch", "seqlen_cached", "total_q", "room",
    ]
)  # fmt: skip
def fold_segments_kernel(
    sums, stats, out, lse, sink, table, lengths, bounds,
    sums_batch, sums_row, sums_head, out_batch, out_row, out_head, lse_batch, lse_head,
    parts, tiles, group, left, right, rescale, batch, seqlen_cached, total_q, room,
    SINK: tl.constexpr, DROPOUT: tl.constexpr, CACHED: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, REST_DV: tl.constexpr,
    TILE_ROWS: tl.constexpr, ROWS: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """A program per ROWS rows of a tile of ``forward_kernel``, whose arguments have their names there.

    ``sums``: what it left at ``out``; ``stats``: at ``lse``; ``parts``: segments that rows have room for.
    Segments are counted as there, from the first one that a row of the tile sees.
    """
    head = (tl.program_id(0) // tiles).to(tl.int64)
    _, batch_q, start_q, _, _, seqlen_q, seqlen_k, diagonal, top = tile_of(
        tl.program_id(0) % tiles, table, lengths, bounds, batch, seqlen_cached, total_q, room, group,
        CACHED, TILE_ROWS,
    )  # fmt: skip
    of_tile = top + tl.arange(0, TILE_ROWS)
    rows = top + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    heads = head
    if CACHED:
        of_tile = of_tile // group
        heads = head * group + rows % group
        rows = rows // group
    there = rows < seqlen_q
    first, last = row_interval(of_tile, diagonal, seqlen_q, seqlen_k, left, right)
    segments = (tl.max(last, 0) + SEGMENT) // SEGMENT - tl.min(first, 0) // SEGMENT

    at = batch_q * lse_batch + heads * lse_head + start_q + rows
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = zeros(ROWS, BLOCK_DV, REST_DV)
    place = stats + at * parts * 2
    sums += batch_q * sums_batch * 8 + start_q * sums_row * 8
    for _ in range(segments):
        m = tl.load(place, mask=there, other=float("-inf"))
        total_here = tl.load(place + 1, mask=there, other=0.0)
        here = load_group_head(sums, sums_row, sums_head, rows, heads, there, HEAD_DIM_V, BLOCK_DV, REST_DV)
        maximum, total, acc = folded(maximum, total, acc, m, total_here, here, REST_DV)
        place += 2
        sums += HEAD_DIM_V
    if SINK:
        maximum, total, acc = with_sink(maximum, total, acc, tl.load(sink + heads) * LOG2E, REST_DV)
    tl.store(lse + at, lse_of(maximum, total), mask=there)
    acc = output_of(acc, total, rescale, DROPOUT, ROWS, BLOCK_DV, REST_DV)
    out += batch_q * out_batch * 8 + start_q * out_row * 8
    store_group_head(out, out_row, out_head, rows, heads, there, acc, HEAD_DIM_V, BLOCK_DV, REST_DV)

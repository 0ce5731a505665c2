"""The kernel after the main one, where tiles were split: folds what was left of their segments."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ..device import registers
from ..device.operands import DTYPES
from .config import ROWS
from .exact import folded, inverse, lse_of, row_sum, weights, with_sink, without_sign
from .table import ENTRY_WORDS


class Fold:
    """One block per split tile and q head, with the threads that the tile has in the main kernel."""

    def __init__(self, config):
        self.config = config
        self.dtype = DTYPES[config.dtype]

    @cute.jit
    def __call__(self, memory, launch, stream):
        """`memory`: out, lse, table, partial and sink."""
        self.kernel(*memory, launch.entries).launch(
            grid=(launch.folds, memory[0].shape[2], 1),
            block=(128 * self.config.warpgroups, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, mOut, mLse, table, partial, sink, entries: Int32) -> None:
        c = self.config
        cute.arch.griddepcontrol_wait()
        index, q_head, _ = cute.arch.block_idx()
        tidx, group = cute.arch.thread_idx()[0] % 128, cute.arch.thread_idx()[0] // 128
        batches = mOut.shape[0]
        record = (entries + index) * ENTRY_WORDS
        sequence, q_tile, first, segments, seqlen_q, _, row_first, _ = (
            table[record + i] for i in range(ENTRY_WORDS)
        )
        batch = sequence
        if batches == 1:
            batch = Int32(0)
        else:
            row_first = Int32(0)
        if q_tile * c.tile_m + ROWS * group < seqlen_q:
            place = (batch, row_first, seqlen_q, q_tile, q_head)
            self.fold((mOut, mLse, sink), partial, (first, segments), group, tidx, place)

    @cute.jit
    def fold(self, tensors, partial, parts, group: Int32, tidx: Int32, place) -> None:
        """Fold the rows of a warpgroup."""
        (mOut, _, _), (first, segments), c = tensors, parts, self.config
        heads = mOut.shape[2]
        q_head = place[-1]
        vectors = ROWS * c.head_dim_v // 512
        values = cute.make_rmem_tensor((4, vectors), Float32)
        after = cute.make_rmem_tensor((4, vectors), Float32)
        numbers, fresh = (cute.make_rmem_tensor(4, Float32) for _ in range(2))
        left, right = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        source = self._source(partial, first * heads + q_head, group, tidx)
        self._load(source, values, 0, vectors)
        cute.autovec_copy(source[None, vectors], numbers)
        for s in cutlass.range(1, segments, unroll=1):
            source = self._source(partial, (first + s) * heads + q_head, group, tidx)
            if const_expr(c.head_dim_v <= 128):
                self._load(source, after, 0, vectors)
            cute.autovec_copy(source[None, vectors], fresh)
            for half in cutlass.range_constexpr(2):
                numbers[half], left[half], right[half] = weights(numbers[half], fresh[half])
                numbers[2 + half] = folded(numbers[2 + half], left[half], fresh[2 + half], right[half])
            for v in cutlass.range_constexpr(vectors):
                if const_expr(c.head_dim_v > 128 and v % 8 == 0):
                    cute.arch.sync_warp()  # ptxas moves no load across: registers do not hold all of them
                    self._load(source, after, v, v + 8)
                for e in cutlass.range_constexpr(4):
                    values[e, v] = folded(values[e, v], left[e // 2], after[e, v], right[e // 2])
        self.finish(tensors, numbers, values, group, tidx, place)

    @cute.jit
    def finish(
        self, tensors, numbers, values, group: Int32, tidx: Int32, place, part: Int32 | None = None
    ) -> None:
        """Divide, and write out and LSE; with `part` so many columns of it as there are values, and no LSE if
        it is not the first one."""
        (mOut, mLse, sink), c, lane = tensors, self.config, tidx % 32
        batch, row_first, seqlen_q, q_tile, q_head = place
        vectors = cute.size(values) // 4
        for half in cutlass.range_constexpr(2):
            maximum, total, factor = numbers[half], row_sum(numbers[2 + half]), Float32(1.0)
            if const_expr(c.sink):
                score = self._sink_of(sink, q_head, q_tile * c.tile_m + ROWS * group, tidx, half)
                maximum, total, factor = with_sink(maximum, total, score)
            row = q_tile * c.tile_m + ROWS * group + tidx // 32 * 16 + lane // 4 + 8 * half
            empty, lse = total == Float32(0.0), lse_of(maximum, total)
            writes = (lane % 4 == 0) & (row < seqlen_q)
            if const_expr(part is not None):
                writes = writes & (part == 0)
            if writes:
                mLse[batch, q_head, row_first + row] = cutlass.select_(empty, -Float32.inf, lse)
            factor = factor * inverse(total)
            row_values = cute.make_rmem_tensor((2, vectors), Float32)
            for v in cutlass.range_constexpr(vectors):
                for e in cutlass.range_constexpr(2):
                    row_values[e, v] = without_sign(values[2 * half + e, v], factor)
            converted = registers.converted_rows(row_values.load(), vectors, self.dtype)
            line = mOut[batch, row_first + row, q_head, None]
            if const_expr(part is None):
                registers.store_rows(converted, line, lane, row < seqlen_q, mOut.shape[3])
            else:
                line = cute.local_tile(line, (8 * vectors,), (part,))
                registers.store_rows(converted, line, lane, row < seqlen_q)

    def _sink_of(self, sink, q_head: Int32, top: Int32, tidx: Int32, half):
        """The sink of one of a thread's two rows."""
        return sink[q_head]

    def _source(self, partial, place: Int32, group: Int32, tidx: Int32):
        """What a segment has left of this thread's rows, (4, vectors): O, then maxima and sums."""
        c = self.config
        start = (Int64(place) * c.warpgroups + group) * c.partial_words + tidx * 4
        layout = cute.make_layout((4, ROWS * c.head_dim_v // 512 + 1), stride=(1, 512))
        return cute.make_tensor(partial.iterator + cute.assume(start, divby=4), layout)

    @cute.jit
    def _load(self, source, values, begin: cutlass.Constexpr[int], end: cutlass.Constexpr[int]) -> None:
        for v in cutlass.range_constexpr(begin, end):
            cute.autovec_copy(source[None, v], cute.make_tensor(values.iterator + 4 * v, 4))

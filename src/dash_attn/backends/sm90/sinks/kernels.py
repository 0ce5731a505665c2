"""dsink = -sum over rows of exp(sink - lse) delta, in the order that docs/bit-contract.md states.

`SinkParts` sums the rows of each sequence and head, `SinkTotals` the sequences. LSE and delta are what the
kernel before the backward has left, in the places of dQ tiles: rows of a sequence and head follow each other.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from ....schedule.layout import HEADER
from ..device import plan_view

WARPS = 8


class SinkParts:
    """One block per sequence and head. Its warps take tiles of rows, a tile each at a time.

    ``adds``: to the sums of earlier rows.
    """

    def __init__(self, rows: int, adds: bool):
        self.rows, self.adds = rows, adds

    @cute.jit
    def __call__(self, arguments, stream):
        heads = arguments.sink.shape[0]
        self.kernel(arguments).launch(
            grid=(arguments.sequences, heads, 1), block=(32 * WARPS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, arguments) -> None:
        @cute.struct
        class Storage:
            sums: cute.struct.MemRange[Float32, WARPS]

        sums = SmemAllocator().allocate(Storage).sums.get_tensor(cute.make_layout(WARPS))
        cute.arch.griddepcontrol_wait()
        table, warp, lane = arguments.table, cute.arch.warp_idx(), cute.arch.lane_idx()
        sequence, head, _ = cute.arch.block_idx()
        seq = plan_view.read_sequence(table, table[HEADER.sequence_offset], sequence)
        first_tile = seq.q_tile_first * table[HEADER.heads] + head * seq.q_tile_count
        base = Int64(first_tile) * table[HEADER.tile_m]
        sink2, total = arguments.sink[head] * math.log2(math.e), Float32(0.0)
        place = sequence * arguments.sink.shape[0] + head
        if const_expr(self.adds):
            total = arguments.parts[place]
        tiles = (seq.seqlen_q + self.rows - 1) // self.rows
        for begin in cutlass.range(0, tiles, WARPS, unroll=1):
            part = self._tile(arguments, sink2, base, (begin + warp) * self.rows + lane, seq.seqlen_q)
            if lane == 0:
                sums[warp] = part
            cute.arch.sync_threads()
            for n in cutlass.range_constexpr(WARPS):
                if begin + n < tiles:
                    total = total + sums[n]
            cute.arch.sync_threads()
        if cute.arch.thread_idx()[0] == 0:
            arguments.parts[place] = total

    def _tile(self, arguments, sink2, base, row: Int32, rows: Int32):
        """The sum of a tile in lane 0: its second half is added to its first one, and so on."""
        values = [self._value(arguments, sink2, base, row + 32 * n, rows) for n in range(self.rows // 32)]
        while len(values) > 1:
            half = len(values) // 2
            values = [a + b for a, b in zip(values[:half], values[half:])]
        total = values[0]
        for distance in (16, 8, 4, 2, 1):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=distance)
        return total

    @cute.jit
    def _value(self, arguments, sink2, base, row: Int32, rows: Int32) -> Float32:
        """What a row adds; the delta that is kept is negative."""
        value = Float32(0.0)
        if row < rows:
            exponent = sink2 - arguments.lse2[base + row]
            if exponent > 1.0:  # of a large sink lse may be rounded to so much less that exp2 would overflow
                exponent = Float32(1.0)
            value = cute.math.exp2(exponent, fastmath=True) * arguments.delta[base + row]
        return value


class SinkTotals:
    """One thread per head."""

    THREADS = 128

    @cute.jit
    def __call__(self, arguments, stream):
        blocks = (arguments.dsink.shape[0] + self.THREADS - 1) // self.THREADS
        self.kernel(arguments).launch(
            grid=(blocks, 1, 1), block=(self.THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, arguments) -> None:
        cute.arch.griddepcontrol_wait()
        heads = arguments.dsink.shape[0]
        head = cute.arch.block_idx()[0] * self.THREADS + cute.arch.thread_idx()[0]
        if head < heads:
            total = Float32(0.0)
            for sequence in cutlass.range(arguments.sequences, unroll=1):
                total = total + arguments.parts[sequence * heads + head]
            arguments.dsink[head] = total

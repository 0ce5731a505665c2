"""The kernel before the main one: row statistics, counters, empty dQ tiles."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from ....schedule.layout import HEADER
from . import finish
from .arguments import BeforeMemory, Launch, Tensors, Workspace
from .config import ARRIVED, CLAIMED, CONTROL_WORDS, FINISHED, TAKEN, BackwardConfig

THREADS = 256


def lanes_of(columns: int) -> int:
    """Threads per row, 16 bytes each: a power of 2, whose sums are those of a padded row.

    >>> lanes_of(64), lanes_of(96), lanes_of(128)
    (8, 16, 16)
    """
    return 1 << (columns // 8 - 1).bit_length()


class Preprocess:
    """Row statistics (delta = -rowsum(O dO), the value dP starts from, and base-2 LSE), counters and queue.

    One block per q tile and head, or per two of them (`BackwardConfig.tiles_before`). Zeroes dQ where nobody
    contributes (`everywhere`: there is no such tile). Without order, zeroes fp32 dQ. Rows beyond the sequence
    and rows without visible keys get lse2 = +inf, so that P is exactly 0 there. Contributions that are apart
    need row statistics only.
    """

    def __init__(self, config: BackwardConfig):
        self.config = config
        self.tiles = config.tiles_before

    @cute.jit
    def __call__(self, tensors: Tensors, workspace: Workspace, launch: Launch, stream):
        heads = tensors.out.shape[2]
        everywhere = launch.complete == launch.q_tiles * heads
        named = tensors._asdict() | workspace._asdict()
        self.kernel(BeforeMemory(*[named[name] for name in BeforeMemory._fields]), everywhere).launch(
            grid=((launch.q_tiles + self.tiles - 1) // self.tiles, heads, 1),
            block=(THREADS * self.tiles, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, memory: BeforeMemory, everywhere: Boolean) -> None:
        cute.arch.griddepcontrol_wait()
        # Blocks of the main kernel may come as soon as these leave. They wait for all that is written here.
        cute.arch.griddepcontrol_launch_dependents()
        index, q_head, _ = cute.arch.block_idx()
        tidx = cute.arch.thread_idx()[0]
        if const_expr(self.tiles > 1):
            index = index * self.tiles + tidx // THREADS
            if index < memory.table[HEADER.q_tile_total]:
                self._tile(memory, everywhere, index, q_head, tidx % THREADS)
        else:
            self._tile(memory, everywhere, index, q_head, tidx)

    @cute.jit
    def _tile(
        self, memory: BeforeMemory, everywhere: Boolean, index: Int32, q_head: Int32, tidx: Int32
    ) -> None:
        c, table = self.config, memory.table
        mO, mdO, mLse, mLse2, mDelta = memory.out, memory.dout, memory.lse, memory.lse2, memory.delta
        mdQ, control = memory.dq, memory.control
        if const_expr(not c.apart):
            if (tidx == 0) & (index + q_head == 0):
                for counter in (CLAIMED, ARRIVED, FINISHED, TAKEN):
                    control[counter] = Int32(0)
        key = index * mO.shape[2] + q_head
        tile, where = finish.locate(c, table, table[HEADER.q_map_offset], key, mO)
        batch, first, seqlen_q, q_tile, _ = where
        if const_expr(not c.apart):
            if tidx == 0:
                control[CONTROL_WORDS + tile] = Int32(0)
                finish.clear(control, table, tile)
        if const_expr(c.intervals):
            seen = memory.intervals.seen
            for n in cutlass.range((seen.shape[1] + THREADS - 1) // THREADS, unroll=1):
                if n * THREADS + tidx < seen.shape[1]:
                    seen[tile, n * THREADS + tidx] = Int32(0)
        stat = Int64(tile) * c.tile_m
        if tidx < c.tile_m:
            row = q_tile * c.tile_m + tidx
            value = Float32.inf
            if row < seqlen_q:
                natural = mLse[batch, q_head, first + row]
                if natural != -Float32.inf:
                    value = natural * math.log2(math.e)
            mLse2[stat + tidx] = value
        lanes = lanes_of(c.head_dim_v)
        rows = THREADS // lanes
        # All loads first: a block has them in flight together. Rows beyond the sequence repeat its last one.
        left, right = [], []
        for n in cutlass.range_constexpr(c.tile_m // rows):
            row = q_tile * c.tile_m + n * rows + tidx // lanes
            row = first + (row if row < seqlen_q else seqlen_q - 1)
            left.append(self._chunk(mO[batch, row, q_head, None], tidx % lanes, mO.shape[3]))
            right.append(self._chunk(mdO[batch, row, q_head, None], tidx % lanes, mO.shape[3]))
        for n in cutlass.range_constexpr(c.tile_m // rows):
            local = n * rows + tidx // lanes
            product = left[n].to(Float32) * right[n].to(Float32)
            total = product.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            total = cute.arch.warp_reduction(total, lambda x, y: x + y, threads_in_group=lanes)
            if tidx % lanes == 0:
                inside = q_tile * c.tile_m + local < seqlen_q
                mDelta[stat + local] = -total if inside else Float32(0.0)
        if const_expr(c.waits):
            here = everywhere
            if not everywhere:
                here = finish.contributions(table, index) > 0
            if not here:
                # Nobody will write, queue or convert this tile.
                chunks = c.head_dim // 8
                if const_expr(THREADS % chunks == 0):
                    for n in cutlass.range_constexpr(c.tile_m * chunks // THREADS):
                        row = n * (THREADS // chunks) + tidx // chunks
                        self._store_zeros(mdQ, where, q_head, row, tidx % chunks)
                else:
                    for n in cutlass.range(-(-c.tile_m * chunks // THREADS), unroll=1):
                        index = n * THREADS + tidx
                        row = index // chunks
                        if const_expr(c.tile_m * chunks % THREADS != 0):  # rows behind the tile are others'
                            row = row if row < c.tile_m else Int32(1 << 30)
                        self._store_zeros(mdQ, where, q_head, row, index % chunks)
        if const_expr(not c.ordered):
            acc = cute.make_tensor(
                memory.dq_acc.iterator + Int64(tile) * c.dq_elements, cute.make_layout(c.dq_elements)
            )
            if const_expr(c.dq_elements < 64 * THREADS):
                for n in cutlass.range_constexpr(c.dq_elements // THREADS):
                    acc[n * THREADS + tidx] = Float32(0.0)
            else:  # the compiler warns of so long a text
                for n in cutlass.range(c.dq_elements // THREADS, unroll=8):
                    acc[n * THREADS + tidx] = Float32(0.0)

    @cute.jit
    def _store_zeros(self, mdQ, where, q_head, local, chunk) -> None:
        """Zeros for 8 columns of a row of the q tile, if they exist."""
        batch, first, seqlen_q, q_tile, _ = where
        row = q_tile * self.config.tile_m + local
        if (row < seqlen_q) & (chunk * 8 < mdQ.shape[3]):
            line = cute.local_tile(mdQ[batch, first + row, q_head, None], (8,), (chunk,))
            line.store(cute.zeros_like(line))

    @cute.jit
    def _chunk(self, line, index, columns):
        """Columns 8 index to 8 index + 7 of a row; zeros where the row has fewer."""
        values = cute.make_rmem_tensor(8, line.element_type)
        source = cute.local_tile(line, (8,), (index,))
        c = self.config
        if const_expr(not c.padded and lanes_of(c.head_dim_v) == c.head_dim_v // 8):
            cute.autovec_copy(source, values)
        else:
            values.fill(0.0)
            if 8 * index < columns:
                cute.autovec_copy(source, values)
        return values.load()

"""Kernels before and after the main one: row statistics and counters, and the conversion of fp32 dQ."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from . import plan_view, registers
from .config import CONTROL_WORDS, BackwardConfig

THREADS = 256


class Preprocess:
    """delta = -rowsum(O dO) (the value dP starts from), base-2 LSE, tickets and claim counter reset.

    Tensors: o, do (B, Sq, H, D); lse (B, H, Sq) fp32, natural logarithm; lse2, delta fp32, tile_m values a dQ tile, in
    tile-index order. Rows beyond the sequence and rows without visible keys get lse2 = +inf, so that P is exactly 0 there.
    """

    def __init__(self, config: BackwardConfig):
        self.config = config

    @cute.jit
    def __call__(self, o, do, lse, lse2, delta, dq_acc, plan, control, grid, stream):
        self.kernel(o, do, lse, lse2, delta, dq_acc, plan, control).launch(
            grid=grid, block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, mO: cute.Tensor, mdO: cute.Tensor, mLse: cute.Tensor, mLse2: cute.Tensor, mDelta: cute.Tensor,
        mdQacc: cute.Tensor, mPlan: cute.Tensor, mControl: cute.Tensor,
    ):  # fmt: skip
        c = self.config
        q_tile, q_head, sequence = cute.arch.block_idx()
        tidx = cute.arch.thread_idx()[0]
        if (tidx == 0) & (q_tile + q_head + sequence == 0):
            mControl[0] = Int32(0)
        seq = plan_view.read_sequence(mPlan, mPlan[plan_view.SEQUENCE_OFFSET], sequence)
        if q_tile < seq.q_tile_count:
            tile = seq.q_tile_first * mPlan[plan_view.HEADS] + q_head * seq.q_tile_count + q_tile
            if tidx == 0:
                mControl[CONTROL_WORDS + tile * c.ticket_stride] = Int32(0)
            stat = Int64(tile) * c.tile_m
            if tidx < c.tile_m:
                row = q_tile * c.tile_m + tidx
                value = Float32.inf
                if row < seq.seqlen_q:
                    natural = mLse[sequence, q_head, row]
                    if natural != -Float32.inf:
                        value = natural * math.log2(math.e)
                mLse2[stat + tidx] = value
            lanes = c.head_dim // 8  # threads a row, 16 bytes each
            rows = THREADS // lanes
            # All loads first, so that a block has them in flight together; rows beyond the sequence repeat its last one.
            left, right = [], []
            for n in cutlass.range_constexpr(c.tile_m // rows):
                row = q_tile * c.tile_m + n * rows + tidx // lanes
                row = row if row < seq.seqlen_q else seq.seqlen_q - 1
                left.append(self._chunk(mO[sequence, row, q_head, None], tidx % lanes))
                right.append(self._chunk(mdO[sequence, row, q_head, None], tidx % lanes))
            for n in cutlass.range_constexpr(c.tile_m // rows):
                local = n * rows + tidx // lanes
                product = left[n].to(Float32) * right[n].to(Float32)
                total = product.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
                total = cute.arch.warp_reduction(total, lambda x, y: x + y, threads_in_group=lanes)
                if tidx % lanes == 0:
                    inside = q_tile * c.tile_m + local < seq.seqlen_q
                    mDelta[stat + local] = -total if inside else Float32(0.0)
            if const_expr(not c.ordered):
                acc = cute.make_tensor(
                    mdQacc.iterator + Int64(tile) * c.dq_elements, cute.make_layout(c.dq_elements)
                )
                for n in cutlass.range_constexpr(c.dq_elements // THREADS):
                    acc[n * THREADS + tidx] = Float32(0.0)

    def _chunk(self, line, index):
        return cute.local_tile(line, (8,), (index,)).load()


class Convert:
    """dQ = softmax scale * fp32 dQ, in the output dtype; tiles that nobody contributes to become zero."""

    def __init__(self, config: BackwardConfig):
        self.config = config

    @cute.jit
    def __call__(self, dq_acc, dq, plan, scale, grid, stream):
        self.kernel(dq_acc, dq, plan, scale).launch(
            grid=grid, block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, mdQacc: cute.Tensor, mdQ: cute.Tensor, mPlan: cute.Tensor, scale: Float32):
        c = self.config
        q_tile, q_head, sequence = cute.arch.block_idx()
        tidx = cute.arch.thread_idx()[0]
        seq = plan_view.read_sequence(mPlan, mPlan[plan_view.SEQUENCE_OFFSET], sequence)
        cute.arch.griddepcontrol_wait()
        if q_tile < seq.q_tile_count:
            tile = seq.q_tile_first * mPlan[plan_view.HEADS] + q_head * seq.q_tile_count + q_tile
            missing = Boolean(False)
            if const_expr(c.ordered):
                missing = mPlan[seq.total_first + q_tile] == 0  # then nobody has written the fp32 tile either
            vectors = c.dq_elements // 1024
            layout = cute.make_layout((4, 128, vectors, 2), stride=(1, 4, 512, 512 * vectors))
            acc = cute.make_tensor(mdQacc.iterator + Int64(tile) * c.dq_elements, layout)
            # Each of the eight warps takes the rows of one MMA warp: the same values in the same lanes.
            group, lane = tidx // 128, tidx % 32
            mine = cute.make_rmem_tensor((2, 2, vectors), Float32)
            for v in cutlass.range_constexpr(vectors):
                cute.autovec_copy(
                    acc[None, tidx % 128, v, group], cute.make_tensor(mine[None, None, v].iterator, 4)
                )
            first = tidx % 128 // 32 * 16 + lane // 4
            first_column = 0
            if const_expr(c.tile_m == 64):
                first_column = group * (c.head_dim // 2)
            else:
                first += group * 64
            for half in cutlass.range_constexpr(2):
                values = cute.make_rmem_tensor((2, vectors), mdQ.element_type)
                for v in cutlass.range_constexpr(vectors):
                    pair = mine[None, half, v].load() * scale
                    values[None, v].store(pair.to(mdQ.element_type))
                words = cute.recast_tensor(values, Int32)
                for i in cutlass.range_constexpr(cute.size(words)):
                    words[i] = Int32(0) if missing else words[i]
                row = q_tile * c.tile_m + first + 8 * half
                line = mdQ[sequence, row, q_head, None]
                part = cute.local_tile(line, (8 * vectors,), (first_column // (8 * vectors),))
                registers.store_rows(values, part, lane, row < seq.seqlen_q)

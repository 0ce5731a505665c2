"""The MMA warpgroups where dK and dV of 64 keys have 256 columns each: each warpgroup has half of these.

A thread then holds 128 registers of dK and dV, as at head dim 128. S^T and dP^T of 64 x 64 are made in halves
of 32 queries. Every warpgroup needs all of P and dS for its columns, so both travel through shared memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ..device import plan_view, ptx
from ..device.operands import as_operand_a, multiply, transposed
from ..device.ring import arrive
from . import reduce
from .config import DS_BARRIER, MMA_WARPGROUPS, V_BARRIER
from .mma import MmaRole


class SplitColumns(MmaRole):
    def _fragments(self, products, shared, numbers, tidx):
        """tGrT: P^T or dS^T, by stage of dS, as an operand of dV or dK."""
        t = super()._fragments(products, shared, numbers, tidx)
        grads = products.grads.get_slice(t.group * 128)
        t.tGrT = grads.make_fragment_A(grads.partition_A(transposed(shared.ds)))
        return t

    def _column_view(self, stat, lane):
        """Of the 32 queries of this warpgroup."""
        tile_m, stages = stat.shape
        layout = cute.make_layout((2, 4, tile_m // 16, stages), stride=(1, 2, 8, tile_m))
        return cute.make_tensor(stat.iterator + 32 * self._group(), layout)[None, lane % 4, None, None]

    def _group(self):
        return self._mma_thread() // 128

    def _first_row(self):
        tidx = self._mma_thread() % 128
        return tidx // 32 * 16 + tidx % 32 // 4

    def _first_column(self):
        return ptx.thread_index() % 4 * 2 + 32 * self._group()

    @cute.jit
    def task(self, t, n_task: Int32, first: Int32, rings, slot, is_last: cutlass.Constexpr[bool]):
        """One (kv tile, q tile).

        Expects S^T in acc_S, and leaves the next task's there unless it is the last.
        Tensor-core order: dP, dV, dQ, dK, next S; exp2 and P's trip through shared memory beside dP, dS and
        its trip beside dV, the dQ write-out beside dK and the next S. `first` is of no use here.
        """
        q_stage, do_stage = rings.q.stage(n_task), rings.dout.stage(n_task)
        of_p, of_ds = 2 * n_task, 2 * n_task + 1  # uses of the buffers of dS: P has the first one
        rings.dout.wait_full(n_task)
        acc_dP = self.start_dp(t, do_stage)
        p = self.p(t, q_stage)
        rings.ds.wait_empty(of_p)
        self._share(t, p, 0)
        multiply(t.grads, t.acc_dV, t.tGrT[None, None, None, 0], t.tVrdO[None, None, None, do_stage], True)
        warpgroup.wait_group(1)
        for i in cutlass.range_constexpr(cute.size(acc_dP)):
            acc_dP[i] = t.acc_S[i] * acc_dP[i]
        rings.ds.wait_empty(of_ds)
        self._share(t, acc_dP, 1)
        acc_dQ = self.start_dq(t, 1)
        multiply(t.keys, t.acc_dK, t.tGrT[None, None, None, 1], t.tKrQ[None, None, None, q_stage], True)
        if const_expr(not is_last):
            self.start_s(t, n_task + 1, rings)
            warpgroup.wait_group(2)
        else:
            warpgroup.wait_group(1)
        for barrier in (rings.dout.empty_of(n_task), rings.ds.empty_of(of_p)):
            arrive(barrier)
        for piece in cutlass.range_constexpr(self.config.dq_pieces):
            self._put_piece(t, acc_dQ, piece, reduce.use_of_dq(self.config, n_task, piece), rings)
        warpgroup.wait_group(0)
        for barrier in (rings.ds.empty_of(of_ds), rings.q.empty_of(n_task)):
            arrive(barrier)
        if const_expr(is_last):
            self.put_dv(t, slot, rings)

    def p(self, t, stage):
        """P of this warpgroup's queries; what dP is multiplied by has the place of S."""
        self.probabilities(t, 0, stage)
        return t.acc_S

    @cute.jit
    def probabilities(self, t, h: cutlass.Constexpr[int], stage):
        """P = exp2(S scale - LSE) in place; 0 where the mask hides the score."""
        for column in cutlass.range_constexpr(cute.size(t.acc_S) // 4):
            lse2 = self.column_of_lse(t, column, stage)
            for e in cutlass.range_constexpr(4):
                i = 4 * column + e
                t.acc_S[i] = cute.math.exp2(t.acc_S[i] * t.scale_log2 - lse2[e % 2], fastmath=True)
        self._mask_if_cut(t, t.acc_S, 0, stage, t.info[0, stage], 0.0)

    @cute.jit
    def _share(self, t, acc, stage: cutlass.Constexpr[int]):
        """Put P^T or dS^T into a stage, and wait until the other warpgroup has put its half there."""
        self.store_ds(t, as_operand_a(acc, self.dtype), acc.layout, stage)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=DS_BARRIER, number_of_threads=128 * MMA_WARPGROUPS)

    @cute.jit
    def _put_piece(self, t, acc_dQ, piece: cutlass.Constexpr[int], n_dq: Int32, rings):
        """Hand a piece of a finished dQ over."""
        rings.dq.wait_empty(n_dq)
        values = cute.size(acc_dQ) // self.config.dq_pieces
        layout = cute.make_layout((4, values // 4))
        vectors = cute.make_tensor(acc_dQ.iterator + piece * values, layout)
        cute.autovec_copy(vectors, t.tdQsdQ[None, None, rings.dq.stage(n_dq)])
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        arrive(rings.dq.full_of(n_dq))

    @cute.jit
    def put_dv(self, t, slot, rings):
        """As in `ItemEnd`. Both warpgroups read all rows of V."""
        if plan_view.mailbox_item(slot).record.group_sum < 0:
            cute.arch.barrier(barrier_id=V_BARRIER, number_of_threads=128 * MMA_WARPGROUPS)
            self._put(t.grads, t.acc_dV, None, t.sV[None, None, 0])
        arrive(rings.v.empty)

    @cute.jit
    def put_dk(self, t, following: Int32, slot, scale, rings):
        """Put dK where K was, for the load warp to store: no other buffer has room for it."""
        if plan_view.mailbox_item(slot).record.group_sum < 0:
            cute.arch.barrier(barrier_id=V_BARRIER, number_of_threads=128 * MMA_WARPGROUPS)
            self._put(t.keys, t.acc_dK, scale, t.sdK[None, None, 0])
        for barrier in (rings.dk.full, rings.k.empty):
            arrive(barrier)

"""The MMA warpgroups where dK and dV take 160 registers: 192 columns of Q and K beside 128 of V."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ..device.operands import as_operand_a, multiply
from ..device.ring import arrive
from .config import DS_BARRIER, MMA_WARPGROUPS
from .mma import MmaRole


class TightMma(MmaRole):
    @cute.jit
    def task(self, t, n_task: Int32, first: Int32, rings, slot, is_last: cutlass.Constexpr[bool]):
        """One (kv tile, q tile). `first` is of no use here.

        Expects S^T in acc_S, and leaves the next task's there unless it is the last.
        Beside dK and dV there is room for dP and the rounded P, and then for dQ, but not for P in fp32. So dS
        is made of the rounded P that dV takes, and dQ and dK have 1.2 times the error. dK reads dS from
        shared memory, which leaves dQ its registers.
        Tensor-core order: dV, dP, dQ, dK, next S; the dQ write-out beside dK. With dP before dV, dS would be
        made beside dV, but ptxas then finds too few registers, and serialises all products.
        """
        q_stage, do_stage = rings.q.stage(n_task), rings.dout.stage(n_task)
        ds_stage, dq_stage = rings.ds.stage(n_task), rings.dq.stage(n_task)
        self.probabilities(t, 0, q_stage)
        rounded = self.rounded(t.acc_S)
        rP = as_operand_a(rounded, self.dtype)
        rings.dout.wait_full(n_task)
        multiply(t.grads, t.acc_dV, rP, t.tVrdO[None, None, None, do_stage], True)
        acc_dP = self.start_dp(t, do_stage)
        warpgroup.wait_group(0)
        arrive(rings.dout.empty_of(n_task))
        acc_dP.store(rounded.load().to(Float32) * acc_dP.load())
        rdS = as_operand_a(acc_dP, self.dtype)
        rings.ds.wait_empty(n_task)
        self.store_ds(t, rdS, acc_dP.layout, ds_stage)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=DS_BARRIER, number_of_threads=128 * MMA_WARPGROUPS)
        acc_dQ = self.start_dq(t, ds_stage)
        dS, q = t.tKrdS[None, None, None, ds_stage], t.tKrQ[None, None, None, q_stage]
        multiply(t.keys, t.acc_dK, dS, q, True)
        rings.dq.wait_empty(n_task)
        warpgroup.wait_group(1)
        if const_expr(is_last):
            arrive(rings.k.empty)
        self.store_dq(t, acc_dQ, dq_stage)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        arrive(rings.dq.full_of(n_task))
        if const_expr(is_last):
            self.put_dv(t, slot, rings)
            warpgroup.wait_group(0)
        else:
            self.start_s(t, n_task + 1, rings)
            warpgroup.wait_group(1)
        for barrier in (rings.ds.empty_of(n_task), rings.q.empty_of(n_task)):
            arrive(barrier)
        if const_expr(not is_last):
            warpgroup.wait_group(0)

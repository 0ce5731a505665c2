"""The MMA warpgroups where q tiles have 64 rows and dQ is computed a task later: up to 96 columns.

There registers and shared memory have room for what that takes. The warpgroups then need not meet in every
task: one makes exponentials while the other one multiplies (docs/experiments/head-dims.md).
"""

import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ..device.operands import as_operand_a, multiply
from ..device.ring import arrive
from .mma import MmaRole


class LaterMma(MmaRole):
    def begin_p(self, t, stage, is_cut, lse2=None) -> None:
        """P of a task, beside dQ and dK of the one before."""
        self.probabilities(t, 0, stage, is_cut, lse2)

    def begun_p(self, t):
        """P of a task as an operand."""
        return as_operand_a(t.acc_S, self.dtype)

    @cute.jit
    def delayed_task(self, t, n_task: Int32, first: Int32, rings, is_last: Constexpr[bool]):
        """One (kv tile, q tile).

        Expects P in acc_S, and leaves the next task's there unless it is the last. For dQ and `first` see
        `leave_dq`.
        Tensor-core order: dP, dV, next S, dQ of the task before, dK; dS beside dV, exp2 of the next task
        beside dQ and dK. Products take shared memory most of the time, so it matters where a read or a wait
        stands: LSE is read before the wait for S, and dS of the task before is waited for before this one's
        is stored.
        """
        c = self.config
        q_stage, do_stage = rings.q.stage(n_task), rings.dout.stage(n_task)
        rings.dout.wait_full(n_task)
        acc_dP = self.start_dp(t, do_stage)
        multiply(t.grads, t.acc_dV, self.begun_p(t), t.tVrdO[None, None, None, do_stage], True)
        rings.ds.wait_empty(n_task)
        warpgroup.wait_group(1)
        rdS = self.ds_operand(t, acc_dP)
        is_cut = Int32(0)
        if const_expr(not is_last):
            self.start_s(t, n_task + 1, rings)
            is_cut = t.info[0, rings.q.stage(n_task + 1)]
        rings.ds.wait_full_before(n_task)
        self.store_ds(t, rdS, t.acc_S.layout, rings.ds.stage(n_task))
        acc_dQ = self.start_dq(t, self._stage_before(n_task, rings))
        multiply(t.grads, t.acc_dK, rdS, t.tKrQ[None, None, None, q_stage], True)
        lse2 = None
        if const_expr(not is_last):
            stage = rings.q.stage(n_task + 1)
            lse2 = [self.column_of_lse(t, column, stage) for column in range(c.tile_m // 8)]
        warpgroup.wait_group(2)
        arrive(rings.dout.empty_of(n_task))
        if const_expr(not is_last):
            self.begin_p(t, rings.q.stage(n_task + 1), is_cut, lse2)
        self.leave_dq(t, acc_dQ, (n_task, n_task - 1, first), rings)
        warpgroup.wait_group(0)
        arrive(rings.q.empty_of(n_task))

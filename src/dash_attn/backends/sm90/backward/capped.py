"""The MMA warpgroups where scores have a softcap: P takes more steps, and what dP is multiplied by is not P.

With t = tanh of a score, P is exp2(softcap t - LSE) and dS = P (1 - t^2) dP. No register can keep t beside P.
So P is converted at once, and P (1 - t^2) takes the place of t.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from ..device.operands import as_operand_a, multiply, packed
from ..device.tanh import cap, scale_and_look, tanh_near
from ..forward.exact import fma
from ..softcap import HUGE
from .later import LaterMma
from .mma import MmaRole
from .split_columns import SplitColumns


class _Capped(MmaRole):
    def _fragments(self, products, shared, numbers, tidx):
        t = super()._fragments(products, shared, numbers, tidx)
        t.inner, t.scale_log2 = numbers.inner, numbers.outer
        return t

    def _p(self, t, first: int, converted, stage) -> None:
        columns = cute.size(converted) * 2
        waits = self._tanh(t, first, columns, stage)
        self._cap_and_convert(t, first, converted, stage, waits)

    @cute.jit
    def _tanh(self, t, first: cutlass.Constexpr[int], columns: cutlass.Constexpr[int], stage):
        """tanh in place of S, of some query columns; they have half a register each.

        Where no score is near the cap and none is hidden, tanh waits for `_convert`, and scores are scaled
        only. Returns whether it waits.
        """
        acc = cute.make_tensor(t.acc_S.iterator + first // 2, columns // 2)
        places, is_cut = range(columns // 2), t.info[0, stage] == 1
        far = scale_and_look(acc, places, t.inner)
        waits = ~(far | is_cut)
        if ~waits:
            cap(acc, places, far)
        # What makes zeros of P and of all that is made of it: finite, for 0 times it must be 0.
        if is_cut:
            self._mask(t, acc, stage, first, -HUGE)
        return waits

    @cute.jit
    def _cap_and_convert(self, t, first: cutlass.Constexpr[int], converted, stage, waits) -> None:
        """`_convert`, where tanh may have been left to be made here, beside exp2, whose unit is another."""
        if waits:
            self._convert(t, first, converted, stage, caps=True)
        else:
            self._convert(t, first, converted, stage)

    def _convert(self, t, first: int, converted, stage, caps: bool = False) -> None:
        """P of query columns from `first` on, converted, and P (1 - t^2) in place of t."""
        words = cute.recast_tensor(converted, Int32)
        for column in range(cute.size(converted) // 4):
            lse2 = self.column_of_lse(t, first // 8 + column, stage)
            for half in range(2):
                values = []
                for e in range(2):
                    i = first // 2 + 4 * column + 2 * half + e
                    if caps:
                        t.acc_S[i] = tanh_near(t.acc_S[i])
                    p = cute.math.exp2(fma(t.acc_S[i], t.scale_log2, -lse2[e]), fastmath=True)
                    t.acc_S[i] = fma(-(p * t.acc_S[i]), t.acc_S[i], p)
                    values.append(p)
                words[2 * column + half] = packed(*values, self.dtype)


class CappedMma(_Capped):
    def _fragments(self, products, shared, numbers, tidx):
        t = super()._fragments(products, shared, numbers, tidx)
        t.first_p = cute.make_rmem_tensor(32, self.dtype)
        return t

    def begin_p(self, t, stage, is_cut, lse2=None) -> None:
        """P of the first 64 query columns."""
        self._p(t, 0, t.first_p, stage)

    def begun_p(self, t):
        """What `begin_p` has made, as an operand."""
        return as_operand_a(t.first_p, self.dtype)

    def wide_ds(self, t, n_task: Int32, rings):
        """As in `MmaRole`, but dP begins when dV is done and P has left its registers. Elementwise work takes
        twice the time of all products, which run beside that of the other warpgroup."""
        q_stage, do_stage = rings.q.stage(n_task), rings.dout.stage(n_task)
        rings.dout.wait_full(n_task)
        rP = self.begun_p(t)
        multiply(t.grads, t.acc_dV, rP, t.tVrdO[None, None, None, do_stage], True)
        converted = cute.make_rmem_tensor(32, self.dtype)
        self._p(t, 64, converted, q_stage)
        rP = as_operand_a(converted, self.dtype)
        multiply(t.grads, t.acc_dV, rP, t.tVrdO[None, None, None, do_stage], True, 4)
        warpgroup.wait_group(0)
        acc_dP = self.start_dp(t, do_stage)
        rings.ds.wait_empty(n_task)
        warpgroup.wait_group(0)
        # Not into acc_S, nor converted one by one: then ptxas would keep some of them in memory.
        for i in range(cute.size(acc_dP)):
            acc_dP[i] = acc_dP[i] * t.acc_S[i]
        return as_operand_a(acc_dP, self.dtype)

    def p_operand(self, t, stage):
        """In two halves: ptxas moves little across the branch around a mask, and so needs fewer registers."""
        converted = cute.make_rmem_tensor(32, self.dtype)
        for half in range(2):
            self._p(t, 32 * half, cute.make_tensor(converted.iterator + 16 * half, 16), stage)
        return as_operand_a(converted, self.dtype)


class CappedLater(CappedMma, LaterMma):
    """P of all 64 queries is made beside dQ and dK of the task before."""


class CappedSplitColumns(_Capped, SplitColumns):
    """A thread has 16 scores, so P finds room beside what dP is multiplied by."""

    def p(self, t, stage):
        converted = cute.make_rmem_tensor(t.acc_S.layout, self.dtype)
        self._p(t, 0, converted, stage)
        return converted

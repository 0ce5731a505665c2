"""The MMA warpgroups where scores have a softcap: P takes more steps, and what dP is multiplied by is not P.

With t = tanh of a score, P is exp2(softcap t - LSE) and dS = P (1 - t^2) dP. No register can keep t beside P.
So P is converted at once, and P (1 - t^2) takes the place of t.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from ..device.operands import as_operand_a, multiply, packed
from ..device.tanh import tanh
from ..forward.exact import fma
from ..softcap import HUGE
from .mma import MmaRole


class CappedMma(MmaRole):
    def _fragments(self, products, shared, numbers, tidx):
        t = super()._fragments(products, shared, numbers, tidx)
        t.inner, t.scale_log2 = numbers.inner, numbers.outer
        return t

    def begin_p(self, t, stage, is_cut) -> None:
        """tanh in place of S."""
        for h in range(2):
            self._tanh(t, 64 * h, 64, stage)

    def wide_ds(self, t, n_task: Int32, rings):
        """As in `MmaRole`, but dP begins when dV is done and P has left its registers. Elementwise work takes
        twice the time of all products, which run beside that of the other warpgroup."""
        q_stage, do_stage = rings.q.stage(n_task), rings.dout.stage(n_task)
        rP = self._converted(t, 0, q_stage)
        rings.dout.wait_full(n_task)
        multiply(t.grads, t.acc_dV, rP, t.tVrdO[None, None, None, do_stage], True)
        rP = self._converted(t, 1, q_stage)
        multiply(t.grads, t.acc_dV, rP, t.tVrdO[None, None, None, do_stage], True, 4)
        warpgroup.wait_group(0)
        acc_dP = self.start_dp(t, do_stage)
        rings.ds.wait_empty(n_task)
        warpgroup.wait_group(0)
        # Not into acc_S, nor converted one by one: then ptxas would keep some of them in memory.
        for i in range(cute.size(acc_dP)):
            acc_dP[i] = acc_dP[i] * t.acc_S[i]
        return as_operand_a(acc_dP, self.dtype)

    def _converted(self, t, h: int, stage):
        """P of the 64 query columns h as an operand."""
        converted = cute.make_rmem_tensor(32, self.dtype)
        self._convert(t, 64 * h, converted, stage)
        return as_operand_a(converted, self.dtype)

    def p_operand(self, t, stage):
        """In two halves: ptxas moves little across the branch around a mask, and so needs fewer registers."""
        converted = cute.make_rmem_tensor(32, self.dtype)
        for half in range(2):
            self._tanh(t, 32 * half, 32, stage)
            self._convert(t, 32 * half, cute.make_tensor(converted.iterator + 16 * half, 16), stage)
        return as_operand_a(converted, self.dtype)

    @cute.jit
    def _tanh(self, t, first: cutlass.Constexpr[int], columns: cutlass.Constexpr[int], stage):
        """tanh in place of S, of some query columns; they have half a register each."""
        acc = cute.make_tensor(t.acc_S.iterator + first // 2, columns // 2)
        for i in cutlass.range_constexpr(columns // 2):
            acc[i] = tanh(acc[i], t.inner)
        # What makes zeros of P and of all that is made of it: finite, for 0 times it must be 0.
        if t.info[0, stage] == 1:
            self._mask(t, acc, stage, first, -HUGE)

    def _convert(self, t, first: int, converted, stage) -> None:
        """P of query columns from `first` on, converted, and P (1 - t^2) in place of t."""
        words = cute.recast_tensor(converted, Int32)
        for column in range(cute.size(converted) // 4):
            lse2 = self.column_of_lse(t, first // 8 + column, stage)
            for half in range(2):
                values = []
                for e in range(2):
                    i = first // 2 + 4 * column + 2 * half + e
                    p = cute.math.exp2(fma(t.acc_S[i], t.scale_log2, -lse2[e]), fastmath=True)
                    t.acc_S[i] = fma(-(p * t.acc_S[i]), t.acc_S[i], p)
                    values.append(p)
                words[2 * column + half] = packed(*values, self.dtype)

"""The MMA warpgroups: the five products of every task, and dK and dV of every item.

All products keep kv rows on the wgmma M axis: S^T = K Q^T and dP^T = V dO^T leave P^T and dS^T in registers
in exactly the layout of an A operand, so dV += P^T dO and dK += dS^T Q need no shared memory for A
(FlashAttention-3, algorithm 3). Only dS travels through shared memory, for dQ = dS K.
"""

import math
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from ..device import plan_view, ptx
from ..device.operands import (
    as_operand_a,
    blocks_of,
    multiply,
    multiply_all,
    operand_registers,
    packed,
    read_operand,
    transposed,
)
from ..device.ring import arrive
from . import reduce, seen
from .config import DS_BARRIER, MMA_WARPGROUPS, THREADS
from .item_end import ItemEnd


def part(acc: cute.Tensor, index: int) -> cute.Tensor:
    """View of the 64 query columns `index` of a score accumulator: 32 consecutive registers."""
    return cute.make_tensor(acc.iterator + 32 * index, cute.make_layout(32))


class MmaRole(ItemEnd):
    """The MMA warpgroups of a configuration."""

    @cute.jit
    def run(self, products, memory, shared, rings, numbers):
        """MMA warpgroups: all five products of every task of an item, then its dK and dV.

        Returns how many items there were.
        """
        c = self.config
        tidx = cute.arch.thread_idx()[0] - 128 * (THREADS // 128 - MMA_WARPGROUPS)
        t = self._fragments(products, shared, numbers, tidx)
        t.intervals = memory.intervals
        n_item, n_task, n_kv = Int32(0), Int32(0), Int32(0)
        slot = reduce.wait_item(shared, rings, n_item)
        while plan_view.mailbox_item(slot).place >= 0:
            tasks = (
                plan_view.mailbox_item(slot).record.q_head_count
                * plan_view.mailbox_item(slot).record.task_count
            )
            for acc in (t.acc_dK, t.acc_dV, *((t.acc_S,) if not c.delayed_dq else ())):
                acc.fill(0.0)  # acc_S only so that no old value stays alive through the epilogue
            if tasks > 0:
                rings.k.wait_full(n_kv)
                self._hold(t, t.held_K, t.sK, c.k_columns)
                self.start_s(t, n_task, rings)
                warpgroup.wait_group(0)
                if const_expr(c.delayed_dq):
                    stage = rings.q.stage(n_task)
                    self.begin_p(t, stage, t.info[0, stage])
                rings.v.wait_full(n_kv)
                self._hold(t, t.held_V, t.sV, c.v_columns)
                if const_expr(not c.split):
                    rings.dk.wait_empty(n_kv)
                first = n_task
                if const_expr(c.delayed_dq):
                    for _ in cutlass.range(tasks - 1, unroll=1):
                        self.delayed_task(t, n_task, first, rings, False)
                        n_task += 1
                    self.delayed_task(t, n_task, first, rings, True)
                    self.last_dq(t, n_task, slot, rings)
                else:
                    for _ in cutlass.range(tasks - 1, unroll=1):
                        self.task(t, n_task, first, rings, slot, False)
                        n_task += 1
                    self.task(t, n_task, first, rings, slot, True)
                n_task += 1
                n_kv += 1
                self.put_dk(t, n_task, slot, numbers.scale, rings)
            if const_expr(c.key_sums):
                if tasks > 0:
                    self.leave_sums(t, memory.group_sums, plan_view.mailbox_item(slot).record.group_sum)
            elif plan_view.mailbox_item(slot).record.group_sum >= 0:
                self.leave_sums(t, memory.group_sums, plan_view.mailbox_item(slot).record.group_sum)
            elif tasks == 0:
                for target in (memory.dk, memory.dv):
                    self.store_zeros(target, plan_view.mailbox_item(slot))
            reduce.release_item(rings, n_item)
            n_item += 1
            slot = reduce.wait_item(shared, rings, n_item)
        return n_item

    def _fragments(self, products, shared, numbers, tidx):
        """What a thread multiplies, and the accumulators that live from task to task.

        In names like tSrK, the letter behind t is a product (S, P, V, K, Q: those of S, dP, dV, dK, dQ), r
        stands for registers or descriptors, s for shared memory, d for a destination.
        """
        c = self.config
        group = cute.arch.make_warp_uniform(tidx // 128)
        lane = cute.arch.lane_idx()
        keys = products.keys if c.tight else products.grads
        of_all = (products.scores, products.grads, products.dq, keys)
        wg_scores, wg_grads, wg_dq, wg_keys = (m.get_slice(group * 128) for m in of_all)
        sdSt = transposed(shared.ds)
        acc_S = cute.make_rmem_tensor(wg_scores.partition_shape_C((c.tile_n, c.tile_m)), Float32)
        acc_dK = cute.make_rmem_tensor(wg_keys.partition_shape_C((c.tile_n, c.head_dim)), Float32)
        acc_dV = cute.make_rmem_tensor(wg_grads.partition_shape_C((c.tile_n, c.head_dim_v)), Float32)
        # dS^T as an operand of dK where registers do not hold it.
        tKrdS = wg_keys.make_fragment_A(wg_keys.partition_A(sdSt)) if c.tight else None
        store_ds = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.dtype), products.scores
        ).get_slice(tidx)
        return SimpleNamespace(
            sK=shared.k, sV=shared.v, sdK=shared.dk,
            held=products.held,
            held_K=operand_registers(c.k_columns, self.dtype) if c.k_columns else None,
            held_V=operand_registers(c.v_columns, self.dtype) if c.v_columns else None,
            scores=products.scores, grads=products.grads, dq=products.dq, keys=keys,
            group=group, scale_log2=numbers.scale * math.log2(math.e),
            tSrK=wg_scores.make_fragment_A(wg_scores.partition_A(shared.k)),
            tSrQ=wg_scores.make_fragment_B(wg_scores.partition_B(shared.q)),
            tPrV=wg_scores.make_fragment_A(wg_scores.partition_A(shared.v)),
            tPrdO=wg_scores.make_fragment_B(wg_scores.partition_B(shared.dout)),
            tVrdO=wg_grads.make_fragment_B(wg_grads.partition_B(transposed(shared.dout))),
            tKrQ=wg_keys.make_fragment_B(wg_keys.partition_B(transposed(shared.q))), tKrdS=tKrdS,
            tQrdS=wg_dq.make_fragment_A(wg_dq.partition_A(shared.ds)),
            tQrK=wg_dq.make_fragment_B(wg_dq.partition_B(transposed(shared.k))),
            store_ds=store_ds, tSsdS=store_ds.partition_D(sdSt), tdQsdQ=self._dq_view(shared.dq, tidx),
            lse2=self._column_view(shared.lse2, lane), delta=self._column_view(shared.delta, lane),
            acc_S=acc_S, acc_dK=acc_dK, acc_dV=acc_dV,
            info=shared.q_info,
        )  # fmt: skip

    def _hold(self, t, registers, tile, columns: int) -> None:
        """Read the first columns of K or V of an item into registers, if any are kept there."""
        if columns > 0:
            first = cute.local_tile(tile[None, None, 0], (self.config.tile_n, columns), (0, 0))
            read_operand(t.held, self._mma_thread(), first, registers)

    def _dq_view(self, sdQ, tidx):
        """This thread's values of the dQ buffers, (4, vectors, stage): vectors of four fp32, 2 KB apart."""
        c = self.config
        vectors = c.dq_stage // 1024
        layout = cute.make_layout(
            (4, 128, vectors, MMA_WARPGROUPS, c.dq_stages), stride=(1, 4, 512, 512 * vectors, c.dq_stage)
        )
        return cute.make_tensor(sdQ.iterator, layout)[None, tidx % 128, None, tidx // 128, None]

    def _column_view(self, stat, lane):
        """The per-query values this thread's accumulator columns need, (2, tile_m / 8, stage)."""
        tile_m, stages = stat.shape
        layout = cute.make_layout((2, 4, tile_m // 8, stages), stride=(1, 2, 8, tile_m))
        return cute.make_tensor(stat.iterator, layout)[None, lane % 4, None, None]

    @cute.jit
    def task(self, t, n_task: Int32, first: Int32, rings, slot, is_last: cutlass.Constexpr[bool]):
        """One (kv tile, q tile) with 64 query rows.

        Expects S^T in acc_S, and leaves the next task's there unless it is the last.
        Tensor-core order: dP, dV, next S, dQ, dK; exp2 beside dP, dS and its way into shared memory beside
        dV, the dQ write-out beside dK. A proxy fence waits for all that its warp has stored, so it stands
        where that is long done: that of dS behind the next S, that of dQ behind exp2 of the next task
        (`first`: the item's first task, before which there is no dQ).
        """
        q_stage, do_stage = rings.q.stage(n_task), rings.dout.stage(n_task)
        ds_stage, dq_stage = rings.ds.stage(n_task), rings.dq.stage(n_task)
        rings.dout.wait_full(n_task)
        acc_dP = self.start_dp(t, do_stage)
        rP = self.p_operand(t, q_stage)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        if n_task > first:
            arrive(rings.dq.full_of(n_task - 1))
        multiply(t.grads, t.acc_dV, rP, t.tVrdO[None, None, None, do_stage], True)
        warpgroup.wait_group(1)
        for i in cutlass.range_constexpr(cute.size(acc_dP)):
            acc_dP[i] = t.acc_S[i] * acc_dP[i]
        rings.ds.wait_empty(n_task)
        self.store_ds(t, self.rounded(acc_dP), acc_dP.layout, ds_stage)
        # dV is done before the next S^T starts: ptxas finds no room for both beside dP, and its operand P
        # gives its registers to dS, which is converted a second time for them. The tensor cores hardly
        # notice.
        warpgroup.wait_group(0)
        arrive(rings.dout.empty_of(n_task))
        if const_expr(not is_last):
            self.start_s(t, n_task + 1, rings)
        rdS = as_operand_a(self.rounded(acc_dP), self.dtype)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=DS_BARRIER, number_of_threads=128 * MMA_WARPGROUPS)
        acc_dQ = self.start_dq(t, ds_stage)
        multiply(t.grads, t.acc_dK, rdS, t.tKrQ[None, None, None, q_stage], True)
        if const_expr(is_last):
            self.put_dv(t, slot, rings)
        rings.dq.wait_empty(n_task)
        warpgroup.wait_group(1)
        arrive(rings.ds.empty_of(n_task))
        if const_expr(is_last):
            arrive(rings.k.empty)
        self.store_dq(t, acc_dQ, dq_stage)
        if const_expr(is_last):
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            arrive(rings.dq.full_of(n_task))
        warpgroup.wait_group(0)
        arrive(rings.q.empty_of(n_task))

    def rounded(self, acc):
        """An accumulator in the dtype of the tensors, converted where this stands in the program."""
        found = cute.make_rmem_tensor(acc.layout, self.dtype)
        pairs = cute.recast_tensor(found, Int32)
        for i in range(cute.size(pairs)):
            pairs[i] = packed(acc[2 * i], acc[2 * i + 1], self.dtype)
        return found

    @cute.jit
    def delayed_task(self, t, n_task: Int32, first: Int32, rings, is_last: cutlass.Constexpr[bool]):
        """One (kv tile, q tile) with 128 query rows.

        Expects S^T in acc_S with exp2 done for its first 64 columns, and leaves the next task's like that
        unless it is the last.

        A tile of 128 rows has twice the exp2 of one of 64 for the same products, so elementwise work limits,
        and the two warpgroups should not do it at the same time. Nothing keeps them in step: dQ needs the dS
        of both, and is therefore computed a task later (`last_dq` for the last task of an item, `first`: its
        first task). Tensor-core order: dP, dV, next S, dQ of the task before, dK; one half of exp2 beside dP,
        the other, of the next task, beside dQ and dK.
        """
        q_stage, ds_stage = rings.q.stage(n_task), rings.ds.stage(n_task)
        rdS = self.wide_ds(t, n_task, rings)
        is_cut = Int32(0)
        if const_expr(not is_last):
            self.start_s(t, n_task + 1, rings)
            is_cut = t.info[0, rings.q.stage(n_task + 1)]  # read long before it is asked for
        self.store_ds(t, rdS, t.acc_S.layout, ds_stage)
        last = n_task - 1  # here, and not in `leave_dq`, for the machine code that was measured
        rings.ds.wait_full_before(n_task)
        acc_dQ = self.start_dq(t, self._stage_before(n_task, rings))
        multiply(t.grads, t.acc_dK, rdS, t.tKrQ[None, None, None, q_stage], True)
        warpgroup.wait_group(2)
        arrive(rings.dout.empty_of(n_task))
        if const_expr(not is_last):
            self.begin_p(t, rings.q.stage(n_task + 1), is_cut)
        self.leave_dq(t, acc_dQ, (n_task, last, first), rings)
        warpgroup.wait_group(0)
        arrive(rings.q.empty_of(n_task))

    def _stage_before(self, n_task: Int32, rings):
        """The stage of dS that the task before has, in numbers that are not negative."""
        return rings.ds.stage(n_task + self.config.ds_stages - 1)

    @cute.jit
    def leave_dq(self, t, acc_dQ, tasks, rings):
        """Hand over dQ of the task before, when dK alone is still being computed, and the dS of this one.

        `tasks`: this one, the one before, and the first one of the item. Before the first one there is no dQ:
        the product is computed from old values, put into the buffer that the first task's own dQ will
        overwrite, and told to nobody. A branch around it would make ptxas serialise the products.
        """
        n_task, last, first = tasks
        into = cutlass.max(last, first)
        rings.dq.wait_empty(into)
        warpgroup.wait_group(1)
        self.store_dq(t, acc_dQ, rings.dq.stage(into))
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        arrive(rings.ds.full_of(n_task))
        if last >= first:
            arrive(rings.ds.empty + self._stage_before(n_task, rings))
            arrive(rings.dq.full_of(last))

    def wide_ds(self, t, n_task: Int32, rings):
        """dV of a task, and dS as an operand; there is room in its buffer."""
        q_stage, do_stage = rings.q.stage(n_task), rings.dout.stage(n_task)
        rings.dout.wait_full(n_task)
        is_cut = t.info[0, q_stage]  # read long before it is asked for
        acc_dP = self.start_dp(t, do_stage)
        rP = as_operand_a(part(t.acc_S, 0), self.dtype)
        multiply(t.grads, t.acc_dV, rP, t.tVrdO[None, None, None, do_stage], True)
        self.probabilities(t, 1, q_stage, is_cut)
        # This wait is also a branch, below which ptxas sinks nothing: otherwise most of exp2 would end up
        # behind dP.
        rings.ds.wait_empty(n_task)
        warpgroup.wait_group(0)  # so that the operands of both products can share registers
        rP = as_operand_a(part(t.acc_S, 1), self.dtype)
        multiply(t.grads, t.acc_dV, rP, t.tVrdO[None, None, None, do_stage], True, 4)
        cute.arch.sync_warp()  # ptxas moves nothing across: the products are issued before dS is computed
        return self.ds_operand(t, acc_dP)

    def ds_operand(self, t, acc_dP):
        """dS, of what has the place of S and of dP."""
        rdS = cute.make_rmem_tensor(acc_dP.layout, self.dtype)
        rdS.store((t.acc_S.load() * acc_dP.load()).to(self.dtype))
        return as_operand_a(rdS, self.dtype)

    @cute.jit
    def last_dq(self, t, last: Int32, slot, rings):
        """dQ of the last task of an item, when K is needed for the last time; dV leaves beside it."""
        rings.ds.wait_full(last)
        acc_dQ = self.start_dq(t, rings.ds.stage(last))
        self.put_dv(t, slot, rings)
        rings.dq.wait_empty(last)
        warpgroup.wait_group(0)
        for barrier in (rings.ds.empty_of(last), rings.k.empty):
            arrive(barrier)
        self.store_dq(t, acc_dQ, rings.dq.stage(last))
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        arrive(rings.dq.full_of(last))

    def start_dq(self, t, stage):
        """Issue dQ = dS K of the dS in a stage."""
        c = self.config
        acc_dQ = cute.make_rmem_tensor(t.dq.get_slice(0).partition_shape_C((c.tile_m, c.head_dim)), Float32)
        multiply(t.dq, acc_dQ, t.tQrdS[None, None, None, stage], t.tQrK[None, None, None, 0], False)
        return acc_dQ

    @cute.jit
    def store_dq(self, t, acc_dQ, stage):
        """Put a finished dQ into its buffer."""
        vectors = cute.make_tensor(acc_dQ.iterator, cute.make_layout((4, cute.size(acc_dQ) // 4)))
        cute.autovec_copy(vectors, t.tdQsdQ[None, None, stage])

    def store_ds(self, t, rdS, layout, stage) -> None:
        """Put dS^T, an accumulator of layout `layout` converted in place, into a stage as dS."""
        flat = cute.make_tensor(rdS.iterator, layout)
        cute.copy(t.store_ds, t.store_ds.retile(flat), t.tSsdS[None, None, None, stage])

    @cute.jit
    def start_s(self, t, n_task: Int32, rings):
        """Issue S^T of a task as soon as its Q has arrived."""
        stage = rings.q.stage(n_task)
        rings.q.wait_full(n_task)
        self._multiply(t, t.acc_S, t.held_K, t.tSrK, t.tSrQ[None, None, None, stage], False)

    def start_dp(self, t, stage):
        """Issue dP^T, its accumulator started at -delta: no register holds delta while they are scarce."""
        acc_dP = cute.make_rmem_tensor(t.acc_S.layout, Float32)
        for column in range(cute.size(acc_dP) // 4):
            delta = cute.make_rmem_tensor(2, Float32)
            cute.autovec_copy(t.delta[None, column, stage], delta)
            for e in range(4):
                acc_dP[4 * column + e] = delta[e % 2]
        self._multiply(t, acc_dP, t.held_V, t.tPrV, t.tPrdO[None, None, None, stage], True)
        return acc_dP

    def _multiply(self, t, acc, held, a, b, accumulate: bool) -> None:
        """Issue S^T or dP^T: K or V, whose first columns may be in registers, by Q or dO."""
        a = a[None, None, None, 0]
        if held is None:
            multiply(t.scores, acc, a, b, accumulate)
            return
        inside, b = blocks_of(held), blocks_of(b)
        outside = blocks_of(a)[len(inside) :]
        parts = [(t.held, acc, zip(inside, b), accumulate)]
        if outside:
            parts.append((t.scores, acc, zip(outside, b[len(inside) :]), True))
        multiply_all(parts)

    def begin_p(self, t, stage, is_cut) -> None:
        """What is done of P beside dQ and dK of the task before."""
        self.probabilities(t, 0, stage, is_cut)

    def p_operand(self, t, stage):
        """P of a tile of 64 rows as an operand."""
        self.probabilities(t, 0, stage)
        return as_operand_a(t.acc_S, self.dtype)

    @cute.jit
    def probabilities(self, t, h: cutlass.Constexpr[int], stage, is_cut=None, lse2=None):
        """P = exp2(S scale - LSE) in place, for the 64 query columns h; 0 where the mask hides the score.

        `is_cut`, of `info`, is given where dQ is delayed, and read here elsewhere. `lse2`: `column_of_lse` of
        all columns, where it is read before.
        The branch around the mask keeps exp2 on its side of it: at head dim 128 exp2 should begin while dP is
        being issued, at head dim 64, where half of it runs beside dQ and dK of the task before, nothing
        should keep it there.
        """
        c = self.config
        acc = part(t.acc_S, h)
        if const_expr(c.delayed_dq):
            self._mask_if_cut(t, acc, h, stage, is_cut, -math.inf)
        for column in cutlass.range_constexpr(8):
            lse = self.column_of_lse(t, 8 * h + column, stage) if lse2 is None else lse2[column]
            for e in cutlass.range_constexpr(4):
                i = 4 * column + e
                acc[i] = cute.math.exp2(acc[i] * t.scale_log2 - lse[e % 2], fastmath=True)
        if const_expr(not c.delayed_dq):
            self._mask_if_cut(t, acc, h, stage, t.info[0, stage], 0.0)

    def column_of_lse(self, t, column: int, stage):
        """LSE of the two queries of this thread among eight."""
        lse2 = cute.make_rmem_tensor(2, Float32)
        cute.autovec_copy(t.lse2[None, column, stage], lse2)
        return lse2

    def _first_row(self):
        """Row of the kv tile of this thread's first accumulator value.

        Not kept in a register: the main loop has none to spare.
        """
        tidx = self._mma_thread()
        return tidx // 32 * 16 + tidx % 32 // 4

    def _first_column(self):
        """Query column of this thread's first accumulator value."""
        return ptx.thread_index() % 4 * 2

    @cute.jit
    def _mask_if_cut(self, t, acc, h: cutlass.Constexpr[int], stage, is_cut, value: cutlass.Constexpr[float]):
        """`_mask` where the mask cuts the task's tile: `is_cut`, from `info`. Of its 64 query columns h."""
        if is_cut == 1:
            self._mask(t, acc, stage, 64 * h, value)

    @cute.jit
    def _mask(self, t, acc, stage, first_column: cutlass.Constexpr[int], value: cutlass.Constexpr[float]):
        """Set what the mask hides to `value`; `acc` begins at query column `first_column`."""
        info = t.info[None, stage]
        row, column = self._first_row(), self._first_column() + first_column
        for half in cutlass.range_constexpr(2):
            first, last = info[1] + row + 8 * half - column, info[2] + row + 8 * half - column
            if const_expr(self.config.intervals):
                if row + 8 * half < info[3]:
                    start, end = seen.interval_of(t.intervals, info[4] + row + 8 * half)
                    first = cutlass.max(first, start - info[5] - column)
                    last = cutlass.min(last, end - 1 - info[5] - column)
            if info[3] <= row + 8 * half:
                first = Int32(plan_view.UNBOUNDED)
            for i in cutlass.range_constexpr(cute.size(acc) // 2):
                c = i // 2 * 8 + i % 2
                element = i // 2 * 4 + half * 2 + i % 2
                hidden = (c < first) | (c > last)
                acc[element] = cutlass.select_(hidden, Float32(value), acc[element])

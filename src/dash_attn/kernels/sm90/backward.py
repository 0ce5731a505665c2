"""The backward kernel: persistent, warp specialised, told what to do by the plan table.

Roles of a block of 384 threads: warp 0 loads, claims items, and stores dV, warp 1 adds dQ partials to global memory, warp 2 hands
finished contributions over, warp 3 walks the plan and waits for tickets, two warpgroups multiply.

All products keep kv rows on the wgmma M axis: S^T = K Q^T and dP^T = V dO^T leave P^T and dS^T in registers in exactly the
layout of an A operand, so dV += P^T dO and dK += dS^T Q need no shared memory for A (FlashAttention-3, algorithm 3).
Only dS travels through shared memory, for dQ = dS K.

The fp32 dQ tile, in shared and global memory, is kept in the order of the accumulator registers: value (row, col) of
warpgroup g, thread t sits at ((g * tile_m*head_dim/1024 + v) * 128 + t) * 4 + e; `accumulator_coordinates` inverts it.
"""

import math
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.utils import SmemAllocator, hopper_helpers

from . import finish, plan_view, ptx, reduce, registers
from .config import MMA_WARPGROUPS, SLOTS, THREADS, BackwardConfig

LOAD_WARP, REDUCE_WARP, RELEASE_WARP, TICKET_WARP, FIRST_MMA_WARP = 0, 1, 2, 3, 4
MMA_WARPS = 4 * MMA_WARPGROUPS
DS_BARRIER, V_BARRIER = 1, 2  # named barriers; V_BARRIER one a warpgroup
DV_PLACE_WORDS = 8
MAX_INT32 = (1 << 31) - 1
DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}


def tile_layout(dtype, rows: int, columns: int, stages: int):
    """Shared-memory layout (rows, columns, stages), columns contiguous in 128-byte swizzled atoms."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))


def transposed(tensor: cute.Tensor) -> cute.Tensor:
    """View of a (rows, columns, stages) tile as (columns, rows, stages)."""
    shape = (tensor.shape[1], tensor.shape[0], tensor.shape[2])
    return cute.composition(tensor, cute.make_ordered_layout(shape, order=(1, 0, 2)))


def part(acc: cute.Tensor, index: int) -> cute.Tensor:
    """View of the 64 query columns `index` of a score accumulator: 32 consecutive registers."""
    return cute.make_tensor(acc.iterator + 32 * index, cute.make_layout(32))


def multiply(tiled_mma, acc, a, b, accumulate: bool, first: int = 0) -> None:
    """Issue and commit acc (+)= a b as one wgmma group; a and b are (MMA, M or N, K), a begins at block `first` of b's K."""
    warpgroup.fence()
    atom = cute.make_mma_atom(tiled_mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in range(cute.size(a.shape[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, first + k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def as_operand_a(acc: cute.Tensor, dtype) -> cute.Tensor:
    """View an accumulator (64 x N a warpgroup) as a register A operand of K = N, same thread, same order; convert if fp32."""
    out = acc
    if acc.element_type is not dtype:
        out = cute.make_rmem_tensor(acc.layout, dtype)
        out.store(acc.load().to(dtype))
    blocks = cute.size(acc) // 8
    return cute.make_tensor(out.iterator, cute.make_layout(((2, 2, 2), 1, blocks), stride=((1, 2, 4), 0, 8)))


class Backward:
    """dQ partials, dK and dV of one plan.

    Tensors: q, do (B, Sq, H, D), k, v (B, Sk, Hkv, D), any strides with D contiguous and rows of 16-byte multiples; with B = 1 the
    sequences of the plan lie one after the other, otherwise one a batch. lse2 and
    delta fp32, tile_m values a dQ tile, in tile-index order (base-2 LSE, +inf for rows without keys; -rowsum(O dO));
    dq_acc fp32, tile_m*D values a dQ tile; parts fp32, 2*tile_n*D values an item that owns one of several head groups (dK, dV,
    in accumulator order, unscaled); control int32, claim counter and tickets, zero at launch.
    Guarantee: for one plan the bits of dK, dV and dq_acc do not depend on timing, grid size or neighbours (ordered=True).
    """

    def __init__(self, config: BackwardConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        # Registers of an MMA thread and of any other. The block starts with 168 a thread (384 threads), and setmaxnreg can
        # only move what the block was given: 2 * 240 + 24 = 3 * 168. One more would wait for ever.
        self.registers = (240, 24)

    def _tiled_mmas(self):
        c = self.config
        major = cute.nvgpu.OperandMajorMode
        source = warpgroup.OperandSource

        def make(a_major, b_major, warpgroups, columns, a_source=source.SMEM):
            return hopper_helpers.make_trivial_tiled_mma(
                self.dtype, self.dtype, a_major, b_major, Float32, warpgroups, (64, columns), a_source
            )

        scores = make(major.K, major.K, (2, 1, 1), c.tile_m)
        grads = make(major.K, major.MN, (2, 1, 1), c.head_dim, source.RMEM)
        dq_split = (1, 2, 1) if c.tile_m == 64 else (2, 1, 1)
        dq = make(major.K, major.MN, dq_split, c.head_dim // dq_split[1])
        return scores, grads, dq

    def _storage(self):
        c, dtype = self.config, self.dtype

        def tile(rows, columns, stages):
            return cute.struct.Align[cute.struct.MemRange[dtype, rows * columns * stages], 1024]

        @cute.struct
        class Storage:
            q_full: cute.struct.MemRange[Int64, c.q_stages]
            q_empty: cute.struct.MemRange[Int64, c.q_stages]
            do_full: cute.struct.MemRange[Int64, c.do_stages]
            do_empty: cute.struct.MemRange[Int64, c.do_stages]
            kv_full: cute.struct.MemRange[Int64, 2]
            kv_empty: cute.struct.MemRange[Int64, 2]
            ds_full: cute.struct.MemRange[Int64, c.ds_stages]
            ds_empty: cute.struct.MemRange[Int64, c.ds_stages]
            dq_full: cute.struct.MemRange[Int64, c.dq_stages]
            dq_empty: cute.struct.MemRange[Int64, c.dq_stages]
            item_full: cute.struct.MemRange[Int64, 2]
            item_empty: cute.struct.MemRange[Int64, 2]
            item_granted: cute.struct.MemRange[Int64, 1]
            granted: cute.struct.MemRange[Int64, SLOTS]
            performed: cute.struct.MemRange[Int64, SLOTS]
            slot_empty: cute.struct.MemRange[Int64, SLOTS]
            slots: cute.struct.Align[cute.struct.MemRange[Int32, reduce.SLOT_WORDS * SLOTS], 16]
            item: cute.struct.Align[cute.struct.MemRange[Int32, 2 * plan_view.MAILBOX_WORDS], 16]
            q_info: cute.struct.Align[cute.struct.MemRange[Int32, 4 * c.q_stages], 16]
            dv_place: cute.struct.Align[cute.struct.MemRange[Int32, DV_PLACE_WORDS], 16]
            lse2: cute.struct.Align[cute.struct.MemRange[Float32, c.tile_m * c.q_stages], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, c.tile_m * c.do_stages], 128]
            q: tile(c.tile_m, c.head_dim, c.q_stages)
            do: tile(c.tile_m, c.head_dim, c.do_stages)
            k: tile(c.tile_n, c.head_dim, 1)
            v: tile(c.tile_n, c.head_dim, 1)
            ds: tile(c.tile_m, c.tile_n, c.ds_stages)
            dq: cute.struct.Align[cute.struct.MemRange[Float32, c.dq_elements * c.dq_stages], 1024]

        return Storage

    @cute.jit
    def _tma(self, op: cutlass.Constexpr, tensor, layout, rows: cutlass.Constexpr[int]):
        """Copy-engine operation on (rows, head_dim) tiles of a (B, S, H, D) tensor seen as `plan_view.tma_rows` says."""
        batch_stride, row_stride, head_stride, _ = tensor.stride
        row_extent, batches, shifts = tensor.shape[1], tensor.shape[0], Int32(1)
        if tensor.shape[0] == 1:
            row_extent, batches, shifts = Int32(plan_view.PACKED_ROWS), Int32(MAX_INT32), Int32(MAX_INT32)
            batch_stride = (1 << 34) - row_stride
        batch_stride = cute.assume(batch_stride, divby=8)
        shape = (row_extent, self.config.head_dim, tensor.shape[2], batches, shifts)
        stride = (row_stride, 1, head_stride, batch_stride, row_stride)
        view = cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))
        return cpasync.make_tiled_tma_atom(
            op, view, cute.select(layout, [0, 1]), (rows, self.config.head_dim)
        )

    @cute.jit
    def __call__(
        self,
        q,
        k,
        v,
        do,
        lse2,
        delta,
        dq_acc,
        dq,
        dk,
        dv,
        parts,
        plan,
        control,
        errors,
        partials,
        trace,
        scale,
        grid,
        workers,
        complete,
        min_workers,
        stream,
    ):
        c = self.config
        layouts = SimpleNamespace(
            q=tile_layout(self.dtype, c.tile_m, c.head_dim, c.q_stages),
            do=tile_layout(self.dtype, c.tile_m, c.head_dim, c.do_stages),
            kv=tile_layout(self.dtype, c.tile_n, c.head_dim, 1),
            ds=tile_layout(self.dtype, c.tile_m, c.tile_n, c.ds_stages),
        )
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        atom_q, tma_q = self._tma(load, q, layouts.q, c.tile_m)
        atom_do, tma_do = self._tma(load, do, layouts.do, c.tile_m)
        atom_k, tma_k = self._tma(load, k, layouts.kv, c.tile_n)
        atom_v, tma_v = self._tma(load, v, layouts.kv, c.tile_n)
        atom_dv, tma_dv = self._tma(store, dv, layouts.kv, c.tile_n)
        # Blocks of which several must be resident start together or not at all, whatever else runs on the GPU.
        together = Int32(1) if min_workers > 1 else Int32(0)
        self.kernel(
            atom_q, tma_q, atom_do, tma_do, atom_k, tma_k, atom_v, tma_v, atom_dv, tma_dv,
            layouts.q, layouts.do, layouts.kv, layouts.ds, *self._tiled_mmas(),
            lse2, delta, dq_acc, dq, dk, dv, parts, plan, control, errors, partials, trace, scale, workers, complete, min_workers,
        ).launch(grid=(grid, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True,
                 cooperative=together)  # fmt: skip

    @cute.kernel
    def kernel(
        self, atom_q: cute.CopyAtom, mQ: cute.Tensor, atom_do: cute.CopyAtom, mdO: cute.Tensor, atom_k: cute.CopyAtom,
        mK: cute.Tensor, atom_v: cute.CopyAtom, mV: cute.Tensor, atom_dv: cute.CopyAtom, tma_dV: cute.Tensor, q_layout: cute.ComposedLayout,
        do_layout: cute.ComposedLayout, kv_layout: cute.ComposedLayout, ds_layout: cute.ComposedLayout,
        mma_scores: cute.TiledMma, mma_grads: cute.TiledMma, mma_dq: cute.TiledMma, mLse2: cute.Tensor, mDelta: cute.Tensor,
        mdQacc: cute.Tensor, mdQ: cute.Tensor, mdK: cute.Tensor, mdV: cute.Tensor, mParts: cute.Tensor, mPlan: cute.Tensor,
        mControl: cute.Tensor, mErrors: cute.Tensor, mPartials: cute.Tensor, mTrace: cute.Tensor, scale: Float32,
        workers: Int32, complete: Int32, min_workers: Int32,
    ):  # fmt: skip
        c = self.config
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == LOAD_WARP:
            for atom in (atom_q, atom_do, atom_k, atom_v, atom_dv):
                cpasync.prefetch_descriptor(atom)
        storage = SmemAllocator().allocate(self._storage())
        bars = SimpleNamespace(
            **{n: getattr(storage, n).data_ptr() for n in self._barrier_counts()},
            item=storage.item.data_ptr(),
            q_info=storage.q_info.data_ptr(),
            slots=storage.slots.data_ptr(),
            dv_place=storage.dv_place.data_ptr(),
        )
        dv_place = self._dv_place(bars)
        if warp_idx == LOAD_WARP:
            with cute.arch.elect_one():
                for name, (stages, count) in self._barrier_counts().items():
                    for stage in range(stages):
                        cute.arch.mbarrier_init(getattr(bars, name) + stage, count)
                dv_place[0] = Int32(0)
            cute.arch.mbarrier_init_fence()
        sQ = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        sdO = storage.do.get_tensor(do_layout.outer, swizzle=do_layout.inner)
        sK = storage.k.get_tensor(kv_layout.outer, swizzle=kv_layout.inner)
        sV = storage.v.get_tensor(kv_layout.outer, swizzle=kv_layout.inner)
        sdS = storage.ds.get_tensor(ds_layout.outer, swizzle=ds_layout.inner)
        sLse2 = storage.lse2.get_tensor(cute.make_layout((c.tile_m, c.q_stages)))
        sDelta = storage.delta.get_tensor(cute.make_layout((c.tile_m, c.do_stages)))
        sdQ = storage.dq.get_tensor(cute.make_layout((c.dq_elements, c.dq_stages)))
        cute.arch.sync_threads()
        # Tickets, claim counter, LSE and delta come from the preprocessing kernel.
        cute.arch.griddepcontrol_wait()

        if warp_idx < FIRST_MMA_WARP:
            cute.arch.setmaxregister_decrease(self.registers[1])
            if warp_idx == LOAD_WARP:
                tma = (atom_q, mQ, sQ, atom_do, mdO, sdO, atom_k, mK, sK, atom_v, mV, sV, atom_dv, tma_dV)
                self.load(tma, mLse2, mDelta, sLse2, sDelta, mPlan, mControl, bars, mdK.shape[0], workers)
            if warp_idx == REDUCE_WARP:
                reduce.reduce_role(c, mdQacc, mPartials, mTrace, sdQ, bars)
            if const_expr(c.ordered):
                if warp_idx == RELEASE_WARP:
                    reduce.release_role(mPlan, mControl, bars)
            if warp_idx == TICKET_WARP:
                reduce.ticket_role(c, mPlan, mControl, mErrors, bars, min_workers)
        else:
            cute.arch.setmaxregister_increase(self.registers[0])
            self.mma(
                mma_scores,
                mma_grads,
                mma_dq,
                sQ,
                sdO,
                sK,
                sV,
                sdS,
                sLse2,
                sDelta,
                sdQ,
                mdK,
                mdV,
                mParts,
                scale,
                bars,
            )
            if const_expr(c.ordered):
                finish.finish_role(c, mPlan, mControl, mErrors, mdQacc, mdQ, scale, complete)

    def _barrier_counts(self):
        """Barrier name -> (stages, arrivals a phase)."""
        c = self.config
        return {
            "q_full": (c.q_stages, 1), "q_empty": (c.q_stages, MMA_WARPS),
            "do_full": (c.do_stages, 1), "do_empty": (c.do_stages, MMA_WARPS),
            "kv_full": (2, 1), "kv_empty": (2, MMA_WARPS),
            "ds_full": (c.ds_stages, MMA_WARPS), "ds_empty": (c.ds_stages, MMA_WARPS),
            "dq_full": (c.dq_stages, MMA_WARPS), "dq_empty": (c.dq_stages, 1),
            "item_full": (2, 1), "item_empty": (2, 1 + MMA_WARPS),
            "item_granted": (1, 1), "granted": (SLOTS, 1), "performed": (SLOTS, 1), "slot_empty": (SLOTS, 1),
        }  # fmt: skip

    @cute.jit
    def load(self, tma, mLse2, mDelta, sLse2, sDelta, mPlan, mControl, bars, batches, workers):
        """Load warp: claims items; K and V once an item; Q with LSE and dO with delta once a task, in the order of the item's runs."""
        c = self.config
        atom_q, mQ, sQ, atom_do, mdO, sdO, atom_k, mK, sK, atom_v, mV, sV, atom_dv, tma_dV = tma
        tile_bytes = 2 * c.tile_m * c.head_dim + 4 * c.tile_m
        kv_bytes = 2 * c.tile_n * c.head_dim
        n_item, n_task, n_kv = Int32(0), Int32(0), Int32(0)
        slot = reduce.claim_first_item(mPlan, mControl, bars, batches, workers)
        while slot[0] >= 0:
            # Fields of the item are read from the mailbox where they are used: this warp has few registers.
            fresh = Int32(1)
            for r in cutlass.range(plan_view.mailbox_item(slot).run_count, unroll=1):
                run = plan_view.read_run(mPlan, slot, r)
                for i in cutlass.range(run.count, unroll=1):
                    q_tile = run.q_first + i * run.q_step
                    for h in cutlass.range(plan_view.mailbox_item(slot).q_head_count, unroll=1):
                        item = plan_view.mailbox_item(slot)
                        q_head = item.q_head_first + h
                        stat = Int64(plan_view.first_tile_of(item, q_head) + q_tile) * c.tile_m
                        rows = (item.q_tma_row, item.tma_batch, item.q_tma_shift)
                        stage, phase = n_task % c.q_stages, (n_task // c.q_stages) & 1
                        cute.arch.mbarrier_wait(bars.q_empty + stage, phase ^ 1)
                        full = bars.q_full + stage
                        with cute.arch.elect_one():
                            self._put_q_info(bars, stage, item, q_tile)
                            cute.arch.mbarrier_arrive_and_expect_tx(full, tile_bytes)
                            ptx.bulk_load(
                                sLse2[None, stage].iterator, mLse2.iterator + stat, 4 * c.tile_m, full
                            )
                        self._load_tile(atom_q, mQ, sQ[None, None, stage], rows, q_tile, q_head, full)
                        stage, phase = n_task % c.do_stages, (n_task // c.do_stages) & 1
                        cute.arch.mbarrier_wait(bars.do_empty + stage, phase ^ 1)
                        full = bars.do_full + stage
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(full, tile_bytes)
                            ptx.bulk_load(
                                sDelta[None, stage].iterator, mDelta.iterator + stat, 4 * c.tile_m, full
                            )
                        self._load_tile(atom_do, mdO, sdO[None, None, stage], rows, q_tile, q_head, full)
                        # K and V last: their buffers are the last ones the previous item lets go.
                        if fresh == 1:
                            rows = (item.k_tma_row, item.tma_batch, item.k_tma_shift)
                            for which, atom, mX, sX in ((0, atom_k, mK, sK), (1, atom_v, mV, sV)):
                                cute.arch.mbarrier_wait(bars.kv_empty + which, (n_kv & 1) ^ 1)
                                if const_expr(which == 1):
                                    self._store_dv(atom_dv, tma_dV, sV, bars)
                                    with cute.arch.elect_one():
                                        self._put_dv_place(bars, item)
                                full = bars.kv_full + which
                                with cute.arch.elect_one():
                                    cute.arch.mbarrier_arrive_and_expect_tx(full, kv_bytes)
                                tile = sX[None, None, 0]
                                self._load_tile(atom, mX, tile, rows, item.kv_tile, item.kv_head, full)
                            n_kv += 1
                        fresh = Int32(0)
                        n_task += 1
            n_item += 1
            if fresh == 0:
                # Only an item whose tickets are granted no longer depends on other blocks: see reduce.py, Claiming.
                cute.arch.mbarrier_wait(bars.item_granted, (n_kv & 1) ^ 1)
            slot = reduce.claim_item(mPlan, mControl, bars, n_item, batches)
        cute.arch.mbarrier_wait(bars.kv_empty + 1, (n_kv & 1) ^ 1)
        self._store_dv(atom_dv, tma_dV, sV, bars)
        cute.arch.cp_async_bulk_wait_group(0)

    def _dv_place(self, bars):
        """Where the dV in V's buffer belongs: [there is one, kv tile, kv head, row, batch, shift] as `plan_view.tma_rows` defines them."""
        return cute.make_tensor(bars.dv_place, cute.make_layout(DV_PLACE_WORDS))

    def _put_dv_place(self, bars, item) -> None:
        """Remember where dV of an item that gets its V now will belong; partial sums are stored elsewhere."""
        place = self._dv_place(bars)
        words = (
            Int32(item.partial_slot < 0),
            item.kv_tile,
            item.kv_head,
            item.k_tma_row,
            item.tma_batch,
            item.k_tma_shift,
        )
        for i, word in enumerate(words):
            place[i] = word

    @cute.jit
    def _store_dv(self, atom, tensor, sV, bars):
        """Store the dV that the MMA warps have put into V's buffer, if there is one, and wait until the buffer has been read."""
        cute.arch.sync_warp()
        place = self._dv_place(bars)
        if place[0] == 1:
            shared, target = self._tiles(
                atom, tensor, sV[None, None, 0], (place[3], place[4], place[5]), place[2]
            )
            cute.copy(atom, shared, target[None, place[1]])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()

    def _put_q_info(self, bars, stage, item, q_tile: Int32) -> None:
        """Tell the MMA warps which scores of a task the mask hides."""
        c = self.config
        q_row, kv_row, low, high = q_tile * c.tile_m, item.kv_tile * c.tile_n, item.low, item.high
        cut = (kv_row + c.tile_n > item.seqlen_k) | (kv_row + c.tile_n - 1 > q_row + high)
        cut = cut | (kv_row < q_row + c.tile_m - 1 + low)
        info = self._q_info(bars)[None, stage]
        info[0] = Int32(cut)
        info[1] = kv_row - high - q_row  # first query column that sees key row 0 of the tile
        info[2] = kv_row - low - q_row  # the last one
        info[3] = item.seqlen_k - kv_row  # key rows that exist

    def _q_info(self, bars):
        """What the load warp tells the MMA warps about the mask of a task, (4, stage)."""
        return cute.make_tensor(bars.q_info, cute.make_layout((4, self.config.q_stages)))

    def _load_tile(self, atom, tensor, shared, rows, tile: Int32, head: Int32, barrier) -> None:
        """Start the TMA load of one tile of a sequence; `rows`: (row, batch, shift) as `plan_view.tma_rows` defines them."""
        target, source = self._tiles(atom, tensor, shared, rows, head)
        cute.copy(atom, source[None, tile], target, tma_bar_ptr=barrier)

    def _tiles(self, atom, tensor, shared, rows, head: Int32):
        """Partitions of a tile in shared memory and of a sequence's tiles, (., tile), for the copy engine; `rows` as in `_load_tile`."""
        row, batch, shift = rows
        sequence = cute.domain_offset((row, 0), tensor[None, None, head, batch, shift])
        tile_shape = (cute.size(shared, mode=[0]), self.config.head_dim)
        tiles = cute.flat_divide(sequence, tile_shape)[None, None, None, 0]
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
        )

    @cute.jit
    def mma(
        self, mma_scores, mma_grads, mma_dq, sQ, sdO, sK, sV, sdS, sLse2, sDelta, sdQ, mdK, mdV, mParts, scale, bars
    ):  # fmt: skip
        """MMA warpgroups: all five products of every task of an item, then dK and dV of the item."""
        c = self.config
        tidx = cute.arch.thread_idx()[0] - 128 * (THREADS // 128 - MMA_WARPGROUPS)
        group = cute.arch.make_warp_uniform(tidx // 128)
        lane = cute.arch.lane_idx()
        wg_scores, wg_grads, wg_dq = (m.get_slice(group * 128) for m in (mma_scores, mma_grads, mma_dq))
        sdSt = transposed(sdS)
        acc_S = cute.make_rmem_tensor(wg_scores.partition_shape_C((c.tile_n, c.tile_m)), Float32)
        acc_dK, acc_dV = (
            cute.make_rmem_tensor(wg_grads.partition_shape_C((c.tile_n, c.head_dim)), Float32)
            for _ in range(2)
        )
        store_ds = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.dtype), mma_scores
        ).get_slice(tidx)
        store_dv = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma_grads
        ).get_slice(tidx)
        t = SimpleNamespace(
            store_dv=store_dv, tVsdV=store_dv.partition_D(sV),
            scores=mma_scores, grads=mma_grads, dq=mma_dq, group=group, lane=lane, scale_log2=scale * math.log2(math.e),
            tSrK=wg_scores.make_fragment_A(wg_scores.partition_A(sK)),
            tSrQ=wg_scores.make_fragment_B(wg_scores.partition_B(sQ)),
            tPrV=wg_scores.make_fragment_A(wg_scores.partition_A(sV)),
            tPrdO=wg_scores.make_fragment_B(wg_scores.partition_B(sdO)),
            tVrdO=wg_grads.make_fragment_B(wg_grads.partition_B(transposed(sdO))),
            tKrQ=wg_grads.make_fragment_B(wg_grads.partition_B(transposed(sQ))),
            tQrdS=wg_dq.make_fragment_A(wg_dq.partition_A(sdS)),
            tQrK=wg_dq.make_fragment_B(wg_dq.partition_B(transposed(sK))),
            store_ds=store_ds, tSsdS=store_ds.partition_D(sdSt), tdQsdQ=self._dq_view(sdQ, tidx),
            lse2=self._column_view(sLse2, lane), delta=self._column_view(sDelta, lane),
            acc_S=acc_S, acc_dK=acc_dK, acc_dV=acc_dV,
            info=self._q_info(bars),
        )  # fmt: skip
        n_item, n_task, n_kv = Int32(0), Int32(0), Int32(0)
        slot = reduce.wait_item(bars, n_item)
        while plan_view.mailbox_item(slot).index >= 0:
            tasks = plan_view.mailbox_item(slot).q_head_count * plan_view.mailbox_item(slot).task_count
            for acc in (acc_dK, acc_dV, *((acc_S,) if c.head_dim == 128 else ())):
                acc.fill(0.0)  # acc_S only so that no old value stays alive through the epilogue
            if tasks > 0:
                cute.arch.mbarrier_wait(bars.kv_full, n_kv & 1)
                self.start_s(t, n_task, bars)
                cute.arch.mbarrier_wait(bars.kv_full + 1, n_kv & 1)
                warpgroup.wait_group(0)
                if const_expr(c.delayed_dq):
                    self.probabilities(t, 0, n_task % c.q_stages)
                    first = n_task
                    for _ in cutlass.range(tasks - 1, unroll=1):
                        self.wide_task(t, n_task, first, bars, False)
                        n_task += 1
                    self.wide_task(t, n_task, first, bars, True)
                    self.put_dv(t, slot, bars)
                    self.last_dq(t, n_task, bars)
                else:
                    for _ in cutlass.range(tasks - 1, unroll=1):
                        self.task(t, n_task, bars, slot, False)
                        n_task += 1
                    self.task(t, n_task, bars, slot, True)
                n_task += 1
                n_kv += 1
            item = plan_view.mailbox_item(slot)
            if item.partial_slot >= 0:
                self.store_partial_grads(t, mParts, item.partial_slot)
            else:
                self.store_grads(t.acc_dK, mdK, item, scale)
                if tasks == 0:
                    self.store_grads(t.acc_dV, mdV, item, None)
            reduce.release_item(bars, n_item)
            n_item += 1
            slot = reduce.wait_item(bars, n_item)

    def _dq_view(self, sdQ, tidx):
        """This thread's values of the dQ buffers, (4, vectors, stage): four consecutive floats, then a vector a 2 KB step."""
        c = self.config
        vectors = c.dq_elements // 1024
        layout = cute.make_layout(
            (4, 128, vectors, MMA_WARPGROUPS, c.dq_stages), stride=(1, 4, 512, 512 * vectors, c.dq_elements)
        )
        return cute.make_tensor(sdQ.iterator, layout)[None, tidx % 128, None, tidx // 128, None]

    def _column_view(self, stat, lane):
        """The per-query values this thread's accumulator columns need, (2, tile_m / 8, stage)."""
        tile_m, stages = stat.shape
        layout = cute.make_layout((2, 4, tile_m // 8, stages), stride=(1, 2, 8, tile_m))
        return cute.make_tensor(stat.iterator, layout)[None, lane % 4, None, None]

    @cute.jit
    def task(self, t, n_task: Int32, bars, slot, is_last: cutlass.Constexpr[bool]):
        """One (kv tile, q tile) with 64 query rows: expects S^T in acc_S, and leaves the next task's there unless it is the last.

        Tensor-core order: dP, dV, next S, dQ, dK; exp2 beside dP, dS beside dV, its trip through shared memory beside the next
        S, the dQ write-out beside dK.
        """
        c = self.config
        q_stage, do_stage = n_task % c.q_stages, n_task % c.do_stages
        ds_stage, dq_stage = n_task % c.ds_stages, n_task % c.dq_stages
        cute.arch.mbarrier_wait(bars.do_full + do_stage, (n_task // c.do_stages) & 1)
        acc_dP = self.start_dp(t, do_stage)
        self.probabilities(t, 0, q_stage)
        rP = as_operand_a(t.acc_S, self.dtype)
        multiply(t.grads, t.acc_dV, rP, t.tVrdO[None, None, None, do_stage], True)
        warpgroup.wait_group(1)
        # dV is done before the next S^T starts: ptxas finds no room for both beside dP, and its operand P gives its
        # registers to dS. The tensor cores hardly notice, dS takes less time than dV.
        for i in cutlass.range_constexpr(cute.size(acc_dP)):
            acc_dP[i] = t.acc_S[i] * acc_dP[i]
        warpgroup.wait_group(0)
        self._arrive(t, bars.do_empty + do_stage)
        if const_expr(is_last):
            self.put_dv(t, slot, bars)
        else:
            self.start_s(t, n_task + 1, bars)
        rdS = as_operand_a(acc_dP, self.dtype)
        cute.arch.mbarrier_wait(bars.ds_empty + ds_stage, ((n_task // c.ds_stages) & 1) ^ 1)
        self.store_ds(t, rdS, acc_dP.layout, ds_stage)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=DS_BARRIER, number_of_threads=128 * MMA_WARPGROUPS)
        acc_dQ = self.start_dq(t, ds_stage)
        multiply(t.grads, t.acc_dK, rdS, t.tKrQ[None, None, None, q_stage], True)
        cute.arch.mbarrier_wait(bars.dq_empty + dq_stage, ((n_task // c.dq_stages) & 1) ^ 1)
        warpgroup.wait_group(1)
        self._arrive(t, bars.ds_empty + ds_stage)
        if const_expr(is_last):
            self._arrive(t, bars.kv_empty)
        self.store_dq(t, acc_dQ, dq_stage)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        self._arrive(t, bars.dq_full + dq_stage)
        warpgroup.wait_group(0)
        self._arrive(t, bars.q_empty + q_stage)

    @cute.jit
    def wide_task(self, t, n_task: Int32, first: Int32, bars, is_last: cutlass.Constexpr[bool]):
        """One (kv tile, q tile) with 128 query rows: expects S^T in acc_S with exp2 done for its first 64 columns, and
        leaves the next task's like that unless it is the last.

        A tile of 128 rows has twice the exp2 of one of 64 for the same products, so elementwise work limits, and the two
        warpgroups should not do it at the same time. Nothing keeps them in step: dQ needs the dS of both, and is therefore
        computed a task later (`last_dq` for the last task of an item, `first`: its first task). Tensor-core order: dP, dV,
        next S, dQ of the task before, dK; one half of exp2 beside dP, the other, of the next task, beside dQ and dK.
        """
        c = self.config
        q_stage, do_stage = n_task % c.q_stages, n_task % c.do_stages
        ds_stage = n_task % c.ds_stages
        cute.arch.mbarrier_wait(bars.do_full + do_stage, (n_task // c.do_stages) & 1)
        acc_dP = self.start_dp(t, do_stage)
        rP = as_operand_a(part(t.acc_S, 0), self.dtype)
        multiply(t.grads, t.acc_dV, rP, t.tVrdO[None, None, None, do_stage], True)
        self.probabilities(t, 1, q_stage)
        # This wait is also a branch, below which ptxas sinks nothing: otherwise most of exp2 would end up behind dP.
        cute.arch.mbarrier_wait(bars.ds_empty + ds_stage, ((n_task // c.ds_stages) & 1) ^ 1)
        warpgroup.wait_group(0)  # so that the operands of both products can share registers
        rP = as_operand_a(part(t.acc_S, 1), self.dtype)
        multiply(t.grads, t.acc_dV, rP, t.tVrdO[None, None, None, do_stage], True, 4)
        cute.arch.sync_warp()  # ptxas moves nothing across: the products are issued before dS is computed
        rdS = cute.make_rmem_tensor(acc_dP.layout, self.dtype)
        rdS.store((t.acc_S.load() * acc_dP.load()).to(self.dtype))
        rdS = as_operand_a(rdS, self.dtype)
        if const_expr(not is_last):
            self.start_s(t, n_task + 1, bars)
        self.store_ds(t, rdS, acc_dP.layout, ds_stage)

        # Before the first task there is no dQ: the product is computed from old values, put into the buffer that the first
        # task's own dQ will overwrite, and told to nobody. A branch around it would make ptxas serialise the products.
        last = n_task - 1
        cute.arch.mbarrier_wait(bars.ds_full + last % c.ds_stages, (last // c.ds_stages) & 1)
        acc_dQ = self.start_dq(t, last % c.ds_stages)
        multiply(t.grads, t.acc_dK, rdS, t.tKrQ[None, None, None, q_stage], True)
        warpgroup.wait_group(2)
        self._arrive(t, bars.do_empty + do_stage)
        if const_expr(not is_last):
            self.probabilities(t, 0, (n_task + 1) % c.q_stages)
        into = cutlass.max(last, first)
        cute.arch.mbarrier_wait(bars.dq_empty + into % c.dq_stages, ((into // c.dq_stages) & 1) ^ 1)
        warpgroup.wait_group(1)
        self.store_dq(t, acc_dQ, into % c.dq_stages)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        self._arrive(t, bars.ds_full + ds_stage)
        if last >= first:
            self._arrive(t, bars.ds_empty + last % c.ds_stages)
            self._arrive(t, bars.dq_full + last % c.dq_stages)
        warpgroup.wait_group(0)
        self._arrive(t, bars.q_empty + q_stage)

    @cute.jit
    def last_dq(self, t, last: Int32, bars):
        """dQ of the last task of an item, when K is needed for the last time."""
        c = self.config
        cute.arch.mbarrier_wait(bars.ds_full + last % c.ds_stages, (last // c.ds_stages) & 1)
        acc_dQ = self.start_dq(t, last % c.ds_stages)
        cute.arch.mbarrier_wait(bars.dq_empty + last % c.dq_stages, ((last // c.dq_stages) & 1) ^ 1)
        warpgroup.wait_group(0)
        for barrier in (bars.ds_empty + last % c.ds_stages, bars.kv_empty):
            self._arrive(t, barrier)
        self.store_dq(t, acc_dQ, last % c.dq_stages)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        self._arrive(t, bars.dq_full + last % c.dq_stages)

    @cute.jit
    def put_dv(self, t, slot, bars):
        """V of an item is no longer needed: put the finished dV into its buffer, for the load warp to store, if the item owns its kv head."""
        if plan_view.mailbox_item(slot).partial_slot < 0:
            self._put_dv(t)
        self._arrive(t, bars.kv_empty + 1)

    @cute.jit
    def _put_dv(self, t):
        """A warpgroup overwrites the rows of V that it alone reads, when all its warps have done so."""
        cute.arch.barrier(barrier_id=V_BARRIER + t.group, number_of_threads=128)
        converted = cute.make_rmem_tensor(t.acc_dV.layout, self.dtype)
        converted.store(t.acc_dV.load().to(self.dtype))
        cute.copy(t.store_dv, t.store_dv.retile(converted), t.tVsdV[None, None, None, 0])
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()

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
    def start_s(self, t, n_task: Int32, bars):
        """Issue S^T of a task as soon as its Q has arrived."""
        stage = n_task % self.config.q_stages
        cute.arch.mbarrier_wait(bars.q_full + stage, (n_task // self.config.q_stages) & 1)
        multiply(t.scores, t.acc_S, t.tSrK[None, None, None, 0], t.tSrQ[None, None, None, stage], False)

    def start_dp(self, t, stage):
        """Issue dP^T, its accumulator started at -delta: no register holds delta while they are scarce."""
        acc_dP = cute.make_rmem_tensor(t.acc_S.layout, Float32)
        for column in range(cute.size(acc_dP) // 4):
            delta = cute.make_rmem_tensor(2, Float32)
            cute.autovec_copy(t.delta[None, column, stage], delta)
            for e in range(4):
                acc_dP[4 * column + e] = delta[e % 2]
        multiply(t.scores, acc_dP, t.tPrV[None, None, None, 0], t.tPrdO[None, None, None, stage], True)
        return acc_dP

    @cute.jit
    def probabilities(self, t, h: cutlass.Constexpr[int], stage):
        """P = exp2(S scale - LSE) in place, for the 64 query columns h; 0 where the mask hides the score."""
        acc = part(t.acc_S, h)
        if t.info[0, stage] == 1:
            self._mask(acc, t.info[None, stage], 64 * h)
        for column in cutlass.range_constexpr(8):
            lse2 = cute.make_rmem_tensor(2, Float32)
            cute.autovec_copy(t.lse2[None, 8 * h + column, stage], lse2)
            for e in cutlass.range_constexpr(4):
                i = 4 * column + e
                acc[i] = cute.math.exp2(acc[i] * t.scale_log2 - lse2[e % 2], fastmath=True)

    @cute.jit
    def _arrive(self, t, barrier):
        with cute.arch.elect_one():  # comparing the lane would keep it in a register
            cute.arch.mbarrier_arrive(barrier)

    def _first_row(self):
        """Row of the kv tile of this thread's first accumulator value. Not kept in a register: the main loop has none to spare."""
        tidx = ptx.thread_index() - 128 * (THREADS // 128 - MMA_WARPGROUPS)
        return tidx // 32 * 16 + tidx % 32 // 4

    @cute.jit
    def _mask(self, acc, info, first_column: cutlass.Constexpr[int]):
        """Set invisible scores of the S^T tile to -inf, `acc` beginning at query column `first_column`."""
        row, column = self._first_row(), ptx.thread_index() % 4 * 2 + first_column
        for half in cutlass.range_constexpr(2):
            first, last = info[1] + row + 8 * half - column, info[2] + row + 8 * half - column
            if info[3] <= row + 8 * half:
                first = Int32(plan_view.UNBOUNDED)
            for i in cutlass.range_constexpr(cute.size(acc) // 2):
                c = i // 2 * 8 + i % 2
                element = i // 2 * 4 + half * 2 + i % 2
                hidden = (c < first) | (c > last)
                acc[element] = cutlass.select_(hidden, Float32(-Float32.inf), acc[element])

    @cute.jit
    def store_grads(self, acc, target, item, factor):
        """Write this thread's rows of dK or dV, times the factor if there is one, converted; rows beyond the sequence are left alone."""
        c = self.config
        pairs = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, c.head_dim // 8)))
        for half in cutlass.range_constexpr(2):
            values = cute.make_rmem_tensor((2, c.head_dim // 8), self.dtype)
            row_values = pairs[None, half, None].load()
            if const_expr(factor is not None):
                row_values = row_values * factor
            values.store(row_values.to(self.dtype))
            row = item.kv_tile * c.tile_n + self._first_row() + 8 * half
            line = target[item.batch, item.k_row_first + row, item.kv_head, None]
            registers.store_rows(values, line, ptx.thread_index() % 32, row < item.seqlen_k)

    @cute.jit
    def store_partial_grads(self, t, mParts, slot: Int32):
        """Write this thread's fp32 dK (unscaled) and dV, for an item that owns one of several head groups, kept like the dQ tile."""
        c = self.config
        size = c.tile_n * c.head_dim
        vectors = size // 1024
        layout = cute.make_layout((4, vectors), stride=(1, 512))
        tidx = ptx.thread_index() - 128 * (THREADS // 128 - MMA_WARPGROUPS)
        place = tidx // 128 * (512 * vectors) + tidx % 128 * 4
        for which, acc in ((0, t.acc_dK), (1, t.acc_dV)):
            start = (Int64(slot) * 2 + which) * size + place
            target = cute.make_tensor(mParts.iterator + cute.assume(start, divby=4), layout)
            cute.autovec_copy(cute.make_tensor(acc.iterator, cute.make_layout((4, vectors))), target)

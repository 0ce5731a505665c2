"""The backward kernel: persistent, warp specialised, told what to do by the plan table.

Roles of a block of 384 threads: warp 0 loads, claims items, and stores dK and dV (load.py), warp 1 adds dQ partials to global memory, warp 2
hands finished contributions over, warp 3 walks the plan and waits for tickets (reduce.py), two warpgroups multiply (mma.py), and
convert complete dQ tiles when there are no items left (finish.py).

The fp32 dQ tile, in shared and global memory, is kept in the order of the accumulator registers: value (row, col) of
warpgroup g, thread t sits at ((g * tile_m*head_dim/1024 + v) * 128 + t) * 4 + e; `launch._accumulator_order` inverts it.
"""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils import hopper_helpers

from ..device import plan_view
from . import finish, load, mma, reduce
from .config import FINISH_STAGES, MMA_WARPS, SLOTS, THREADS, BackwardConfig

LOAD_WARP, REDUCE_WARP, RELEASE_WARP, TICKET_WARP, FIRST_MMA_WARP = 0, 1, 2, 3, 4
MAX_INT32 = (1 << 31) - 1
DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}


def tile_layout(dtype, rows: int, columns: int, stages: int):
    """Shared-memory layout (rows, columns, stages), columns contiguous in 128-byte swizzled atoms."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))


class Backward:
    """dQ, dK and dV of one plan.

    Tensors: q, do (B, Sq, H, D), k, v (B, Sk, Hkv, D), any strides with D contiguous and rows of 16-byte multiples; with B = 1 the
    sequences of the plan lie one after the other, otherwise one a batch. lse2 and
    delta fp32, tile_m values a dQ tile, in tile-index order (base-2 LSE, +inf for rows without keys; -rowsum(O dO));
    dq_acc fp32, tile_m*D values a dQ tile; parts fp32, 2*tile_n*D values an item that owns one of several head groups (dK, dV,
    in accumulator order, unscaled); control int32, counters, tickets and queue as Preprocess leaves them. dq, dk, dv as q, k, v.
    Guarantee: for one plan the bits of dQ, dK and dV do not depend on timing, grid size or neighbours (ordered=True; without
    order, Convert makes dq of dq_acc).
    """

    def __init__(self, config: BackwardConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.load_role, self.mma_role = load.LoadRole(config), mma.MmaRole(config, self.dtype)

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
            k_full: cute.struct.MemRange[Int64, 1]
            k_empty: cute.struct.MemRange[Int64, 1]
            v_full: cute.struct.MemRange[Int64, 1]
            v_empty: cute.struct.MemRange[Int64, 1]
            dk_full: cute.struct.MemRange[Int64, 1]
            dk_empty: cute.struct.MemRange[Int64, 1]
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
            tile_full: cute.struct.MemRange[Int64, FINISH_STAGES]
            tile_empty: cute.struct.MemRange[Int64, FINISH_STAGES]
            slots: cute.struct.Align[cute.struct.MemRange[Int32, reduce.SLOT_WORDS * SLOTS], 16]
            item: cute.struct.Align[cute.struct.MemRange[Int32, 2 * plan_view.MAILBOX_WORDS], 16]
            q_info: cute.struct.Align[cute.struct.MemRange[Int32, 4 * c.q_stages], 16]
            grads_place: cute.struct.Align[cute.struct.MemRange[Int32, load.GRADS_PLACE_WORDS], 16]
            tile_place: cute.struct.Align[
                cute.struct.MemRange[Int32, finish.PLACE_STRIDE * FINISH_STAGES], 16
            ]
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
        stream,
    ):
        c = self.config
        layouts = SimpleNamespace(
            q=tile_layout(self.dtype, c.tile_m, c.head_dim, c.q_stages),
            do=tile_layout(self.dtype, c.tile_m, c.head_dim, c.do_stages),
            kv=tile_layout(self.dtype, c.tile_n, c.head_dim, 1),
            ds=tile_layout(self.dtype, c.tile_m, c.tile_n, c.ds_stages),
            dk=tile_layout(self.dtype, c.tile_n, c.head_dim, 2 * c.dk_stages),
        )
        fetch, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        atom_q, tma_q = self._tma(fetch, q, layouts.q, c.tile_m)
        atom_do, tma_do = self._tma(fetch, do, layouts.do, c.tile_m)
        atom_k, tma_k = self._tma(fetch, k, layouts.kv, c.tile_n)
        atom_v, tma_v = self._tma(fetch, v, layouts.kv, c.tile_n)
        atom_dk, tma_dk = self._tma(store, dk, layouts.kv, c.tile_n)
        atom_dv, tma_dv = self._tma(store, dv, layouts.kv, c.tile_n)
        self.kernel(
            atom_q, tma_q, atom_do, tma_do, atom_k, tma_k, atom_v, tma_v, atom_dk, tma_dk, atom_dv, tma_dv,
            layouts.q, layouts.do, layouts.kv, layouts.ds, layouts.dk, *self._tiled_mmas(),
            lse2, delta, dq_acc, dq, dk, dv, parts, plan, control, errors, partials, trace, scale, workers, complete,
        ).launch(grid=(grid, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True)  # fmt: skip

    @cute.kernel
    def kernel(
        self, atom_q: cute.CopyAtom, mQ: cute.Tensor, atom_do: cute.CopyAtom, mdO: cute.Tensor, atom_k: cute.CopyAtom,
        mK: cute.Tensor, atom_v: cute.CopyAtom, mV: cute.Tensor, atom_dk: cute.CopyAtom, tma_dK: cute.Tensor,
        atom_dv: cute.CopyAtom, tma_dV: cute.Tensor, q_layout: cute.ComposedLayout,
        do_layout: cute.ComposedLayout, kv_layout: cute.ComposedLayout, ds_layout: cute.ComposedLayout, dk_layout: cute.ComposedLayout,
        mma_scores: cute.TiledMma, mma_grads: cute.TiledMma, mma_dq: cute.TiledMma, mLse2: cute.Tensor, mDelta: cute.Tensor,
        mdQacc: cute.Tensor, mdQ: cute.Tensor, mdK: cute.Tensor, mdV: cute.Tensor, mParts: cute.Tensor, mPlan: cute.Tensor,
        mControl: cute.Tensor, mErrors: cute.Tensor, mPartials: cute.Tensor, mTrace: cute.Tensor, scale: Float32,
        workers: Int32, complete: Int32,
    ):  # fmt: skip
        c = self.config
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == LOAD_WARP:
            for atom in (atom_q, atom_do, atom_k, atom_v, atom_dk, atom_dv):
                cpasync.prefetch_descriptor(atom)
        storage = SmemAllocator().allocate(self._storage())
        bars = SimpleNamespace(
            **{n: getattr(storage, n).data_ptr() for n in self._barrier_counts()},
            item=storage.item.data_ptr(),
            q_info=storage.q_info.data_ptr(),
            slots=storage.slots.data_ptr(),
            grads_place=storage.grads_place.data_ptr(),
            tile_place=storage.tile_place.data_ptr(),
        )
        grads_place = self.load_role.grads_place(bars)
        if warp_idx == LOAD_WARP:
            with cute.arch.elect_one():
                for name, (stages, count) in self._barrier_counts().items():
                    for stage in range(stages):
                        cute.arch.mbarrier_init(getattr(bars, name) + stage, count)
                grads_place[0] = Int32(0)
            cute.arch.mbarrier_init_fence()
        sQ = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        sdO = storage.do.get_tensor(do_layout.outer, swizzle=do_layout.inner)
        sK = storage.k.get_tensor(kv_layout.outer, swizzle=kv_layout.inner)
        sV = storage.v.get_tensor(kv_layout.outer, swizzle=kv_layout.inner)
        sdS = storage.ds.get_tensor(ds_layout.outer, swizzle=ds_layout.inner)
        sLse2 = storage.lse2.get_tensor(cute.make_layout((c.tile_m, c.q_stages)))
        sDelta = storage.delta.get_tensor(cute.make_layout((c.tile_m, c.do_stages)))
        sdQ = storage.dq.get_tensor(cute.make_layout((c.dq_elements, c.dq_stages)))
        leaving = storage.ds if const_expr(c.delayed_dq) else storage.dq
        sdK = leaving.get_tensor(dk_layout.outer, swizzle=dk_layout.inner, dtype=self.dtype)
        # Finishing needs what items no longer need, from Q on.
        sTiles = cute.make_tensor(
            cute.recast_ptr(storage.q.data_ptr(), dtype=Float32),
            cute.make_layout((c.dq_elements, FINISH_STAGES)),
        )
        cute.arch.sync_threads()
        # Tickets, claim counter, LSE and delta come from the preprocessing kernel.
        cute.arch.griddepcontrol_wait()

        if warp_idx < FIRST_MMA_WARP:
            cute.arch.setmaxregister_decrease(c.registers.other)
            if warp_idx == LOAD_WARP:
                tma = (atom_q, mQ, sQ, atom_do, mdO, sdO, atom_k, mK, sK, atom_v, mV, sV)
                tma += (atom_dk, tma_dK, sdK, atom_dv, tma_dV)
                self.load_role.run(
                    tma,
                    mLse2,
                    mDelta,
                    sLse2,
                    sDelta,
                    mPlan,
                    mControl,
                    mErrors,
                    mdQacc,
                    mdQ,
                    sTiles,
                    bars,
                    workers,
                    complete,
                )
            if warp_idx == REDUCE_WARP:
                reduce.reduce_role(c, mdQacc, mPartials, mTrace, sdQ, bars)
            if const_expr(c.ordered):
                if warp_idx == RELEASE_WARP:
                    reduce.release_role(mPlan, mControl, bars)
            if warp_idx == TICKET_WARP:
                reduce.ticket_role(c, mPlan, mControl, mErrors, bars)
        else:
            cute.arch.setmaxregister_increase(c.registers.mma)
            n_item = self.mma_role.run(
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
                sdK,
                mdK,
                mdV,
                mParts,
                scale,
                bars,
            )
            if const_expr(c.ordered):
                finish.convert_role(c, mdQ, sTiles, bars, n_item, scale)

    def _barrier_counts(self):
        """Barrier name -> (stages, arrivals a phase)."""
        c = self.config
        return {
            "q_full": (c.q_stages, 1), "q_empty": (c.q_stages, MMA_WARPS),
            "do_full": (c.do_stages, 1), "do_empty": (c.do_stages, MMA_WARPS),
            "k_full": (1, 1), "k_empty": (1, MMA_WARPS), "v_full": (1, 1), "v_empty": (1, MMA_WARPS),
            "dk_full": (1, MMA_WARPS), "dk_empty": (1, 1),
            "ds_full": (c.ds_stages, MMA_WARPS), "ds_empty": (c.ds_stages, MMA_WARPS),
            "dq_full": (c.dq_stages, MMA_WARPS), "dq_empty": (c.dq_stages, 1),
            "item_full": (2, 32), "item_empty": (2, 1 + MMA_WARPS),
            "item_granted": (1, 1), "tile_full": (FINISH_STAGES, 1), "tile_empty": (FINISH_STAGES, MMA_WARPS // 2),
            "granted": (SLOTS, 1), "performed": (SLOTS, 1), "slot_empty": (SLOTS, 1),
        }  # fmt: skip

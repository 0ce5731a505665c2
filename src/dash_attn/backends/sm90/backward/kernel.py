"""The backward kernel: persistent, warp specialised, told what to do by the plan table.

Roles of a block of 384 threads: warp 0 loads, claims items, and stores dK and dV (load.py). Warp 1 adds
contributions to dQ in global memory, warp 2 hands them over, warp 3 walks the plan and waits for tickets
(reduce.py). Two warpgroups multiply (mma.py), and convert complete dQ tiles when there are no items left
(finish.py).

The fp32 dQ tile, in shared and global memory, is kept in the order of the accumulator registers. Value
(row, col) of warpgroup g, thread t sits at ((g * tile_m*head_dim/1024 + v) * 128 + t) * 4 + e;
`launch._accumulator_order` inverts it.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils import hopper_helpers

from ..device import plan_view
from ..device.copies import copy_of
from ..device.operands import DTYPES, tile_layout
from ..device.ring import Ring
from . import capped, finish, later, load, mma, reduce, seen, split_columns, tight
from .arguments import Copies, Launch, Layouts, Memory, Numbers, Products, Shared, Tensors, Workspace
from .config import MMA_WARPS, SLOTS, THREADS, BackwardConfig
from .rings import Rings

LOAD_WARP, REDUCE_WARP, RELEASE_WARP, TICKET_WARP, FIRST_MMA_WARP = 0, 1, 2, 3, 4


class Backward:
    """dQ, dK and dV of one plan; see arguments.py for what it is given.

    Guarantee: for one plan the bits of dQ, dK and dV do not depend on timing, grid size or neighbours.
    Without order (`BackwardConfig.accumulation`) those of dQ do. There, and where contributions are apart,
    Convert makes dQ of dq_acc.
    """

    def __init__(self, config: BackwardConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.load_role, self.mma_role = load.LoadRole(config), self._mma_kind()(config, self.dtype)
        self._mailbox_words = seen.MAILBOX_WORDS if config.intervals else plan_view.MAILBOX_WORDS
        self._info_words = 8 if config.intervals else 4

    def _mma_kind(self) -> type[mma.MmaRole]:
        if self.config.split:
            return capped.CappedSplitColumns if self.config.softcap else split_columns.SplitColumns
        if self.config.tight:
            return tight.TightMma
        if self.config.delayed_dq and not self.config.wide:
            return capped.CappedLater if self.config.softcap else later.LaterMma
        return capped.CappedMma if self.config.softcap else mma.MmaRole

    def _tiled_mmas(self) -> Products:
        c = self.config
        major = cute.nvgpu.OperandMajorMode
        source = warpgroup.OperandSource

        def make(a_major, b_major, warpgroups, columns, a_source=source.SMEM):
            return hopper_helpers.make_trivial_tiled_mma(
                self.dtype, self.dtype, a_major, b_major, Float32, warpgroups, (64, columns), a_source
            )

        rows, halves = (2, 1, 1), (1, 2, 1)
        of_scores = (halves, c.tile_m // 2) if c.split else (rows, c.tile_m)
        scores = make(major.K, major.K, *of_scores)
        any_held = c.k_columns + c.v_columns > 0
        held = make(major.K, major.K, *of_scores, source.RMEM) if any_held else None
        if c.split:
            grads = make(major.MN, major.MN, halves, c.head_dim // 2)
            return Products(scores, grads, make(major.K, major.MN, halves, c.head_dim // 2), None, held)
        grads = make(major.K, major.MN, rows, c.head_dim_v, source.RMEM)
        dq_split = rows if c.wide else halves
        dq = make(major.K, major.MN, dq_split, c.head_dim // dq_split[1])
        keys = make(major.MN, major.MN, rows, c.head_dim) if c.tight else None
        return Products(scores, grads, dq, keys, held)

    def _storage(self):
        c, dtype = self.config, self.dtype

        def tile(rows, columns, stages):
            return cute.struct.Align[cute.struct.MemRange[dtype, rows * columns * stages], 1024]

        @cute.struct
        class Storage:
            q_full: cute.struct.MemRange[Int64, c.q_stages]
            q_empty: cute.struct.MemRange[Int64, c.q_stages]
            dout_full: cute.struct.MemRange[Int64, c.do_stages]
            dout_empty: cute.struct.MemRange[Int64, c.do_stages]
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
            tile_full: cute.struct.MemRange[Int64, c.finish_stages[0]]
            tile_empty: cute.struct.MemRange[Int64, c.finish_stages[0]]
            slots: cute.struct.Align[cute.struct.MemRange[Int32, reduce.SLOT_WORDS * SLOTS], 16]
            mailbox: cute.struct.Align[cute.struct.MemRange[Int32, 2 * self._mailbox_words], 16]
            q_info: cute.struct.Align[cute.struct.MemRange[Int32, self._info_words * c.q_stages], 16]
            grads_place: cute.struct.Align[cute.struct.MemRange[Int32, load.GRADS_PLACE_WORDS], 16]
            tile_place: cute.struct.Align[
                cute.struct.MemRange[Int32, finish.PLACE_STRIDE * c.finish_stages[0]], 16
            ]
            lse2: cute.struct.Align[cute.struct.MemRange[Float32, c.tile_m * c.q_stages], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, c.tile_m * c.do_stages], 128]
            q: tile(c.tile_m, c.head_dim, c.q_stages)
            dout: tile(c.tile_m, c.head_dim_v, c.do_stages)
            k: tile(c.tile_n, c.head_dim, 1)
            v: tile(c.tile_n, c.head_dim_v, 1)
            ds: tile(c.tile_m, c.tile_n, c.ds_stages)
            dq: cute.struct.Align[cute.struct.MemRange[Float32, c.dq_stage * c.dq_stages], 1024]

        return Storage

    @cute.jit
    def __call__(self, tensors: Tensors, workspace: Workspace, launch: Launch, cap, stream):
        """cap: the numbers of a softcap, where the variant has one."""
        c = self.config
        layouts = Layouts(
            q=tile_layout(self.dtype, c.tile_m, c.head_dim, c.q_stages),
            dout=tile_layout(self.dtype, c.tile_m, c.head_dim_v, c.do_stages),
            k=tile_layout(self.dtype, c.tile_n, c.head_dim, 1, c.k_row_bytes),
            v=tile_layout(self.dtype, c.tile_n, c.head_dim_v, 1),
            ds=tile_layout(self.dtype, c.tile_m, c.tile_n, c.ds_stages),
            dk=tile_layout(self.dtype, c.tile_n, c.head_dim, c.leaving_stages * c.dk_stages),
        )
        fetch, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        copies = Copies(
            q=copy_of(fetch, tensors.q, layouts.q, c.tile_m),
            dout=copy_of(fetch, tensors.dout, layouts.dout, c.tile_m),
            k=copy_of(fetch, tensors.k, layouts.k, c.tile_n),
            v=copy_of(fetch, tensors.v, layouts.v, c.tile_n),
            dk=copy_of(store, tensors.dk, layouts.dk, c.tile_n),
            dv=copy_of(store, tensors.dv, layouts.v, c.tile_n),
        )
        named = tensors._asdict() | workspace._asdict()
        memory = Memory(*[named[name] for name in Memory._fields])
        numbers = Numbers(launch.scale, launch.workers, launch.complete, *cap)
        self.kernel(copies, layouts, self._tiled_mmas(), memory, numbers).launch(
            grid=(launch.grid, 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self, copies: Copies, layouts: Layouts, products: Products, memory: Memory, numbers: Numbers
    ) -> None:
        c = self.config
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == LOAD_WARP:
            for each in copies:
                cpasync.prefetch_descriptor(each.atom)
        storage = SmemAllocator().allocate(self._storage())
        barriers = {name: getattr(storage, name).data_ptr() for name in self._barrier_counts()}
        rings, shared = self._rings(barriers), self._shared(storage, layouts)
        grads_place = shared.grads_place
        if warp_idx == LOAD_WARP:
            with cute.arch.elect_one():
                for name, (stages, count) in self._barrier_counts().items():
                    for stage in range(stages):
                        cute.arch.mbarrier_init(barriers[name] + stage, count)
                grads_place[0] = Int32(0)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # Tickets, claim counter, LSE and delta come from the preprocessing kernel. Where contributions are
        # apart, only LSE and delta do, and the load warp waits for them: all else was there before.
        if const_expr(c.apart):
            cute.arch.griddepcontrol_launch_dependents()  # Convert, which waits for the end of this kernel
        else:
            cute.arch.griddepcontrol_wait()

        if warp_idx < FIRST_MMA_WARP:
            cute.arch.setmaxregister_decrease(c.registers.other)
            if warp_idx == LOAD_WARP:
                self.load_role.run(copies, memory, shared, rings, numbers)
            if warp_idx == REDUCE_WARP:
                reduce.reduce_role(c, memory, shared, rings)
            if const_expr(c.waits):
                if warp_idx == RELEASE_WARP:
                    reduce.release_role(c, memory, shared, rings, numbers.complete)
            if warp_idx == TICKET_WARP:
                reduce.ticket_role(c, memory, shared, rings)
        else:
            cute.arch.setmaxregister_increase(c.registers.mma)
            n_item = self.mma_role.run(products, memory, shared, rings, numbers)
            if const_expr(c.waits):
                finish.convert_role(c, memory.dq, shared, rings, n_item, numbers.scale)

    def _shared(self, storage, layouts: Layouts) -> Shared:
        c = self.config
        leaving = storage.ds if c.wide else storage.k if c.split else storage.dq
        # Finishing needs what items no longer need, from Q on.
        complete = cute.recast_ptr(storage.q.data_ptr(), dtype=Float32)
        words = (
            (storage.mailbox, (self._mailbox_words, 2)),
            (storage.slots, (reduce.SLOT_WORDS, SLOTS)),
            (storage.q_info, (self._info_words, c.q_stages)),
            (storage.grads_place, (load.GRADS_PLACE_WORDS,)),
            (storage.tile_place, (finish.PLACE_STRIDE, c.finish_stages[0])),
        )
        mailbox, slots, q_info, grads_place, tile_place = (
            place.get_tensor(cute.make_layout(shape)) for place, shape in words
        )
        return Shared(
            q=storage.q.get_tensor(layouts.q.outer, swizzle=layouts.q.inner),
            dout=storage.dout.get_tensor(layouts.dout.outer, swizzle=layouts.dout.inner),
            k=storage.k.get_tensor(layouts.k.outer, swizzle=layouts.k.inner),
            v=storage.v.get_tensor(layouts.v.outer, swizzle=layouts.v.inner),
            ds=storage.ds.get_tensor(layouts.ds.outer, swizzle=layouts.ds.inner),
            lse2=storage.lse2.get_tensor(cute.make_layout((c.tile_m, c.q_stages))),
            delta=storage.delta.get_tensor(cute.make_layout((c.tile_m, c.do_stages))),
            dq=storage.dq.get_tensor(cute.make_layout((c.dq_stage, c.dq_stages))),
            dk=leaving.get_tensor(layouts.dk.outer, swizzle=layouts.dk.inner, dtype=self.dtype),
            complete=cute.make_tensor(complete, cute.make_layout((c.dq_elements, c.finish_stages[0]))),
            mailbox=mailbox,
            slots=slots,
            q_info=q_info,
            grads_place=grads_place,
            tile_place=tile_place,
        )

    def _rings(self, barriers) -> Rings:
        c = self.config

        def ring(name: str, stages: int = 1) -> Ring:
            return Ring(barriers[f"{name}_full"], barriers[f"{name}_empty"], stages)

        return Rings(
            q=ring("q", c.q_stages),
            dout=ring("dout", c.do_stages),
            k=ring("k"),
            v=ring("v"),
            dk=Ring(barriers["dk_full"], barriers["dk_empty"], starts_empty=False),
            ds=ring("ds", c.ds_stages),
            dq=ring("dq", c.dq_stages),
            item=ring("item", 2),
            granted=Ring(barriers["granted"], barriers["slot_empty"], SLOTS),
            performed=Ring(barriers["performed"], barriers["slot_empty"], SLOTS),
            item_granted=Ring(barriers["item_granted"], None),
            tile=Ring(barriers["tile_full"], barriers["tile_empty"], c.finish_stages[0], starts_empty=False),
        )

    def _barrier_counts(self):
        """Barrier name -> (stages, arrivals per phase)."""
        c = self.config
        return {
            "q_full": (c.q_stages, 1), "q_empty": (c.q_stages, MMA_WARPS),
            "dout_full": (c.do_stages, 1), "dout_empty": (c.do_stages, MMA_WARPS),
            "k_full": (1, 1), "k_empty": (1, MMA_WARPS), "v_full": (1, 1), "v_empty": (1, MMA_WARPS),
            "dk_full": (1, MMA_WARPS), "dk_empty": (1, 1),
            "ds_full": (c.ds_stages, MMA_WARPS), "ds_empty": (c.ds_stages, MMA_WARPS),
            "dq_full": (c.dq_stages, MMA_WARPS), "dq_empty": (c.dq_stages, 1),
            "item_full": (2, 32), "item_empty": (2, 1 + MMA_WARPS),
            "item_granted": (1, 1),
            "tile_full": (c.finish_stages[0], 1), "tile_empty": (c.finish_stages[0], MMA_WARPS // 2),
            "granted": (SLOTS, 1), "performed": (SLOTS, 1), "slot_empty": (SLOTS, 1),
        }  # fmt: skip

"""The forward kernel: persistent, warp specialised, one item (64 rows per warpgroup of one q head) after
the other.

Warp 0 claims items and loads Q, K and V by the copy engine (load.py), and one warp per warpgroup stores O.
Warpgroups multiply: S = Q K^T of the next kv tile and O += P V of this one are started together, and one
warpgroup's softmax runs beside the products of another (FlashAttention-3, section 3). Numerics:
schedule/forward.py.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils import hopper_helpers

from ..device.copies import copy_of
from ..device.operands import DTYPES, tile_layout
from ..device.ring import Ring
from .arguments import Copies, Extra, Launch, Layouts, Memory, Products, Shared, Tensors, Workspace
from .config import ROWS, ForwardConfig
from .item import Rings, info_words
from .load import LoadRole
from .mma import MmaRole
from .store import StoreRole

LOAD_WARP, FIRST_STORE_WARP, FIRST_MMA_WARP = 0, 1, 4


class Forward:
    def __init__(self, config: ForwardConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.load_role, self.store_role = LoadRole(config), StoreRole(config)
        self.mma_role = MmaRole(config, self.dtype)

    def _tiled_mmas(self) -> Products:
        c = self.config
        major, source = cute.nvgpu.OperandMajorMode, warpgroup.OperandSource
        make = hopper_helpers.make_trivial_tiled_mma
        scores = make(
            self.dtype, self.dtype, major.K, major.K, Float32, (1, 1, 1), (ROWS, c.tile_n), source.SMEM
        )
        out = make(
            self.dtype, self.dtype, major.K, major.MN, Float32, (1, 1, 1), (ROWS, c.head_dim_v), source.RMEM
        )
        return Products(scores, out)

    def _storage(self):
        c, dtype = self.config, self.dtype

        def tile(rows, columns, stages):
            return cute.struct.Align[cute.struct.MemRange[dtype, rows * columns * stages], 1024]

        @cute.struct
        class Storage:
            q_full: cute.struct.MemRange[Int64, c.q_stages]
            q_empty: cute.struct.MemRange[Int64, c.q_stages]
            k_full: cute.struct.MemRange[Int64, c.kv_stages]
            k_empty: cute.struct.MemRange[Int64, c.kv_stages]
            v_full: cute.struct.MemRange[Int64, c.kv_stages]
            v_empty: cute.struct.MemRange[Int64, c.kv_stages]
            item: cute.struct.Align[cute.struct.MemRange[Int32, info_words(c) * c.q_stages], 16]
            q: tile(ROWS, c.head_dim, c.q_stages * c.warpgroups)
            k: tile(c.tile_n, c.head_dim, c.kv_stages)
            v: tile(c.tile_n, c.head_dim_v, c.kv_stages)

        return Storage

    def _barrier_counts(self):
        c = self.config
        return {
            "q_full": (c.q_stages, 1), "q_empty": (c.q_stages, c.warpgroups),
            "k_full": (c.kv_stages, 1), "k_empty": (c.kv_stages, 4 * c.warpgroups),
            "v_full": (c.kv_stages, 1), "v_empty": (c.kv_stages, 4 * c.warpgroups),
        }  # fmt: skip

    @cute.jit
    def __call__(self, tensors: Tensors, workspace: Workspace, launch: Launch, extra: Extra, stream):
        c = self.config
        layouts = Layouts(
            q=tile_layout(self.dtype, ROWS, c.head_dim, c.q_stages * c.warpgroups),
            k=tile_layout(self.dtype, c.tile_n, c.head_dim, c.kv_stages),
            v=tile_layout(self.dtype, c.tile_n, c.head_dim_v, c.kv_stages),
            out=tile_layout(self.dtype, ROWS, c.head_dim_v, 1),
        )
        fetch, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        copies = Copies(
            q=copy_of(fetch, tensors.q, layouts.q, ROWS),
            k=copy_of(fetch, tensors.k, layouts.k, c.tile_n, used=True),
            v=copy_of(fetch, tensors.v, layouts.v, c.tile_n, used=True),
            out=copy_of(store, tensors.out, layouts.out, ROWS),
        )
        group = tensors.q.shape[2] // tensors.k.shape[2]
        memory = Memory(tensors.lse, *workspace, *extra)
        numbers = (
            launch.scale, launch.entries, launch.heads, launch.left, launch.right, group, tensors.q.shape[0],
            tensors.q.shape[2], tensors.k.shape[0], tensors.k.shape[1],
        )  # fmt: skip
        self.kernel(copies, layouts, self._tiled_mmas(), memory, numbers).launch(
            grid=(launch.grid, 1, 1),
            block=(c.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, copies: Copies, layouts: Layouts, products: Products, memory: Memory, numbers) -> None:
        c = self.config
        scale, *others = numbers
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == LOAD_WARP:
            for each in copies:
                cpasync.prefetch_descriptor(each.atom)
        storage = SmemAllocator().allocate(self._storage())
        barriers = {name: getattr(storage, name).data_ptr() for name in self._barrier_counts()}
        rings = Rings(
            q=Ring(barriers["q_full"], barriers["q_empty"], c.q_stages),
            k=Ring(barriers["k_full"], barriers["k_empty"], c.kv_stages),
            v=Ring(barriers["v_full"], barriers["v_empty"], c.kv_stages),
        )
        shared = Shared(
            q=storage.q.get_tensor(layouts.q.outer, swizzle=layouts.q.inner),
            k=storage.k.get_tensor(layouts.k.outer, swizzle=layouts.k.inner),
            v=storage.v.get_tensor(layouts.v.outer, swizzle=layouts.v.inner),
            item=storage.item.get_tensor(cute.make_layout((info_words(c), c.q_stages))),
        )
        if warp_idx == LOAD_WARP:
            with cute.arch.elect_one():
                for name, (stages, count) in self._barrier_counts().items():
                    for stage in range(stages):
                        cute.arch.mbarrier_init(barriers[name] + stage, count)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        if warp_idx < FIRST_MMA_WARP:
            cute.arch.setmaxregister_decrease(c.registers[1])
            if warp_idx == LOAD_WARP:
                self.load_role.run(copies, memory, shared, rings, tuple(others))
            elif warp_idx < FIRST_STORE_WARP + c.warpgroups:
                self.store_role.run(copies, shared, rings, warp_idx - FIRST_STORE_WARP)
        else:
            cute.arch.setmaxregister_increase(c.registers[0])
            self.mma_role.run(products, memory, shared, rings, scale)

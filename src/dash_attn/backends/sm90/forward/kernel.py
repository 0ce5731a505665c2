"""The forward kernel: persistent, warp specialised, one item (64 rows per warpgroup of one q head) after
the other.

Warp 0 claims items and loads Q, K and V by the copy engine (load.py); with at most two warpgroups, warp 3
loads V. One warp per warpgroup stores O.
Warpgroups multiply: S = Q K^T of the next kv tile and O += P V of this one are started together, and one
warpgroup's softmax runs beside the products of another (FlashAttention-3, section 3). Numerics:
schedule/forward.py.
"""

import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import cpasync

from ..device.copies import copy_of
from ..device.operands import DTYPES
from .arguments import Copies, Extra, Launch, Layouts, Memory, Products, Tensors, Workspace
from .block import LOAD_WARP, begin, launch_blocks, layouts_of, products_of
from .config import ROWS, ForwardConfig
from .load import LoadRole
from .mma import MmaRole
from .store import StoreRole

FIRST_STORE_WARP, FIRST_MMA_WARP = 1, 4


class Forward:
    def __init__(self, config: ForwardConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.load_role, self.store_role = LoadRole(config), StoreRole(config)
        self.mma_role = MmaRole(config, self.dtype)

    def _barrier_counts(self):
        c = self.config
        return {
            "q_full": (c.q_stages, 1), "q_empty": (c.q_stages, c.warpgroups + c.v_warp),
            "k_full": (c.kv_stages, 1), "k_empty": (c.kv_stages, 4 * c.warpgroups),
            "v_full": (c.kv_stages, 1), "v_empty": (c.kv_stages, 4 * c.warpgroups),
        }  # fmt: skip

    @cute.jit
    def __call__(self, tensors: Tensors, workspace: Workspace, launch: Launch, extra: Extra, stream):
        c = self.config
        layouts = layouts_of(c, self.dtype)
        fetch, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        copies = Copies(
            q=copy_of(fetch, tensors.q, layouts.q, ROWS),
            k=copy_of(fetch, tensors.k, layouts.k, c.tile_n),
            v=copy_of(fetch, tensors.v, layouts.v, c.tile_n),
            out=copy_of(store, tensors.out, layouts.out, ROWS),
        )
        if const_expr(c.rest > 0):
            copies = copies._replace(
                k_rest=copy_of(fetch, tensors.k, layouts.k_rest, c.tile_n),
                v_rest=copy_of(fetch, tensors.v, layouts.v_rest, c.tile_n),
            )
        group = tensors.q.shape[2] // tensors.k.shape[2]
        memory = Memory(tensors.lse, *workspace, extra.sink, extra.trace, extra.intervals)
        scales = (extra.inner, extra.outer) if c.softcap else (launch.scale,)
        numbers = (
            *scales, launch.entries, launch.heads, launch.left, launch.right, group, tensors.q.shape[0],
            tensors.q.shape[2], tensors.k.shape[0],
        )  # fmt: skip
        launch_blocks(
            self.kernel(copies, layouts, products_of(c, self.dtype), memory, numbers), c, launch.grid, stream
        )

    @cute.kernel
    def kernel(self, copies: Copies, layouts: Layouts, products: Products, memory, numbers) -> None:
        c = self.config
        of_scores = 2 if c.softcap else 1
        warp_idx, rings, shared = begin(c, self.dtype, copies, layouts, self._barrier_counts())
        if warp_idx < FIRST_MMA_WARP:
            cute.arch.setmaxregister_decrease(c.registers[1])
            if warp_idx == LOAD_WARP:
                self.load_role.run(copies, memory, shared, rings, numbers[of_scores:])
            elif warp_idx < FIRST_STORE_WARP + c.warpgroups:
                self.store_role.run(copies, shared, rings, warp_idx - FIRST_STORE_WARP)
            elif const_expr(c.v_warp and c.warpgroups == 2):
                self.load_role.run_values(copies, memory, shared, rings, numbers[of_scores:])
            elif const_expr(c.v_warp):
                if warp_idx == FIRST_MMA_WARP - 1:  # one more warp is left
                    self.load_role.run_values(copies, memory, shared, rings, numbers[of_scores:])
        else:
            cute.arch.setmaxregister_increase(c.registers[0])
            self.mma_role.run(products, memory, shared, rings, numbers[:of_scores])

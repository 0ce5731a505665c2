"""What a block of a forward has, over a cache of keys or not: its products, and its shared memory."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import hopper_helpers

from ..device.operands import tile_layout
from .arguments import Layouts, Products, Shared
from .config import ROWS, ForwardConfig
from .item import info_words

BarrierCounts = dict[str, tuple[int, int]]
"""By name: how many mbarriers, and how many arrivals each of them counts."""


def products_of(c: ForwardConfig, dtype: Any) -> Products:
    """S = Q K^T from shared memory, O += P V with P in registers."""
    major, source = cute.nvgpu.OperandMajorMode, warpgroup.OperandSource
    make = hopper_helpers.make_trivial_tiled_mma
    types = dtype, dtype, major.K
    scores = make(*types, major.K, Float32, (1, 1, 1), (ROWS, c.tile_n), source.SMEM)
    out = make(*types, major.MN, Float32, (1, 1, 1), (ROWS, c.head_dim_v), source.RMEM)
    return Products(scores, out)


def layouts_of(c: ForwardConfig, dtype: Any) -> Layouts:
    return Layouts(
        q=tile_layout(dtype, ROWS, c.head_dim, c.q_stages * c.warpgroups),
        k=tile_layout(dtype, c.tile_n, c.head_dim, c.kv_stages),
        v=tile_layout(dtype, c.tile_n, c.head_dim_v, c.kv_stages),
        out=tile_layout(dtype, ROWS, c.head_dim_v, 1),
    )


def storage_of(c: ForwardConfig, dtype: Any, counts: BarrierCounts) -> Any:
    """The shared memory of a block: barriers in the order of their names, words of items, tiles."""

    def tile(rows: int, columns: int, stages: int) -> Any:
        return cute.struct.Align[cute.struct.MemRange[dtype, rows * columns * stages], 1024]

    barriers = {name: cute.struct.MemRange[Int64, stages] for name, (stages, _) in counts.items()}
    fields = barriers | {
        "item": cute.struct.Align[cute.struct.MemRange[Int32, info_words(c) * c.q_stages], 16],
        "q": tile(ROWS, c.head_dim, c.q_stages * c.warpgroups),
        "k": tile(c.tile_n, c.head_dim, c.kv_stages),
        "v": tile(c.tile_n, c.head_dim_v, c.kv_stages),
    }
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


def shared_of(storage: Any, c: ForwardConfig, layouts: Layouts) -> Shared:
    """Tiles and words of items in a block's storage."""
    return Shared(
        q=storage.q.get_tensor(layouts.q.outer, swizzle=layouts.q.inner),
        k=storage.k.get_tensor(layouts.k.outer, swizzle=layouts.k.inner),
        v=storage.v.get_tensor(layouts.v.outer, swizzle=layouts.v.inner),
        item=storage.item.get_tensor(cute.make_layout((info_words(c), c.q_stages))),
    )

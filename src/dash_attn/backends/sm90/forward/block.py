"""What a block of a forward has, over a cache of keys or not: its products, and its shared memory."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils import hopper_helpers

from ..device.operands import tile_layout
from ..device.ring import Ring
from .arguments import Layouts, Products, Shared
from .config import ROWS, ForwardConfig
from .item import Rings, info_words

LOAD_WARP = 0
RESTS = "k_rest", "v_rest"

BarrierCounts = dict[str, tuple[int, int]]
"""By name: how many mbarriers, and how many arrivals each of them counts."""


def products_of(c: ForwardConfig, dtype: Any) -> Products:
    """S = Q K^T, O += P V with P in registers."""

    def out_of(columns: int) -> Any:
        return make(*types, major.MN, Float32, (1, 1, 1), (ROWS, columns), source.RMEM)

    major, source = cute.nvgpu.OperandMajorMode, warpgroup.OperandSource
    make = hopper_helpers.make_trivial_tiled_mma
    types = dtype, dtype, major.K
    q_source = source.RMEM if c.q_registers else source.SMEM
    scores = make(*types, major.K, Float32, (1, 1, 1), (ROWS, c.tile_n), q_source)
    if c.rest:
        return Products(scores, out_of(c.head_dim_v), out_of(c.kv_columns[1]), out_of(c.rest))
    return Products(scores, out_of(c.head_dim_v))


def launch_blocks(kernel: Any, c: ForwardConfig, grid: Any, stream: Any) -> None:
    """Launch a main kernel, one block per SM, as early as the kernel before it lets it."""
    kernel.launch(
        grid=(grid, 1, 1), block=(c.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True
    )


def layouts_of(c: ForwardConfig, dtype: Any) -> Layouts:
    return Layouts(
        q=tile_layout(dtype, ROWS, c.head_dim, c.q_stages * c.warpgroups),
        k=tile_layout(dtype, c.tile_n, c.kv_columns[0], c.kv_stages),
        v=tile_layout(dtype, c.tile_n, c.kv_columns[1], c.kv_stages),
        out=tile_layout(dtype, ROWS, c.head_dim_v, 1),
        **{name: tile_layout(dtype, c.tile_n, c.rest, c.kv_stages) for name in RESTS if c.rest},
    )


def _storage_of(c: ForwardConfig, dtype: Any, counts: BarrierCounts) -> Any:
    """The shared memory of a block: barriers in the order of their names, words of items, tiles."""

    def tile(rows: int, columns: int, stages: int) -> Any:
        return cute.struct.Align[cute.struct.MemRange[dtype, rows * columns * stages], 1024]

    barriers = {name: cute.struct.MemRange[Int64, stages] for name, (stages, _) in counts.items()}
    fields = barriers | {
        "item": cute.struct.Align[cute.struct.MemRange[Int32, info_words(c) * c.q_stages], 16],
        "q": tile(ROWS, c.head_dim, c.q_stages * c.warpgroups),
        "k": tile(c.tile_n, c.kv_columns[0], c.kv_stages),
        "v": tile(c.tile_n, c.kv_columns[1], c.kv_stages),
        **{name: tile(c.tile_n, c.rest, c.kv_stages) for name in RESTS if c.rest},
    }
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


def _shared_of(storage: Any, c: ForwardConfig, layouts: Layouts) -> Shared:
    """Tiles and words of items in a block's storage."""
    names = ("q", "k", "v", *(RESTS if c.rest else ()))
    layout_of = layouts._asdict()
    tiles = {
        name: getattr(storage, name).get_tensor(layout_of[name].outer, swizzle=layout_of[name].inner)
        for name in names
    }
    return Shared(item=storage.item.get_tensor(cute.make_layout((info_words(c), c.q_stages))), **tiles)


@cute.jit  # type: ignore[untyped-decorator]
def begin(
    c: ForwardConfig, dtype: Any, copies: Any, layouts: Layouts, counts: BarrierCounts
) -> tuple[Any, Rings, Shared]:
    """What every warp does first, until the kernels before have ended: (the warp, rings, shared memory)."""
    warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp_idx == LOAD_WARP:
        for each in filter(None, copies):
            cpasync.prefetch_descriptor(each.atom)
    storage = SmemAllocator().allocate(_storage_of(c, dtype, counts))
    barriers = {name: getattr(storage, name).data_ptr() for name in counts}
    rings = Rings(
        q=Ring(barriers["q_full"], barriers["q_empty"], c.q_stages),
        k=Ring(barriers["k_full"], barriers["k_empty"], c.kv_stages),
        v=Ring(barriers["v_full"], barriers["v_empty"], c.kv_stages),
    )
    shared = _shared_of(storage, c, layouts)
    if warp_idx == LOAD_WARP:
        with cute.arch.elect_one():
            for name, (stages, count) in counts.items():
                for stage in range(stages):
                    cute.arch.mbarrier_init(barriers[name] + stage, count)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    cute.arch.griddepcontrol_wait()
    return warp_idx, rings, shared

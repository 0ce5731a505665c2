"""One compiled callable per configuration."""

from functools import partial

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream

from ..arguments import regrouped
from ..cached.arguments import Places, Tensors
from ..cached.kernel import rows_of_groups, statistics_of_groups
from ..cached.pages import as_packed, box_of
from ..device import fakes
from ..device.copies import copy_of
from ..device.fakes import statistics, vector
from ..device.operands import DTYPES, tile_layout
from ..softcap import Cap
from .arguments import Launch, Memory, Numbers, Workspace
from .config import SpreadConfig
from .fold import SpreadFold
from .score import Score
from .spread import Spread


class Program:
    def __init__(self, config: SpreadConfig):
        self.config = config
        self.score, self.spread, self.fold = Score(config), Spread(config), SpreadFold(config)

    @cute.jit
    def __call__(self, *arguments):
        c, stream = self.config, arguments[-1]
        tensors, places, workspace, launch = regrouped(arguments, Tensors, Places, Workspace, Launch)
        cap = arguments[len(tensors + places + workspace + launch) : -1]
        kv_heads = tensors.k.shape[2]
        group = tensors.q.shape[2] // kv_heads
        sinks = cute.make_layout((kv_heads, group), stride=(group, 1))
        memory = Memory(
            rows_of_groups(tensors.q, group),
            rows_of_groups(tensors.out, group),
            statistics_of_groups(tensors.lse, group),
            cute.make_tensor(places.sink.iterator, sinks),
            places.lengths,
            places.pages,
            *workspace,
        )
        numbers = Numbers(
            launch.left, launch.right, group, kv_heads, launch.tiles, launch.segments, tensors.k.shape[0],
            tensors.k.shape[1], launch.most_pages,
            *(Int32(x.stride[0] // x.stride[1]) for x in (tensors.k, tensors.v)),
        )  # fmt: skip
        scales = cap if c.softcap else (launch.scale,)
        fetch, dtype = cpasync.CopyBulkTensorTileG2SOp(), DTYPES[c.dtype]
        k = copy_of(fetch, as_packed(tensors.k), tile_layout(dtype, c.piece, box_of(c), 1), c.piece)
        v = copy_of(fetch, as_packed(tensors.v), self.spread.tile_of(c.piece, 1), c.piece)
        self.score(k, memory, numbers, scales, launch, stream)
        self.spread(v, memory, numbers, scales, launch, stream)
        if launch.segments > 1:
            self.fold(memory, numbers, launch, stream)


def fake_arguments(config: SpreadConfig, env_stream: bool):
    """Tensors without data, in the order of `Program.__call__`."""
    matrix = partial(fakes.matrix, DTYPES[config.dtype])
    tensors = Tensors(q=matrix(), k=matrix(), v=matrix(), out=matrix(), lse=statistics())
    places = Places(vector(Int32, 4), vector(Int32, 4), vector(Int32, 4), vector(Float32, 4))
    workspace = Workspace(*(vector(Float32, 128) for _ in Workspace._fields))
    launch = Launch(Float32(1.0), *(Int32(1) for _ in Launch._fields[1:]))
    cap = Cap(Float32(1.0), Float32(1.0)) if config.softcap else ()
    return [*tensors, *places, *workspace, *launch, *cap, make_fake_stream(use_tvm_ffi_env_stream=env_stream)]

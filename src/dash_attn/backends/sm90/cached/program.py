"""One compiled callable per configuration."""

from functools import partial

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream

from ..arguments import regrouped
from ..device import fakes
from ..device.fakes import statistics, vector
from ..device.operands import DTYPES
from ..softcap import Cap
from .arguments import Launch, Memory, Places, Tensors, Workspace
from .chunk import Chunk
from .config import CachedConfig, ChunkConfig
from .deal import Deal
from .fold import CachedFold
from .kernel import Cached, rows_of_groups, statistics_of_groups


class Program:
    def __init__(self, config: CachedConfig):
        self.config = config
        self.deal, self.fold = Deal(config), CachedFold(config)
        self.main = Chunk(config) if isinstance(config, ChunkConfig) else Cached(config)

    @cute.jit
    def __call__(self, *arguments):
        stream = arguments[-1]
        tensors, places, workspace, launch = regrouped(arguments, Tensors, Places, Workspace, Launch)
        cap = arguments[len(tensors + places + workspace + launch) : -1]
        heads, group, more = self._heads(tensors)
        memory = Memory(
            q=rows_of_groups(tensors.q, group),
            out=rows_of_groups(tensors.out, group),
            lse=statistics_of_groups(tensors.lse, group),
            sink=cute.make_tensor(places.sink.iterator, cute.make_layout((heads, group), stride=(group, 1))),
            pages=places.pages,
            table=workspace.table,
            claimed=workspace.claimed,
            state=workspace.state,
            partial=workspace.partial,
        )
        keys = launch.most_pages * tensors.k.shape[1]
        sizes = (group, heads, tensors.q.shape[1], keys, *more)
        self.deal(workspace, places, launch, sizes, stream)
        self.main(tensors, memory, launch, cap, stream)
        if launch.folds > 0:
            self.fold(memory, launch, stream)

    def _heads(self, tensors):
        """Heads whose rows have tiles of their own, q heads among the rows of a tile, and what `Deal` needs
        besides: q heads per kv head."""
        kv_heads = tensors.k.shape[2]
        group = tensors.q.shape[2] // kv_heads
        return (tensors.q.shape[2], 1, [group]) if self.config.by_head else (kv_heads, group, [])


def fake_arguments(config: CachedConfig, env_stream: bool):
    """Tensors without data, in the order of `Program.__call__`."""
    matrix = partial(fakes.matrix, DTYPES[config.dtype])
    tensors = Tensors(q=matrix(), k=matrix(), v=matrix(), out=matrix(), lse=statistics())
    places = Places(vector(Int32, 4), vector(Int32, 4), vector(Int32, 4), vector(Float32, 4))
    workspace = Workspace(
        table=vector(Int32, 16),
        claimed=vector(Int32, 4),
        state=vector(Float32, 128),
        partial=vector(Float32, 128),
    )
    launch = Launch(Float32(1.0), *(Int32(1) for _ in Launch._fields[1:]))
    cap = Cap(Float32(1.0), Float32(1.0)) if config.softcap else ()
    stream = make_fake_stream(use_tvm_ffi_env_stream=env_stream)
    return [*tensors, *places, *workspace, *launch, *cap, stream]

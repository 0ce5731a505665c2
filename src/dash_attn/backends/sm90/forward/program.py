"""One compiled callable per configuration."""

from functools import partial

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from ..arguments import regrouped
from ..device import fakes
from ..device.fakes import statistics, vector
from ..device.operands import DTYPES
from .arguments import Extra, Launch, Tensors, Workspace
from .claims import Claims
from .config import ForwardConfig
from .fold import Fold
from .kernel import Forward


class Program:
    def __init__(self, config: ForwardConfig):
        self.config = config
        self.claims, self.forward, self.fold = Claims(), Forward(config), Fold(config)

    @cute.jit
    def __call__(self, *arguments):
        stream = arguments[-1]
        tensors, workspace, launch = regrouped(arguments, Tensors, Workspace, Launch)
        given = arguments[len(tensors + workspace + launch) : -1]
        extra = Extra(**dict(zip(extras_of(self.config), given)))
        if launch.grid < launch.entries * tensors.q.shape[2]:
            self.claims(workspace.claimed, stream)
        self.forward(tensors, workspace, launch, extra, stream)
        if launch.folds > 0:
            self.fold(tensors, workspace, launch, extra.sink, stream)


def extras_of(config: ForwardConfig) -> list[str]:
    """The fields of `Extra` that a variant has."""
    asked = Extra(config.sink, config.trace, config.softcap, config.softcap)
    return [name for name, wanted in asked._asdict().items() if wanted]


def fake_arguments(config: ForwardConfig, env_stream: bool):
    """Tensors without data, in the order of `Program.__call__`."""
    matrix = partial(fakes.matrix, DTYPES[config.dtype], None)
    tensors = Tensors(q=matrix(), k=matrix(), v=matrix(), out=matrix(), lse=statistics())
    workspace = Workspace(
        table=vector(Int32, 16),
        claimed=vector(Int32, 4),
        state=vector(Float32, 128),
        partial=vector(Float32, 128),
    )
    launch = Launch(
        scale=Float32(1.0),
        entries=Int32(1),
        folds=Int32(0),
        heads=Int32(1),
        grid=Int32(1),
        left=Int32(-1),
        right=Int32(-1),
    )
    kinds = Extra(sink=vector(Float32, 4), trace=vector(Int64, 8), inner=Float32(1.0), outer=Float32(1.0))
    extra = [getattr(kinds, name) for name in extras_of(config)]
    return [*tensors, *workspace, *launch, *extra, make_fake_stream(use_tvm_ffi_env_stream=env_stream)]

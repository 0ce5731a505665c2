"""One compiled callable per configuration. The kernel is ../forward/fold.py."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream

from ..arguments import regrouped
from ..device.fakes import vector
from ..device.operands import DTYPES
from ..device.places import fake_places, matrix_at, statistics_at, vector_at
from ..forward.fold import Fold
from ..places import Place, Sizes
from .arguments import Launch
from .config import FoldConfig


class Program:
    def __init__(self, config: FoldConfig):
        self.config, self.fold = config, Fold(config)

    @cute.jit
    def __call__(self, table, *arguments):
        """Called with the table, a sink if the variant has one, the place of out, and the fields of ``Sizes``
        and ``Launch``; traced with a stream behind."""
        place, sizes, launch = regrouped(arguments[self.config.sink : -1], Place, Sizes, Launch)
        sink = arguments[0] if const_expr(self.config.sink) else None
        out = matrix_at(DTYPES[self.config.dtype], place, sizes.of_out)
        lse, partial = statistics_at(launch.lse, sizes.of_q), vector_at(launch.partial, launch.partial_words)
        self.fold((out, lse, table, partial, sink), launch, arguments[-1])


def fake_arguments(config: FoldConfig, env_stream: bool):
    """What stands for the arguments of `Program.__call__` while it is compiled."""
    return [
        vector(Int32, 16), *[vector(Float32, 4)] * config.sink, *fake_places(1),
        *(Int32(1) for _ in Sizes._fields), *Launch(Int64(0), Int64(32), Int64(32), Int32(1), Int32(1)),
        make_fake_stream(use_tvm_ffi_env_stream=env_stream),
    ]  # fmt: skip

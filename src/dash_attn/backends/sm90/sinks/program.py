"""The launches: one or both."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.runtime import make_fake_stream

from ..arguments import regrouped
from ..device.fakes import vector
from .config import SinkConfig
from .kernels import SinkParts, SinkTotals


class Arguments(NamedTuple):
    """table: the plan table; lse2, delta: of the backward's workspace; sink, dsink: (heads,) fp32; parts:
    fp32, a word per sequence and head; sequences: int32."""

    table: Any
    lse2: Any
    delta: Any
    sink: Any
    parts: Any
    dsink: Any
    sequences: Any


class ToAdd(NamedTuple):
    """As in ``Arguments``; parts are added to."""

    table: Any
    lse2: Any
    delta: Any
    sink: Any
    parts: Any
    sequences: Any


class ToFinish(NamedTuple):
    """As in ``Arguments``."""

    parts: Any
    dsink: Any
    sequences: Any


_GIVEN: dict[str, Any] = {"": Arguments, "add": ToAdd, "finish": ToFinish}


class Program:
    def __init__(self, config: SinkConfig):
        self.given, self.step = _GIVEN[config.step], config.step
        self.parts, self.totals = SinkParts(config.rows, adds=config.step == "add"), SinkTotals()

    @cute.jit
    def __call__(self, *arguments):
        """Called with the fields of what is given; traced with a stream behind."""
        (given,), stream = regrouped(arguments[:-1], self.given), arguments[-1]
        if const_expr(self.step != "finish"):
            self.parts(given, stream)
        if const_expr(self.step != "add"):
            self.totals(given, stream)


def fake_arguments(config: SinkConfig, env_stream: bool):
    """Tensors without data, in the order of `Program.__call__`."""
    known = Arguments(
        table=vector(Int32, 16),
        lse2=vector(Float32, 128),
        delta=vector(Float32, 128),
        sink=vector(Float32, 4),
        parts=vector(Float32, 4),
        dsink=vector(Float32, 4),
        sequences=Int32(1),
    )
    arguments = [getattr(known, name) for name in _GIVEN[config.step]._fields]
    return [*arguments, make_fake_stream(use_tvm_ffi_env_stream=env_stream)]

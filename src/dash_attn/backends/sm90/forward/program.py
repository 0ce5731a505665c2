"""One compiled callable per configuration. What may be left after it: ../fold."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream

from ..arguments import Given
from ..device.fakes import vector
from ..device.operands import DTYPES
from ..device.places import fake_places, matrix_at, statistics_at, vector_at, words_of
from ..places import Sizes
from .arguments import MATRICES, PARTS, Extra, Intervals, Launch, Tensors, Workspace, named, tensors_of
from .bounds import KeyBounds
from .claims import Claims
from .config import ForwardConfig
from .kernel import Forward


class Program:
    def __init__(self, config: ForwardConfig):
        self.config = config
        self.claims, self.forward = Claims(), Forward(config)
        self.key_bounds = KeyBounds(config)

    @cute.jit
    def __call__(self, *arguments):
        """Called with what ``arguments.named`` names; traced with a stream behind."""
        stream, given = arguments[-1], named(self.config, arguments[:-1])
        tensors, launch = self._tensors(given), given.launch
        claimed, state, partial = (vector_at(*part) for part in given.parts)
        workspace = Workspace(given.tensors["table"], words_of(claimed, Int32, 4), state, partial)
        extra = Extra(given.tensors.get("sink"), given.tensors.get("trace"), *given.cap)
        if const_expr(self.config.intervals):
            extra = extra._replace(intervals=Intervals(*(given.tensors[x] for x in Intervals._fields)))
        if launch.grid < launch.entries * tensors.q.shape[2]:
            self.claims(workspace.claimed, stream)
        if const_expr(self.config.intervals):
            self.key_bounds(workspace.table, extra.intervals, launch.entries, stream)
        self.forward(tensors, workspace, launch, extra, stream)

    def _tensors(self, given: Given) -> Tensors:
        dtype, sizes = DTYPES[self.config.dtype], given.sizes
        matrices = {
            name: matrix_at(dtype, place, getattr(sizes, f"of_{name}"))
            for name, place in given.places.items()
        }
        return Tensors(**matrices, lse=statistics_at(given.lse, sizes.of_q))


def fake_arguments(config: ForwardConfig, env_stream: bool):
    """What stands for the arguments of `Program.__call__` while it is compiled."""
    kinds = {
        "table": vector(Int32, 16), "work": vector(Float32, 128), "sink": vector(Float32, 4),
        "trace": vector(Int64, 8), "starts": vector(Int32, 4), "ends": vector(Int32, 4),
        "bounds": vector(Int32, 16),
    }  # fmt: skip
    launch = Launch(Float32(1.0), *(Int32(1) for _ in Launch._fields[1:]))
    cap = [Float32(1.0), Float32(1.0)] if config.softcap else []
    return [
        *(kinds[name] for name in tensors_of(config)), *fake_places(len(MATRICES)), Int64(0),
        *(Int32(1) for _ in Sizes._fields), *(Int64(32) for _ in 2 * PARTS), *launch, *cap,
        make_fake_stream(use_tvm_ffi_env_stream=env_stream),
    ]  # fmt: skip

"""The launch: four values per thread at a time."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass.cute.runtime import make_fake_stream

from ..arguments import regrouped
from ..device import ptx
from ..device.fakes import vector
from .config import AddSumsConfig

THREADS, BLOCKS = 256, 1056


class Arguments(NamedTuple):
    """sums, more: fp32, a multiple of four values; vectors: so many times four."""

    sums: Any
    more: Any
    vectors: Any


class Add:
    @cute.jit
    def __call__(self, arguments: Arguments, stream):
        self.kernel(arguments).launch(grid=(BLOCKS, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, arguments) -> None:
        first = Int64(cute.arch.block_idx()[0]) * THREADS + cute.arch.thread_idx()[0]
        for at in cutlass.range(first, arguments.vectors, BLOCKS * THREADS, unroll=4):
            values = cute.make_rmem_tensor(4, Float32)
            start = cute.assume(at * 4, divby=4)
            cute.autovec_copy(cute.make_tensor(arguments.more.iterator + start, 4), values)
            ptx.add_f32x4(arguments.sums.iterator + start, [values[i] for i in range(4)])


class Program:
    def __init__(self, config: AddSumsConfig):
        self.add = Add()

    @cute.jit
    def __call__(self, *arguments):
        """Called with the fields of ``Arguments``; traced with a stream behind."""
        (given,) = regrouped(arguments[:-1], Arguments)
        self.add(given, arguments[-1])


def fake_arguments(config: AddSumsConfig, env_stream: bool):
    """Tensors without data, in the order of `Program.__call__`."""
    arguments = Arguments(sums=vector(Float32, 16), more=vector(Float32, 16), vectors=Int64(1))
    return [*arguments, make_fake_stream(use_tvm_ffi_env_stream=env_stream)]

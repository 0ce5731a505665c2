"""The launch: one block per kv tile, kv head, gradient and batch."""

from functools import partial
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream

from ..arguments import regrouped
from ..backward.add_up import GroupsOf, RowsOf, add_up
from ..device import fakes
from ..device.operands import DTYPES
from .config import KeySumsConfig

THREADS = 256


class Arguments(NamedTuple):
    """sums: fp32, (kv tiles, B, Hkv, head groups, 2, tile_n * head_dim), dK and dV in accumulator order.

    dk, dv: (B, Sk, Hkv, D); scale: of dK; groups: head groups."""

    sums: Any
    dk: Any
    dv: Any
    scale: Any
    groups: Any


class Finish:
    def __init__(self, config: KeySumsConfig):
        self.config = config

    @cute.jit
    def __call__(self, arguments: Arguments, stream):
        batch, rows, kv_heads = arguments.dk.shape[0], arguments.dk.shape[1], arguments.dk.shape[2]
        tiles = (rows + self.config.tile_n - 1) // self.config.tile_n
        # Only the first dimension of a grid takes any number of heads and sequences.
        self.kernel(arguments).launch(
            grid=(tiles * batch * kv_heads, 2, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, arguments) -> None:
        tile, which, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_wait()
        if which == 0:
            self._finish(arguments, 0, arguments.dk, arguments.scale, tile)
        else:
            self._finish(arguments, 1, arguments.dv, Float32(1.0), tile)

    def _finish(self, arguments, which, target, scale, tile) -> None:
        """tile: the number of a kv tile, batch and kv head, in the order of the sums."""
        kv_head, rest = tile % target.shape[2], tile // target.shape[2]
        batch, kv_tile = rest % target.shape[0], rest // target.shape[0]
        of = GroupsOf(tile * arguments.groups, arguments.groups, which, scale)
        to = RowsOf(target, batch, 0, kv_tile, kv_head, target.shape[1])
        add_up(self.config, arguments.sums, of, to, cute.arch.thread_idx()[0])


class Program:
    def __init__(self, config: KeySumsConfig):
        self.finish = Finish(config)

    @cute.jit
    def __call__(self, *arguments):
        """Called with the fields of ``Arguments``; traced with a stream behind."""
        (given,) = regrouped(arguments[:-1], Arguments)
        self.finish(given, arguments[-1])


def fake_arguments(config: KeySumsConfig, env_stream: bool):
    """Tensors without data, in the order of `Program.__call__`."""
    matrix = partial(fakes.matrix, DTYPES[config.dtype])
    arguments = Arguments(
        sums=fakes.vector(Float32, 128),
        dk=matrix(),
        dv=matrix(),
        scale=Float32(1.0),
        groups=Int32(1),
    )
    return [*arguments, make_fake_stream(use_tvm_ffi_env_stream=env_stream)]

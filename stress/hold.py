"""Holding SMs: a kernel whose blocks leave room for no other large block until they are told to end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import cutlass.cute as cute
import torch
from cutlass import Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from dash_attn.backends.sm90.device import ptx

SHARED = 200 * 1024  # bytes per block: no second one, and no block of the backward, fits beside it
POLLS = 10_000_000  # then a block ends by itself, after some seconds


@cute.kernel
def _kernel(flags: cute.Tensor, polls: Int32):
    block, _, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        seen, spins = ptx.load_acquire(flags.iterator + block), Int32(0)
        while (seen == 0) & (spins < polls):
            seen = ptx.load_acquire(flags.iterator + block)
            spins += 1


@cute.jit
def _launch(flags: cute.Tensor, blocks: Int32, polls: Int32, stream: Any):
    _kernel(flags, polls).launch(
        grid=(blocks, 1, 1), block=(32, 1, 1), smem=SHARED, stream=stream, min_blocks_per_mp=1
    )


@cache
def _program() -> Any:
    flags = make_fake_tensor(Int32, (cute.sym_int64(),), (1,), assumed_align=16)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        _launch, flags, Int32(1), Int32(1), stream, options="--enable-tvm-ffi --gpu-arch sm_90a"
    )


class Held:
    """SMs that are held; ``release(n)`` gives n of them back."""

    def __init__(self, blocks: int) -> None:
        self._flags = torch.zeros(blocks, dtype=torch.int32, device="cuda")
        self._ones = torch.ones(blocks, dtype=torch.int32).pin_memory()
        self._stream, self._writer = torch.cuda.Stream(), torch.cuda.Stream()
        self._released = 0
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            _program()(self._flags, blocks, POLLS)

    def release(self, count: int) -> None:
        """Let some blocks end. The copy engine writes, for even a small kernel has no room beside them."""
        with torch.cuda.stream(self._writer):
            self._flags[self._released :][:count].copy_(self._ones[:count], non_blocking=True)
        self._writer.synchronize()
        self._released += count

    def release_all(self) -> None:
        self.release(len(self._flags) - self._released)
        self._stream.synchronize()


@contextmanager
def held(blocks: int) -> Iterator[Held]:
    """Hold so many SMs; all are given back at the end."""
    found = Held(blocks)
    try:
        yield found
    finally:
        found.release_all()

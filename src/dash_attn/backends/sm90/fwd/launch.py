"""Launching the forward draft on PyTorch tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....problem import Problem
from ...cuda.cache import KernelCache
from ...cuda.multiprocessors import multiprocessors
from ...cuda.upload import Upload, loadable
from ..compile import ARCH, _compiler_or_error, _load
from .arguments import Launch, Tensors, Workspace
from .config import ForwardConfig
from .table import forward_table

DTYPES = {"bfloat16": "bf16", "float16": "fp16"}


def _compile(config: ForwardConfig, options: str = "") -> Any:
    with _compiler_or_error():
        import cutlass.cute as cute

        from .program import Program, fake_arguments
    arguments = fake_arguments(config, env_stream=True)
    return cute.compile(Program(config), *arguments, options=f"--enable-tvm-ffi --gpu-arch {ARCH} {options}")


PROGRAMS = KernelCache(_compile, _load)


def prepared(
    problem: Problem, device: torch.device, config: ForwardConfig, blocks: int | None = None
) -> Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    """A forward of dense tensors, (batch, seqlen, heads, head_dim), or packed ones, (total, heads, head_dim)."""
    program = PROGRAMS(config, ARCH)
    available = multiprocessors(device) if blocks is None else blocks
    table = forward_table(problem, config.tile_m, config.segment, available)
    grid = max(1, min(available, table.entries * problem.heads))
    upload = Upload("items", [table.words], device)
    several = max(seqlen_k for _, seqlen_k in problem.sequences) > config.segment
    words = grid * config.state_words if several else 32
    partial_words = max(table.places * problem.heads * config.warpgroups * config.partial_words, 32)
    left, right = problem.mask.sides

    def run(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        packed = q.dim() == 3
        shape = (1, q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
        state, partial = torch.empty(
            words + partial_words, dtype=torch.float32, device=q.device
        ).split_with_sizes([words, partial_words])
        four = [loadable(x) for x in (q, k, v)] + [out]
        if packed:
            four = [x.unsqueeze(0) for x in four]
        program(
            *Tensors(*four, lse),
            *Workspace(upload.use()[0], state, partial),
            *Launch(scale, table.entries, table.folds, table.heads, grid, left, right),
        )
        return out, lse[0] if packed else lse

    return run

"""Calls over a cache of keys: from shapes to a prepared forward, and tokens that are appended."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..backends.base import NO_AUX, AuxTensors, Backend, as_current
from ..backends.cached import CachedProblem, CachedTensors, PreparedCached
from ..errors import InputError, ProblemError
from ..scores import Scores
from ..spec import AttentionSpec
from .autograd import call_directly
from .calls import DTYPE_NAMES, first_that_covers
from .policies import forget_with

__all__ = [
    "CachedCall",
    "append",
    "cached_call",
    "check_last_strides",
    "load",
    "numbers",
]


class CachedCall:
    """What shapes, dtypes, device and spec decide of a forward over a cache of keys.

    Raises:
        InputError: no backend covers it, or the one that is asked for does not.
    """

    def __init__(self, spec: AttentionSpec, problem: CachedProblem, device: torch.device) -> None:
        self.scores: Scores = spec.scores
        self.problem, self.device = problem, device
        self.backend = _first(spec.backend, problem, device, self.scores)
        self.prepared: PreparedCached = self.backend.prepare_cached(problem, device)

    def load(self, tensors: CachedTensors) -> None:
        """Find what :meth:`forward` needs, or fail; nothing where there is nothing to compute."""
        if tensors.q.numel() and tensors.k.numel() and self.problem.keys and self.problem.batch:
            with as_current(self.device):
                self.prepared.load(self.scores)

    def forward(self, tensors: CachedTensors, aux: AuxTensors = NO_AUX) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        with as_current(self.device):
            return self.prepared.forward(tensors, self.scores, aux)


def _first(asked: str, problem: CachedProblem, device: torch.device, scores: Scores) -> Backend:
    try:
        return first_that_covers(asked, device, lambda x: x.why_not_cached(problem, device, scores))
    except ProblemError as error:
        raise InputError(str(error)) from error


def cached_call(tensors: CachedTensors, spec: AttentionSpec, longest_q: int = -1) -> CachedCall:
    """The call of some tensors, whose values are not read here.

    ``longest_q``: no sequence of packed q has more rows; -1: unknown.

    Raises:
        InputError: no backend covers it, or a size is out of range.
    """
    return _call(spec, _problem(tensors, spec, longest_q), tensors.q.device)


def load(tensors: CachedTensors, spec: AttentionSpec, longest_q: int = -1) -> None:
    """Find what the forward of a call needs, before anything is written. Symbolic sizes are not looked at,
    and nothing is loaded for fake tensors.

    Raises:
        InputError: no backend covers it, or a size is out of range.
        DashError: there is no kernel.
    """
    if any(type(n) is not int for x in tensors if x is not None for n in x.shape):
        return
    if type(tensors.q).__name__ == "FakeTensor":
        _first(spec.backend, _problem(tensors, spec, longest_q), tensors.q.device, spec.scores)
        return
    cached_call(tensors, spec, longest_q).load(tensors)


def _problem(tensors: CachedTensors, spec: AttentionSpec, longest_q: int) -> CachedProblem:
    q, k, v, _, table, cu_seqlens_q = tensors
    if cu_seqlens_q is None:
        batch, seqlen_q = q.shape[:2]
        of_q = (seqlen_q, batch * seqlen_q, seqlen_q)
    else:
        batch, total = cu_seqlens_q.shape[0] - 1, q.shape[0]
        of_q = (-1, total, total if longest_q < 0 else min(longest_q, total))
    sizes = (q.shape[-2], k.shape[2], q.shape[-1], v.shape[3], DTYPE_NAMES[q.dtype])
    pages = (k.shape[1], k.shape[0], table.shape[1])
    return CachedProblem(batch, *sizes, spec.mask.sides, *of_q, *pages)


@lru_cache(256)
def _call(spec: AttentionSpec, problem: CachedProblem, device: torch.device) -> CachedCall:
    return CachedCall(spec, problem, device)


def numbers(count: int, q: Tensor) -> Tensor:
    """(count,) int32 on q's device: 0, 1, 2 and so on. On a GPU it is kept where it can be, to save a launch:
    write nothing to it."""
    kept = None
    if q.device.type == "cuda" and call_directly(q, q, q):
        upload: Any = import_module("..backends.cuda.upload", __package__)
        kept = upload.constant(np.arange(count, dtype=np.int32), q.device)
    return torch.arange(count, dtype=torch.int32, device=q.device) if kept is None else kept


def check_last_strides(cache: tuple[Tensor, Tensor]) -> None:
    """Tokens can be appended only where the columns of a cache lie side by side, and each has its memory.

    Raises:
        InputError: they do not.
    """
    for name, x in zip(("k_cache", "v_cache"), cache):
        if x.stride(-1) != 1:
            raise InputError(f"{name} must have a last dimension of stride 1, got strides {x.stride()}")
        if _shares_memory(x.shape, x.stride()):
            raise InputError(
                f"{name} has tokens that share memory: shape {tuple(x.shape)}, strides {x.stride()}"
            )


@lru_cache(256)
def _shares_memory(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements may lie in one place: a step is no longer than all smaller ones together."""
    span = 0
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape) if size > 1):
        if stride <= span:
            return True
        span += stride * (size - 1)
    return False


def append(cache: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], at: Tensor, table: Tensor) -> None:
    """Write new keys and values behind the first ``at`` tokens of every sequence, in place.

    On a GPU, tokens for which there is no room, or no page, are not written.

    Args:
        cache: (pages, page_size, kv_heads, head_dim) each.
        new: (batch, rows, kv_heads, head_dim) each.
        at: (batch,) int32.
        table: (batch, most_pages) int32.
    """
    if not new[0].numel() and not new[1].numel():
        return
    check_last_strides(cache)
    where = "cpu.cached" if cache[0].device.type == "cpu" else "triton.append"
    module: Any = import_module(f"..backends.{where}", __package__)
    with as_current(cache[0].device):
        module.append(cache, tuple(beside(cache, *new)), at, table)
    # PyTorch does not see what a kernel writes, but must know it of what is saved for a backward.
    increment_version([x for x in cache if not x.is_inference()])


def beside(cache: Sequence[Tensor], *tensors: Tensor) -> list[Tensor]:
    """Tensors that no append writes over: copies of those that lie in the memory of a cache."""
    memory = {x.untyped_storage().data_ptr() for x in cache}

    def within(x: Tensor) -> bool:
        # One under a transform of torch.func does not say where it lies.
        return torch._C._functorch.is_functorch_wrapped_tensor(x) or x.untyped_storage().data_ptr() in memory

    return [x.clone() if within(x) else x for x in tensors]


forget_with(_call.cache_clear)

"""The Hopper backend: what it covers, and its prepared calls."""

from __future__ import annotations

import os
import random
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import InputError, PlanMismatchError
from ...problem import Problem, default_tiles
from ...schedule import ForwardNumerics, Plan
from ..base import (
    Backend,
    Gradients,
    Keys,
    Prepared,
    RowIntervals,
    Tensors,
    forward_shapes,
    refuse_backward,
)
from .forward.launch import Forward, why_no_scale
from .launch import DTYPES, Debug, run_backward
from .tiles import TILES, tiles_of

__all__ = ["BACKEND"]


class _Prepared(Prepared):
    def __init__(self, problem: Problem, device: torch.device, packed: bool, keys: Keys | None) -> None:
        if reason := _why_no_head_dim(problem):
            raise InputError(reason)
        self.problem, self.device, self.packed, self._keys = problem, device, packed, keys
        self._forward = Forward(problem, device, keys=keys)
        self._shapes = forward_shapes(problem, packed, keys)

    @property
    def forward_fingerprint(self) -> str:
        return ForwardNumerics.of(self.problem).fingerprint

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float,
        *,
        softcap: float = 0.0,
        rows: RowIntervals | None = None,
    ) -> tuple[Tensor, Tensor]:
        _refuse(softcap, rows is not None)
        self._check(q, k, v)
        if not q.numel() or not k.numel():
            *batch, seqlen, heads, _ = q.shape
            lse = q.new_full((*batch, heads, seqlen), -torch.inf, dtype=torch.float32)
            return torch.zeros_like(q), lse
        return self._forward(q, k, v, softmax_scale)

    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Kernels take lengths from the problem: tensors of others would be read beyond their ends."""
        if (q.shape, k.shape, v.shape) == self._shapes:
            return
        for name, x, shape in zip("qkv", (q, k, v), self._shapes):
            if x.shape != shape:
                raise PlanMismatchError(f"{name} has shape {tuple(x.shape)}, the problem says {tuple(shape)}")

    def backward(
        self,
        plan: Plan,
        tensors: Tensors,
        softmax_scale: float,
        *,
        softcap: float = 0.0,
        rows: RowIntervals | None = None,
        ordered: bool = True,
        disorder: random.Random | None = None,
    ) -> Gradients:
        refuse_backward(self._keys)
        _refuse(softcap, rows is not None)
        in_order = ordered and disorder is None
        result = run_backward(plan, tensors, softmax_scale, ordered=in_order, debug=_debug())
        return Gradients(result.dq, result.dk, result.dv)


@cache
def _debug() -> Debug | None:
    """What ``DASH_ATTN_DEBUG`` asks for.

    "bounded": a wait that lasts ends in a HandOverError that names it, instead of lasting for ever.
    "bounded,trace": the error also says where it saved what was done until then.

    Raises:
        InputError: it asks for something else.
    """
    asked = os.environ.get("DASH_ATTN_DEBUG", "")
    if asked not in ("", "bounded", "bounded,trace"):
        raise InputError(f"DASH_ATTN_DEBUG must be bounded, or bounded,trace; got {asked!r}")
    return Debug(bounded=True, trace="trace" in asked) if asked else None


def _why_no_head_dim(problem: Problem) -> str:
    if (problem.head_dim, problem.head_dim_v) in TILES:
        return ""
    known = ", ".join(str(head_dim) for head_dim, head_dim_v in TILES if head_dim == head_dim_v)
    of_v = "" if problem.head_dim_v == problem.head_dim else f" with head_dim_v {problem.head_dim_v}"
    return f"head_dim {problem.head_dim}{of_v} is not supported by sm90; supported: {known}"


def _why_no_softcap(softcap: float) -> str:
    return f"softcap {softcap} is not supported by sm90" if softcap else ""


def _why_no_intervals(row_intervals: bool) -> str:
    return "row_starts and row_ends are not supported by sm90" if row_intervals else ""


def _refuse(softcap: float, row_intervals: bool) -> None:
    if reason := _why_no_softcap(softcap) or _why_no_intervals(row_intervals):
        raise InputError(reason)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


class _SM90(Backend):
    name: ClassVar[str] = "sm90"

    def why_not(
        self,
        problem: Problem,
        device: torch.device,
        packed: bool,
        *,
        softcap: float = 0.0,
        softmax_scale: float = 1.0,
        row_intervals: bool = False,
    ) -> str:
        if device.type != "cuda":
            return f"the sm90 backend does not run on {device}"
        major, minor = _capability(device)
        if (major, minor) != (9, 0):
            return f"{device} is sm_{major}{minor}; the sm90 kernels are for Hopper"
        if problem.dtype not in DTYPES:
            return f"dtype {problem.dtype} is not supported by sm90; supported: {', '.join(DTYPES)}"
        reasons = (
            _why_no_head_dim(problem), _why_no_softcap(softcap), why_no_scale(softmax_scale),
            _why_no_intervals(row_intervals),
        )  # fmt: skip
        for reason in filter(None, reasons):
            return reason
        if problem.q_starts is not None:
            return (
                f"q_starts {problem.q_starts!r:.80} are not supported by sm90: rows are aligned bottom-right"
            )
        return ""

    def tiles(self, head_dim: int) -> tuple[int, int]:
        if (head_dim, head_dim) not in TILES:
            return default_tiles(head_dim)
        kernel = tiles_of(head_dim)
        return kernel.tile_m, kernel.tile_n

    def prepare(
        self, problem: Problem, device: torch.device, packed: bool, keys: Keys | None = None
    ) -> Prepared:
        return _Prepared(problem, device, packed, keys)


BACKEND = _SM90()

"""The Hopper backend: what it covers, and its prepared calls."""

from __future__ import annotations

import hashlib
import os
import random
from dataclasses import replace
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import InputError, PlanMismatchError
from ...problem import Problem, default_tiles
from ...schedule import Plan
from ...schedule.constants import SOFTCAP_VERSION
from ...scores import PLAIN, Scores
from ..base import (
    NO_AUX,
    AuxTensors,
    Backend,
    Gradients,
    Prepared,
    RowIntervals,
    SegmentTargets,
    Tensors,
    refuse_backward,
)
from ..cached import CachedProblem, PreparedCached
from ..cuda.limits import MOST_GRID
from ..cuda.multiprocessors import multiprocessors
from ..shapes import Keys, forward_shapes, lse_shape
from .cached.launch import Cached
from .compile import flavour
from .forward.launch import Forward, config_of, numerics_of, why_no_scale
from .launch import Debug, run_backward
from .segments import add_sums, finish_keys, run_segment, words_of_sum
from .sinks.launch import finish_sink
from .softcap import cap_of, why_no_cap
from .spread.launch import Spread, spreads
from .tiles import HEAD_DIMS, SHORT_DTYPES, covers, has_intervals, has_softcap, kernel_of, name_of, tiles_of

__all__ = ["BACKEND", "why_no_kernel"]

COMPILER = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}
"""Modules that kernels are compiled and loaded with, and the packages that have them."""


TESTED = "CUDA 13"
"""Of drivers: it decides which build of the compiler is in use, and builds make other machine code."""


class _Prepared(Prepared):
    def __init__(self, problem: Problem, device: torch.device, packed: bool, keys: Keys | None) -> None:
        if reason := _why_no_head_dim(problem):
            raise InputError(reason)
        self.problem, self.device, self.packed, self._keys = problem, device, packed, keys
        self._forwards: dict[tuple[bool, ...], Forward] = {}
        self._shapes = forward_shapes(problem, packed, keys)

    @property
    def forward_fingerprint(self) -> str:
        return numerics_of(self.problem).fingerprint

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, aux: AuxTensors = NO_AUX
    ) -> tuple[Tensor, Tensor]:
        sink, intervals = _sink_of(scores, aux), self._rows_of(aux)
        self._check(q, k, v)
        if not q.numel() or not k.numel():
            lse = q.new_full(lse_shape(q), -torch.inf, dtype=torch.float32)
            out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
            return out, lse if sink is None else lse.copy_(sink[:, None])
        asked = (sink is not None, scores.softcap > 0, intervals is not None)
        forward = self._forwards.get(asked) or self._forward(*asked)
        return forward(q, k, v, scores.softmax_scale, sink=sink, rows=intervals, cap=cap_of(scores))

    def _forward(self, sink: bool, softcap: bool, intervals: bool) -> Forward:
        problem = self.problem
        config = replace(config_of(problem), sink=sink, softcap=softcap)
        if intervals:
            config = config.with_intervals()
        found = Forward(problem, self.device, keys=self._keys, config=config)
        return self._forwards.setdefault((sink, softcap, intervals), found)

    def _rows_of(self, aux: AuxTensors) -> RowIntervals | None:
        """Which rows see each key, if that is said, of as many keys as there are."""
        if aux is NO_AUX or (rows := aux.rows) is None:
            return None
        if self._keys is not None:
            raise InputError("row_starts and row_ends are not supported where keys are placed")
        shape = self._shapes[1][:-2]
        for name, x in zip(("row_starts", "row_ends"), rows):
            if x.shape != shape:
                raise PlanMismatchError(f"{name} has shape {tuple(x.shape)}, the problem says {tuple(shape)}")
        return rows

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
        scores: Scores,
        aux: AuxTensors = NO_AUX,
        *,
        ordered: bool = True,
        disorder: random.Random | None = None,
        sink_sums: Tensor | None = None,
    ) -> Gradients:
        refuse_backward(self._keys)
        sink, rows = _sink_of(scores, aux), self._rows_of(aux)
        result = run_backward(
            plan,
            tensors,
            scores,
            sink=sink,
            sink_sums=sink_sums,
            rows=rows,
            ordered=ordered and disorder is None,
            apart=None,
            debug=_debug(),
        )
        dsink = result.dsink
        if dsink is not None and aux.learnable_sink is not None:
            dsink = dsink.to(aux.learnable_sink.dtype)
        return Gradients(result.dq, result.dk, result.dv, dsink)

    def backward_segment(
        self, plan: Plan, tensors: Tensors, scores: Scores, aux: AuxTensors, into: SegmentTargets
    ) -> None:
        """See :meth:`Prepared.backward_segment`."""
        sink = _sink_of(scores, aux)
        if aux.rows is not None:
            raise InputError("row_starts and row_ends are not supported by sm90 in segments of rows")
        run_segment(plan, tensors, scores, into, sink=sink, debug=_debug())


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
    of_qk, of_v = problem.head_dim, problem.head_dim_v
    if covers(of_qk, of_v):
        return ""
    given = f"head_dim {of_qk}" if of_v == of_qk else f"head_dim_v {of_v} beside head_dim {of_qk}"
    less = "" if of_v == of_qk else f", and less for one of them (multiples of {HEAD_DIMS.step})"
    return (
        f"{given} is not supported by sm90; supported: multiples of {HEAD_DIMS.step} from {HEAD_DIMS[0]} to "
        f"{HEAD_DIMS[-1]}{less}"
    )


@lru_cache
def _why_no_scores(scores: Scores) -> str:
    """Why the kernels do not have what is made of scores: they have the softmax scale, softcap, sinks and
    intervals of rows, but no softcap beside intervals."""
    if scores.row_intervals and scores.softcap:
        return f"row_starts and row_ends beside softcap {scores.softcap} are not supported by sm90"
    for name, value in scores._asdict().items():
        # Only dropout counts from an origin.
        if value and name not in ("softmax_scale", "softcap", "sink", "row_intervals", "origin"):
            said = "alibi_slopes" if name == "alibi" else f"{name} {value}"
            return f"{said} is not supported by sm90"
    return why_no_cap(scores)


def _sink_of(scores: Scores, aux: AuxTensors) -> Tensor | None:
    """The sink as the kernels read it, (heads,) fp32, if there is one."""
    if reason := _why_no_scores(scores):
        raise InputError(reason)
    if aux is NO_AUX or aux.learnable_sink is None:
        return None
    return aux.learnable_sink.detach().resolve_neg().float().contiguous()


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def _why_no_compiler() -> str:
    """Why no kernel can be made or loaded, empty if it can. Programs on disk need both packages, too."""
    missing = [package for module, package in COMPILER.items() if find_spec(module) is None]
    if not missing:
        return ""
    return f"the sm90 backend needs {' and '.join(missing)}: pip install 'dash-attn[cuda]'"


def why_no_kernel(problem: Problem, scores: Scores = PLAIN) -> str:
    """Why there is no kernel for a problem, on whatever GPU; empty if there is one."""
    if problem.dtype not in SHORT_DTYPES:
        return f"dtype {problem.dtype} is not supported by sm90; supported: {', '.join(SHORT_DTYPES)}"
    if problem.heads > MOST_GRID:
        return f"{problem.heads} q heads are not supported by sm90, at most {MOST_GRID}"
    of_scores = _why_no_scores(scores) or why_no_scale(scores.softmax_scale)
    if reason := _why_no_head_dim(problem) or of_scores:
        return reason
    head_dims = name_of(problem.head_dim, problem.head_dim_v)
    if scores.softcap and not has_softcap(problem.head_dim, problem.head_dim_v):
        return f"softcap {scores.softcap} is not supported by sm90 at head_dim {head_dims}"
    if scores.row_intervals and not has_intervals(problem.head_dim, problem.head_dim_v):
        return f"row_starts and row_ends are not supported by sm90 at head_dim {head_dims}"
    if problem.q_starts is not None:
        return f"q_starts {problem.q_starts!r:.80} are not supported by sm90: rows are aligned bottom-right"
    return _why_no_compiler()


class _SM90(Backend):
    name: ClassVar[str] = "sm90"

    def why_not(self, problem: Problem, device: torch.device, packed: bool, scores: Scores = PLAIN) -> str:
        if device.type != "cuda":
            return f"the sm90 backend does not run on {device}"
        major, minor = _capability(device)
        if (major, minor) != (9, 0):
            return f"{device} is sm_{major}{minor}; the sm90 kernels are for Hopper"
        return why_no_kernel(problem, scores)

    def tiles(self, head_dim: int, head_dim_v: int) -> tuple[int, int]:
        if max(head_dim, head_dim_v) not in HEAD_DIMS:
            return default_tiles(head_dim, head_dim_v)
        kernel = kernel_of(head_dim, head_dim_v)
        return tiles_of(kernel.head_dim, kernel.head_dim_v)[:2]

    def with_scores(self, fingerprint: str, scores: Scores) -> str:
        if not scores.softcap:
            return fingerprint
        return hashlib.sha256(repr(("softcap", SOFTCAP_VERSION, fingerprint)).encode()).hexdigest()

    def untried(self, device: torch.device) -> str:
        found = flavour()
        if device.type != "cuda" or found in (TESTED, "no driver"):
            return ""
        return f"by the kernel compiler's build for {found}, never run on a GPU: tested with {TESTED}"

    def prepare(
        self, problem: Problem, device: torch.device, packed: bool, keys: Keys | None = None
    ) -> Prepared:
        return _Prepared(problem, device, packed, keys)

    def key_sums(self, problem: Problem, head_groups: int) -> tuple[int, int]:
        return head_groups, words_of_sum(problem)

    def add_sums(self, sums: Tensor, more: Tensor) -> None:
        add_sums(sums, more)

    def finish_keys(self, sums: Tensor, scores: Scores, dk: Tensor, dv: Tensor) -> None:
        finish_keys(sums, scores.softmax_scale, dk, dv)

    def finish_sink(self, sums: Tensor, dtype: torch.dtype) -> Tensor:
        return finish_sink(sums, dtype)

    def prepare_cached(self, problem: CachedProblem, device: torch.device) -> PreparedCached:
        kind = Spread if spreads(problem, multiprocessors(device)) else Cached
        return kind(problem, device)


BACKEND = _SM90()

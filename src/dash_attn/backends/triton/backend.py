"""The Triton backend: what it covers, and its prepared calls. Preparing the first call loads Triton."""

from __future__ import annotations

import os
import random
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ...errors import PlanMismatchError, UnavailableError
from ...problem import Problem, default_tiles
from ...schedule import Plan
from ...scores import PLAIN, Scores
from ..base import (
    NO_AUX,
    AuxTensors,
    Backend,
    Gradients,
    Prepared,
    SegmentTargets,
    Tensors,
    as_current,
    refuse_backward,
)
from ..cached import CachedProblem, PreparedCached
from ..shapes import Keys, Shapes, forward_shapes, tensor_shapes
from ..sums import finish_rows
from .tiles import DTYPES, HEAD_DIMS, TILES, fingerprint_of, padded

if TYPE_CHECKING:
    from .launch import Backward

__all__ = ["BACKEND"]

OLDEST = (8, 0)
"""The oldest compute capability; older GPUs multiply no bfloat16."""

TESTED = ((9, 0),)
"""Compute capabilities of the GPUs on which the kernels were run and compared."""

COMPILED = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
"""Those that tests compile them for, without such a GPU (tests/cpu/triton_compiled.py)."""


class _Prepared(Prepared):
    def __init__(self, problem: Problem, device: torch.device, packed: bool, keys: Keys | None) -> None:
        if reason := _why_unavailable(device):
            raise UnavailableError(reason)
        from .launch import Backward, Forward

        self.problem, self.device, self.packed, self._keys = problem, device, packed, keys
        self._forward = Forward(problem, device, packed, keys)
        self._backward: Backward | None = Backward(problem, device, packed) if keys is None else None
        # None of dense tensors where sequences are not equally long: no tensor fits then.
        whole = tensor_shapes(problem).get(3 if packed else 4, Shapes())
        self._shapes = whole if keys is None else Shapes(*forward_shapes(problem, packed, keys))

    @property
    def forward_fingerprint(self) -> str:
        return fingerprint_of(self._forward.numerics.fingerprint)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, aux: AuxTensors = NO_AUX
    ) -> tuple[Tensor, Tensor]:
        self._check(dict(zip("qkv", zip((q, k, v), self._shapes[:3]))))
        with as_current(self.device):
            return self._forward(q, k, v, scores, aux)

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
        """See :meth:`Prepared.backward`. Giving up the order gains nothing here: only ``disorder`` does."""
        refuse_backward(self._keys)
        assert self._backward is not None
        tiles = plan.problem.tile_m, plan.problem.tile_n
        if tiles != (known := BACKEND.tiles(plan.problem.head_dim, plan.problem.head_dim_v)):
            raise PlanMismatchError(f"the plan has tiles {tiles}, the kernels have {known}")
        if plan.problem != self.problem:
            raise PlanMismatchError(f"the plan is for {plan.problem}, the tensors are of {self.problem}")
        _ = plan.min_workers  # an error unless it was proven; how many there are is no matter here
        self._check(dict(zip(Tensors._fields, zip(tensors, self._shapes.of_tensors))))
        grads = Gradients(*(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors[1:4]))
        with as_current(self.device):
            return self._backward(plan, tensors, scores, aux, disorder, grads, sink_sums)

    def backward_segment(
        self, plan: Plan, tensors: Tensors, scores: Scores, aux: AuxTensors, into: SegmentTargets
    ) -> None:
        """See :meth:`Prepared.backward_segment`. dK and dV are scaled when they are added."""
        assert self._backward is not None
        sums, dq, sink_sums = into
        with as_current(self.device):
            wide = [x.new_empty(x.shape, dtype=sums.dtype) for x in (tensors.k, tensors.v)]
            grads = self._backward(plan, tensors, scores, aux, None, Gradients(dq, *wide), sink_sums)
            both = torch.cat([grads.dk, grads.dv], -1)
            tile_n, rows = self.problem.tile_n, both.shape[1]
            tiles, batch, kv_heads, _, words = sums.shape
            whole, columns = rows // tile_n, words // tile_n
            by_row = sums.view(tiles, batch, kv_heads, tile_n, columns).permute(1, 0, 3, 2, 4)
            by_row[:, :whole] += both[:, : whole * tile_n].reshape(batch, whole, tile_n, kv_heads, columns)
            if rows % tile_n:
                by_row[:, whole, : rows % tile_n] += both[:, whole * tile_n :]

    def _check(self, given: dict[str, tuple[Tensor, tuple[int, ...]]]) -> None:
        """Kernels take lengths and types from the problem: others would be read beyond their ends."""
        for name, (x, shape) in given.items():
            dtype = torch.float32 if name == "lse" else getattr(torch, self.problem.dtype)
            if x.shape != shape or x.dtype != dtype:
                raise PlanMismatchError(
                    f"{name} has shape {tuple(x.shape)} and dtype {x.dtype}; the problem is for "
                    f"{shape or 'packed tensors'} and {dtype}"
                )


def _interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, slowly: for tests. It must be set before Triton is loaded."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _why_unavailable(device: torch.device) -> str:
    """Why no kernel runs on a device, empty if they do."""
    if find_spec("triton") is None:
        return (
            "the triton backend needs Triton, which PyTorch's builds for GPUs bring along: pip install triton"
        )
    if device.type == "cuda":
        return ""
    if device.type == "cpu" and _interpreted():
        return ""
    return f"the triton backend does not run on {device}; on a CPU, only for tests, with TRITON_INTERPRET=1"


class _Triton(Backend):
    name: ClassVar[str] = "triton"

    def why_not(self, problem: Problem, device: torch.device, packed: bool, scores: Scores = PLAIN) -> str:
        if reason := _why_unavailable(device):
            return reason
        if device.type == "cuda" and torch.version.hip is None:
            capability = torch.cuda.get_device_capability(device)
            if capability < OLDEST:
                return (
                    f"{device} is sm_{capability[0]}{capability[1]}; the triton backend needs sm_80 or newer"
                )
        if problem.dtype not in DTYPES:
            return f"dtype {problem.dtype} is not supported by triton; supported: {', '.join(DTYPES)}"
        for name in ("head_dim", "head_dim_v"):
            if (value := getattr(problem, name)) not in HEAD_DIMS:
                return (
                    f"{name} {value} is not supported by triton; supported: multiples of "
                    f"{HEAD_DIMS.step} up to {HEAD_DIMS[-1]}"
                )
        return ""

    def tiles(self, head_dim: int, head_dim_v: int) -> tuple[int, int]:
        widest = max(head_dim, head_dim_v)
        return TILES[padded(widest)] if widest in HEAD_DIMS else default_tiles(head_dim, head_dim_v)

    def fingerprint_of(self, numerics: str) -> str:
        return fingerprint_of(numerics)

    def untried(self, device: torch.device) -> str:
        if device.type != "cuda":
            return ""
        if torch.version.hip is not None:
            return "never run on ROCm"
        capability = torch.cuda.get_device_capability(device)
        if capability in TESTED:
            return ""
        here = f"sm_{capability[0]}{capability[1]}"
        for major, minor in reversed(COMPILED):
            if major == capability[0] and minor <= capability[1]:
                return f"compiled for sm_{major}{minor}, never run on {here}"
        return f"never compiled for {here}, and never run there"

    def prepare(
        self, problem: Problem, device: torch.device, packed: bool, keys: Keys | None = None
    ) -> Prepared:
        return _Prepared(problem, device, packed, keys)

    def key_sums(self, problem: Problem, head_groups: int) -> tuple[int, int]:
        return 1, problem.tile_n * (problem.head_dim + problem.head_dim_v)

    def finish_keys(self, sums: Tensor, scores: Scores, dk: Tensor, dv: Tensor) -> None:
        finish_rows(sums, (1.0, 1.0), dk, dv)

    def finish_sink(self, sums: Tensor, dtype: torch.dtype) -> Tensor:
        from .launch import finish_sink

        return finish_sink(sums, dtype)

    def prepare_cached(self, problem: CachedProblem, device: torch.device) -> PreparedCached:
        if reason := _why_unavailable(device):
            raise UnavailableError(reason)
        from .cached import Cached

        return Cached(problem, device)


BACKEND = _Triton()

"""The CPU backend: the forward and the executor, for dense and packed batches. A reference, not fast."""

from __future__ import annotations

import random
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import PlanMismatchError
from ...problem import Problem, default_tiles
from ...schedule import ForwardNumerics, Plan
from ...scores import PLAIN, Scores
from ..base import (
    NO_AUX,
    AuxTensors,
    Backend,
    Gradients,
    Prepared,
    SegmentTargets,
    Tensors,
    refuse_backward,
)
from ..cached import CachedProblem, PreparedCached
from ..shapes import Keys, forward_shapes
from ..sums import finish_rows
from . import executor
from .cached import Cached
from .forward import forward
from .sinks import finish_sink

__all__ = ["BACKEND"]


class _Prepared(Prepared):
    def __init__(self, problem: Problem, packed: bool, keys: Keys | None) -> None:
        self.problem, self.packed, self._keys = problem, packed, keys

    @property
    def forward_fingerprint(self) -> str:
        return ForwardNumerics.of(self.problem).fingerprint

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, aux: AuxTensors = NO_AUX
    ) -> tuple[Tensor, Tensor]:
        keys = self._keys
        if keys is not None or q.ndim == 4:
            # The executor sees packed rows, where one sequence of 200 rows looks like two of 100.
            self._check(q, k, v, forward_shapes(self.problem, self.packed and keys is not None, keys))
        if keys is not None:
            k, v = (self._used(x, keys) for x in (k, v))
        if q.ndim == 3:
            return forward(self.problem, q, k, v, scores, aux)
        batch, seqlen_q, heads, _ = q.shape
        rows = [x.flatten(0, 1) if x.ndim == 4 else x for x in (q, k, v)]
        out, lse = forward(self.problem, rows[0], rows[1], rows[2], scores, aux.map_rows(torch.flatten))
        # Not a view, so that a caller may write to it where autograd is on.
        whole: Tensor = torch.ops.aten._unsafe_view(out, (*q.shape[:-1], out.shape[-1]))
        return whole, lse.view(heads, batch, seqlen_q).transpose(0, 1).contiguous()

    def _used(self, x: Tensor, keys: Keys) -> Tensor:
        """The used rows of k or v, one sequence directly after the other."""
        lengths = self.problem.lengths[:, 1].tolist()
        if keys.starts is None:
            return torch.cat([x[at, :length] for at, length in enumerate(lengths)])
        return torch.cat([x[start : start + length] for start, length in zip(keys.starts, lengths)])

    def _check(self, q: Tensor, k: Tensor, v: Tensor, shapes: tuple[tuple[int, ...], ...]) -> None:
        for name, x, shape in zip("qkv", (q, k, v), shapes):
            if x.shape != shape:
                raise PlanMismatchError(
                    f"{name} has shape {tuple(x.shape)}, the problem is for {shape or 'packed tensors'}"
                )

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
        if plan.problem != self.problem:
            raise PlanMismatchError(f"the plan is for {plan.problem}, the tensors are of {self.problem}")
        _, q, k, v, _, _ = tensors
        if q.ndim == 4:
            tensors, aux = _packed_rows(tensors), aux.map_rows(torch.flatten)
        dq, dk, dv, dsink = executor.backward(
            plan, tensors, scores, aux, rng=disorder, ordered=disorder is None, sink_sums=sink_sums
        )
        return Gradients(dq.view(q.shape), dk.view(k.shape), dv.view(v.shape), dsink)

    def backward_segment(
        self, plan: Plan, tensors: Tensors, scores: Scores, aux: AuxTensors, into: SegmentTargets
    ) -> None:
        """See :meth:`Prepared.backward_segment`."""
        packed = _packed_rows(tensors)
        grads = executor.backward(plan, packed, scores, aux, sums=into.key_sums, sink_sums=into.sink_sums)
        into.dq.copy_(grads.dq.view(into.dq.shape))


def _packed_rows(tensors: Tensors) -> Tensors:
    """Dense tensors as packed ones."""
    rows = [x.flatten(0, 1) for x in tensors[:-1]]
    return Tensors._make([*rows, tensors.lse.transpose(0, 1).flatten(1)])


class _CPU(Backend):
    name: ClassVar[str] = "cpu"

    def why_not(self, problem: Problem, device: torch.device, packed: bool, scores: Scores = PLAIN) -> str:
        return "" if device.type == "cpu" else f"the cpu backend does not run on {device}"

    def tiles(self, head_dim: int, head_dim_v: int) -> tuple[int, int]:
        return default_tiles(head_dim, head_dim_v)

    def prepare(
        self, problem: Problem, device: torch.device, packed: bool, keys: Keys | None = None
    ) -> Prepared:
        return _Prepared(problem, packed, keys)

    def key_sums(self, problem: Problem, head_groups: int) -> tuple[int, int]:
        return head_groups, problem.tile_n * (problem.head_dim + problem.head_dim_v)

    def finish_keys(self, sums: Tensor, scores: Scores, dk: Tensor, dv: Tensor) -> None:
        finish_rows(sums, (scores.softmax_scale, scores.dropout_rescale), dk, dv)

    def finish_sink(self, sums: Tensor, dtype: torch.dtype) -> Tensor:
        return finish_sink(sums, dtype)

    def prepare_cached(self, problem: CachedProblem, device: torch.device) -> PreparedCached:
        return Cached(problem)


BACKEND = _CPU()

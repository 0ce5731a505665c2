"""The CPU backend: the forward and the executor, for dense and packed batches. A reference, not fast."""

from __future__ import annotations

import random
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import PlanMismatchError
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
from . import executor
from .forward import forward

__all__ = ["BACKEND"]


class _Prepared(Prepared):
    def __init__(self, problem: Problem, packed: bool, keys: Keys | None) -> None:
        self.problem, self.packed, self._keys = problem, packed, keys

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
        keys = self._keys
        if keys is not None or q.ndim == 4:
            # The executor sees packed rows, where one sequence of 200 rows looks like two of 100.
            self._check(q, k, v, forward_shapes(self.problem, self.packed and keys is not None, keys))
        if keys is not None:
            k, v = (self._used(x, keys) for x in (k, v))
        if q.ndim == 3:
            return forward(self.problem, q, k, v, softmax_scale, softcap=softcap, rows=rows)
        batch, seqlen_q, heads, _ = q.shape
        x, y, z = (x.flatten(0, 1) if x.ndim == 4 else x for x in (q, k, v))
        out, lse = forward(self.problem, x, y, z, softmax_scale, softcap=softcap, rows=_packed(rows))
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
        softmax_scale: float,
        *,
        softcap: float = 0.0,
        rows: RowIntervals | None = None,
        ordered: bool = True,
        disorder: random.Random | None = None,
    ) -> Gradients:
        """See :meth:`Prepared.backward`. Giving up the order gains nothing here: only ``disorder`` does."""
        refuse_backward(self._keys)
        if plan.problem != self.problem:
            raise PlanMismatchError(f"the plan is for {plan.problem}, the tensors are of {self.problem}")
        _, q, k, v, _, _ = tensors
        if q.ndim == 4:
            five = [x.flatten(0, 1) for x in tensors[:-1]]
            tensors = Tensors._make([*five, tensors.lse.transpose(0, 1).flatten(1)])
        dq, dk, dv = executor.backward(
            plan, tensors, softmax_scale, softcap=softcap, rows=_packed(rows), rng=disorder,
            ordered=disorder is None,
        )  # fmt: skip
        return Gradients(dq.view(q.shape), dk.view(k.shape), dv.view(v.shape))


def _packed(rows: RowIntervals | None) -> RowIntervals | None:
    return None if rows is None else RowIntervals(*(x.flatten() for x in rows))


class _CPU(Backend):
    name: ClassVar[str] = "cpu"

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
        return "" if device.type == "cpu" else f"the cpu backend does not run on {device}"

    def tiles(self, head_dim: int) -> tuple[int, int]:
        return default_tiles(head_dim)

    def prepare(
        self, problem: Problem, device: torch.device, packed: bool, keys: Keys | None = None
    ) -> Prepared:
        return _Prepared(problem, packed, keys)


BACKEND = _CPU()

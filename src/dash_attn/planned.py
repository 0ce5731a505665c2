"""A call by a plan of your own."""

from __future__ import annotations

import random
from typing import NamedTuple

from torch import Tensor

from .arguments import aux_of, check_aux, check_dropout, check_rows, check_softcap, completed
from .backends.base import NO_AUX, AuxTensors, Gradients, Prepared, Tensors, as_current, check_backend
from .errors import PlanMismatchError
from .ops.autograd import attend
from .ops.calls import DTYPE_NAMES, first_that_covers, prepared_once
from .schedule import Plan
from .scores import Scores

__all__ = ["apply_plan"]


def apply_plan(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    *,
    disorder: random.Random | None = None,
    backend: str = "auto",
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    row_starts: Tensor | None = None,
    row_ends: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) with autograd, by a plan of your own.

    Args:
        plan: a proven plan whose tiles are those of the backend.
        q: (batch, seqlen_q, heads, head_dim), or packed (total_q, heads, head_dim).
        k, v: (batch, seqlen_k, kv_heads, head_dim), or packed (total_k, kv_heads, head_dim).
        softmax_scale: factor on Q K^T.
        disorder: sums dQ in no fixed order instead: a negative control. Without atomics it draws the order.
        backend, softcap, learnable_sink, alibi_slopes, dropout_p, dropout_seed, row_starts, row_ends: as in
            :func:`dash_attn.attention`.

    Raises:
        InputError: no backend covers the plan's problem, or the one that is asked for does not.
        PlanMismatchError: the tensors are not of the plan's problem, or its tiles are not the backend's.
    """
    packed = q.ndim == 3
    p = check_dropout(dropout_p)
    aux = aux_of(q, learnable_sink, alibi_slopes, (p, dropout_seed), (row_starts, row_ends))
    check_aux(aux, q, len(plan.problem.sequences))
    check_rows(aux, k, None)
    scores = Scores(softmax_scale, check_softcap(softcap), dropout_p=p, **aux.given)
    asked = check_backend(backend)
    chosen, _ = first_that_covers(lambda _: plan.problem, asked, q.device, packed, scores)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if DTYPE_NAMES.get(x.dtype) != plan.problem.dtype or x.device != q.device:
            raise PlanMismatchError(
                f"{name} has dtype {x.dtype} and is on {x.device}; "
                f"the plan is for {plan.problem.dtype}, and q is on {q.device}"
            )
    prepared = prepared_once(chosen, plan.problem, q.device, packed)
    return attend(_Planned(prepared, plan, scores, disorder), q, k, v, completed(aux, p, q))


class _Planned(NamedTuple):
    """A call whose plan is given."""

    prepared: Prepared
    plan: Plan
    scores: Scores
    disorder: random.Random | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, aux: AuxTensors = NO_AUX) -> tuple[Tensor, Tensor]:
        with as_current(q.device):
            return self.prepared.forward(q, k, v, self.scores, aux)

    def backward(self, tensors: Tensors, aux: AuxTensors = NO_AUX) -> Gradients:
        ordered = self.disorder is None
        with as_current(tensors.q.device):
            return self.prepared.backward(
                self.plan, tensors, self.scores, aux, ordered=ordered, disorder=self.disorder
            )

"""A call by a plan of your own."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .arguments import aux_of, check_aux, check_planned, check_rows, completed
from .backends.base import (
    NO_AUX,
    AuxTensors,
    Gradients,
    Prepared,
    Tensors,
    as_current,
    check_backend,
    given_by,
)
from .errors import InputError, PlanMismatchError
from .ops.autograd import attend, is_wrapped, refuse_transforms
from .ops.calls import DTYPE_NAMES, first_that_covers, prepared_once
from .schedule import Plan
from .scores import Scores
from .values import check_dropout, check_softcap, short

__all__ = ["apply_plan"]


def apply_plan(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
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
        plan: a proven plan whose tiles are those of the backend. Autocast must leave tensors of its dtype.
        q: (batch, seqlen_q, heads, head_dim), or packed (total_q, heads, head_dim).
        k, v: (batch, seqlen_k, kv_heads, head_dim), or packed (total_k, kv_heads, head_dim).
        softmax_scale: factor on Q K^T; None: ``head_dim ** -0.5``.
        disorder: sums dQ in no fixed order instead: a negative control. Without atomics it draws the order.
        backend, softcap, learnable_sink, alibi_slopes, dropout_p, dropout_seed, row_starts, row_ends: as in
            :func:`dash_attn.attention`.

    ``torch.compile`` breaks its graph here: a plan is no value that it knows.

    Raises:
        InputError: an argument cannot be used; the plan is not proven; no backend covers its problem, or the
            one that is asked for does not.
        PlanMismatchError: the tensors are not of the plan's problem, or its tiles are not the backend's.
    """
    run = _apply
    if torch.compiler.is_compiling():
        run = torch.compiler.disable(_apply)  # type: ignore[no-untyped-call]
    p = check_dropout(dropout_p)
    aux = aux_of(
        q, learnable_sink=learnable_sink, alibi_slopes=alibi_slopes, dropout_p=p,
        dropout_seed=dropout_seed, row_starts=row_starts, row_ends=row_ends,
    )  # fmt: skip
    how = _How(
        softmax_scale=softmax_scale, softcap=softcap, dropout_p=p,
        backend=check_backend(backend), disorder=disorder,
    )  # fmt: skip
    return run(plan, (q, k, v), aux, how)


class _How(NamedTuple):
    """What is asked besides the tensors: dropout and backend are checked."""

    softmax_scale: float | None
    softcap: float
    dropout_p: float
    backend: str
    disorder: random.Random | None


def _apply(
    plan: Plan, qkv: tuple[Tensor, Tensor, Tensor], aux: AuxTensors, how: _How
) -> tuple[Tensor, Tensor]:
    refuse_transforms("apply_plan")
    if not isinstance(plan, Plan):
        raise InputError(f"plan must be a dash_attn.schedule.Plan, got {short(plan)}")
    if plan.verdict is None:
        raise InputError(
            "the plan is not proven, for copies and unpickled plans are not: "
            "plan = dash_attn.schedule.prove(plan)"
        )
    if how.disorder is not None and not isinstance(how.disorder, random.Random):
        raise InputError(f"disorder must be None or a random.Random, got {short(how.disorder)}")
    q, k, v, scale = check_planned(*qkv, how.softmax_scale)
    packed = q.ndim == 3
    check_aux(aux, q, len(plan.problem.sequences))
    check_rows(aux, k, None)
    softcap = check_softcap(how.softcap, scale)
    scores = Scores(scale, softcap, dropout_p=how.dropout_p, **given_by(aux))
    chosen = first_that_covers(
        how.backend, q.device, lambda x: x.why_not(plan.problem, q.device, packed, scores)
    )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if is_wrapped(x):
            raise InputError(f"{name} is a {type(x).__name__}: a plan is for plain tensors")
        if DTYPE_NAMES.get(x.dtype) != plan.problem.dtype or x.device != q.device:
            raise PlanMismatchError(
                f"{name} has dtype {x.dtype} and is on {x.device}; "
                f"the plan is for {plan.problem.dtype}, and q is on {q.device}"
            )
    prepared = prepared_once(chosen, plan.problem, q.device, packed)
    call = _Planned(prepared, plan, scores, how.disorder)
    return attend(call, q, k, v, completed(aux, how.dropout_p, q))


class _Planned(NamedTuple):
    """A call whose plan is given. Modes of dispatch, such as that of a selective checkpoint, do not see what
    computes it."""

    prepared: Prepared
    plan: Plan
    scores: Scores
    disorder: random.Random | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, aux: AuxTensors = NO_AUX) -> tuple[Tensor, Tensor]:
        with as_current(q.device), _disable_current_modes():
            return self.prepared.forward(q, k, v, self.scores, aux)

    def backward(self, tensors: Tensors, aux: AuxTensors = NO_AUX) -> Gradients:
        ordered = self.disorder is None
        with as_current(tensors.q.device), _disable_current_modes():
            return self.prepared.backward(
                self.plan, tensors, self.scores, aux, ordered=ordered, disorder=self.disorder
            )

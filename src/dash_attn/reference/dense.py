"""The executor for dense batches: (batch, seqlen, heads, head_dim) in, the same out."""

from __future__ import annotations

import random

from torch import Tensor

from ..schedule.plan import Plan
from . import executor

__all__ = ["backward", "forward"]


def forward(plan: Plan, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) of a dense batch; lse (batch, heads, seqlen_q). See :func:`executor.forward`."""
    batch, seqlen_q, heads, _ = q.shape
    out, lse = executor.forward(plan, q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), softmax_scale)
    return out.view(q.shape), lse.view(heads, batch, seqlen_q).transpose(0, 1).contiguous()


def backward(
    plan: Plan,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    *,
    rng: random.Random | None = None,
    ordered: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of a dense batch; lse (batch, heads, seqlen_q). See :func:`executor.backward`."""
    dq, dk, dv = executor.backward(
        plan,
        dout.flatten(0, 1),
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        out.flatten(0, 1),
        lse.transpose(0, 1).flatten(1),
        softmax_scale,
        rng=rng,
        ordered=ordered,
    )
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)

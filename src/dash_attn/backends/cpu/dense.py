"""The executor behind one signature for both layouts: dense (batch, seqlen, heads, head_dim) and packed."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from ...schedule.plan import Plan
from . import executor

__all__ = ["backward", "forward"]


def forward(plan: Plan, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) of a dense or packed batch. See :func:`executor.forward`.

    lse: (batch, heads, seqlen_q) of a dense batch, (heads, total_q) of a packed one.
    """
    if q.ndim == 3:
        return executor.forward(plan, q, k, v, softmax_scale)
    batch, seqlen_q, heads, _ = q.shape
    out, lse = executor.forward(plan, q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), softmax_scale)
    # Not a view, so that a caller may write to it where autograd is on.
    whole: Tensor = torch.ops.aten._unsafe_view(out, q.shape)
    return whole, lse.view(heads, batch, seqlen_q).transpose(0, 1).contiguous()


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
    """(dq, dk, dv) of a dense or packed batch; lse as from :func:`forward`. See :func:`executor.backward`."""
    if q.ndim == 3:
        return executor.backward(
            plan, dout, q, k, v, out, lse, softmax_scale, rng=rng, ordered=ordered
        )  # fmt: skip
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

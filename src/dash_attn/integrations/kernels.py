"""Forward and backward without autograd, for frameworks that bring their own."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..api import _prepare

__all__ = ["Band", "run_backward", "run_forward"]


class Band(NamedTuple):
    """Which columns a row sees, in FlashAttention's terms; -1 or None: unbounded."""

    causal: bool
    left: int | None = None
    right: int | None = None

    @property
    def window(self) -> tuple[int | None, int | None]:
        return self.left, self.right


@torch.no_grad()
def run_forward(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float | None) -> tuple[Tensor, Tensor]:
    """(out, lse) as :func:`dash_attn.attention` gives them; q (batch, seqlen, heads, head_dim)."""
    call = _prepare(q, k, v, band.causal, band.window, "auto", scale)
    return call.backend.forward(call.plan, q, k, v, call.softmax_scale)


@torch.no_grad()
def run_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), bitwise the same on every call."""
    call = _prepare(q, k, v, band.causal, band.window, "auto", scale)
    return call.backend.backward(call.plan, dout, q, k, v, out, lse, call.softmax_scale)

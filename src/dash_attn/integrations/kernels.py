"""Forward and backward without autograd, for frameworks that bring their own."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..arguments import Packing, check_call
from ..ops.autograd import Differentiable, Gradients
from ..ops.operators import DENSE, VARLEN

__all__ = ["Band", "run_backward", "run_forward"]


class Band(NamedTuple):
    """Which columns a row sees, in FlashAttention's terms; -1 or None: unbounded."""

    causal: bool
    left: int | None = None
    right: int | None = None


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    band: Band,
    softmax_scale: float | None,
    cu_seqlens: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a dense batch (batch, seqlen, heads, head_dim), or of a packed one (total, ...).

    Raises:
        InputError: as :func:`dash_attn.flash_attn_func` and ``flash_attn_varlen_func``.
    """
    functions, arguments = _call(q, k, v, band, softmax_scale, cu_seqlens)
    return functions.forward(q, k, v, *arguments)


def run_backward(
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    band: Band,
    softmax_scale: float | None,
    cu_seqlens: tuple[Tensor, Tensor] | None = None,
) -> Gradients:
    """(dq, dk, dv), bitwise the same on every call; ``saved`` is dout, q, k, v, out and lse.

    Raises:
        InputError: as :func:`run_forward`.
    """
    functions, arguments = _call(*saved[1:4], band, softmax_scale, cu_seqlens)
    return functions.backward(*saved, *arguments)


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    band: Band,
    softmax_scale: float | None,
    cu_seqlens: tuple[Tensor, Tensor] | None,
) -> tuple[Differentiable, list[Any]]:
    """The operators, and their arguments after the tensors."""
    packing = None if cu_seqlens is None else Packing(*cu_seqlens)
    window = (band.left, band.right)
    call = check_call(q, k, v, packing, band.causal, window, softmax_scale, "auto", True)
    if call.packing is None:
        return DENSE, [*call.options]
    return VARLEN, [*call.packing[:2], *call.options, *call.packing[2:]]

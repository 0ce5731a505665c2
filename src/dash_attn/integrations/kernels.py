"""Forward and backward without autograd, for frameworks that bring their own."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..arguments import Asked, CheckedCall, Packing, check_call
from ..backends.base import Gradients, Tensors
from ..errors import InputError
from ..ops.operators import DENSE, VARLEN
from ..ops.spread import current_spread, told
from .spread_rows import INSIDE

__all__ = ["Band", "run_backward", "run_forward"]


class Band(NamedTuple):
    """Which columns a row sees, in FlashAttention's terms; -1 or None: unbounded."""

    causal: bool
    left: int | None = None
    right: int | None = None


@told
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
        InputError: as :func:`dash_attn.flash_attn_func` and ``flash_attn_varlen_func``; or rows are spread
            over ranks, where a call without autograd would see those of one rank alone.
    """
    if current_spread() is not None:
        raise InputError(f"sdpa.activate() is not supported {INSIDE}: use sdpa.enabled()")
    call = _checked(q, k, v, band, softmax_scale, cu_seqlens)
    return (DENSE if call.packing is None else VARLEN).forward(q, k, v, *call.rest)


def run_backward(
    saved: Tensors | tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    band: Band,
    softmax_scale: float | None,
    cu_seqlens: tuple[Tensor, Tensor] | None = None,
) -> Gradients:
    """(dq, dk, dv), bitwise the same on every call; ``saved`` is dout, q, k, v, out and lse.

    Raises:
        InputError: as :func:`run_forward`.
    """
    call = _checked(*saved[1:4], band, softmax_scale, cu_seqlens)
    return (DENSE if call.packing is None else VARLEN).backward(*saved, *call.rest)


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    band: Band,
    softmax_scale: float | None,
    cu_seqlens: tuple[Tensor, Tensor] | None,
) -> CheckedCall:
    packing = None if cu_seqlens is None else Packing(*cu_seqlens)
    sides = band.left, band.right
    asked = Asked(causal=band.causal, window=sides, softmax_scale=softmax_scale)
    return check_call(q, k, v, packing, asked)

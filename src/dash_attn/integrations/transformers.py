"""``attn_implementation="dash"`` for models of transformers::

    from dash_attn.integrations.transformers import register
    register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="dash")

Causal, sliding-window, chunked and bidirectional masks, padding on either side, packed sequences (by
``position_ids`` or ``cu_seq_lens_q``) and growing key caches work; padded and packed batches run without
their padding, so that a sequence's bytes do not depend on its neighbours. Everything else (masks with four
dimensions, mask functions of users, dropout, softcap, sinks, biases, attention weights as an output) raises,
and so do models that do their own attention with the mask.

Under ``torch.compile`` there is a graph break where the mask is made: plans are made from lengths, which
are read on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import flash_attn_func, flash_attn_varlen_func
from ..errors import InputError, UnavailableError
from ..ops.lengths import host_lengths
from . import OLDEST_TRANSFORMERS
from .padding import Packing, packing_of
from .token_masks import TokenMask, token_mask

__all__ = ["NAME", "attention_forward", "register"]

NAME = "dash"

_REFUSED = ("softcap", "s_aux", "position_bias", "head_mask", "output_attentions", "block_table")


def register(name: str = NAME) -> None:
    """Make ``attn_implementation=name`` known to transformers.

    Raises:
        UnavailableError: transformers is not installed, or too old.
    """
    oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
    needed = f"transformers >= {oldest} is needed: pip install 'dash-attn[transformers]'"
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, __version__
    except ImportError as error:
        raise UnavailableError(f"{needed} ({error})") from error
    if tuple(map(int, __version__.split(".")[:2])) < OLDEST_TRANSFORMERS:
        raise UnavailableError(f"{needed} (found {__version__})")
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, token_mask)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: TokenMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Attention in the signature of transformers.

    Args:
        module: without a :class:`.TokenMask`, ``is_causal`` of it counts unless the argument is given.
        query: (batch, heads, seqlen_q, head_dim).
        key, value: (batch, kv_heads, seqlen_k, head_dim).
        attention_mask: what :func:`.token_mask` made, which then decides alone what a row sees, as masks do
            for transformers' eager attention. Or (batch, seqlen_k): 0 for padding, otherwise the number of
            the sequence. Or None.
        dropout: must be 0.
        scaling: factor on Q K^T, default ``head_dim ** -0.5``.
        sliding_window: tokens a row sees, itself included; without ``is_causal``, to each side. A
            :class:`.TokenMask` with another window is an error.
        is_causal: as ``module.is_causal``.
        cu_seq_lens_q, cu_seq_lens_k: int32 bounds of sequences packed into a batch of one; an error beside
            padding, or beside other sequences by ``position_ids``.

    Returns:
        out: (batch, seqlen_q, heads, head_dim), zero in padded rows; and None for the weights.

    Raises:
        InputError: an argument cannot be honoured; the message names it and its value.
    """
    _refuse(dropout, attention_mask, other)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if isinstance(attention_mask, TokenMask):
        _check_sizes(attention_mask, q, k)
        _check_window(attention_mask, sliding_window)
        causal, window, packing = attention_mask.causal, attention_mask.window, attention_mask.packing
    else:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        window = _window(sliding_window, causal)
        packing = _packing(attention_mask, q, k, keep_queries=not causal and window == (-1, -1))
    how: dict[str, Any] = {"softmax_scale": scaling, "causal": causal, "window_size": window}
    if (cu_seq_lens_q is None) != (cu_seq_lens_k is None):
        raise InputError("cu_seq_lens_q and cu_seq_lens_k must be given together")
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        if q.shape[0] != 1:
            raise InputError(f"cu_seq_lens_q needs a batch of 1, got {q.shape[0]}")
        _check_sequences(attention_mask, packing, cu_seq_lens_q, cu_seq_lens_k)
        rows = (x.flatten(0, 1) for x in (q, k, v))
        return _of_packed(flash_attn_varlen_func(*rows, cu_seq_lens_q, cu_seq_lens_k, **how))[None], None
    if packing is None:
        if attention_mask is None and causal and 1 < q.shape[1] != k.shape[1]:
            raise InputError(
                f"attention_mask None with {q.shape[1]} queries and {k.shape[1]} keys: how a causal mask is "
                "aligned then differs among implementations"
            )
        return _of_packed(flash_attn_func(q, k, v, **how)), None
    if packing.holes and window != (-1, -1):
        raise InputError(f"sliding_window {window} over padding between the tokens of a sequence")
    return _unpadded(q, k, v, packing, how), None


def _check_sizes(mask: TokenMask, q: Tensor, k: Tensor) -> None:
    of_mask = (mask.batch, mask.q_length, mask.kv_length)
    given = (q.shape[0], q.shape[1], k.shape[1])
    if of_mask != given:
        raise InputError(f"(batch, queries, keys) are {given}, the mask was made for {of_mask}")


def _check_window(mask: TokenMask, sliding_window: int | None) -> None:
    """A window that the layer names must be the mask's."""
    if sliding_window is None:
        return
    farthest = mask.kv_length - 1
    asked = min(_window(sliding_window, mask.causal)[0], farthest)
    if mask.local_size is None:
        sides = [farthest]
    elif mask.causal:
        sides = [mask.local_size - 1]
    else:  # transformers counts windows to both sides with the row itself or without
        sides = [mask.local_size - 1, mask.local_size]
    if asked not in [min(side, farthest) for side in sides]:
        raise InputError(
            f"sliding_window {sliding_window}, but the model made this layer's mask with window "
            f"{mask.local_size}"
        )


def _packing(mask: Tensor | None, q: Tensor, k: Tensor, *, keep_queries: bool) -> Packing | None:
    """The packing of a plain mask."""
    if mask is None:
        return None
    if mask.shape != k.shape[:2]:
        raise InputError(
            f"attention_mask has shape {tuple(mask.shape)}, the keys are (batch, seqlen_k) "
            f"{tuple(k.shape[:2])}"
        )
    packing: Packing = packing_of(mask, q.shape[1], keep_queries=keep_queries)
    return packing


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _check_sequences(
    mask: TokenMask | Tensor | None, packing: Packing | None, cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor
) -> None:
    """Bounds that the caller gives must be those of the mask, if that has any."""
    if packing is None:
        return
    if not isinstance(mask, TokenMask) or mask.padded:
        raise InputError("cu_seq_lens_q and an attention_mask with padding: give one of them")
    for side, bounds, found in (
        ("q", cu_seq_lens_q, packing.cu_seqlens_q),
        ("k", cu_seq_lens_k, packing.cu_seqlens_k),
    ):
        given = [n for n in host_lengths(f"cu_seq_lens_{side}", bounds).seqlens if n]
        of_mask = [n for n in found.diff().tolist() if n]
        if given != of_mask:
            raise InputError(
                f"cu_seq_lens_{side} has sequences of {given}, position_ids or the model's mask of {of_mask}"
            )


def _unpadded(q: Tensor, k: Tensor, v: Tensor, packing: Packing, how: dict[str, Any]) -> Tensor:
    """Attention of the rows that are no padding; the others are zero."""
    rows_q, rows_k = packing.rows_q, packing.rows_k
    packed = [x.flatten(0, 1).index_select(0, rows) for x, rows in ((q, rows_q), (k, rows_k), (v, rows_k))]
    out = _of_packed(flash_attn_varlen_func(*packed, packing.cu_seqlens_q, packing.cu_seqlens_k, **how))
    return out.new_zeros(q.flatten(0, 1).shape).index_copy(0, rows_q, out).view(q.shape)


def _of_packed(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    assert isinstance(out, Tensor)  # no log-sum-exp was asked for
    return out


def _window(sliding_window: int | None, causal: bool) -> tuple[int, int]:
    if sliding_window is None:
        return -1, -1
    side = int(sliding_window) - 1
    if side < 0:
        raise InputError(f"sliding_window must be None or >= 1, got {sliding_window!r}")
    return side, 0 if causal else side


def _refuse(dropout: float, attention_mask: object, other: dict[str, Any]) -> None:
    if dropout:
        raise InputError(f"dropout is not supported by {NAME!r} attention, got {dropout}")
    for name in _REFUSED:
        value = other.get(name)
        if value is not None and value is not False:
            shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise InputError(f"{name} is not supported by {NAME!r} attention, got {shown}")
    if attention_mask is None or isinstance(attention_mask, TokenMask):
        return
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
        shape = tuple(getattr(attention_mask, "shape", ())) or type(attention_mask).__name__
        raise InputError(f"attention_mask must be None or (batch, seqlen_k), got {shape}")

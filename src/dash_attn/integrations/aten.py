"""Kernels of dash-attn in the signatures of PyTorch's flash operators; :func:`.sdpa.activate` installs them.

The operators say no more of causal masks than that a call is causal. On a CUDA device PyTorch comes here with
unequal lengths for a lower-right mask only; its operator for the CPU means upper-left ones.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from ..errors import InputError
from .kernels import Band, run_backward, run_forward
from .keywords import refuse_given

__all__ = ["Handle", "in_layout_of", "override", "refuse", "upper_left"]


class Handle:
    """Keeps the overriding kernels registered."""

    def __init__(self, libraries: list[Library]) -> None:
        self.libraries = libraries

    def remove(self) -> None:
        """Called by PyTorch when another implementation takes over."""
        for library in self.libraries:
            library._destroy()  # type: ignore[no-untyped-call]
        self.libraries = []


def override() -> Handle:
    """Register our kernels over PyTorch's."""
    kernels = {
        "CUDA": {
            "_scaled_dot_product_flash_attention": _sdpa_forward,
            "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
            "_flash_attention_forward": _flash_forward,
            "_flash_attention_backward": _flash_backward,
        },
        "CPU": {
            "_scaled_dot_product_flash_attention_for_cpu": _sdpa_forward_cpu,
            "_scaled_dot_product_flash_attention_for_cpu_backward": _sdpa_backward_cpu,
        },
    }
    libraries = []
    with warnings.catch_warnings():
        # PyTorch warns about every override; here it is what the user asked for.
        warnings.simplefilter("ignore", UserWarning)
        for key, functions in kernels.items():
            libraries.append(Library("aten", "IMPL", key))  # type: ignore[no-untyped-call]
            for name, function in functions.items():
                libraries[-1].impl(name, function, key)  # type: ignore[no-untyped-call]
    return Handle(libraries)


refuse = partial(refuse_given, "by dash-attn")


def upper_left(query: Tensor, key: Tensor, is_causal: bool) -> Band:
    """The band of ``is_causal``; the kernels align bottom-right, which is the same for equal lengths only.

    Args:
        query, key: (batch, heads, seqlen, head_dim).
        is_causal: a row sees the columns up to its own, counted from the first ones.

    Raises:
        InputError: a causal mask of unequal lengths.
    """
    if is_causal and query.shape[2] != key.shape[2]:
        raise InputError(
            f"is_causal with seqlen_q {query.shape[2]} and seqlen_k {key.shape[2]}: SDPA aligns the mask "
            "top-left, which dash-attn does not support; for bottom-right use causal_lower_right of "
            "torch.nn.attention.bias as attn_mask, or dash_attn.attention"
        )
    return Band(is_causal)


def _sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention; tensors (batch, heads, seqlen, head_dim)."""
    refuse(return_debug_mask=return_debug_mask, dropout_p=dropout_p)
    out, lse = _forward(query, key, value, Band(is_causal), scale)
    return out, lse, None, None, query.shape[2], key.shape[2], *_auxiliary(query)


def _sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """aten::_scaled_dot_product_flash_attention_backward."""
    refuse(dropout_p=dropout_p)
    grads = _backward((grad_out, query, key, value, out, logsumexp), Band(is_causal), scale)
    return tuple(in_layout_of(x, grad) for x, grad in zip((query, key, value), grads))


def _sdpa_forward_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """aten::_scaled_dot_product_flash_attention_for_cpu."""
    refuse(attn_mask=attn_mask, dropout_p=dropout_p)
    out, lse = _forward(query, key, value, upper_left(query, key, is_causal), scale)
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)  # the strides that compiled code expects


def _forward(
    query: Tensor, key: Tensor, value: Tensor, band: Band, scale: float | None
) -> tuple[Tensor, Tensor]:
    """out in the layout of query, and lse (batch, heads, seqlen), contiguous."""
    _check_head_dims(query, value)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = run_forward(q, k, v, band, scale)
    return in_layout_of(query, out.transpose(1, 2)), lse


def _backward(
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], band: Band, scale: float | None
) -> tuple[Tensor, ...]:
    """dq, dk and dv, as views; ``saved`` is grad_out, query, key, value, out and lse."""
    dout, q, k, v, out = (x.transpose(1, 2) for x in saved[:5])
    grads = run_backward((dout, q, k, v, out, saved[5].contiguous()), band, scale)
    return tuple(x.transpose(1, 2) for x in grads[:3])


def _sdpa_backward_cpu(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """aten::_scaled_dot_product_flash_attention_for_cpu_backward."""
    refuse(attn_mask=attn_mask, dropout_p=dropout_p)
    band = upper_left(query, key, is_causal)
    return _backward((grad_out, query, key, value, out, logsumexp), band, scale)


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **other: Any,
) -> tuple[Tensor, ...]:
    """aten::_flash_attention_forward; (batch, seqlen, heads, head_dim), or packed with cum_seq."""
    refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask, **other)
    _check_head_dims(query, value)
    band = Band(is_causal, window_size_left, window_size_right)
    out, lse = run_forward(query, key, value, band, scale, _packed(cum_seq_q, cum_seq_k))
    return in_layout_of(query, out), lse, *_auxiliary(query)


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """aten::_flash_attention_backward."""
    refuse(dropout_p=dropout_p)
    band = Band(is_causal, window_size_left, window_size_right)
    saved = grad_out, query, key, value, out, logsumexp
    grads = run_backward(saved, band, scale, _packed(cum_seq_q, cum_seq_k))[:3]
    return tuple(in_layout_of(x, grad) for x, grad in zip((query, key, value), grads))


def _check_head_dims(query: Tensor, value: Tensor) -> None:
    """Compiled code expects an output in the shape of query."""
    if query.shape[-1] != value.shape[-1]:
        raise InputError(
            f"value has head_dim {value.shape[-1]}, query {query.shape[-1]}: PyTorch's flash operators take "
            "equal ones; inside sdpa.enabled() they may differ"
        )


def _packed(cum_seq_q: Tensor | None, cum_seq_k: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Bounds of packed sequences, None for a dense batch."""
    return None if cum_seq_q is None or cum_seq_k is None else (cum_seq_q, cum_seq_k)


def _auxiliary(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Philox seed and offset, which nobody reads without dropout, and an empty debug mask."""
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
    offset = torch.zeros((), dtype=torch.uint64, device=query.device)
    return seed, offset, query.new_empty(0)


def in_layout_of(reference: Tensor, x: Tensor) -> Tensor:
    """x with the strides of ``empty_like(reference)``, which PyTorch gives and compiled code expects.

    x itself where it has another head dim. Its dtype stays: under autocast it is another one. Nothing is
    written to a tensor that is there: selective checkpoints may have saved it.
    """
    if x.shape != reference.shape:
        return x
    strides = torch.empty_like(reference, device="meta").stride()
    if x.stride() == strides:
        return x
    order = sorted(range(x.ndim), key=lambda dim: -strides[dim])
    dense = x.permute(order).contiguous().permute([order.index(dim) for dim in range(x.ndim)])
    return dense if dense.stride() == strides else dense.as_strided(x.shape, strides)

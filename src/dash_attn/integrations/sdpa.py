"""``F.scaled_dot_product_attention`` on dash-attn.

Nothing happens on import. There are two ways in:

``with enabled():``
    Every SDPA call of this thread inside runs here or raises, ``nn.MultiheadAttention``'s among them. The
    backward is ours wherever and whenever it runs. What runs a forward again in the backward, as activation
    checkpointing does, calls SDPA again: let such a backward run inside too.
:func:`activate`, :func:`restore`
    Replace PyTorch's flash backend only, as ``torch.nn.attention.activate_flash_attention_impl("DASH")``
    does, for the whole process, on every thread, on the GPU and on the CPU. PyTorch goes on choosing a
    backend for each call by its own rules, and may choose cuDNN or the memory-efficient one, which this
    package does not control; restrict it with ``torch.nn.attention.sdpa_kernel``, or ask it to raise with
    ``torch.use_deterministic_algorithms``. Forward and backward of a call must both run before
    :func:`restore`. Nested tensors and ``torch.nn.attention.varlen`` reach the same kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.nn import attention as registry
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..api import flash_attn_func
from ..errors import InputError, UnavailableError
from .kernels import Band, run_backward, run_forward

__all__ = ["NAME", "activate", "enabled", "restore"]

NAME = "DASH"
"""Under this name the implementation is registered."""

_HOOKS = (
    "register_flash_attention_impl",
    "activate_flash_attention_impl",
    "current_flash_attention_impl",
    "restore_flash_attention_impl",
)


def activate() -> None:
    """Replace PyTorch's flash backend until :func:`restore`.

    Raises:
        UnavailableError: this PyTorch has no registry of flash implementations.
    """
    _hook("register_flash_attention_impl")(NAME, register_fn=_override)
    _hook("activate_flash_attention_impl")(NAME)


def restore() -> None:
    """Give PyTorch its own flash backend back; nothing happens unless :func:`activate` was called.

    Raises:
        UnavailableError: this PyTorch has no registry of flash implementations.
    """
    if _hook("current_flash_attention_impl")() == NAME:
        _hook("restore_flash_attention_impl")()


@contextmanager
def enabled() -> Iterator[None]:
    """Inside, every SDPA call of this thread runs on dash-attn, forward and backward, or raises.

    Other threads are left alone. A call's backward is ours after the block as well.

    Raises:
        InputError: from a call inside that is not supported; the message names the argument and its value.
        UnavailableError: in this PyTorch nn.MultiheadAttention would escape.

    Example::

        with enabled():  # q, k, v: (batch, heads, seqlen, head_dim)
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out.sum().backward()
    """
    if "scaled_dot_product_attention" not in F.multi_head_attention_forward.__code__.co_names:
        raise UnavailableError(f"torch {torch.__version__}: nn.MultiheadAttention hides its SDPA call")
    with _Mode():
        yield


class _Mode(TorchFunctionMode):
    """Takes this thread's calls of SDPA before PyTorch chooses a backend."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _FUSED:
            raise InputError(
                f"{func.__name__} hides an attention that dash-attn cannot take; call SDPA itself"
            )
        kwargs = kwargs or {}
        if func in _BACKWARDS:
            with self:  # a checkpoint's recomputation is inside too
                return _BACKWARDS[func](*args, **kwargs)
        if func in _OURS:
            return _OURS[func](*args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention, with autograd; tensors (batch, heads, seqlen, head_dim)."""
    _refuse(attn_mask=attn_mask, dropout_p=dropout_p)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise InputError(
                f"{name} must have 4 dimensions (batch, heads, seqlen, head_dim), got {tuple(x.shape)}"
            )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise InputError(f"query has {query.shape[1]} heads, key {key.shape[1]}, and enable_gqa is False")
    band = _sdpa_band(query, key, is_causal)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = flash_attn_func(q, k, v, softmax_scale=scale, causal=band.causal)
    assert isinstance(out, Tensor)  # no log-sum-exp was asked for
    return _in_layout_of(query, out.transpose(1, 2))


def _copy(function: Any, **names: Any) -> Any:
    """A copy of a function of PyTorch in which these names mean something else.

    While a mode is asked about a function it is off, so it would not see the calls inside of that.
    """
    copy = FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _nothing_to_ask(_: Any) -> bool:
    """In place of ``has_torch_function``: the mode has been asked already."""
    return False


_OURS = {
    F.scaled_dot_product_attention: _attention,
    torch.ops.aten.scaled_dot_product_attention: _attention,
    torch.ops.aten.scaled_dot_product_attention.default: _attention,
    F.multi_head_attention_forward: _copy(
        F.multi_head_attention_forward, scaled_dot_product_attention=_attention
    ),
}

_BACKWARDS = {
    Tensor.backward: _copy(Tensor.backward, has_torch_function_unary=_nothing_to_ask),
    torch.autograd.backward: _copy(torch.autograd.backward, has_torch_function=_nothing_to_ask),
    torch.autograd.grad: _copy(torch.autograd.grad, has_torch_function=_nothing_to_ask),
}

_FUSED = (torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd)
"""What nn.MultiheadAttention and nn.TransformerEncoderLayer may call where no gradients are needed. Under a
mode they do not; a direct call is refused."""


def _hook(name: str) -> Any:
    """A function of PyTorch's registry."""
    if missing := [hook for hook in _HOOKS if not hasattr(registry, hook)]:
        raise UnavailableError(
            f"torch {torch.__version__} has no torch.nn.attention.{missing[0]}; call dash_attn.attention "
            "directly, or update PyTorch"
        )
    return getattr(registry, name)


class _Handle:
    """Keeps the overriding kernels registered."""

    def __init__(self, libraries: list[Library]) -> None:
        self.libraries = libraries

    def remove(self) -> None:
        """Called by PyTorch when another implementation takes over."""
        for library in self.libraries:
            library._destroy()  # type: ignore[no-untyped-call]
        self.libraries = []


def _override() -> _Handle:
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
    return _Handle(libraries)


def _refuse(**given: Any) -> None:
    """Raise for every argument that has another value than None, False or 0."""
    for name, value in given.items():
        if value is not None and (isinstance(value, Tensor) or value):
            shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise InputError(f"{name} is not supported by dash-attn, got {shown}")


def _sdpa_band(query: Tensor, key: Tensor, is_causal: bool) -> Band:
    """SDPA aligns its causal mask top-left, the kernels bottom-right: the same for equal lengths only."""
    if is_causal and query.shape[2] != key.shape[2]:
        raise InputError(
            f"is_causal with seqlen_q {query.shape[2]} and seqlen_k {key.shape[2]}: SDPA aligns the mask "
            "top-left, which dash-attn does not support; use dash_attn.attention for bottom-right"
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
    _refuse(return_debug_mask=return_debug_mask, dropout_p=dropout_p)
    out, lse = _sdpa_kernel(query, key, value, is_causal, scale)
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
    grads = _sdpa_backward_cpu(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, scale=scale)
    return tuple(_in_layout_of(x, grad) for x, grad in zip((query, key, value), grads))


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
    _refuse(attn_mask=attn_mask, dropout_p=dropout_p)
    out, lse = _sdpa_kernel(query, key, value, is_causal, scale)
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)  # the strides that compiled code expects


def _sdpa_kernel(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """out in the layout of query, and lse (batch, heads, seqlen), contiguous."""
    band = _sdpa_band(query, key, is_causal)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = run_forward(q, k, v, band, scale)
    return _in_layout_of(query, out.transpose(1, 2)), lse


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
    _refuse(attn_mask=attn_mask, dropout_p=dropout_p)
    band = _sdpa_band(query, key, is_causal)
    dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    grads = run_backward((dout, q, k, v, o, logsumexp.contiguous()), band, scale)
    return tuple(x.transpose(1, 2) for x in grads)


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
    _refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask, **other)
    band = Band(is_causal, window_size_left, window_size_right)
    out, lse = run_forward(query, key, value, band, scale, _packed(cum_seq_q, cum_seq_k))
    return _in_layout_of(query, out), lse, *_auxiliary(query)


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
    _refuse(dropout_p=dropout_p)
    band = Band(is_causal, window_size_left, window_size_right)
    saved = grad_out, query, key, value, out, logsumexp
    grads = run_backward(saved, band, scale, _packed(cum_seq_q, cum_seq_k))
    return tuple(_in_layout_of(x, grad) for x, grad in zip((query, key, value), grads))


def _packed(cum_seq_q: Tensor | None, cum_seq_k: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Bounds of packed sequences, None for a dense batch."""
    return None if cum_seq_q is None or cum_seq_k is None else (cum_seq_q, cum_seq_k)


def _auxiliary(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Philox seed and offset, which nobody reads without dropout, and an empty debug mask."""
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
    offset = torch.zeros((), dtype=torch.uint64, device=query.device)
    return seed, offset, query.new_empty(0)


def _in_layout_of(reference: Tensor, x: Tensor) -> Tensor:
    """x with the strides of ``empty_like(reference)``, which PyTorch gives and compiled code expects."""
    like = torch.empty_like(reference)
    return x if x.stride() == like.stride() else like.copy_(x)

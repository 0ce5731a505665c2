"""``flash_attn_with_kvcache``: attention over a cache of keys, with the bits of training.

Lengths and page tables on a GPU are never read by the host: a captured CUDA graph may be replayed while they
change. What runs is a forward alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .arguments import (
    Asked,
    Window,
    aux_of,
    check_aux,
    check_flag,
    check_flash_options,
    check_no_positional,
    longest,
    short,
    spec_of,
)
from .backends.base import AuxTensors, check_device
from .backends.cached import PAGE_SIZES, CachedTensors
from .errors import InputError
from .ops.autograd import call_directly, needs_grad
from .ops.cached import append, cached_call, check_rows_of_q, check_tokens
from .ops.calls import DTYPE_NAMES
from .ops.operators import APPEND, CACHED
from .spec import AttentionSpec

__all__ = ["Paged", "flash_attn_with_kvcache", "run_paged"]

NO_GRADIENT = (
    "a cache of keys has no backward: call it under torch.no_grad(), or with tensors that need no gradient"
)

_ROTARY = ("rotary_cos", "rotary_sin", "rotary_seqlens")


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *positional: object,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
    return_softmax_lse: bool = False,
    backend: str = "auto",
    **flash_options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a cache of keys, under FlashAttention's name and keywords. New keys are appended first.

    A row has the bytes that it has in one forward over the whole sequence (:func:`dash_attn.attention`),
    whatever chunks, pages, and other sequences there are. There is no backward.

    On a GPU nothing here waits for the device, and the launches depend on shapes alone: the sizes of cache
    and table, not on lengths. So a CUDA graph may capture the call, and lengths, pages and tokens may change
    from replay to replay. What cannot be seen is clamped: a length to the room that a sequence has, a page
    number to pages that exist. A token for which there is no room is not written. Nothing is copied where
    tensors begin at multiples of 16 bytes, strides of the last dimension are 1, and all others are multiples
    of 16 bytes, the first one also of the second one.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k_cache, v_cache: (batch_cache, seqlen_cache, kv_heads, head_dim). With ``page_table``: (num_pages,
            page_size, kv_heads, head_dim), pages of 16, 32, 64, 128 or 256 tokens. v_cache may have another
            head_dim. What lies behind the used keys may be anything.
        k, v: (batch, seqlen_new, kv_heads, head_dim): written into the cache, in place, behind the first
            ``cache_seqlens`` tokens of their sequence.
        cache_seqlens: tokens in the cache before the call: (batch,) int32 on q's device or on the CPU, or one
            number for all. None: the cache is full.
        cache_batch_idx: (batch,) int32, which place of the cache is that of a sequence; None: its own number.
            No place may be given twice where tokens are appended.
        page_table: (batch, most_pages) int32, contiguous pages of a sequence in order; FlashAttention-2 calls
            it ``block_table``. Places behind the last page in use may hold anything.
        causal, window_size: aligned bottom-right with ``cache_seqlens + seqlen_new`` keys.
        softmax_scale, softcap, learnable_sink, backend: as in :func:`dash_attn.attention`.
        return_lse, return_softmax_lse: two names: return the log-sum-exp too, (batch, heads, seqlen_q).
        flash_options: FlashAttention's other arguments with values that ask for nothing. Rotary embeddings
            are not supported.

    Returns:
        out: (batch, seqlen_q, heads, head_dim of v_cache), or (out, lse).

    Raises:
        InputError: an argument cannot be used or honoured; the message names it and its value. Also where a
            tensor needs a gradient.

    >>> import torch
    >>> from dash_attn import flash_attn_func
    >>> q, k = torch.randn(1, 40, 4, 64), torch.randn(1, 40, 2, 64)
    >>> cache = torch.zeros(1, 100, 2, 64)
    >>> first = flash_attn_with_kvcache(q[:, :30], cache, cache, k[:, :30], k[:, :30], cache_seqlens=0, causal=True)
    >>> second = flash_attn_with_kvcache(q[:, 30:], cache, cache, k[:, 30:], k[:, 30:], cache_seqlens=30, causal=True)
    >>> torch.equal(torch.cat([first, second], 1), flash_attn_func(q, k, k, causal=True))
    True
    """  # noqa: E501
    named = "q, k_cache, v_cache, k and v"
    check_no_positional("flash_attn_with_kvcache", named, positional)
    for name in _ROTARY:
        if flash_options.pop(name, None) is not None:
            raise InputError(f"{name} is not supported: rotate q and k before the call")
    flash_options.pop("rotary_interleaved", None)  # it asks for nothing without the others
    page_table = block_table_or(page_table, flash_options)
    check_flash_options("flash_attn_with_kvcache", flash_options)
    asked = Asked(causal, window_size, softmax_scale, backend=backend, softcap=softcap)
    with_lse = check_flag("return_lse", return_lse) | check_flag("return_softmax_lse", return_softmax_lse)
    _check_caches(q, k_cache, v_cache, 4)
    batch = q.shape[0]
    new = _checked_new(q, k_cache, v_cache, k, v)
    aux = aux_of(q, learnable_sink, None)
    check_aux(aux, q, batch)
    spec = spec_of(q, asked, aux)
    _refuse_gradients(q, k_cache, v_cache, k, v, *aux)
    table = _table(q, k_cache, page_table, cache_batch_idx)
    contiguous, more = page_table is None, 0 if new is None else new[0].shape[1]
    before = _lengths(q, cache_seqlens, k_cache.shape[1] * table.shape[1], new is not None)
    if not torch.compiler.is_compiling():
        check_tokens("cache_seqlens", before, more, table, k_cache, contiguous=contiguous)
    before, table = (x.to(q.device).contiguous() for x in (before, table))
    directly = call_directly(q, k_cache, v_cache, aux)
    if new is not None:
        _append(directly, (k_cache, v_cache), new, before, table)
    tensors = CachedTensors(q, k_cache, v_cache, before + more if more else before, table)
    out, lse = _run(directly, tensors, aux, spec, -1)
    return (out, lse) if with_lse else out


class Paged(NamedTuple):
    """How the sequences of a call with pages lie, as the caller gave it."""

    cu_seqlens_q: Tensor | None
    seqused_k: Tensor
    page_table: Tensor
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None


def run_paged(
    qkv: tuple[Tensor, Tensor, Tensor], paged: Paged, aux: AuxTensors, asked: Asked
) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``flash_attn_varlen_func`` with a page table."""
    q, k, v = qkv
    cu_seqlens_q, seqused_k, page_table, longest_q, longest_k = paged
    for name, value in aux._asdict().items():
        if value is not None and name != "learnable_sink":
            raise InputError(f"{name} is not supported with page_table")
    if asked.dropout_p:
        raise InputError(f"dropout_p {asked.dropout_p!r:.40} is not supported with page_table")
    _check_caches(q, k, v, 4 if cu_seqlens_q is None else 3, names=("k", "v"))
    batch = q.shape[0]
    if cu_seqlens_q is not None:
        _check_int32("cu_seqlens_q", cu_seqlens_q, q, None)
        batch = cu_seqlens_q.shape[0] - 1
    _check_int32("seqused_k", seqused_k, q, (batch,))
    check_aux(aux, q, batch)
    spec = spec_of(q, asked, aux)
    _refuse_gradients(q, k, v, *aux)
    table = _table(q, k, page_table, None, batch)
    most = longest("max_seqlen_q", longest_q)
    longest("max_seqlen_k", longest_k)  # nothing depends on it
    if not torch.compiler.is_compiling():
        check_tokens("seqused_k", seqused_k, 0, table, k, contiguous=False)
        if cu_seqlens_q is not None:
            check_rows_of_q(cu_seqlens_q, q, most)
    seqused_k, table = (x.to(q.device).contiguous() for x in (seqused_k, table))
    if cu_seqlens_q is not None:
        cu_seqlens_q = cu_seqlens_q.to(q.device).contiguous()
    tensors = CachedTensors(q, k, v, seqused_k, table, cu_seqlens_q)
    return _run(call_directly(q, k, v, aux), tensors, aux, spec, most)


def block_table_or(page_table: Tensor | None, options: dict[str, Any]) -> Tensor | None:
    """The table under either of its names, taken from the other options."""
    other = options.pop("block_table", None)
    if other is not None and page_table is not None:
        raise InputError("give page_table or block_table, got both")
    return page_table if other is None else other


def _run(
    directly: bool, tensors: CachedTensors, aux: AuxTensors, spec: AttentionSpec, longest_q: int
) -> tuple[Tensor, Tensor]:
    q, k, v, lengths, table, cu_seqlens_q = tensors
    if directly:
        return cached_call(tensors, spec, longest_q).forward(tensors, aux)
    out, lse = CACHED(q, k, v, *aux, lengths, table, cu_seqlens_q, *spec, longest_q)
    return out, lse


def _append(
    directly: bool, cache: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], at: Tensor, table: Tensor
) -> None:
    if directly:
        append(cache, new, at, table)
    else:
        APPEND(*cache, *new, at, table)


# Checks


def _check_caches(
    q: Tensor, k: Tensor, v: Tensor, dims_q: int, names: tuple[str, str] = ("k_cache", "v_cache")
) -> None:
    for name, x, dims in (("q", q, dims_q), (names[0], k, 4), (names[1], v, 4)):
        if not isinstance(x, Tensor):
            raise InputError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.layout != torch.strided or x.is_nested:
            layout = "nested" if x.is_nested else x.layout
            raise InputError(f"{name} must be a dense tensor, got layout {layout}")
        if x.ndim != dims:
            raise InputError(f"{name} must have {dims} dimensions, got shape {tuple(x.shape)}")
        if x.device != q.device:
            raise InputError(f"{name} is on {x.device}, q is on {q.device}")
        if x.dtype not in DTYPE_NAMES or x.dtype != q.dtype:
            raise InputError(f"{name} has dtype {x.dtype}, q has {q.dtype}")
    check_device(q.device)
    if k.shape[3] != q.shape[-1]:
        raise InputError(f"{names[0]} has head_dim {k.shape[3]}, q has {q.shape[-1]}")
    if k.shape[:3] != v.shape[:3]:
        raise InputError(
            f"{names[0]} has shape {tuple(k.shape)}, {names[1]} has {tuple(v.shape)}: "
            "only head_dim may differ"
        )


def _checked_new(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    if k is None and v is None:
        return None
    if k is None or v is None:
        raise InputError("give k and v, or neither; got only one of them")
    rows = None
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if not isinstance(x, Tensor):
            raise InputError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.ndim != 4 or (x.shape[0], *x.shape[2:]) != (q.shape[0], *cache.shape[2:]):
            wanted = f"({q.shape[0]}, seqlen_new, {cache.shape[2]}, {cache.shape[3]})"
            raise InputError(f"{name} must have shape {wanted}, got {tuple(x.shape)}")
        if x.dtype != q.dtype or x.device != q.device:
            raise InputError(f"{name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}")
        rows = x.shape[1] if rows is None else rows
        if x.shape[1] != rows:
            raise InputError(f"v has {x.shape[1]} new tokens, k has {rows}")
    return k, v


def _refuse_gradients(*tensors: Tensor | None) -> None:
    if not torch.compiler.is_compiling() and needs_grad(*tensors):
        raise InputError(NO_GRADIENT)


def _table(
    q: Tensor, cache: Tensor, pages: Tensor | None, places: Tensor | None, batch: int | None = None
) -> Tensor:
    """The page table; of a contiguous cache the place of each sequence."""
    batch = q.shape[0] if batch is None else batch
    if pages is not None:
        if places is not None:
            raise InputError("cache_batch_idx is not supported with page_table, which says the same")
        _check_int32("page_table", pages, q, (batch, -1))
        if cache.shape[1] not in PAGE_SIZES:
            sizes = ", ".join(map(str, PAGE_SIZES))
            raise InputError(f"pages must have {sizes} tokens, got k_cache of shape {tuple(cache.shape)}")
        return pages
    if places is not None:
        _check_int32("cache_batch_idx", places, q, (batch,))
        return places[:, None]
    if cache.shape[0] != batch:
        raise InputError(f"k_cache has batch {cache.shape[0]}, q has {batch}: give cache_batch_idx")
    # A graph's memory must not be kept beyond its capture.
    if torch.compiler.is_compiling() or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return torch.arange(batch, dtype=torch.int32, device=q.device)[:, None]
    return _own_places(batch, q.device)


@lru_cache(64)
def _own_places(batch: int, device: torch.device) -> Tensor:
    return torch.arange(batch, dtype=torch.int32, device=device)[:, None]


def _lengths(q: Tensor, given: object, room: int, appends: bool) -> Tensor:
    """Tokens in the cache before the call."""
    if given is None:
        if appends:
            raise InputError("k and v need cache_seqlens, which says where they go; got None")
        given = room
    if isinstance(given, Tensor):
        _check_int32("cache_seqlens", given, q, (q.shape[0],))
        return given
    if isinstance(given, bool) or not isinstance(given, (int, np.integer)):
        raise InputError(f"cache_seqlens must be None, an integer or a tensor, got {short(given)}")
    if not 0 <= given <= room:
        raise InputError(f"cache_seqlens is {given}, a sequence has room for 0 to {room} keys")
    return torch.full((q.shape[0],), int(given), dtype=torch.int32, device=q.device)


def _check_int32(name: str, x: object, q: Tensor, shape: tuple[int, ...] | None) -> None:
    """int32, on q's device or the CPU. ``shape``: -1: any; None: (batch + 1,)."""
    if not isinstance(x, Tensor):
        raise InputError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype != torch.int32:
        raise InputError(f"{name} must be torch.int32, got {x.dtype}")
    if shape is None:
        fits, wanted = x.ndim == 1 and x.shape[0] >= 1, "(batch + 1,)"
    else:
        fits = x.ndim == len(shape) and all(b in (-1, a) for a, b in zip(x.shape, shape))
        wanted = f"({', '.join('any' if n < 0 else str(n) for n in shape)}{',' if len(shape) == 1 else ''})"
    if not fits:
        raise InputError(f"{name} must have shape {wanted}, got {tuple(x.shape)}")
    if x.device != q.device and x.device.type != "cpu":
        raise InputError(f"{name} is on {x.device}, q is on {q.device}; it may be there or on the cpu")

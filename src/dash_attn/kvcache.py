"""``flash_attn_with_kvcache``: attention over a cache of keys, with the bits of training.

Lengths and page tables on a GPU are never read by the host: a captured CUDA graph may be replayed while they
change. What runs is a forward alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .arguments import Asked, aux_of
from .cache_arguments import CheckedCache, Kept, block_table_or, check_cache_options, check_kvcache
from .ops.autograd import call_directly
from .ops.cached import append, cached_call, load
from .ops.operators import APPEND, CACHED
from .values import Window, check_flag, check_no_positional

__all__ = ["flash_attn_with_kvcache", "run_cached"]


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
    from replay to replay. What is on the CPU is checked; page numbers only where lengths are there, too.
    Compiled code with tensors on a GPU looks at no values of others on the CPU either. What
    cannot be seen is clamped: a length to the room that a sequence has, a page number to pages that exist. A
    token for which there is no room is not written. Nothing is copied where
    tensors begin at multiples of 16 bytes, strides of the last dimension are 1, and all others are multiples
    of 16 bytes, the first one also of the second one.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k_cache, v_cache: (batch_cache, seqlen_cache, kv_heads, head_dim). With ``page_table``: (num_pages,
            page_size, kv_heads, head_dim), pages of 16, 32, 64, 128 or 256 tokens. v_cache may have another
            head_dim. What lies behind the used keys may be anything.
        k, v: (batch, seqlen_new, kv_heads, head_dim): written into the cache, in place, behind the first
            ``cache_seqlens`` tokens of their sequence. If the caches share memory, k and v must share theirs
            in the same way: one tensor for one cache, ``v = k[..., :n]`` where v_cache is that of k_cache.
        cache_seqlens: tokens in the cache before the call: (batch,) int32 on q's device or on the CPU, or one
            number for all. None: the cache is full.
        cache_batch_idx: (batch,) int32, which place of the cache is that of a sequence; None: its own number.
            No place may be given twice where tokens are appended: an error where it is on the CPU.
        page_table: (batch, most_pages) int32, contiguous pages of a sequence in order; FlashAttention-2 calls
            it ``block_table``. Places behind the last page in use, and of pages before a sliding window, may
            hold any number.
        causal, window_size: aligned bottom-right with ``cache_seqlens + seqlen_new`` keys.
        softmax_scale, softcap, learnable_sink, backend: as in :func:`dash_attn.attention`. So is autocast for
            q, k and v; the caches must have its dtype.
        return_lse, return_softmax_lse: two names: return the log-sum-exp too, (batch, heads, seqlen_q).
        flash_options: FlashAttention's other arguments with values that ask for nothing. Rotary embeddings
            are not supported.

    Returns:
        out: (batch, seqlen_q, heads, head_dim of v_cache), or (out, lse).

    Raises:
        InputError: an argument cannot be used or honoured; the message names it and its value. Also where a
            tensor needs a gradient. Nothing is appended then. (Compiled code does not see that caches, q or a
            sink share memory. Only when it runs, behind the append, it finds that no backend covers a call,
            or that its kernel cannot be had, and on the CPU that a page which is only read does not exist. On
            the CPU it finds a page that two sequences would write to, but not one that a sequence has twice,
            or that another one reads.)

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
    check_no_positional("flash_attn_with_kvcache", named, positional, "rotary_cos")
    page_table = block_table_or(page_table, flash_options)
    check_cache_options(flash_options)
    asked = Asked(
        causal=causal, window=window_size, softmax_scale=softmax_scale, backend=backend, softcap=softcap
    )
    with_lse = check_flag("return_lse", return_lse) | check_flag("return_softmax_lse", return_softmax_lse)
    kept = Kept(cache_seqlens, cache_batch_idx, page_table)
    aux = aux_of(q, learnable_sink=learnable_sink)
    out, lse = run_cached(check_kvcache((q, k_cache, v_cache), (k, v), kept, aux, asked))
    return (out, lse) if with_lse else out


def run_cached(checked: CheckedCache) -> tuple[Tensor, Tensor]:
    """(out, lse) of a checked call. New keys are appended first, if a backend covers the call."""
    tensors, aux, spec, longest_q, new, before = checked
    q, k, v, lengths, table, cu_seqlens_q = tensors
    if call_directly(q, k, v, aux):
        call = cached_call(tensors, spec, longest_q)
        if new is not None and before is not None:
            call.load(tensors)
            append((k, v), new, before, table)
        return call.forward(tensors, aux)
    if new is not None:
        if not torch.compiler.is_compiling():  # that runs operators only
            load(tensors, spec, longest_q)
        APPEND(k, v, *new, before, table)
    out, lse = CACHED(q, k, v, *aux, lengths, table, cu_seqlens_q, *spec, longest_q)
    return out, lse

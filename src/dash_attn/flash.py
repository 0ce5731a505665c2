"""Attention under FlashAttention's names, layouts and keywords."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .arguments import Asked, Packing, Used, aux_of
from .cache_arguments import block_table_or, check_paged, paged_of
from .dispatch import run_dense, run_packed
from .errors import InputError
from .kvcache import run_cached
from .schedule import Numerics, Schedule
from .values import Window, check_flag, check_flash_options, check_no_positional, kind_of

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *positional: object,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    deterministic: bool = True,
    return_lse: bool = False,
    policy: str | Numerics | Schedule = "auto",
    backend: str = "auto",
    q_segment: int | None = None,
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    row_starts: Tensor | None = None,
    row_ends: Tensor | None = None,
    **flash_options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`dash_attn.attention` under FlashAttention's name and keywords, for dense batches.

    What stands fourth is ``dropout_p`` in FlashAttention-2, ``softmax_scale`` in 3 and another tensor in 4.
    Here q, k and v are positional and all else is given by keyword.

    Args:
        q: (batch, seqlen_q, heads, head_dim), bfloat16, float16, float32 or float64.
        k, v: (batch, seqlen_k, kv_heads, head_dim); kv_heads divides heads; v may have another head_dim.
        softmax_scale: default ``head_dim ** -0.5``; "sm90" takes positive ones only.
        causal: aligned bottom-right.
        window_size: (left, right), -1 or None: unbounded. With ``causal`` the right side is 0.
        deterministic: False permits a GPU to sum dQ by atomics, in no fixed order. It is ignored under
            ``torch.use_deterministic_algorithms(True)`` and where the environment has
            ``NVTE_ALLOW_NONDETERMINISTIC_ALGO=0`` or ``FLASH_ATTENTION_DETERMINISTIC=1`` when the
            backward runs.
        return_lse: return the log-sum-exp too, (batch, heads, seqlen_q). It carries no gradient.
        policy, backend, q_segment, softcap, learnable_sink, alibi_slopes, dropout_p, dropout_seed,
            row_starts, row_ends: as in :func:`dash_attn.attention`.
        flash_options: FlashAttention's other arguments (``block_table``, ``score_mod``, ...) with values that
            ask for nothing.

    Returns:
        out, or (out, lse), as :func:`dash_attn.attention`.

    Raises:
        InputError: an argument cannot be used or honoured; the message names it and its value.
        UnsupportedMaskError: the policy does not cover this mask.

    >>> import torch
    >>> q = torch.randn(2, 300, 4, 64)
    >>> flash_attn_func(q, q, q, dropout_p=0.0, causal=True).shape
    torch.Size([2, 300, 4, 64])
    >>> flash_attn_func(q, q, q, num_splits=4)
    Traceback (most recent call last):
    dash_attn.errors.InputError: num_splits=4 is not supported, only 0 or 1
    """
    check_no_positional("flash_attn_func", "q, k and v", positional)
    check_flash_options("flash_attn_func", flash_options)
    asked = Asked(
        causal=causal, window=window_size, softmax_scale=softmax_scale, policy=policy,
        deterministic=deterministic, backend=backend, softcap=softcap, dropout_p=dropout_p,
        q_segment=q_segment,
    )  # fmt: skip
    aux = aux_of(
        q, learnable_sink=learnable_sink, alibi_slopes=alibi_slopes, dropout_p=dropout_p,
        dropout_seed=dropout_seed, row_starts=row_starts, row_ends=row_ends,
    )  # fmt: skip
    return run_dense(q, k, v, aux, asked, return_lse)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    *positional: object,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    deterministic: bool = True,
    return_lse: bool = False,
    policy: str | Numerics | Schedule = "auto",
    backend: str = "auto",
    q_segment: int | None = None,
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    row_starts: Tensor | None = None,
    row_ends: Tensor | None = None,
    **flash_options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a packed batch: sequences of any lengths, one after the other, without padding.

    A sequence has the bytes that it has alone (with dropout, at its index of the batch). The lengths are read
    on the host: a ``cu_seqlens`` or ``seqused_k`` on a GPU is copied once, by its first user; later calls
    with the same tensor, all layers of a model and the backward among them, do not wait. Inside a CUDA graph
    capture a tensor that was not read before is an error, and the graph keeps the lengths of its capture.
    A tensor made in inference mode is read at every call, so a capture takes none on a GPU.

    **A cache of keys.** With ``seqused_k``, sequence i uses only the first ``seqused_k[i]`` of its keys, and
    masks are aligned with that length. A GPU copies nothing where tensors begin at multiples of 16 bytes,
    strides of the last dimension are 1, and all others are multiples of 16 bytes and not 0. What lies behind
    the used keys may be anything, NaN too: outputs have the bytes of a call with the used keys alone. There
    is no backward then, so ``policy`` decides nothing. Under torch.compile a wanted gradient is an error of
    the compiler, with our message in it.

    **Pages.** With ``page_table`` too, k and v are pages (num_pages, page_size, kv_heads, head_dim) of 16,
    32, 64, 128 or 256 tokens. One call then serves chunks of prompts and steps of decoding, mixed. Lengths
    and pages on a GPU are not read by the host: see :func:`.kvcache.flash_attn_with_kvcache`.

    Args:
        q: (total_q, heads, head_dim). With ``seqused_k`` and without ``cu_seqlens_q``:
            (batch, seqlen_q, heads, head_dim).
        k, v: (total_k, kv_heads, head_dim); kv_heads divides heads; v may have another head_dim. With
            ``seqused_k`` and without ``cu_seqlens_k``: (batch, seqlen_k_max, kv_heads, head_dim).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, on the tensors' device or on the CPU: 0, then the
            end of every sequence. Sequences may be empty. In compiled code one on the CPU may not be
            written to before the backward. With ``seqused_k``, a sequence's keys begin at its
            ``cu_seqlens_k``, and those that are not used lie between them and the next sequence's.
        max_seqlen_q, max_seqlen_k: not needed; an integer that is less than the longest sequence (of used
            keys) is an error. With ``page_table`` only where the lengths are on the CPU.
        seqused_k: (batch,) int32, on the tensors' device or on the CPU: how many keys of every sequence are
            used, from 0 to all. None: all.
        page_table: (batch, most_pages) int32: the pages of every sequence in order, with ``seqused_k`` and
            without ``cu_seqlens_k``. FlashAttention-2 calls it ``block_table``. ``cu_seqlens_q`` on a GPU may
            then end before q does: rows behind are not written. On the CPU it must end where q ends.
        row_starts, row_ends: (total_k,) int32, as in :func:`dash_attn.attention`; rows count from the first
            one of their sequence. Not with ``seqused_k``.
        softmax_scale, causal, window_size, deterministic, return_lse, policy, backend, q_segment, softcap,
            learnable_sink, alibi_slopes, dropout_p, dropout_seed, flash_options: as in
            :func:`flash_attn_func`; lse is (heads, total_q), for dense q (batch, heads, seqlen_q).

    Returns:
        out: the shape of q with the head_dim of v, or (out, lse).

    Raises:
        InputError: an argument cannot be used or honoured; the message names it and its value. With
            ``seqused_k`` also where q, k or v needs a gradient.
        UnsupportedMaskError: the policy does not cover this mask.

    >>> import torch
    >>> q = torch.randn(5, 4, 64)
    >>> ends = torch.tensor([0, 3, 5], dtype=torch.int32)
    >>> packed = flash_attn_varlen_func(q, q, q, ends, ends, causal=True)
    >>> torch.equal(packed[3:], flash_attn_func(q[None, 3:], q[None, 3:], q[None, 3:], causal=True)[0])
    True
    >>> cache = torch.full((2, 100, 4, 64), torch.nan)  # (batch, seqlen_k_max, kv_heads, head_dim)
    >>> cache[0, :3], cache[1, :2] = q[:3], q[3:]
    >>> used = torch.tensor([3, 2], dtype=torch.int32)
    >>> torch.equal(flash_attn_varlen_func(q, cache, cache, ends, seqused_k=used, causal=True), packed)
    True
    """
    named = "q, k, v, cu_seqlens and max_seqlen"
    check_no_positional("flash_attn_varlen_func", named, positional)
    page_table = block_table_or(page_table, flash_options)
    check_flash_options("flash_attn_varlen_func", flash_options)
    asked = Asked(
        causal=causal, window=window_size, softmax_scale=softmax_scale, policy=policy,
        deterministic=deterministic, backend=backend, softcap=softcap, dropout_p=dropout_p,
        q_segment=q_segment,
    )  # fmt: skip
    aux = aux_of(
        q, learnable_sink=learnable_sink, alibi_slopes=alibi_slopes, dropout_p=dropout_p,
        dropout_seed=dropout_seed, row_starts=row_starts, row_ends=row_ends,
    )  # fmt: skip
    packing: Packing | Used
    if page_table is not None:
        paged = paged_of(cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, max_seqlen_q, max_seqlen_k)
        check_flag("return_lse", return_lse)
        out, lse = run_cached(check_paged((q, k, v), paged, aux, asked))
        return (out, lse) if return_lse else out
    if seqused_k is not None:
        packing = Used(cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k)
    elif cu_seqlens_q is None or cu_seqlens_k is None:
        given = f"{kind_of(cu_seqlens_q)} and {kind_of(cu_seqlens_k)}"
        raise InputError(f"without seqused_k give cu_seqlens_q and cu_seqlens_k, got {given}")
    else:
        packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return run_packed((q, k, v), packing, aux, asked, return_lse)

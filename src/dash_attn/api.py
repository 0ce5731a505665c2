"""The public functions: attention whose gradients are the same bytes every time, and what it supports.

The same inputs give the same bytes, forward and backward, run after run. The bytes of one sequence do
not depend on the batch it is in, dense or packed. They do depend on the numerics (:func:`fingerprints`), on
the backend, and on the CPU backend also on the PyTorch build and the kind of CPU.

``attention`` is this package's own function. ``flash_attn_func`` and ``flash_attn_varlen_func`` have the
names, layouts and keywords of FlashAttention. What they cannot honour is refused, never ignored.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import (
    Asked,
    CheckedCall,
    Packing,
    Used,
    Window,
    aux_of,
    check_aux,
    check_call,
    check_dropout,
    check_flag,
    check_flash_options,
    check_no_positional,
    check_rows,
    check_softcap,
    completed,
)
from .backends.base import (
    NO_AUX,
    AuxTensors,
    Backend,
    Gradients,
    Prepared,
    Tensors,
    as_current,
    backend_for,
    backends_for,
    check_backend,
)
from .errors import DashError, InputError, PlanMismatchError
from .kvcache import Paged, block_table_or, flash_attn_with_kvcache, run_paged
from .ops.autograd import attend, call_directly, refuse_gradients, with_gradients
from .ops.calls import (
    DTYPE_NAMES,
    Call,
    dense_call,
    first_that_covers,
    packed_call,
    prepared_once,
    used_call,
)
from .ops.known import KnownCalls
from .ops.operators import DENSE, USED, VARLEN
from .schedule import Numerics, Plan, Schedule
from .scores import Scores
from .spec import AttentionSpec

__all__ = [
    "Backend",
    "Fingerprints",
    "Support",
    "apply_plan",
    "attention",
    "backend_for",
    "fingerprints",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "is_supported",
    "plan_for",
]


@dataclass(frozen=True)
class Support:
    """What :func:`is_supported` found; true in a condition if the call would work.

    Attributes:
        ok: True if the function accepts these arguments.
        reason: the message of the error it raises otherwise, empty if ok.
        backend: what would run it ("cpu", "sm90" or "triton"), None if not ok.
    """

    ok: bool
    reason: str = ""
    backend: str | None = None

    def __bool__(self) -> bool:
        return self.ok


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    softmax_scale: float | None = None,
    policy: str | Numerics | Schedule = "auto",
    return_lse: bool = False,
    backend: str = "auto",
    q_segment: int | None = None,
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    row_starts: Tensor | None = None,
    row_ends: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(Q K^T * softmax_scale) V under a mask, with gradients that are the same bytes every time.

    Args:
        q: (batch, seqlen_q, heads, head_dim), bfloat16, float16, float32 or float64.
        k, v: (batch, seqlen_k, kv_heads, head_dim); kv_heads divides heads. v may have another head_dim, as
            in DeepSeek's MLA. "sm90" takes multiples of 8 of which the larger one is 40 to 128.
        causal: row i sees columns up to ``i + seqlen_k - seqlen_q`` (aligned bottom-right).
        window: (left, right) columns around that diagonal, -1 or None: unbounded. With ``causal`` the
            right side is 0, as in FlashAttention.
        softmax_scale: default ``head_dim ** -0.5``; "sm90" takes positive ones only.
        policy: "auto", a policy's name, or a Policy. It decides in which order gradients are summed:
            another policy may give other bytes, all of them equally accurate.
        return_lse: return the log-sum-exp too. It carries no gradient.
        backend: "auto", "cpu", "sm90" (Hopper) or "triton". "auto" is "cpu" for CPU tensors. On a GPU it is
            "sm90" where that covers the call, else "triton". Another backend gives other bytes.
        q_segment: rows per segment, a multiple of 128. The backward of a longer sequence is cut into segments
            of so many q rows, and their sums of dK and dV are added in order. Several GPUs can share
            such a sequence without another bit (:mod:`dash_attn.distributed`). It decides bits of longer
            sequences. None: 16,384 where ``policy`` is "auto", and there is no window on the left and no
            dropout, else no segments. Masks that end elsewhere than at the diagonal or at the last key,
            ``alibi_slopes`` and intervals of rows are not cut.
        softcap: scores s become ``softcap * tanh(s / softcap)`` before the softmax; 0: they stay.
        learnable_sink: (heads,), dtype of q or float32: one score more per q head, of a key without a value.
            ``out = sum_j exp(s_j) v_j / (exp(sink) + sum_j exp(s_j))``. It is a natural logarithm, neither
            scaled nor capped, and may need a gradient.
        alibi_slopes: (heads,) or (batch, heads) float32, without a gradient:
            ``-slope * |i + seqlen_k - seqlen_q - j|`` is added to the scaled, capped score of row i and
            column j. "sm90" does not have it.
        dropout_p: probability with which a weight of the softmax is dropped, 0 <= p < 1; the others are
            divided by 1 - p. lse is that without dropout. "sm90" does not have it.
        dropout_seed: an integer, 0 <= seed < 2^63, or a tensor () int64 on q's device. With the number of the
            sequence in the batch, q head, row and column, all counted from 0 in the call, it decides what is
            dropped, on every backend alike.
            None: one ``torch.randint(2**63 - 1, (), device=q.device)`` per call, from PyTorch's default
            generator, so that ``torch.manual_seed`` makes runs repeat. (What torch.compile makes of a call by
            default draws another number there. Give a seed where both must be the same.)
        row_starts, row_ends: (batch, seqlen_k) int32, on the tensors' device or on the CPU: key j is seen by
            rows i with ``row_starts[j] <= i < row_ends[j]`` only, of those that ``causal`` and ``window``
            leave. None: from the first row, to the last one. So masks of documents, prefixes and trees are
            given (see below). Any values; the host never reads them. From the CPU they are copied to a GPU at
            every call. "sm90" takes none.

    **Masks as intervals of rows.** Rows and keys count from the first one of the sequence. Where they are the
    same tokens, with ``causal=True``: documents by ``row_ends[j]``, the end of the document of token j; a
    tree in depth-first order by ``row_ends[j]``, the end of the subtree of token j; a prefix that several
    continuations share likewise, for it is a tree. A prefix whose tokens all see one another (prefix-LM), in
    front of causal ones: without ``causal``, ``row_starts[j]`` is 0 in the prefix and j behind it.
    FlashMask's ``startend_row_indices`` has the same numbers: ``row_ends`` where its lower triangle begins to
    be masked, ``row_starts`` where its upper one ends to be. Who changes them in place before the backward
    gets an error from it, or where they were copied the gradients of what they were.

    Under autocast q, k and v are cast to its dtype, as in PyTorch's own attention.

    Returns:
        out: (batch, seqlen_q, heads, head_dim of v), dtype of q; rows that see no column are zero.
        lse: with ``return_lse``, (batch, heads, seqlen_q) float32 (float64 for float64), natural
            logarithm; -inf in rows that see no column. With a sink it includes that: the sink in such rows.

    Raises:
        InputError: an argument cannot be used; the message names it and its value.
        UnsupportedMaskError: the policy does not cover this mask.

    Example:
        >>> import torch
        >>> q = torch.randn(2, 300, 4, 64, requires_grad=True)
        >>> k = torch.randn(2, 300, 2, 64)
        >>> out = attention(q, k, k, causal=True)
        >>> out.backward(torch.ones_like(out))
        >>> out.shape == q.grad.shape == q.shape
        True
        >>> ends = torch.tensor([100, 300]).repeat_interleave(torch.tensor([100, 200])).int().expand(2, -1)
        >>> documents = attention(q, k, k, causal=True, row_ends=ends)
        >>> torch.equal(documents[:, :100], attention(q[:, :100], k[:, :100], k[:, :100], causal=True))
        True
    """
    asked = Asked(causal, window, softmax_scale, policy, True, backend, softcap, dropout_p, q_segment)
    dropout, rows = (dropout_p, dropout_seed), (row_starts, row_ends)
    aux = aux_of(q, learnable_sink, alibi_slopes, dropout, rows)
    return _run_dense(q, k, v, aux, asked, return_lse)


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
    """:func:`attention` under FlashAttention's name and keywords, for dense batches.

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
            row_starts, row_ends: as in :func:`attention`.
        flash_options: FlashAttention's other arguments (``block_table``, ``score_mod``, ...) with values that
            ask for nothing.

    Returns:
        out, or (out, lse), as :func:`attention`.

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
        causal, window_size, softmax_scale, policy, deterministic, backend, softcap, dropout_p, q_segment
    )
    dropout, rows = (dropout_p, dropout_seed), (row_starts, row_ends)
    aux = aux_of(q, learnable_sink, alibi_slopes, dropout, rows)
    return _run_dense(q, k, v, aux, asked, return_lse)


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

    A sequence has the bytes that it has alone. The lengths are read on the host: a ``cu_seqlens`` or
    ``seqused_k`` on a GPU is copied once, by its first user; later calls with the same tensor, all layers of
    a model and the backward among them, do not wait. Inside a CUDA graph capture a tensor that was not read
    before is an error, and the graph keeps the lengths of its capture.

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
            end of every sequence. Sequences may be empty. With ``seqused_k``, a sequence's keys begin at its
            ``cu_seqlens_k``, and those that are not used lie between them and the next sequence's.
        max_seqlen_q, max_seqlen_k: not needed; an integer that is less than the longest sequence (of used
            keys) is an error.
        seqused_k: (batch,) int32, on the tensors' device or on the CPU: how many keys of every sequence are
            used, from 0 to all. None: all.
        page_table: (batch, most_pages) int32: the pages of every sequence in order, with ``seqused_k`` and
            without ``cu_seqlens_k``. FlashAttention-2 calls it ``block_table``. Rows of q behind the last of
            ``cu_seqlens_q`` are then not written.
        row_starts, row_ends: (total_k,) int32, as in :func:`attention`; rows count from the first one of
            their sequence. Not with ``seqused_k``.
        softmax_scale, causal, window_size, deterministic, return_lse, policy, backend, softcap,
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
        causal, window_size, softmax_scale, policy, deterministic, backend, softcap, dropout_p, q_segment
    )
    dropout, rows = (dropout_p, dropout_seed), (row_starts, row_ends)
    aux = aux_of(q, learnable_sink, alibi_slopes, dropout, rows)
    packing: Packing | Used
    if page_table is not None:
        if seqused_k is None or cu_seqlens_k is not None:
            given = f"{_kind(seqused_k)} and {_kind(cu_seqlens_k)}"
            raise InputError(f"page_table needs seqused_k and no cu_seqlens_k, got {given}")
        check_flag("return_lse", return_lse)
        paged = Paged(cu_seqlens_q, seqused_k, page_table, max_seqlen_q, max_seqlen_k)
        out, lse = run_paged((q, k, v), paged, aux, asked)
        return (out, lse) if return_lse else out
    if seqused_k is not None:
        packing = Used(cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k)
    elif cu_seqlens_q is None or cu_seqlens_k is None:
        given = f"{_kind(cu_seqlens_q)} and {_kind(cu_seqlens_k)}"
        raise InputError(f"without seqused_k give cu_seqlens_q and cu_seqlens_k, got {given}")
    else:
        packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _run_packed((q, k, v), packing, aux, asked, return_lse)


def is_supported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    *,
    causal: bool = False,
    window: Window = None,
    window_size: Window = None,
    softmax_scale: float | None = None,
    policy: str | Numerics | Schedule = "auto",
    deterministic: bool = True,
    return_lse: bool = False,
    seqused_k: Tensor | None = None,
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
) -> Support:
    """Whether a function of this module accepts these arguments, with the reason if not; it does not raise.

    With ``cu_seqlens_q`` and ``cu_seqlens_k``, or ``seqused_k``, it speaks of :func:`flash_attn_varlen_func`.

    >>> import torch
    >>> q = torch.zeros(1, 8, 4, 64)
    >>> is_supported(q, q[:, :, :3], q[:, :, :3]).reason
    'heads (4) must be a multiple of kv_heads (3)'
    """
    try:
        check_flash_options("is_supported", flash_options)
        check_flag("return_lse", return_lse)
        packing: Packing | Used | None
        if seqused_k is None:
            packing = _packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        else:
            packing = Used(cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k)
        window = _one_window(window, window_size)
        asked = Asked(
            causal, window, softmax_scale, policy, deterministic, backend, softcap, dropout_p, q_segment
        )
        dropout, rows = (dropout_p, dropout_seed), (row_starts, row_ends)
        aux = aux_of(q, learnable_sink, alibi_slopes, dropout, rows)
        checked = check_call(q, k, v, packing, asked, aux)
        found = backends_for(q.device, backend)[0] if _is_empty(checked) else _find(checked).backend
    except (DashError, TypeError) as error:
        return Support(False, str(error))
    return Support(True, backend=found.name)


def plan_for(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = False,
    window: Window = None,
    window_size: Window = None,
    policy: str | Numerics | Schedule = "auto",
    backend: str = "auto",
    q_segment: int | None = None,
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    row_starts: Tensor | None = None,
    row_ends: Tensor | None = None,
) -> Plan:
    """The backward's plan that these arguments lead to, of a packed batch where ``cu_seqlens`` are given.

    It is that of the mask, whatever ``row_starts`` and ``row_ends`` hide; they may lead to another backend.

    Raises:
        InputError, UnsupportedMaskError: as :func:`attention`; also for sequences longer than ``q_segment``,
            which have several plans.

    >>> import torch
    >>> q = torch.zeros(1, 512, 2, 64)
    >>> plan_for(q, q, q, causal=True)
    Plan(spt, 8 items, 20 tasks)
    """
    window = _one_window(window, window_size)
    asked = Asked(causal, window, None, policy, True, backend, softcap, dropout_p, q_segment)
    aux = aux_of(q, learnable_sink, alibi_slopes, rows=(row_starts, row_ends))
    call = _call_of((q, k, v), (cu_seqlens_q, cu_seqlens_k), aux, asked)
    if call.parts:
        raise InputError(
            f"the backward is cut into segments of {call.spec.rows_per_segment} rows of q, each with a plan: "
            "give a larger q_segment for a plan of whole sequences; fingerprints() names all of them"
        )
    return call.plan


class Fingerprints(NamedTuple):
    """What names the numerics of a call: two runs with the same three round in the same places.

    Attributes:
        forward: of out and lse: SHA-256 of the numerics (``dash_attn.schedule.ForwardNumerics``), or the name
            and version of the library whose kernel it is.
        backward: of the gradients: SHA-256 of the plan's numerics (``Plan.fingerprint``), or of those of all
            segments of long sequences.
        backend: its name. Two backends may have the same two numerics, and still round otherwise.
    """

    forward: str
    backward: str
    backend: str


def fingerprints(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = False,
    window: Window = None,
    window_size: Window = None,
    policy: str | Numerics | Schedule = "auto",
    backend: str = "auto",
    q_segment: int | None = None,
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    row_starts: Tensor | None = None,
    row_ends: Tensor | None = None,
) -> Fingerprints:
    """The numerics that these arguments lead to: log them, and a later run can tell whether it sums alike.

    Arguments and errors are those of :func:`plan_for`.

    >>> import torch
    >>> q = torch.zeros(1, 512, 2, 64)
    >>> names = fingerprints(q, q, q, causal=True)
    >>> len(names.forward), len(names.backward), names.backend
    (64, 64, 'cpu')
    """
    window = _one_window(window, window_size)
    asked = Asked(causal, window, None, policy, True, backend, softcap, dropout_p, q_segment)
    aux = aux_of(q, learnable_sink, alibi_slopes, rows=(row_starts, row_ends))
    call = _call_of((q, k, v), (cu_seqlens_q, cu_seqlens_k), aux, asked)
    return Fingerprints(call.prepared.forward_fingerprint, call.fingerprint, call.backend.name)


def apply_plan(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    *,
    disorder: random.Random | None = None,
    backend: str = "auto",
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    row_starts: Tensor | None = None,
    row_ends: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) with autograd, by a plan of your own.

    Args:
        plan: a proven plan whose tiles are those of the backend.
        q: (batch, seqlen_q, heads, head_dim), or packed (total_q, heads, head_dim).
        k, v: (batch, seqlen_k, kv_heads, head_dim), or packed (total_k, kv_heads, head_dim).
        softmax_scale: factor on Q K^T.
        disorder: sums dQ in no fixed order instead: a negative control. Without atomics it draws the order.
        backend, softcap, learnable_sink, alibi_slopes, dropout_p, dropout_seed, row_starts, row_ends: as in
            :func:`attention`.

    Raises:
        InputError: no backend covers the plan's problem, or the one that is asked for does not.
        PlanMismatchError: the tensors are not of the plan's problem, or its tiles are not the backend's.
    """
    packed = q.ndim == 3
    p = check_dropout(dropout_p)
    aux = aux_of(q, learnable_sink, alibi_slopes, (p, dropout_seed), (row_starts, row_ends))
    check_aux(aux, q, len(plan.problem.sequences))
    check_rows(aux, k, None)
    scores = Scores(softmax_scale, check_softcap(softcap), dropout_p=p, **aux.given)
    asked = check_backend(backend)
    chosen, _ = first_that_covers(lambda _: plan.problem, asked, q.device, packed, scores)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if DTYPE_NAMES.get(x.dtype) != plan.problem.dtype or x.device != q.device:
            raise PlanMismatchError(
                f"{name} has dtype {x.dtype} and is on {x.device}; "
                f"the plan is for {plan.problem.dtype}, and q is on {q.device}"
            )
    prepared = prepared_once(chosen, plan.problem, q.device, packed)
    return attend(_Planned(prepared, plan, scores, disorder), q, k, v, completed(aux, p, q))


class _Planned(NamedTuple):
    """A call whose plan is given."""

    prepared: Prepared
    plan: Plan
    scores: Scores
    disorder: random.Random | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, aux: AuxTensors = NO_AUX) -> tuple[Tensor, Tensor]:
        with as_current(q.device):
            return self.prepared.forward(q, k, v, self.scores, aux)

    def backward(self, tensors: Tensors, aux: AuxTensors = NO_AUX) -> Gradients:
        ordered = self.disorder is None
        with as_current(tensors.q.device):
            return self.prepared.backward(
                self.plan, tensors, self.scores, aux, ordered=ordered, disorder=self.disorder
            )


def _packing(
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: Any, max_seqlen_k: Any
) -> Packing | None:
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return None
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise InputError("give cu_seqlens_q and cu_seqlens_k, or neither; got only one of them")
    return Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _one_window(window: Window, window_size: Window) -> Window:
    if window is not None and window_size is not None:
        raise InputError(f"give window or window_size, got {window!r} and {window_size!r}")
    return window_size if window is None else window


_KNOWN: KnownCalls[Call] = KnownCalls()
_KNOWN_PACKED: KnownCalls[tuple[AttentionSpec, tuple[int, int]]] = KnownCalls()


def _run_dense(
    q: Tensor, k: Tensor, v: Tensor, aux: AuxTensors, asked: Asked, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """A dense call. One that is like an earlier one is neither checked nor looked up again."""
    check_flag("return_lse", return_lse)
    more = () if aux is NO_AUX else aux
    if call_directly(q, k, v, aux) and (call := _KNOWN.find(q, k, v, asked, more)) is not None:
        out, lse = attend(call, q, k, v, completed(aux, asked.dropout_p, q))
        return (out, lse) if return_lse else out
    call, out, lse = _run(check_call(q, k, v, None, asked, aux))
    if call is not None:
        _KNOWN.add(call, q, k, v, asked, more)
    return (out, lse) if return_lse else out


_QKV = tuple[Tensor, Tensor, Tensor]


def _run_packed(
    qkv: _QKV, packing: Packing | Used, aux: AuxTensors, asked: Asked, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """A packed call. One that is like an earlier one is not checked again, but for its lengths."""
    check_flag("return_lse", return_lse)
    q, k, v = qkv
    more = packing if aux is NO_AUX else (*packing, *aux)
    if call_directly(q, k, v, aux) and (known := _KNOWN_PACKED.find(q, k, v, asked, more)) is not None:
        spec, longest = known
        aux = completed(aux, asked.dropout_p, q)
        if isinstance(packing, Used):
            refuse_gradients(q, k, v, *aux)
            out, lse = used_call(q, k, v, (*packing[:3], *longest), spec).forward(q, k, v, aux)
        else:
            call = packed_call(q, k, v, (*packing[:2], *longest), spec)
            out, lse = attend(call, q, k, v, aux)
        return (out, lse) if return_lse else out
    checked = check_call(q, k, v, packing, asked, aux)
    made, out, lse = _run(checked)
    if made is not None and checked.packing is not None:
        _KNOWN_PACKED.add((checked.spec, checked.packing[-2:]), q, k, v, asked, more)
    return (out, lse) if return_lse else out


def _run(checked: CheckedCall) -> tuple[Call | None, Tensor, Tensor]:
    """(call, out, lse); the call of those that need no operator."""
    q, k, v, aux, _, packing = checked
    if _is_empty(checked):
        return None, *_empty_results(q, k, v, aux)
    aux = completed(aux, checked.spec.dropout_p, q)
    checked = checked._replace(aux=aux)
    if call_directly(q, k, v, aux):
        call = _find(checked)
        return call, *attend(call, q, k, v, aux)
    if isinstance(packing, Used):
        out, lse = USED(q, k, v, *checked.rest)
        return None, out, lse
    functions = DENSE if packing is None else VARLEN
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return None, *functions.forward(q, k, v, *checked.rest)
    return None, *with_gradients(functions, q, k, v, *checked.rest)


def _call_of(
    qkv: _QKV, cu_seqlens: tuple[Tensor | None, Tensor | None], aux: AuxTensors, asked: Asked
) -> Call:
    """The call that these arguments lead to, checked and not run."""
    return _find(check_call(*qkv, _packing(*cu_seqlens, None, None), asked, aux))


def _find(checked: CheckedCall) -> Call:
    q, k, v, _, spec, packing = checked
    if isinstance(packing, Used):
        return used_call(q, k, v, packing, spec)
    return dense_call(q, k, v, spec) if packing is None else packed_call(q, k, v, packing, spec)


def _is_empty(checked: CheckedCall) -> bool:
    """Whether there is no sequence at all."""
    packing = checked.packing
    if packing is None:
        return checked.q.shape[0] == 0
    if isinstance(packing, Used):
        if packing.seqused_k.shape[0]:
            return False
    elif packing.cu_seqlens_q.shape[0] > 1:
        return False
    for name, x in (("q", checked.q), ("k", checked.k)):
        if x.shape[0]:
            raise InputError(f"cu_seqlens_{name} has no sequence, {name} has {x.shape[0]} rows")
    return True


def _empty_results(q: Tensor, k: Tensor, v: Tensor, aux: AuxTensors) -> tuple[Tensor, Tensor]:
    """Results without rows, with gradients without rows, or of 0."""
    out = q.sum(-1, keepdim=True).expand(*q.shape[:-1], v.shape[-1]) + 0 * (k.sum() + v.sum())
    if aux.learnable_sink is not None:
        out = out + 0 * aux.learnable_sink.sum()
    *batch, rows, heads, _ = q.shape
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out.to(q.dtype), q.new_empty((*batch, heads, rows), dtype=wide)

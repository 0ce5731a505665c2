"""The public functions: attention whose gradients are the same bytes every time, and what it supports.

The same inputs give the same bytes, forward and backward, run after run. The bytes of one sequence do
not depend on the batch it is in, dense or packed, but for dropout. They do depend on the numerics
(:func:`fingerprints`), on the backend, and on the CPU backend also on the PyTorch build and the kind of CPU.

``attention`` is this package's own function. ``flash_attn_func`` and ``flash_attn_varlen_func`` have the
names, layouts and keywords of FlashAttention. What they cannot honour is refused, never ignored.
"""

from __future__ import annotations

from torch import Tensor

from .arguments import Asked, aux_of
from .backends.base import Backend, backend_for
from .dispatch import run_dense
from .flash import flash_attn_func, flash_attn_varlen_func
from .kvcache import flash_attn_with_kvcache
from .planned import apply_plan
from .preview import Fingerprints, Support, fingerprints, is_supported, plan_for
from .schedule import Numerics, Schedule
from .values import Window

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
            in DeepSeek's MLA. "sm90" takes multiples of 8 of which the larger one is 40 to 256.
        causal: row i sees columns up to ``i + seqlen_k - seqlen_q`` (aligned bottom-right).
        window: (left, right) columns around that diagonal, -1 or None: unbounded. With ``causal`` the
            right side is 0, as in FlashAttention.
        softmax_scale: default ``head_dim ** -0.5``; "sm90" takes positive ones only.
        policy: "auto", the name of a policy, what ``str`` makes of one ("descending + lpt"), or one itself
            (:mod:`dash_attn.schedule`). It decides in which order gradients are summed: another policy may
            give other bytes, all of them equally accurate.
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
        learnable_sink: (heads,), dtype of q (of autocast, if that is on) or float32: one score more per q
            head, of a key without a value.
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
            default draws another number there. Give a seed where both must be the same. Where it may compute
            a forward again, as ``torch._functorch.config.activation_memory_budget`` below 1 lets it, its
            backward draws once more and drops other weights, as with PyTorch's own dropout: give a number.)
        row_starts, row_ends: (batch, seqlen_k) int32, on the tensors' device or on the CPU: key j is seen by
            rows i with ``row_starts[j] <= i < row_ends[j]`` only, of those that ``causal`` and ``window``
            leave. None: from the first row, to the last one. So masks of documents, prefixes and trees are
            given (see below). Any values; the host never reads them. From the CPU they are copied to a GPU at
            every call. "sm90" takes them at head dims up to 128, without softcap.

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
    asked = Asked(
        causal=causal, window=window, softmax_scale=softmax_scale, policy=policy, backend=backend,
        softcap=softcap, dropout_p=dropout_p, q_segment=q_segment,
    )  # fmt: skip
    aux = aux_of(
        q, learnable_sink=learnable_sink, alibi_slopes=alibi_slopes, dropout_p=dropout_p,
        dropout_seed=dropout_seed, row_starts=row_starts, row_ends=row_ends,
    )  # fmt: skip
    return run_dense(q, k, v, aux, asked, return_lse)

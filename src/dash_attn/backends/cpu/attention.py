"""The oracle: plain attention in float64, no tiles, straight from the formulas.

It defines what is correct; the executor and the kernels are measured against it. Memory grows with
seqlen_q * seqlen_k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...problem import Mask

__all__ = ["oracle_backward", "oracle_forward"]


def oracle_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attention output and log-sum-exp in float64.

    Args:
        q: (batch, seqlen_q, heads, head_dim), any float dtype.
        k, v: (batch, seqlen_k, kv_heads, head_dim); kv_heads divides heads.
        mask: a band mask, aligned bottom-right.
        softmax_scale: factor on Q K^T.

    Returns:
        out: (batch, seqlen_q, heads, head_dim) float64; zero in rows that see no column.
        lse: (batch, heads, seqlen_q) float64, natural logarithm; -inf in rows that see no column.

    NaN reaches every row of its head that a product touches, seen or not: 0 * NaN is NaN.
    """
    group = q.shape[2] // k.shape[2]
    p, lse = _probabilities(_by_head(q), _by_head(k, group), mask, softmax_scale)
    return (p @ _by_head(v, group)).transpose(1, 2), lse


def oracle_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Mask, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) in float64, in the shapes of q, k and v; zero in rows that see nothing.

    Arguments as in :func:`oracle_forward`; dout has the shape of q.

    >>> q = torch.ones(1, 2, 1, 1)
    >>> v = torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)
    >>> dq, dk, dv = oracle_backward(torch.ones_like(q), q, q, v, Mask.causal(), 1.0)
    >>> [[round(x, 9) for x in g.flatten().tolist()] for g in (dk, dv)]
    [[-0.5, 0.5], [1.5, 0.5]]
    """
    group = q.shape[2] // k.shape[2]
    qs, ks, vs, dos = _by_head(q), _by_head(k, group), _by_head(v, group), _by_head(dout)
    p, _ = _probabilities(qs, ks, mask, softmax_scale)
    dp = dos @ vs.mT
    delta = (dos * (p @ vs)).sum(-1, keepdim=True)
    ds = p * (dp - delta) * softmax_scale
    return (ds @ ks).transpose(1, 2), _sum_group(ds.mT @ qs, group), _sum_group(p.mT @ dos, group)


def _by_head(x: Tensor, group: int = 1) -> Tensor:
    """(batch, heads, seqlen, head_dim) float64, every kv head once for each q head of its group."""
    return x.to(torch.float64).transpose(1, 2).repeat_interleave(group, dim=1)


def _sum_group(x: Tensor, group: int) -> Tensor:
    """Back from q heads to kv heads, in the layout of k and v."""
    batch, heads, seqlen, head_dim = x.shape
    return x.reshape(batch, heads // group, group, seqlen, head_dim).sum(2).transpose(1, 2)


def _probabilities(q: Tensor, k: Tensor, mask: Mask, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """softmax(q k^T * scale) under the mask, and its log-sum-exp."""
    hidden = _hidden(q.shape[2], k.shape[2], mask)
    scores = (q @ k.mT * softmax_scale).masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    # A row that sees nothing has -inf - -inf = NaN everywhere, and every element of it is hidden.
    return torch.exp(scores - lse[..., None]).masked_fill(hidden, 0.0), lse


def _hidden(seqlen_q: int, seqlen_k: int, mask: Mask) -> Tensor:
    """(seqlen_q, seqlen_k) bool, True where the mask hides the element."""
    row = torch.arange(seqlen_q)[:, None] + (seqlen_k - seqlen_q)
    column = torch.arange(seqlen_k)[None, :]
    hidden = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool)
    if mask.left is not None:
        hidden |= column < row - mask.left
    if mask.right is not None:
        hidden |= column > row + mask.right
    return hidden

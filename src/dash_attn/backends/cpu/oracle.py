"""The oracle: plain attention straight from the formulas, in float64 on any device, without tiles.

It defines what is correct; the executor and the kernels are measured against it. Rows are taken in
slices, so that memory grows with the length and not with its square.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...problem import Mask
from ...scores import Scores, scores_of
from ..base import NO_AUX, AuxTensors
from .dropout import dropout_of
from .masks import hidden_elements, outside_intervals

__all__ = ["Inputs", "Results", "oracle_backward", "oracle_forward", "plain_attention", "sink_gradient"]

SLICE = 2**25
"""Elements of a slice of scores."""


class Inputs(NamedTuple):
    """One sequence: dout, q (seqlen_q, heads, head_dim), k, v (seqlen_k, kv_heads, head_dim).

    v and dout may have another head dim than q and k.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


class Results(NamedTuple):
    """Of one sequence, or of a batch: out as dout, lse (heads, seqlen_q), dq, dk and dv as q, k and v."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


@torch.no_grad()
def plain_attention(
    inputs: Inputs,
    mask: Mask,
    scores: Scores | float,
    dtype: torch.dtype = torch.float64,
    *,
    q_start: int | None = None,
    aux: AuxTensors = NO_AUX,
    sequence: int = 0,
) -> Results:
    """Attention and its gradients, one head after the other.

    Args:
        inputs: one sequence, any float dtype, any device.
        mask: a band mask.
        scores: what becomes of Q K^T; a number is the softmax scale alone.
        dtype: float64 for what is exact. A dtype of 16 bits for what must be expected of one: products in
            float32, with P, dS and the results rounded to it, as every kernel does.
        q_start: column aligned with row 0, by default ``seqlen_k - seqlen_q`` (bottom-right).
        aux: the tensors that scores take; slopes (heads,), rows that see each key (seqlen_k,).
        sequence: its number in the batch, which dropout knows.

    Returns:
        Tensors of float64; of float32 where ``dtype`` is narrower. Rows that see no column have out 0,
        lse -inf (a natural logarithm) or the sink, and dq 0. NaN reaches every row of its head that a product
        touches, seen or not: 0 * NaN is NaN.
    """
    dout, q, k, v = inputs
    scores = scores_of(scores)
    softmax_scale, softcap, rescale = scores.softmax_scale, scores.softcap, scores.dropout_rescale
    narrow = dtype.itemsize == 2
    wide = torch.float32 if narrow else dtype
    group = q.shape[1] // k.shape[1]
    out, dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (dout, q, k, v))
    lse = q.new_zeros((q.shape[1], len(q)), dtype=wide)
    positions = torch.arange(len(q), device=q.device) + (len(k) - len(q) if q_start is None else q_start)

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).to(wide) if narrow else x

    step = max(SLICE // max(len(k), 1), 1)
    for start in range(0, len(q), step):
        at = slice(start, start + step)
        hidden = hidden_elements(mask, positions[at], len(k))
        if aux.rows is not None:
            hidden |= outside_intervals(aux.rows, start, len(hidden))
        for head in range(q.shape[1]):
            kh, vh = (x[:, head // group].to(wide) for x in (k, v))
            qh, doh = (x[at, head].to(wide) for x in (q, dout))
            s, slope = (qh @ kh.mT).mul_(softmax_scale), None
            if softcap:
                capped = s.div_(softcap).tanh_()
                s, slope = capped * softcap, 1.0 - capped * capped
            if aux.alibi_slopes is not None:
                distance = (positions[at, None] - torch.arange(len(k), device=k.device)).abs()
                s.sub_(aux.alibi_slopes[head].to(wide) * distance)
            s.masked_fill_(hidden, -torch.inf)
            lse[head, at] = torch.logsumexp(s, -1)
            if aux.learnable_sink is not None:
                lse[head, at] = torch.logaddexp(lse[head, at], aux.learnable_sink[head].to(wide))
            # A row that sees nothing has -inf - -inf = NaN everywhere, and every element of it is hidden.
            p = s.sub_(lse[head, at, None]).exp_().masked_fill_(hidden, 0.0)
            weights, dp = p, doh @ vh.mT
            if dropout := dropout_of(scores, aux, sequence, head):
                kept = dropout.kept(start, 0, *p.shape).to(p.device)
                weights, dp = p * kept, dp.mul_(kept).mul_(rescale)  # not kept * rescale: that is float32
            out[at, head] = rounded((rounded(weights) @ vh).mul_(rescale))
            delta = (doh * out[at, head]).sum(-1, keepdim=True)
            ds = dp.sub_(delta).mul_(p)
            ds = rounded(ds if slope is None else ds.mul_(slope))
            dq[at, head] = rounded((ds @ kh).mul_(softmax_scale))
            dk[:, head // group] += (ds.mT @ qh).mul_(softmax_scale)
            dv[:, head // group] += (rounded(weights).mT @ doh).mul_(rescale)
    return Results(out, lse, dq, rounded(dk), rounded(dv))


def sink_gradient(dout: Tensor, found: Results, sink: Tensor) -> Tensor:
    """(heads,) float64: the gradient of the sink, of one sequence.

    Each row gives exp(sink - lse) of its weight to the sink, which has no value: so dP is 0 there, and
    dS = P (dP - delta) = -exp(sink - lse) delta.
    """
    delta = (dout.double() * found.out.double()).sum(2).T
    return -((sink.double()[:, None] - found.lse.double()).exp() * delta).sum(1)


def oracle_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a dense batch in float64. See :func:`plain_attention`.

    Args:
        q: (batch, seqlen_q, heads, head_dim), any float dtype.
        k, v: (batch, seqlen_k, kv_heads, head_dim); kv_heads divides heads; v may have another head dim.
        mask: a band mask, aligned bottom-right.
        softmax_scale: factor on Q K^T.

    Returns:
        out: (batch, seqlen_q, heads, head dim of v).
        lse: (batch, heads, seqlen_q).
    """
    dout = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    found = _dense(Inputs(dout, q, k, v), mask, softmax_scale)
    return found.out, found.lse


def oracle_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Mask, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) of a dense batch in float64, in the shapes of q, k and v.

    Arguments as in :func:`oracle_forward`; dout has the shape of out.

    >>> q = torch.ones(1, 2, 1, 1)
    >>> v = torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)
    >>> dq, dk, dv = oracle_backward(torch.ones_like(q), q, q, v, Mask.causal(), 1.0)
    >>> [[round(x, 9) for x in g.flatten().tolist()] for g in (dk, dv)]
    [[-0.5, 0.5], [1.5, 0.5]]
    """
    found = _dense(Inputs(dout, q, k, v), mask, softmax_scale)
    return found.dq, found.dk, found.dv


def _dense(batch: Inputs, mask: Mask, softmax_scale: float) -> Results:
    """Tensors of a dense batch, sequence by sequence."""
    parts = [plain_attention(Inputs(*one), mask, softmax_scale) for one in zip(*batch)]
    return Results(*(torch.stack(tensors) for tensors in zip(*parts)))

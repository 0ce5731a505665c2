"""What one sequence's results should be, in float64 on any device, and the error that must be allowed.

Rows are taken in slices, so that memory grows with the length and not with its square.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...problem import Mask
from .batch import Inputs, Results

__all__ = ["allowed_errors", "error_norms", "plain_attention"]

SLICE = 2**25
"""Elements of a slice of scores."""

FACTOR = 2.0
"""Errors may be so many times those of :func:`plain_attention` in the tensors' own dtype."""


def plain_attention(inputs: Inputs, mask: Mask, softmax_scale: float, dtype: torch.dtype) -> Results:
    """out, lse, dq, dk, dv straight from the formulas, without tiles.

    Args:
        inputs: one sequence.
        mask: a band mask, aligned bottom-right.
        softmax_scale: factor on Q K^T.
        dtype: float64 for what is exact. A dtype of 16 bits for what must be expected of one: products in
            float32, with P, dS and the results rounded to it, as every kernel does.

    Returns:
        In the shapes of the inputs, lse (heads, seqlen_q); float64 or float32.
    """
    dout, q, k, v = inputs
    narrow = dtype.itemsize == 2
    wide = torch.float32 if narrow else dtype
    group = q.shape[1] // k.shape[1]
    results = tuple(torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, q, k, v))
    out, dq, dk, dv = results
    lse = q.new_zeros((q.shape[1], len(q)), dtype=wide)

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).to(wide) if narrow else x

    step = max(SLICE // max(len(k), 1), 1)
    for head in range(q.shape[1]):
        kh, vh = (x[:, head // group].to(wide) for x in (k, v))
        for start in range(0, len(q), step):
            at = slice(start, start + step)
            qh, doh = (x[at, head].to(wide) for x in (q, dout))
            hidden = _hidden(start, len(qh), len(q), len(k), mask, q.device)
            scores = (qh @ kh.mT).mul_(softmax_scale).masked_fill_(hidden, -torch.inf)
            lse[head, at] = torch.logsumexp(scores, -1)
            p = scores.sub_(lse[head, at, None]).exp_().masked_fill_(hidden, 0.0)
            out[at, head] = rounded(rounded(p) @ vh)
            delta = (doh * out[at, head]).sum(-1, keepdim=True)
            ds = rounded((doh @ vh.mT).sub_(delta).mul_(p))
            dq[at, head] = rounded((ds @ kh).mul_(softmax_scale))
            dk[:, head // group] += (ds.mT @ qh).mul_(softmax_scale)
            dv[:, head // group] += rounded(p).mT @ doh
    return out, lse, dq, rounded(dk), rounded(dv)


def _hidden(start: int, rows: int, seqlen_q: int, seqlen_k: int, mask: Mask, device: torch.device) -> Tensor:
    """(rows, seqlen_k) bool from row ``start`` on, True where the mask hides the element."""
    row = torch.arange(start, start + rows, device=device)[:, None] + (seqlen_k - seqlen_q)
    column = torch.arange(seqlen_k, device=device)[None, :]
    hidden = torch.zeros(rows, seqlen_k, dtype=torch.bool, device=device)
    if mask.left is not None:
        hidden |= column < row - mask.left
    if mask.right is not None:
        hidden |= column > row + mask.right
    return hidden


def error_norms(found: Results, exact: Results) -> list[float]:
    """Norm of the error of every tensor, infinite where one is not finite and the other is."""
    norms = []
    for x, y in zip(found, exact):
        finite = y.isfinite()
        if not torch.equal(finite, x.isfinite()) or not torch.equal(x.double()[~finite], y.double()[~finite]):
            norms.append(float("inf"))
        else:
            norms.append(float((x.double() - y)[finite].norm()))
    return norms


def allowed_errors(inputs: Inputs, expected: Results, exact: Results) -> list[float]:
    """Largest norms of error that pass: twice those of plain attention, and the rounding of sums.

    Args:
        inputs: one sequence.
        expected: of plain attention in the tensors' own dtype.
        exact: of plain attention in float64.
    """
    double = inputs.q.dtype == torch.float64
    epsilon = torch.finfo(torch.float64 if double else torch.float32).eps
    size = float(inputs.dout.double().norm())
    norms = [float(x[x.isfinite()].norm()) + size for x in exact]
    return [FACTOR * e + 64 * epsilon * n for e, n in zip(error_norms(expected, exact), norms)]

"""How far results are from those of the oracle, and how far they may be."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...backends.cpu.oracle import Inputs, Results

__all__ = ["allowed_errors", "error_norms"]

FACTOR = 2.0
"""Errors may be so many times those of plain attention in the tensors' own dtype."""


def error_norms(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
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

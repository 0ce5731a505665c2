"""What a mask hides, element by element: the one place where tensors of hidden elements are made."""

from __future__ import annotations

import torch
from torch import Tensor

from ...problem import Mask
from ..base import RowIntervals

__all__ = ["hidden_elements", "outside_intervals"]


def hidden_elements(mask: Mask, positions: Tensor, columns: int) -> Tensor:
    """(rows, columns) bool, True where the mask hides the element, on the device of ``positions``.

    Args:
        mask: a band mask.
        positions: (rows,) integers: the column that is aligned with each row. It may lie outside of
            ``0 .. columns - 1``.
        columns: how many columns there are; the first one is column 0.

    >>> hidden_elements(Mask.causal(), torch.arange(2), 3).int().tolist()
    [[0, 1, 1], [0, 0, 1]]
    """
    column = torch.arange(columns, device=positions.device)
    hidden = torch.zeros(len(positions), columns, dtype=torch.bool, device=positions.device)
    first, last = mask.interval(positions[:, None])
    if first is not None:
        hidden |= column < first
    if last is not None:
        hidden |= column > last
    return hidden


def outside_intervals(rows: RowIntervals, first: int, count: int) -> Tensor:
    """(count, keys) bool, True where a row from ``first`` on is not in the interval of a key.

    >>> ends = torch.tensor([1, 3], dtype=torch.int32)
    >>> outside_intervals(RowIntervals(torch.zeros_like(ends), ends), 0, 4).int().T.tolist()
    [[0, 1, 1, 1], [0, 0, 0, 1]]
    """
    row = torch.arange(first, first + count, device=rows.starts.device)[:, None]
    return (row < rows.starts) | (row >= rows.ends)

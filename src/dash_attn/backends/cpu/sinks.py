"""The gradient of a sink, summed in an order that only the lengths of the sequences decide."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ...problem import Problem
from ...schedule.constants import SINK_ROWS
from ..base import AuxTensors, Tensors, accumulator
from .tiles import TileRows

__all__ = ["sink_gradient"]


def sink_gradient(problem: Problem, tensors: Tensors, aux: AuxTensors) -> Tensor | None:
    """(heads,): minus the sum over rows of exp(sink - lse) * delta; None without a sink.

    The rows of a sequence are cut into tiles of SINK_ROWS. Within a tile the second half is added to the
    first one, and so on. Tiles are added one after the other, and so are the sums of sequences.

    Args:
        tensors: packed, as in :func:`.executor.backward`.
    """
    sink = aux.learnable_sink
    if sink is None:
        return None
    wide = accumulator(tensors.q.dtype)
    total = torch.zeros(problem.heads, dtype=wide, device="cpu")
    starts = TileRows(problem).q_start
    for begin, end in pairwise(starts):
        rows = slice(begin, end)
        products = tensors.dout[rows].to(wide) * tensors.out[rows].to(wide)
        delta = products.contiguous().sum(2).T  # strides decide in which order PyTorch adds
        lse = tensors.lse[:, rows]
        parts = (sink.detach().to(wide)[:, None] - lse).exp_() * delta
        total.add_(_sum(parts.masked_fill_(lse == -torch.inf, 0.0)))  # no key, and a sink of -inf
    return total.neg_().to(sink.dtype)


def _sum(parts: Tensor) -> Tensor:
    """(heads, rows) to (heads,)."""
    heads, rows = parts.shape
    tiles = parts.new_zeros(heads, -(-rows // SINK_ROWS) * SINK_ROWS)
    tiles[:, :rows] = parts
    tiles = tiles.view(heads, -1, SINK_ROWS)
    while tiles.shape[2] > 1:
        half = tiles.shape[2] // 2
        tiles = tiles[..., :half] + tiles[..., half:]
    total = parts.new_zeros(heads)
    for tile in tiles.unbind(1):
        total.add_(tile[:, 0])
    return total

"""The gradient of a sink, summed in an order that only the lengths of the sequences decide."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ...problem import Problem
from ...schedule.constants import SINK_ROWS
from ..base import AuxTensors, Tensors
from ..sums import accumulator, new_sink_sums
from .tiles import TileRows

__all__ = ["finish_sink", "sink_gradient"]


def sink_gradient(
    problem: Problem, tensors: Tensors, aux: AuxTensors, sums: Tensor | None = None
) -> Tensor | None:
    """(heads,): minus the sum over rows of exp(sink - lse) * delta; None without a sink.

    The rows of a sequence are cut into tiles of SINK_ROWS. Within a tile the second half is added to the
    first one, and so on. Tiles are added one after the other, and so are the sums of sequences.

    Args:
        tensors: packed, as in :func:`.executor.backward`.
        sums: (sequences, heads), as :func:`.new_sink_sums` makes them: tiles are added to these. Then None is
            returned.
    """
    if aux.learnable_sink is None:
        return None
    sink = aux.learnable_sink.detach().to(accumulator(tensors.q.dtype))
    found = new_sink_sums(len(problem.sequences), sink) if sums is None else sums
    for total, (begin, end) in zip(found, pairwise(TileRows(problem).q_start)):
        rows = slice(begin, end)
        products = tensors.dout[rows].to(sink.dtype) * tensors.out[rows].to(sink.dtype)
        delta = products.contiguous().sum(2).T  # strides decide in which order PyTorch adds
        lse = tensors.lse[:, rows]
        # Of a large sink lse may be rounded to so much less that exp would overflow.
        parts = (sink[:, None] - lse).clamp_(max=1.0).exp_() * delta
        parts.masked_fill_(lse == -torch.inf, 0.0)  # no key, and a sink of -inf
        for tile in _tiles(parts):
            total.add_(tile)
    return finish_sink(found, aux.learnable_sink.dtype) if sums is None else None


def finish_sink(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """(heads,): minus the sums of all sequences, added one after the other."""
    total = sums.new_zeros(sums.shape[1])
    for of_sequence in sums:
        total.add_(of_sequence)
    return total.neg_().to(dtype)


def _tiles(parts: Tensor) -> tuple[Tensor, ...]:
    """(heads, rows) to (heads,) of each tile."""
    heads, rows = parts.shape
    tiles = parts.new_zeros(heads, -(-rows // SINK_ROWS) * SINK_ROWS)
    tiles[:, :rows] = parts
    tiles = tiles.view(heads, -1, SINK_ROWS)
    while tiles.shape[2] > 1:
        half = tiles.shape[2] // 2
        tiles = tiles[..., :half] + tiles[..., half:]
    return tiles[..., 0].unbind(1)

"""Head after head, which keeps few heads in L2 at a time; heads whose items would queue take turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ...machine import (
    BYTES_IN_TURNS,
    COLUMNS_IN_TURNS,
    FEW_IN_TURNS,
    HEADS_IN_TURNS,
    HOP_TASKS,
    QUEUE,
    WORKERS,
)
from ...problem import IntArray
from ..batch import Batch
from ..policy import Numerics
from .base import Placement, sorted_by
from .l2 import all_fit, l2_limit

__all__ = ["InOrder", "LastFirst", "downwards", "heads_in_turns", "queueing"]


@dataclass(frozen=True)
class InOrder(Placement):
    """Head after head, its kv tiles from the first to the last. Where items queue, heads take turns.

    >>> from dash_attn.problem import Mask, Problem
    >>> from dash_attn.schedule import Descending, build_plan
    >>> window = Problem.dense(heads=2, seqlen=384, head_dim=64, mask=Mask.window(200, 0))
    >>> build_plan(window, Descending()).items[:, 1:].tolist()                           # (head, kv tile)
    [[0, 0], [1, 0], [0, 1], [1, 1], [0, 2], [1, 2]]
    """

    name: ClassVar[str] = "in_order"

    def place(self, batch: Batch, numerics: Numerics) -> IntArray:
        codes, queues = np.arange(batch.item_count), queueing(batch)
        if not queues.any():
            return codes
        return sorted_by(codes, batch.per_item(_sections(batch, queues)), batch.columns.kv)


@dataclass(frozen=True)
class LastFirst(Placement):
    """Head after head, its kv tiles from the last to the first (FlashAttention-4 section 3.2.4).

    Where items queue, neighbouring heads take turns, kv tile by kv tile: few workers are then in one queue.
    Where all heads have few bytes (``BYTES_IN_TURNS``), so do neighbours with equally many kv tiles: then
    several long items end side by side.

    >>> from dash_attn.problem import Mask, Problem
    >>> from dash_attn.schedule import SPT, build_plan
    >>> chunk = Problem.dense(heads=2, seqlen_q=128, seqlen_k=640, head_dim=64, mask=Mask.causal())
    >>> build_plan(chunk, SPT()).items[:5, 1:].tolist()                                  # (head, kv tile)
    [[0, 4], [1, 4], [0, 3], [1, 3], [0, 2]]
    """

    name: ClassVar[str] = "last_first"

    def place(self, batch: Batch, numerics: Numerics) -> IntArray:
        return downwards(batch)


def queueing(batch: Batch) -> NDArray[np.bool_]:
    """Of each head group, whether its items queue: many begin at the same q tile.

    So they do where QUEUE kv tiles or more lie before the first row, and under a window, whose last kv tiles
    are all seen by the last rows.
    """
    lengths, tile_n = batch.problem.lengths, batch.problem.tile_n
    many = lengths[:, 1] - lengths[:, 0] >= (QUEUE * tile_n if batch.problem.mask.left is None else -np.inf)
    return np.repeat(many, batch.groups)


def heads_in_turns(batch: Batch, which: NDArray[np.bool_]) -> float:
    """How many of these head groups, which queue, keep all workers busy if they take turns."""
    problem = batch.problem
    steps = np.repeat(batch.q_tiles * problem.group // batch.head_groups, batch.groups)[which]
    least = HEADS_IN_TURNS
    if problem.mask.left is not None:
        least = max(FEW_IN_TURNS, COLUMNS_IN_TURNS // problem.head_dim)
    return max(least, WORKERS * HOP_TASKS / max(float(steps.mean()), 1.0))


def downwards(batch: Batch, may: NDArray[np.bool_] | None = None) -> IntArray:
    """Codes head after head, the kv tiles of each from the last to the first; some heads take turns.

    Those are neighbours that queue, and where all heads have few bytes those with equally many kv tiles.

    Args:
        batch: the sequences.
        may: of each head group, whether it may take turns; by default all may.
    """
    queues, codes = queueing(batch), np.arange(batch.item_count)
    fit = not queues.all() and all_fit(batch, min(BYTES_IN_TURNS, l2_limit(batch.problem)))
    turns = np.ones_like(queues) if fit else queues
    if may is not None:
        turns = turns & may
    if not turns.any():
        found: IntArray = codes + batch.columns.turned
        return found
    section = batch.per_item(_sections(batch, turns, queues if fit else None))
    return sorted_by(codes + batch.columns.turned, section, batch.columns.kv)


def _sections(batch: Batch, turns: NDArray[np.bool_], queues: NDArray[np.bool_] | None = None) -> IntArray:
    """Which head groups take turns: sections of equal size, each large enough to keep all workers busy.

    With ``queues`` all heads have few bytes. Sections then have at least ``WORKERS`` members where there are
    so many, and those that do not queue have equally many kv tiles: no long one is left alone at the end.
    """
    begins = ~turns
    begins[1:] |= ~turns[:-1]
    if queues is None:
        together = heads_in_turns(batch, turns)
    else:
        together = WORKERS
        begins[1:] |= (np.diff(batch.items_of_group) != 0) & ~(queues[1:] & queues[:-1])
    begins[:1] = True  # of a run of neighbours that take turns, or a head group that does not
    run = np.cumsum(begins) - 1
    first, size = np.flatnonzero(begins), np.bincount(run)
    parts = np.maximum(size // together, 1).astype(np.int64)
    within = (np.arange(len(turns)) - first[run]) * parts[run] // size[run]
    sections: IntArray = (np.cumsum(parts) - parts)[run] + within
    return sections

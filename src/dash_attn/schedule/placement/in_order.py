"""Head after head, which keeps few heads in L2 at a time; heads whose items would queue take turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ...machine import HEADS_TOGETHER, HOP_TASKS, QUEUE, WORKERS
from ...problem import IntArray
from ..batch import Batch
from ..policy import Numerics
from .base import Placement, sorted_by

__all__ = ["InOrder", "LastFirst", "downwards", "queueing"]


@dataclass(frozen=True)
class InOrder(Placement):
    """Head after head, its kv tiles from the first to the last."""

    name: ClassVar[str] = "in_order"

    def place(self, batch: Batch, numerics: Numerics) -> IntArray:
        return np.arange(batch.item_count)


@dataclass(frozen=True)
class LastFirst(Placement):
    """Head after head, its kv tiles from the last to the first (FlashAttention-4 section 3.2.4).

    Where queries stand behind many keys that all of them see, those items begin at the same q tile, and queue
    there. Neighbouring heads then take turns, kv tile by kv tile, so that few workers are in one queue.

    >>> from dash_attn.problem import Mask, Problem
    >>> from dash_attn.schedule import SPT, build_plan
    >>> chunk = Problem.dense(heads=2, seqlen_q=128, seqlen_k=640, head_dim=64, mask=Mask.causal())
    >>> build_plan(chunk, SPT()).items[:5, 1:].tolist()                                  # (head, kv tile)
    [[0, 4], [1, 4], [0, 3], [1, 3], [0, 2]]
    """

    name: ClassVar[str] = "last_first"

    def place(self, batch: Batch, numerics: Numerics) -> IntArray:
        return downwards(batch, queueing(batch))


def queueing(batch: Batch) -> NDArray[np.bool_]:
    """Of each head group, whether its items queue: QUEUE kv tiles or more lie before its first row."""
    lengths, tile_n = batch.problem.lengths, batch.problem.tile_n
    return np.repeat(lengths[:, 1] - lengths[:, 0] >= QUEUE * tile_n, batch.groups)


def downwards(batch: Batch, queues: NDArray[np.bool_]) -> IntArray:
    """Codes head after head, the kv tiles of each from the last to the first.

    Neighbours among the head groups that ``queues`` names take turns.
    """
    codes: IntArray = np.arange(batch.item_count) + batch.columns.turned
    if not queues.any():
        return codes
    section = batch.per_item(_sections(batch, queues))
    from_the_end = batch.columns.kv + batch.columns.turned
    return sorted_by(np.arange(batch.item_count), section, from_the_end)


def _sections(batch: Batch, queues: NDArray[np.bool_]) -> IntArray:
    """Which head groups take turns: sections of equal size, each large enough to keep all workers busy."""
    steps = np.repeat(batch.q_tiles * batch.problem.group // batch.head_groups, batch.groups)[queues]
    together = max(HEADS_TOGETHER, WORKERS * HOP_TASKS / max(float(steps.mean()), 1.0))
    begins = ~queues
    begins[1:] |= ~queues[:-1]
    begins[:1] = True  # of a run of neighbours that queue, or a head group that does not
    run = np.cumsum(begins) - 1
    first, size = np.flatnonzero(begins), np.bincount(run)
    parts = np.maximum(size // together, 1).astype(np.int64)
    within = (np.arange(len(queues)) - first[run]) * parts[run] // size[run]
    sections: IntArray = (np.cumsum(parts) - parts)[run] + within
    return sections

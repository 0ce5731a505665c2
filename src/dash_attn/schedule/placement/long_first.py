"""Long sequences first, and of those the longest items first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...errors import PlacementError
from ...machine import HEADS_TOGETHER
from ..batch import Batch, Items
from ..constants import LONG_FROM
from ..policy import Numerics
from .base import Placement, sorted_by

__all__ = ["LongFirst"]


@dataclass(frozen=True)
class LongFirst(Placement):
    """Sequences of ``long_from`` keys and more, then the others, whose items fill the gap at the end.

    Long sequences come in sections of ``HEADS_TOGETHER`` heads, and there the longest items first, as in
    FlashAttention-4 (section 3.3). The others come head after head, kv tiles from the last to the first.

    >>> from dash_attn.problem import Mask, Problem
    >>> from dash_attn.schedule import ByLength, build_plan
    >>> packed = Problem(((256, 256), (512, 512)), 1, 1, head_dim=64, mask=Mask.causal())
    >>> build_plan(packed, ByLength(long_from=512)).items[:, ::2].tolist()      # (sequence, kv tile)
    [[1, 0], [1, 1], [1, 2], [1, 3], [0, 1], [0, 0]]
    """

    name: ClassVar[str] = "long_first"
    long_from: int = LONG_FROM

    def place(self, batch: Batch, numerics: Numerics) -> Items:
        if self.long_from < 0:
            raise PlacementError(f"long_from must be >= 0, got {self.long_from}")
        long = np.array([pair[1] >= self.long_from for pair in batch.problem.sequences])
        is_long = {p: bool(x) for p, x in zip(batch.patterns, long)}
        # Sequences of one pattern are long together or not: the pattern's policy depends on it.
        items = batch.in_order(
            lambda p: np.arange(p.grid.kv_tiles)[:: 1 if is_long[p] else -1].astype(np.int64)
        )
        if not long.any():
            return items
        groups_are_long = long[batch.sequence_of_group]
        section = np.where(
            groups_are_long, (np.cumsum(groups_are_long) - 1) // HEADS_TOGETHER, len(groups_are_long)
        )
        tasks = batch.by_item(items, lambda p: p.task_counts)
        return sorted_by(items, section[batch.group_of_item(items)], np.where(long[items[:, 0]], -tasks, 0))

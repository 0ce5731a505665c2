"""The two halves of every head, for numerics that pair long kv tiles with short ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...errors import PlacementError
from ...problem import IntArray
from ..batch import Batch
from ..policy import Numerics, require_integers
from .base import Placement, sorted_by

__all__ = ["Pairs"]


@dataclass(frozen=True)
class Pairs(Placement):
    """The left half of the kv tiles of ``heads_at_once`` heads, then their right halves, kv tile by kv tile.

    Workers of a left half come free in the order in which the right half is listed (DASH section 3.4).
    """

    name: ClassVar[str] = "pairs"
    heads_at_once: int = 2

    def __post_init__(self) -> None:
        require_integers(self, self.name, "heads_at_once")
        if self.heads_at_once < 1:
            raise PlacementError(f"heads_at_once must be >= 1, got {self.heads_at_once}")

    def place(self, batch: Batch, numerics: Numerics) -> IntArray:
        half = batch.flat("half", lambda p: np.full(p.grid.kv_tiles, -(-p.grid.kv_tiles // 2)))
        kv = batch.columns.kv
        right = kv >= half
        section = batch.per_item(np.arange(len(batch.items_of_group)) // self.heads_at_once)
        codes = np.arange(batch.item_count)
        return sorted_by(codes, section, right.astype(np.int64), np.where(right, kv, 0))

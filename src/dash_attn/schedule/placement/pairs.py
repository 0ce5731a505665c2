"""The two halves of every head, for numerics that pair long kv tiles with short ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import ClassVar

import numpy as np

from ...machine import WORKERS
from ...problem import IntArray
from ..batch import Batch
from ..policy import Numerics, require_integers
from .base import Placement, sorted_by

__all__ = ["Pairs"]


@dataclass(frozen=True)
class Pairs(Placement):
    """The left half of the kv tiles of some heads, then their right halves, kv tile by kv tile.

    Workers of a left half come free in the order in which the right half is listed (DASH section 3.4).

    Args:
        heads_at_once: so many heads; by default as many as keep a GPU busy with their left halves, and those
            that would be left over come with the last ones.
    """

    name: ClassVar[str] = "pairs"
    heads_at_once: int | None = None

    def __post_init__(self) -> None:
        require_integers(self, 1, "heads_at_once")

    def place(self, batch: Batch, numerics: Numerics) -> IntArray:
        half = batch.flat("half", lambda p: np.full(p.grid.kv_tiles, -(-p.grid.kv_tiles // 2)))
        kv = batch.columns.kv
        right = kv >= half
        section = batch.per_item(self._sections(batch))
        codes = np.arange(batch.item_count)
        return sorted_by(codes, section, right.astype(np.int64), np.where(right, kv, 0))

    def _sections(self, batch: Batch) -> IntArray:
        """Of every head group."""
        heads = np.arange(len(batch.items_of_group))
        if self.heads_at_once is not None:
            return heads // min(self.heads_at_once, max(len(heads), 1))
        found: list[IntArray] = []
        first = 0
        for kv_tiles, run in _runs(batch):
            at_once = max(1, 2 * WORKERS // max(kv_tiles + kv_tiles % 2, 1))
            sections = max(1, run // at_once)
            found.append(first + np.minimum(np.arange(run) // at_once, sections - 1))
            first += sections
        return np.concatenate(found) if found else heads


def _runs(batch: Batch) -> Iterator[tuple[int, int]]:
    """kv tiles of neighbouring head groups that have equally many, and how many head groups these are."""
    for kv_tiles, run in groupby(zip(batch.kv_tiles.tolist(), batch.groups.tolist()), itemgetter(0)):
        yield kv_tiles, sum(groups for _, groups in run)

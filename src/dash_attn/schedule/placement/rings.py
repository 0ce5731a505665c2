"""Ring by ring: for numerics whose items go round together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...errors import PlacementError
from ...machine import WORKERS
from ...problem import IntArray
from ..batch import Batch, Items
from ..numerics.shift import Shift
from ..policy import Numerics
from .base import Placement, sorted_by, upwards

__all__ = ["Rings"]


@dataclass(frozen=True)
class Rings(Placement):
    """As many heads together as keep a GPU busy with their first rings, and of those ring after ring.

    The second ring of a head has nothing to add before its first one has been round.
    """

    name: ClassVar[str] = "rings"

    def place(self, batch: Batch, numerics: Numerics) -> Items:
        if not isinstance(numerics, Shift):
            raise PlacementError(f"the placement rings is for shift, got {numerics}")
        items = batch.in_order(upwards)
        ring = batch.by_item(items, lambda p: numerics.ring_of(p.grid))
        first = batch.per_sequence(lambda p: int((numerics.ring_of(p.grid) == 0).sum()))
        section = filling(first, np.diff(batch.group_first))
        return sorted_by(items, section[batch.group_of_item(items)], ring)


def filling(members: IntArray, heads: IntArray) -> IntArray:
    """Sections of neighbouring heads whose first rings come closest to ``WORKERS`` members.

    At least two heads per section, where there are so many.

    Args:
        members: kv tiles in the first ring of each sequence, shape (sequences,).
        heads: head groups of each sequence, shape (sequences,).

    Returns:
        The section of each head group of the batch.

    >>> filling(np.array([60, 200]), np.array([3, 3])).tolist()
    [0, 0, 1, 1, 2, 2]
    """
    sections: list[tuple[int, int]] = []  # (section, heads)
    section = count = busy = 0
    for size, left in zip(members.tolist(), heads.tolist()):
        while left:
            if count > 1 and busy + size / 2 > WORKERS:
                section, count, busy = section + 1, 0, 0
            room = max(2 - count, int((WORKERS - size / 2 - busy) // size) + 1) if size else left
            taken = min(room, left)
            sections.append((section, taken))
            count, busy, left = count + taken, busy + taken * size, left - taken
    numbers, sizes = np.array(sections, dtype=np.int64).reshape(-1, 2).T
    return np.repeat(numbers, sizes)

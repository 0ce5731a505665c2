"""Ring by ring: for numerics whose items go round together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...errors import PlacementError
from ...machine import WORKERS
from ...problem import IntArray
from ..batch import Batch
from ..numerics.shift import Shift
from ..policy import Numerics
from .base import Placement, sorted_by
from .l2 import all_fit, l2_limit

__all__ = ["Rings"]


@dataclass(frozen=True)
class Rings(Placement):
    """As many heads together as keep a GPU busy with their first rings, and of those ring after ring.

    The second ring of a head follows the first one without waiting, once that has been round. Where all heads
    fit L2 (:func:`.l2.l2_limit`), they come together: workers then have no rest between sections.
    """

    name: ClassVar[str] = "rings"

    def place(self, batch: Batch, numerics: Numerics) -> IntArray:
        if not isinstance(numerics, Shift):
            raise PlacementError(f"the placement rings is for shift, got {numerics}")
        ring = batch.flat(("ring", numerics), lambda p: numerics.ring_of(p.grid))
        if all_fit(batch, l2_limit(batch.problem)):
            return sorted_by(np.arange(batch.item_count), ring)
        first = batch.per_sequence(lambda p: int((numerics.ring_of(p.grid) == 0).sum()))
        section = filling(first, batch.groups)
        return sorted_by(np.arange(batch.item_count), batch.per_item(section), ring)


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
    numbers: list[int] = []
    sizes: list[int] = []
    section = count = busy = 0
    for size, left in zip(members.tolist(), heads.tolist()):
        while left:
            if count > 1 and busy + size / 2 > WORKERS:
                section, count, busy = section + 1, 0, 0
            room = max(2 - count, int((WORKERS - size / 2 - busy) // size) + 1) if size else left
            taken = min(room, left)
            numbers.append(section)
            sizes.append(taken)
            count, busy, left = count + taken, busy + taken * size, left - taken
    return np.repeat(np.array(numbers, dtype=np.int64), np.array(sizes, dtype=np.int64))

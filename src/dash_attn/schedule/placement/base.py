"""What a placement is: the order in which workers claim items. It decides no bit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...problem import IntArray
from ..batch import Batch, Items
from ..plan import HeadPattern
from ..policy import Numerics, printed

__all__ = ["Placement", "downwards", "sorted_by", "upwards"]


@dataclass(frozen=True)
class Placement(ABC):
    """Base of all placements. A frozen dataclass; its fields are its parameters."""

    name: ClassVar[str]

    def __str__(self) -> str:
        return printed(self, self.name)

    @abstractmethod
    def place(self, batch: Batch, numerics: Numerics) -> Items:
        """All items of the batch, once each, in the order in which workers claim them.

        Raises:
            PlacementError: it cannot arrange items of these numerics.
        """


def upwards(pattern: HeadPattern) -> IntArray:
    """kv tiles from the first to the last."""
    return np.arange(pattern.grid.kv_tiles, dtype=np.int64)


def downwards(pattern: HeadPattern) -> IntArray:
    """kv tiles from the last to the first."""
    return np.arange(pattern.grid.kv_tiles, dtype=np.int64)[::-1]


def sorted_by(items: Items, *keys: IntArray) -> Items:
    """Items by the keys, the first one first; items of equal keys keep their order."""
    size = len(items)
    if not size:
        return items
    code, room = np.arange(size, dtype=np.int64), size
    for key in reversed(keys):
        low = int(key.min())
        span = int(key.max()) - low + 1
        if room > 2**62 // span:
            return items[np.lexsort((np.arange(size), *reversed(keys)))]
        code += (key - low) * room
        room *= span
    # One sort of distinct numbers is several times as fast as a stable sort of several keys.
    code.sort()
    return items[code % size]

"""What a placement is: the order in which workers claim items. It decides no bit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...problem import IntArray
from ..batch import Batch
from ..policy import Numerics, printed

__all__ = ["Placement", "sorted_by"]


@dataclass(frozen=True)
class Placement(ABC):
    """Base of all placements. A frozen dataclass; its fields are its parameters.

    Attributes:
        name: in names of schedules.
    """

    name: ClassVar[str]

    def __str__(self) -> str:
        return printed(self, self.name)

    @abstractmethod
    def place(self, batch: Batch, numerics: Numerics) -> IntArray:
        """Codes of all items of the batch, once each, in the order in which workers claim them.

        Raises:
            PlacementError: it cannot arrange items of these numerics.
        """


def sorted_by(codes: IntArray, *keys: IntArray) -> IntArray:
    """Codes by the keys, which stand in the order of the codes, the first key first; ties keep their order.

    >>> sorted_by(np.array([7, 8, 9]), np.array([1, 0, 1]), np.array([5, 5, 4])).tolist()
    [8, 9, 7]
    """
    size = len(codes)
    if not size:
        return codes
    rank, room = np.arange(size, dtype=np.int64), 1 << size.bit_length()
    place = room - 1
    for key in reversed(keys):
        low = int(key.min())
        span = int(key.max()) - low + 1
        if room > 2**62 // span:
            return codes[np.lexsort((np.arange(size), *reversed(keys)))]
        rank += (key - low) * room
        room *= span
    # One sort of distinct numbers is several times as fast as a stable sort of several keys.
    rank.sort()
    found: IntArray = codes[rank & place]
    return found

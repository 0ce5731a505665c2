"""Two orders under a causal mask: one for short sequences, one for long ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...errors import UnsupportedMaskError
from ..constants import LONG_FROM
from ..policy import Numerics, Policy, require_integers
from .descending import Descending
from .spt import SPT

__all__ = ["ByLength"]

_LONG, _SHORT = Descending(), SPT()


@dataclass(frozen=True)
class ByLength(Numerics):
    """:class:`SPT` for sequences of fewer than ``long_from`` keys, :class:`Descending` for the others.

    SPT claims the longest items of a head last, and whoever has them at the end makes all others wait. So
    long sequences are summed in the order that lets their longest items come first.
    Every sequence is decided for itself: its bits do not depend on its neighbours. Any mask.

    Args:
        long_from: keys of the shortest long sequence.

    >>> str(ByLength(long_from=512).for_lengths(300, 511)), str(ByLength(long_from=512).for_lengths(300, 512))
    ('spt', 'descending')
    """

    name: ClassVar[str] = "by_length"
    long_from: int = LONG_FROM

    def __post_init__(self) -> None:
        require_integers(self, self.name, "long_from")
        if self.long_from < 0:
            raise UnsupportedMaskError(f"long_from must be >= 0, got {self.long_from}")

    def for_lengths(self, seqlen_q: int, seqlen_k: int) -> Policy:
        return _LONG if seqlen_k >= self.long_from else _SHORT

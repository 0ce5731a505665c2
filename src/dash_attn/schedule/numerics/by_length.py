"""Orders under a causal mask by length: short sequences, long ones, and squares that fill a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..constants import LONG_FROM, SHIFT_KEYS, SHIFT_TO
from ..policy import Numerics, Policy, require_integers
from .descending import Descending
from .spt import SPT
from .symmetric_shift import SymmetricShift

__all__ = ["ByLength"]

_LONG, _SHORT, _SQUARE = Descending(), SPT(), SymmetricShift()


@dataclass(frozen=True)
class ByLength(Numerics):
    """:class:`SPT` for sequences of fewer than ``long_from`` keys, :class:`Descending` for the others.

    SPT claims the longest items of a head last, and whoever has them at the end makes all others wait. So
    long sequences are summed in the order that lets their longest items come first.
    Every sequence is decided for itself: its bits do not depend on its neighbours. Any mask.

    With ``shift_from``, :class:`SymmetricShift` sums squares (seqlen_q == seqlen_k) of ``shift_from`` to
    16,384 keys whose number, rounded up to 128, is a power of two. Their heads come in numbers that fill a
    GPU, wait less for each other, and few at a time are in L2. Causal mask, kv tiles of 128 keys.

    Args:
        long_from: keys of the shortest long sequence.
        shift_from: keys of the shortest square that is summed by symmetric shift; None: none is.

    >>> str(ByLength(long_from=512).for_lengths(300, 511)), str(ByLength(long_from=512).for_lengths(300, 512))
    ('spt', 'descending')
    >>> [str(ByLength(shift_from=2048).for_lengths(n, n)) for n in (2047, 2048, 2049, 16384, 32768)]
    ['symmetric_shift', 'symmetric_shift', 'descending', 'symmetric_shift', 'descending']
    """

    name: ClassVar[str] = "by_length"
    long_from: int = LONG_FROM
    shift_from: int | None = None

    def __post_init__(self) -> None:
        require_integers(self, 0, "long_from", "shift_from")

    def for_lengths(self, seqlen_q: int, seqlen_k: int) -> Policy:
        if self.shifts(seqlen_q, seqlen_k):
            return _SQUARE
        return _LONG if seqlen_k >= self.long_from else _SHORT

    def shifts(self, seqlen_q: Any, seqlen_k: Any) -> Any:
        """Whether symmetric shift sums a sequence of these lengths; of arrays, for each."""
        tiles = -(-seqlen_k // SHIFT_KEYS)
        size = tiles * SHIFT_KEYS
        shortest = SHIFT_TO + 1 if self.shift_from is None else self.shift_from
        return (seqlen_q == seqlen_k) & (tiles & (tiles - 1) == 0) & (size >= shortest) & (size <= SHIFT_TO)

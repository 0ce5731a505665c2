"""Placements: orders in which workers claim items. They decide speed and never a bit."""

from __future__ import annotations

from ..numerics import SPT, ByLength, Shift, SymmetricShift
from ..policy import Numerics
from .base import Placement
from .in_order import InOrder, LastFirst
from .long_first import LongFirst
from .lpt import Longest, lpt_placement
from .pairs import Pairs
from .rings import Rings

__all__ = [
    "PLACEMENTS",
    "InOrder",
    "LastFirst",
    "LongFirst",
    "Longest",
    "Pairs",
    "Placement",
    "Rings",
    "default_placement",
    "lpt_placement",
]

PLACEMENTS: dict[str, type[Placement]] = {
    kind.name: kind for kind in (InOrder, LastFirst, Rings, Pairs, LongFirst, Longest)
}


def default_placement(numerics: Numerics) -> Placement:
    """The order of items that suits the numerics; head after head for policies of others."""
    if isinstance(numerics, ByLength):
        return LongFirst(numerics.long_from)
    known: dict[type[Numerics], Placement] = {SPT: LastFirst(), Shift: Rings(), SymmetricShift: Pairs(2)}
    return known.get(type(numerics), InOrder())

"""What the roles of a block share of an item."""

from dataclasses import dataclass
from typing import Any

from ..device.ring import Ring


@dataclass(frozen=True)
class Rings:
    """q: tiles of Q with their item, until these have been used; k, v: tiles of K and V; item: the first of
    the mbarriers, one per stage of Q, at which an item's words are there."""

    q: Ring
    k: Ring
    v: Ring
    item: Any

"""What the roles of a block share of an item."""

from ..forward.item import TURN_BARRIER

ITEM_BARRIER = TURN_BARRIER
"""The first of the barriers, one per stage of Q, at which an item's words are there; there are no turns."""

Q_WARPS = 3
"""Warps that copy rows of Q."""

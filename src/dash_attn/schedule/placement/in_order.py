"""Head after head, which keeps few heads in L2 at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..batch import Batch, Items
from ..policy import Numerics
from .base import Placement, downwards, upwards

__all__ = ["InOrder", "LastFirst"]


@dataclass(frozen=True)
class InOrder(Placement):
    """Head after head, its kv tiles from the first to the last."""

    name: ClassVar[str] = "in_order"

    def place(self, batch: Batch, numerics: Numerics) -> Items:
        return batch.in_order(upwards)


@dataclass(frozen=True)
class LastFirst(Placement):
    """Head after head, its kv tiles from the last to the first (FlashAttention-4 section 3.2.4)."""

    name: ClassVar[str] = "last_first"

    def place(self, batch: Batch, numerics: Numerics) -> Items:
        return batch.in_order(downwards)

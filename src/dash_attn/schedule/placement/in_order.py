"""Head after head, which keeps few heads in L2 at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...problem import IntArray
from ..batch import Batch
from ..policy import Numerics
from .base import Placement

__all__ = ["InOrder", "LastFirst", "downwards"]


@dataclass(frozen=True)
class InOrder(Placement):
    """Head after head, its kv tiles from the first to the last."""

    name: ClassVar[str] = "in_order"

    def place(self, batch: Batch, numerics: Numerics) -> IntArray:
        return np.arange(batch.item_count)


@dataclass(frozen=True)
class LastFirst(Placement):
    """Head after head, its kv tiles from the last to the first (FlashAttention-4 section 3.2.4)."""

    name: ClassVar[str] = "last_first"

    def place(self, batch: Batch, numerics: Numerics) -> IntArray:
        return downwards(batch)


def downwards(batch: Batch) -> IntArray:
    """Codes head after head, the kv tiles of each from the last to the first."""
    codes: IntArray = np.arange(batch.item_count) + batch.columns.turned
    return codes

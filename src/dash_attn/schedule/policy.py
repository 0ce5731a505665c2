"""What a policy is: it chooses visits, summation orders and a default placement, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedMaskError
from ..problem import SequenceGrid
from .tickets import SummationGroup, Visit

__all__ = ["Head", "Policy", "head_items"]


class Head(NamedTuple):
    """One (sequence, head group) of a batch, the unit a placement arranges."""

    sequence: int
    head_group: int
    grid: SequenceGrid


def head_items(head: Head, kv_tiles: NDArray[np.int64]) -> NDArray[np.int32]:
    """Items of one head group in the given order of kv tiles, (n, 3) int32 as in ``Plan.items``."""
    items = np.empty((len(kv_tiles), 3), dtype=np.int32)
    items[:, 0], items[:, 1], items[:, 2] = head.sequence, head.head_group, kv_tiles
    return items


@dataclass(frozen=True)
class Policy(ABC):
    """Base of all policies. A policy is a frozen dataclass; its fields are its parameters."""

    name: ClassVar[str]

    def __str__(self) -> str:
        given = [f"{f.name}={v}" for f in fields(self) if (v := getattr(self, f.name)) is not None]
        return f"{self.name}({', '.join(given)})" if given else self.name

    def _require_integers(self, *names: str) -> None:
        """Raise UnsupportedMaskError unless these parameters are integers or None."""
        for name in names:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise UnsupportedMaskError(f"{self.name}: {name} must be an integer, got {value!r}")

    def check(self, grid: SequenceGrid) -> None:  # noqa: B027 - most policies cover every grid
        """Raise UnsupportedMaskError if the policy does not cover this grid."""

    @abstractmethod
    def visits(self, grid: SequenceGrid) -> list[list[Visit]]:
        """For each kv tile, the q tiles its item visits, in order."""

    @abstractmethod
    def summation(self, grid: SequenceGrid) -> Sequence[SummationGroup]:
        """The summation order of every q tile."""

    def kv_order(self, grid: SequenceGrid) -> NDArray[np.int64]:
        """Order in which the items of one head are claimed, shape (kv_tiles,)."""
        return np.arange(grid.kv_tiles, dtype=np.int64)

    def place(self, heads: Sequence[Head]) -> NDArray[np.int32]:
        """Order in which all items are claimed: head after head unless a policy needs otherwise."""
        orders = {head.grid: self.kv_order(head.grid) for head in heads}
        return np.concatenate([head_items(head, orders[head.grid]) for head in heads])


def sweep(grid: SequenceGrid, *, descending: bool = False) -> list[list[Visit]]:
    """Visits of items that go through their q tiles in one direction."""
    visits: list[list[Visit]] = []
    for first, last in zip(grid.q_first.tolist(), grid.q_last.tolist(), strict=True):
        if last < first:
            visits.append([])
        else:
            visits.append([(last, -1, last - first + 1) if descending else (first, 1, last - first + 1)])
    return visits

"""Shift: the cyclic schedule for masks that leave every task (DASH section 3.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...errors import InputError, UnsupportedMaskError
from ...problem import IntArray, TileGrid
from ..policy import Policy, require_integers
from ..tickets import SummationGroup, Visit

__all__ = ["Shift"]


@dataclass(frozen=True)
class Shift(Policy):
    """The items of a ring start at different q tiles and go round, so that no two ever meet.

    A ring is ``ring`` neighbouring kv tiles; the last ring may be smaller. Member ``k`` starts ``k * stride``
    q tiles after the first member and visits all q tiles upwards, going round once; a q tile is summed in
    the order in which the members reach it, ring after ring. Members of one ring must be resident
    together (``min_workers`` is the ring size), and ``stride`` q tiles lie between two contributions
    to the same dQ tile: that is the slack that hides a hand-over.

    The first member of a head's first ring starts at q tile 0. A later ring starts where one more member of
    the ring before it would, near the first q tile that all of them have left: so it can follow closely, and
    few heads keep many workers busy.

    Args:
        ring: kv tiles of a ring at most, by default all of a head: the paper's schedule. A ring never
            has more members than the sequence has q tiles.
        stride: q tiles between the starts of two members, default: as many as fit.
        min_stride: rings have so few members that the default stride is at least this, where the sequence
            has so many q tiles.
        max_stride: the default stride is at most this. A head in progress occupies L2 with the q tiles
            between the first and the last member of its ring.

    Source: DASH section 3.4 and figure 6. Full mask only.

    >>> from dash_attn.problem import Problem
    >>> from dash_attn.schedule import build_plan
    >>> pattern = build_plan(Problem.dense(seqlen=512, head_dim=64), Shift()).pattern(0)
    >>> pattern.runs_of(1)
    [Run(q_first=1, q_step=1, count=3, t_first=0, t_step=1, t_hold=1), \
Run(q_first=0, q_step=1, count=1, t_first=3, t_step=0, t_hold=1)]
    >>> pattern.summation_orders()
    [[0, 3, 2, 1], [1, 0, 3, 2], [2, 1, 0, 3], [3, 2, 1, 0]]
    """

    name: ClassVar[str] = "shift"
    ring: int | None = None
    stride: int | None = None
    min_stride: int | None = None
    max_stride: int | None = None

    def __post_init__(self) -> None:
        require_integers(self, 1, "ring", "stride", "min_stride", "max_stride")
        if self.stride is not None and (self.min_stride, self.max_stride) != (None, None):
            raise InputError(
                f"shift: stride {self.stride} leaves nothing for min_stride {self.min_stride} and max_stride "
                f"{self.max_stride} to decide"
            )
        if self.min_stride is not None and self.max_stride is not None and self.min_stride > self.max_stride:
            raise InputError(
                f"shift: min_stride must be <= max_stride, got {self.min_stride} and {self.max_stride}"
            )

    def check(self, grid: TileGrid) -> None:
        if not grid.is_full:
            raise UnsupportedMaskError(
                f"shift needs a mask that leaves every task, this one leaves {grid.tasks} of "
                f"{grid.q_tiles * grid.kv_tiles}"
            )
        needed = self._ring(grid) * (1 if self.stride is None else self.stride)
        if needed > grid.q_tiles:
            raise UnsupportedMaskError(
                f"a ring of {self._ring(grid)} with stride {self.stride} needs {needed} q tiles, "
                f"the sequence has {grid.q_tiles}"
            )

    def _ring(self, grid: TileGrid) -> int:
        limit = min(grid.kv_tiles, grid.q_tiles)
        if self.min_stride is not None:
            limit = min(limit, max(1, grid.q_tiles // self.min_stride))
        return limit if self.ring is None else min(self.ring, limit)

    def _stride(self, grid: TileGrid, members: int) -> int:
        if self.stride is not None:
            return self.stride
        most = grid.q_tiles // members
        return most if self.max_stride is None else min(most, self.max_stride)

    def _rings(self, grid: TileGrid) -> list[tuple[int, int, IntArray]]:
        """Of every ring: its first kv tile, where that starts, and how far behind it each member starts."""
        if not grid.tasks:
            return []
        rings, start = [], 0
        size = self._ring(grid)
        for first in range(0, grid.kv_tiles, size):
            members = np.arange(min(size, grid.kv_tiles - first), dtype=np.int64)
            stride = self._stride(grid, len(members))
            rings.append((first, start, members * stride))
            start = (start + size * stride) % grid.q_tiles
        return rings

    def visits(self, grid: TileGrid) -> list[list[Visit]]:
        n = grid.q_tiles
        starts = [q for _, start, ring in self._rings(grid) for q in ((start + ring) % n).tolist()]
        visits: list[list[Visit]] = [[(q, 1, n - q), (0, 1, q)] if q else [(0, 1, n)] for q in starts]
        return visits or [[] for _ in range(grid.kv_tiles)]

    def ring_of(self, grid: TileGrid) -> IntArray:
        """The ring that each kv tile belongs to, shape (kv_tiles,)."""
        kv = np.arange(grid.kv_tiles, dtype=np.int64)
        return kv // self._ring(grid) if grid.tasks else np.zeros_like(kv)

    def summation(self, grid: TileGrid) -> Sequence[SummationGroup]:
        q = np.arange(grid.q_tiles, dtype=np.int64)
        groups = []
        for first, start, ring in self._rings(grid):
            # The member that started at or just before q reaches it first, then those behind it.
            lead = first + np.searchsorted(ring, (q - start) % grid.q_tiles, side="right") - 1
            groups.append(SummationGroup(first, first + len(ring) - 1, step=-1, lead=lead))
        return groups

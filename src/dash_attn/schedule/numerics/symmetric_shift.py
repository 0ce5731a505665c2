"""Symmetric shift: pairs of kv tiles and a folded square for causal masks (DASH section 3.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...errors import UnsupportedMaskError
from ...problem import TileGrid
from ..policy import Policy
from ..tickets import SummationGroup, Visit

__all__ = ["SymmetricShift"]


@dataclass(frozen=True)
class SymmetricShift(Policy):
    """Long kv tiles are paired with short ones; both phases go round without a conflict.

    With n kv tiles and h = ceil(n / 2), worker w runs kv tile w and then kv tile 2h - 1 - w where
    there is one, n + 1 tasks in all for even n and n for odd n. In steps of one task:

    * phase 1, steps 0..h-1: the square of kv tiles below h and the last h rows, by cyclic shift;
    * phase 2: the left triangle downwards from the diagonal, then the right triangle upwards from
      the last row. At every step the workers stand on different rows: no contribution waits.

    A row is ``tile_n / tile_m`` q tiles. Within a head, the items of phase 1 form a ring, so h workers
    must be resident (the placement ``pairs`` keeps that number small).

    Causal mask with seqlen_q == seqlen_k and tile_n a multiple of tile_m. Source: DASH section 3.4
    and figure 7, which are for even n; for odd n the paper is silent and the pairing is ours.

    >>> from dash_attn.problem import Mask, Problem
    >>> from dash_attn.schedule import build_plan
    >>> plan = build_plan(Problem.dense(seqlen=512, head_dim=64, mask=Mask.causal()), SymmetricShift())
    >>> for kv in (1, 2): print(*plan.pattern(0).tasks_of(kv))
    [3 2 1] [0 1 0]
    [3 2] [2 2]
    >>> plan.pattern(0).summation_orders()
    [[0], [1, 0], [0, 1, 2], [1, 0, 2, 3]]
    """

    name: ClassVar[str] = "symmetric_shift"

    def check(self, grid: TileGrid) -> None:
        if grid.tile_n % grid.tile_m:
            raise UnsupportedMaskError(
                "symmetric_shift needs tile_n to be a multiple of tile_m, "
                f"got {grid.tile_n} and {grid.tile_m}"
            )
        row = np.arange(grid.q_tiles) // (grid.tile_n // grid.tile_m)
        square = int(row.max(initial=-1)) + 1 == grid.kv_tiles
        if not square or grid.kv_first.any() or not np.array_equal(grid.kv_last, row):
            raise UnsupportedMaskError("symmetric_shift needs a causal mask and seqlen_q == seqlen_k")

    def visits(self, grid: TileGrid) -> list[list[Visit]]:
        n, rows = grid.kv_tiles, _RowVisits(grid)
        half = -(-n // 2)
        top = n - half
        visits: list[list[Visit]] = []
        for w in range(half):
            visits.append(rows.up(top + w, n) + rows.up(top, top + w) + rows.up(w, top))
        for kv in range(half, n):
            visits.append(rows.down(n, kv))
        return visits

    def summation(self, grid: TileGrid) -> Sequence[SummationGroup]:
        n = grid.kv_tiles
        half = -(-n // 2)
        row = np.arange(grid.q_tiles, dtype=np.int64) // (grid.tile_n // grid.tile_m)
        lead = np.where(row < n - half, row, row - (n - half))
        groups = [SummationGroup(0, half - 1, step=-1, lead=lead)]
        if half < n:
            groups.append(SummationGroup(half, n - 1, step=1))
        return groups if n else []


class _RowVisits:
    """Visits of whole rows; a row is the q tiles beside one kv tile, and the last row may be short."""

    def __init__(self, grid: TileGrid) -> None:
        self.height, self.q_tiles = grid.tile_n // grid.tile_m, grid.q_tiles

    def up(self, first: int, end: int) -> list[Visit]:
        """Rows first, ..., end - 1."""
        q = first * self.height
        count = min(end * self.height, self.q_tiles) - q
        return [(q, 1, count)] if count > 0 else []

    def down(self, end: int, first: int) -> list[Visit]:
        """Rows end - 1, ..., first."""
        return [(q + count - 1, -1, count) for q, _, count in self.up(first, end)]

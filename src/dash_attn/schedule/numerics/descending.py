"""Descending q-tile iteration (DASH section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...problem import TileGrid
from ..policy import Policy, sweep
from ..tickets import SummationGroup, Visit

__all__ = ["Descending"]


@dataclass(frozen=True)
class Descending(Policy):
    """Items visit q tiles downwards; every dQ tile is summed from the first kv tile to the last.

    Under a causal mask all items of a head start at the last q tile, so the short ones end early and
    their workers begin the next head at its long end. Any mask. Source: DASH section 3.3, figure 4.

    >>> from dash_attn.problem import Mask, Problem
    >>> from dash_attn.schedule import build_plan
    >>> causal = Problem.dense(seqlen=512, head_dim=64, mask=Mask.causal())
    >>> build_plan(causal, Descending()).pattern(0).runs_of(1)
    [Run(q_first=3, q_step=-1, count=3, t_first=1, t_step=0, t_hold=1)]
    """

    name: ClassVar[str] = "descending"

    def visits(self, grid: TileGrid) -> list[list[Visit]]:
        return sweep(grid, descending=True)

    def summation(self, grid: TileGrid) -> Sequence[SummationGroup]:
        return (SummationGroup(0, grid.kv_tiles - 1, step=1),)

"""FlashAttention-3's deterministic order: everything ascending (DASH section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...problem import TileGrid
from ..policy import Policy, sweep
from ..tickets import SummationGroup, Visit

__all__ = ["FA3"]


@dataclass(frozen=True)
class FA3(Policy):
    """Items visit q tiles upwards; every dQ tile is summed from the first kv tile to the last.

    Any mask. Source: DASH section 3.2 and figure 3; FlashAttention-3 appendix B.1.

    >>> from dash_attn.problem import Mask, Problem
    >>> from dash_attn.schedule import build_plan
    >>> causal = Problem.dense(seqlen=512, head_dim=64, mask=Mask.causal())
    >>> build_plan(causal, FA3()).pattern(0).runs_of(1)          # q tiles 1, 2, 3, always second
    [Run(q_first=1, q_step=1, count=3, t_first=1, t_step=0, t_hold=1)]
    """

    name: ClassVar[str] = "fa3"

    def visits(self, grid: TileGrid) -> list[list[Visit]]:
        return sweep(grid)

    def summation(self, grid: TileGrid) -> Sequence[SummationGroup]:
        return (SummationGroup(0, grid.kv_tiles - 1, step=1),)

"""FlashAttention-4's shortest-processing-time-first order (FA4 section 3.2.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...problem import TileGrid
from ..policy import Policy, sweep
from ..tickets import SummationGroup, Visit

__all__ = ["SPT"]


@dataclass(frozen=True)
class SPT(Policy):
    """Items visit q tiles upwards from the diagonal, and every dQ tile is summed from its last kv tile to
    its first. Claimed from the last kv tile on, no item waits at its start under a causal mask.

    Any mask. Source: FlashAttention-4 section 3.2.4 (which says "query block index" where only the kv
    index can order the contributions to one dQ tile).

    >>> from dash_attn.problem import Mask, Problem
    >>> from dash_attn.schedule import build_plan
    >>> plan = build_plan(Problem.dense(seqlen=512, head_dim=64, mask=Mask.causal()), SPT())
    >>> plan.pattern(0).runs_of(1), plan.items[:, 2].tolist()
    ([Run(q_first=1, q_step=1, count=3, t_first=0, t_step=1, t_hold=1)], [3, 2, 1, 0])
    """

    name: ClassVar[str] = "spt"

    def visits(self, grid: TileGrid) -> list[list[Visit]]:
        return sweep(grid)

    def summation(self, grid: TileGrid) -> Sequence[SummationGroup]:
        return (SummationGroup(0, grid.kv_tiles - 1, step=-1),)

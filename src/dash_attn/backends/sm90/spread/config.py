"""Static configuration of the forward over a cache whose segments are spread over blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from ..cached.config import CachedConfig
from ..forward.config import ROWS, WARP_ROWS

HEAD_DIMS = (64, 128)
WEIGH_WARPS = 6
GROUP_TILES = 3
V_STAGES_LOG2, P_STAGES_LOG2, SCORES_LOG2 = 2, 2, 13
"""Of shared memory: groups of V, groups of P of 16 rows, and words of scores."""
LEAST_ROWS_LOG2 = 2
"""Of a slot of scores."""


@dataclass(frozen=True)
class SpreadConfig(CachedConfig):
    """One compiled variant: at most 64 rows per kv head, one q tile per sequence.

    Attributes:
        columns: of V that a block of ``Spread`` multiplies.
    """

    direction: ClassVar[str] = "spread"
    kernels: ClassVar[tuple[str, ...]] = ("Score", "Spread", "SpreadFold")

    columns: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warpgroups != 1:
            raise ValueError(f"{self}: one warpgroup has all rows of a kv head")
        if self.segment > 64 * self.tile_n:
            raise ValueError(f"{self}: of which tiles a segment has, a warp knows 64 at a time")
        if self.columns != 32 or self.head_dim_v % self.columns:
            raise ValueError(f"{self}: blocks have 32 columns of V, rows of 64 bytes")

    @property
    def shared_bytes(self) -> int:
        """Of a block of ``Spread``: V, P, scores, maxima, and what is little."""
        v = 2 * self.tile_n * self.columns * GROUP_TILES << V_STAGES_LOG2
        p = (2 * WARP_ROWS * self.tile_n + 32 * 4 * 4) * GROUP_TILES << P_STAGES_LOG2
        maxima = self.segment // self.tile_n * ROWS * 4
        return 1024 + v + p + (4 << SCORES_LOG2) + maxima + 2048


@cache
def spread_config(head_dim: int, dtype: str, piece: int) -> SpreadConfig:
    """What a head dim runs with."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"no keys are spread at head dim {head_dim}; known: 64, 128")
    return SpreadConfig(head_dim, dtype, warpgroups=1, overlap="softmax", kv_stages=8, piece=piece)

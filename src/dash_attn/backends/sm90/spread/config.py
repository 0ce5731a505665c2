"""Static configuration of the forward over a cache whose segments are spread over blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from ..cached.config import CachedConfig
from ..forward.config import WARP_ROWS

HEAD_DIMS = (64, 128)
COLUMNS = 32
"""Of V that a block multiplies: rows of 64 bytes."""
GROUP_TILES = 3
"""kv tiles whose V and P are handed on together."""
V_GROUPS, P_GROUPS, SCORE_SLOTS = 4, 4, 8
"""In shared memory."""
WEIGH_WARPS = 8
"""At most as many as slots, and a power of two: a warp that waits for a slot has then seen it full the time
before, and does not take one round for another."""


@dataclass(frozen=True)
class SpreadConfig(CachedConfig):
    """One compiled variant: at most 64 rows per kv head, one q tile per sequence."""

    direction: ClassVar[str] = "spread"
    kernels: ClassVar[tuple[str, ...]] = ("Score", "Spread", "SpreadFold")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warpgroups != 1:
            raise ValueError(f"{self}: one warpgroup has all rows of a kv head")
        if self.segment > 64 * self.tile_n:
            raise ValueError(f"{self}: a block keeps the maxima of 64 tiles at most")
        if self.head_dim_v % COLUMNS:
            raise ValueError(f"{self}: blocks have 32 columns of V")

    @property
    def shared_bytes(self) -> int:
        """Of a block of ``Spread``: V, P, scores, maxima, and what is little."""
        v = 2 * self.tile_n * COLUMNS * GROUP_TILES * V_GROUPS
        p = (2 * WARP_ROWS * self.tile_n + 4 * 4 * 32) * GROUP_TILES * P_GROUPS
        scores, maxima = (
            4 * WARP_ROWS * self.tile_n * SCORE_SLOTS,
            4 * WARP_ROWS * self.segment // self.tile_n,
        )
        return 1024 + v + p + scores + maxima + 1024


@cache
def spread_config(head_dim: int, dtype: str, piece: int) -> SpreadConfig:
    """What a head dim runs with."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"no keys are spread at head dim {head_dim}; known: 64, 128")
    return SpreadConfig(head_dim, dtype, warpgroups=1, overlap="softmax", piece=piece)

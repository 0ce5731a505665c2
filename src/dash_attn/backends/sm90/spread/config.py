"""Static configuration of the forward over a cache whose segments are spread over blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from ..cached.config import CachedConfig
from ..forward.config import ROWS, WARP_ROWS

HEAD_DIMS = (64, 128)
WEIGH_WARPS = 4
SCORE_SLOTS, P_SLOTS = 8, 16
"""In shared memory. A slot has 16 rows of scores or of P, and a tile 1, 2 or 4 slots."""


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
        """Of a block of ``Spread``: V, slots of scores and of P, the largest scores, and what is little."""
        scores, p = SCORE_SLOTS * 4 * self.scores_words, P_SLOTS * (2 * self.scores_words + 32 * 4 * 4)
        largest = self.segment // self.tile_n * ROWS * 4
        return 1024 + 2 * self.kv_stages * self.tile_n * self.columns + scores + p + largest + 2048

    @property
    def scores_words(self) -> int:
        """fp32 words of the scores of one kv tile, per 16 rows."""
        return WARP_ROWS * self.tile_n


@cache
def spread_config(head_dim: int, dtype: str, piece: int) -> SpreadConfig:
    """What a head dim runs with."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"no keys are spread at head dim {head_dim}; known: 64, 128")
    return SpreadConfig(head_dim, dtype, warpgroups=1, overlap="softmax", kv_stages=8, piece=piece)

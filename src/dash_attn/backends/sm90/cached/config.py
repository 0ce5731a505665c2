"""Static configuration of the forward over a cache of keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from ..forward.config import ForwardConfig

PIECES = (128, 16)
"""Rows of K or V per copy: all of a kv tile, or of the smallest page."""


@dataclass(frozen=True)
class CachedConfig(ForwardConfig):
    """One compiled variant. Rows of a q tile are those of all q heads of a kv head, token by token.

    It always has a sink, which is -inf where there is none: that adds exactly nothing.

    Attributes:
        piece: rows that the copy engine takes at a time. Pages are whole numbers of them.
    """

    direction: ClassVar[str] = "cached"
    kernels: ClassVar[tuple[str, ...]] = ("Deal", "Cached", "CachedFold")

    sink: bool = True
    piece: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tile_n % self.piece or self.piece % 8:
            raise ValueError(f"{self}: a kv tile is whole pieces, and those are multiples of 8 rows")
        if self.trace or self.in_turns or not self.sink:
            raise ValueError(f"{self}: a forward over a cache has a sink, no trace and no turns")

    @property
    def registers(self) -> tuple[int, int]:
        """One warpgroup needs no others' registers: a block of 256 threads has 255 each."""
        return {1: (0, 0), 2: (232, 40), 3: (160, 32)}[self.warpgroups]


@cache
def cached_config(head_dim: int, dtype: str, few: bool, piece: int) -> CachedConfig:
    """What a head dim runs with. ``few``: where sequences have at most 64 rows per kv head, one warpgroup
    does all, and more tiles of keys are on their way."""
    stages = {(64, True): 6, (128, True): 3, (64, False): 4, (128, False): 2}.get((head_dim, few))
    if stages is None:
        raise ValueError(f"no forward over a cache has head dim {head_dim}; known: 64, 128")
    if few:
        return CachedConfig(head_dim, dtype, warpgroups=1, kv_stages=stages, overlap="softmax", piece=piece)
    early = head_dim == 64
    return CachedConfig(
        head_dim, dtype, warpgroups=3 if early else 2, kv_stages=stages, early=early, piece=piece
    )

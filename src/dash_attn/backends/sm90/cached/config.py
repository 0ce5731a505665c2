"""Static configuration of the forward over a cache of keys."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache, partial
from typing import ClassVar

from ..forward.config import ForwardConfig, forward_config
from ..tiles import name_of

PIECES, CHUNK_PIECES = (128, 16), (128, 64, 16)
"""Rows of K or V per copy: all of a kv tile (64 where it has no more), or of the smallest page. A copy takes
instructions of a warp that shares its issue slots with those that multiply: so chunks have 64, too."""


@dataclass(frozen=True)
class CachedConfig(ForwardConfig):
    """One compiled variant. Rows of a q tile are those of all q heads of a kv head, token by token.

    It always has a sink, which is -inf where there is none: that adds exactly nothing.

    Attributes:
        by_head: rows of a q tile are those of one q head.
        piece: rows that the copy engine takes at a time. Pages are whole numbers of them.
    """

    direction: ClassVar[str] = "cached"
    kernels: ClassVar[tuple[str, ...]] = ("Deal", "Cached", "CachedFold")
    by_head: ClassVar[bool] = False

    sink: bool = True
    piece: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tile_n % self.piece or self.piece % 8:
            raise ValueError(f"{self}: a kv tile is whole pieces, and those are multiples of 8 rows")
        if self.trace or self.rest or not self.sink:
            raise ValueError(f"{self}: a forward over a cache has a sink, and no trace or rest")
        if self.in_turns and not self.by_head:
            raise ValueError(f"{self}: barriers of turns are taken by those of items")

    @property
    def eager(self) -> int:
        """How many blocks each block counts as when `Deal` decides which tiles to split. More where tiles
        have few rows, since these leave little behind."""
        return 4 if self.warpgroups == 1 else 1

    @property
    def v_warp(self) -> bool:
        return self.by_head and super().v_warp

    @property
    def registers(self) -> tuple[int, int]:
        """One warpgroup needs no others' registers: a block of 256 threads has 255 each."""
        return {1: (0, 0), 2: (232, 40), 3: (160, 32)}[self.warpgroups]


class ChunkConfig(CachedConfig):
    """One compiled variant for sequences of many rows. Rows of a q tile are those of one q head."""

    kernels: ClassVar[tuple[str, ...]] = ("Deal", "Chunk", "CachedFold")
    by_head: ClassVar[bool] = True


@cache
def cached_config(head_dim: int, dtype: str, few: bool, piece: int, head_dim_v: int = 0) -> CachedConfig:
    """What a head dim runs with. ``few``: where sequences have at most 64 rows per kv head, one warpgroup
    does all, and more tiles of keys are on their way."""
    head_dims = head_dim, head_dim_v or head_dim
    stages = {
        (64, 64): (6, 4),
        (96, 96): (4, 3),
        (128, 128): (3, 2),
        (192, 128): (2, 2),
        (256, 256): (2, 2),
    }.get(head_dims)
    if stages is None:
        known = "64, 96, 128, 192 (V: 128), 256"
        raise ValueError(f"no forward over a cache has head dim {name_of(*head_dims)}; known: {known}")
    tile_n = forward_config(*head_dims[:1], dtype, head_dims[1]).tile_n
    common = partial(
        CachedConfig, head_dim, dtype, kv_stages=stages[not few], tile_n=tile_n, piece=min(piece, tile_n),
        head_dim_v=head_dim_v,
    )  # fmt: skip
    if few:
        return common(warpgroups=1, overlap="softmax")
    early, q_stages = head_dim == 64, 1 if head_dim >= 192 else 2
    return common(warpgroups=3 if early else 2, q_stages=q_stages, early=early)


@cache
def chunk_config(head_dim: int, dtype: str, piece: int, head_dim_v: int = 0) -> ChunkConfig:
    """What a head dim runs with where sequences have many rows: as in training."""
    base = forward_config(head_dim, dtype, head_dim_v)
    own = {field.name: getattr(base, field.name) for field in fields(base)}
    return ChunkConfig(**own | {"sink": True, "piece": min(piece, base.tile_n)})

"""Static configuration of the kernel after the main one of a backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..backward.config import MMA_WARPS, BackwardConfig
from ..tiles import tiles_of

THREADS = 256
"""Of which each finishes its part of a kv tile."""

FEW, MANY, MANY_FROM = 4, 8, 16
"""FEW contributions are read at a time, or MANY where a dQ tile may get MANY_FROM or more. Reading many takes
registers, so that fewer blocks fit beside the main kernel (docs/experiments/apart.md)."""


MOST_STEPS = 5
"""Most steps of 8 columns per warp: it reads FEW or MANY contributions of them at a time, into registers."""


@dataclass(frozen=True)
class ConvertConfig:
    """One compiled variant.

    Attributes:
        direction: the package of its program.
        kernels: class names, which the compiler puts into the names of the kernels.
        head_dim: of Q and K.
        dtype: of the gradients, "bf16" or "fp16".
        padded: tensors may have fewer columns.
        head_dim_v: of V.
        apart: contributions to dQ are still to be added, so many at a time; 0: they are added.
    """

    direction: ClassVar[str] = "convert"
    kernels: ClassVar[tuple[str, ...]] = ("Convert",)

    head_dim: int
    dtype: str
    padded: bool
    head_dim_v: int
    apart: int = 0

    @property
    def tile_m(self) -> int:
        """Rows of a q tile."""
        return tiles_of(self.head_dim, self.head_dim_v).tile_m

    @property
    def tile_n(self) -> int:
        """Keys of a kv tile."""
        return tiles_of(self.head_dim, self.head_dim_v).tile_n

    @property
    def threads(self) -> int:
        """Per block. Where contributions are apart, more and smaller blocks share the tiles."""
        return 32 * self.piece_warps if self.apart else THREADS

    @property
    def piece_warps(self) -> int:
        """Warps that share the columns of a piece whose contributions are added."""
        steps = self.dq_elements // 1024
        return next(warps for warps in (1, 2, 4) if steps % warps == 0 and steps // warps <= MOST_STEPS)

    @property
    def q_blocks(self) -> int:
        """Per q tile and head: one, or one per piece, which is what a warp of the main kernel has had."""
        return MMA_WARPS if self.apart else 1

    @property
    def kv_blocks(self) -> int:
        """Per kv tile and head."""
        return THREADS // self.threads

    @property
    def dq_elements(self) -> int:
        """fp32 values of one dQ tile."""
        return self.tile_m * self.head_dim


def convert_config(config: BackwardConfig, tickets: int = 1) -> ConvertConfig:
    """What runs behind a variant of the backward, where a dQ tile gets at most so many contributions."""
    apart = 0 if not config.apart else FEW if tickets < MANY_FROM else MANY
    return ConvertConfig(config.head_dim, config.dtype, config.padded, config.head_dim_v, apart)

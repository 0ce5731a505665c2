"""Static configuration of the kernel after the main one of a backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..backward.config import BackwardConfig
from ..tiles import tiles_of


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
        apart: contributions to dQ are still to be added.
    """

    direction: ClassVar[str] = "convert"
    kernels: ClassVar[tuple[str, ...]] = ("Convert",)

    head_dim: int
    dtype: str
    padded: bool
    head_dim_v: int
    apart: bool = False

    @property
    def tile_m(self) -> int:
        """Rows of a q tile."""
        return tiles_of(self.head_dim, self.head_dim_v).tile_m

    @property
    def tile_n(self) -> int:
        """Keys of a kv tile."""
        return tiles_of(self.head_dim, self.head_dim_v).tile_n

    @property
    def dq_elements(self) -> int:
        """fp32 values of one dQ tile."""
        return self.tile_m * self.head_dim


def convert_config(config: BackwardConfig) -> ConvertConfig:
    """What runs behind a variant of the backward."""
    return ConvertConfig(config.head_dim, config.dtype, config.padded, config.head_dim_v, config.apart)

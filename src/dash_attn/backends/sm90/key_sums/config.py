"""Static configuration of the kernel that finishes dK and dV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..tiles import tiles_of


@dataclass(frozen=True)
class KeySumsConfig:
    """One compiled variant. Tensors may have fewer columns than ``head_dim``.

    Attributes:
        direction: the package of its program.
        kernels: class names, which the compiler puts into the names of the kernels.
        head_dim: of the sums of dK.
        dtype: of dK and dV, "bf16" or "fp16".
        head_dim_v: of the sums of dV; 0: the same.
    """

    direction: ClassVar[str] = "key_sums"
    kernels: ClassVar[tuple[str, ...]] = ("Finish",)
    padded: ClassVar[bool] = True

    head_dim: int
    dtype: str = "bf16"
    head_dim_v: int = 0

    def __post_init__(self) -> None:
        if self.head_dim_v == 0:
            object.__setattr__(self, "head_dim_v", self.head_dim)

    @property
    def tile_n(self) -> int:
        """Keys of a kv tile."""
        return tiles_of(self.head_dim, self.head_dim_v).tile_n

"""Static configuration of the kernel after the main one of a forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..forward.config import ROWS, ForwardConfig, partial_words_of


@dataclass(frozen=True)
class FoldConfig:
    """One compiled variant. Tensors may have fewer columns.

    Attributes:
        direction: the package of its program.
        kernels: class names, which the compiler puts into the names of the kernels.
        head_dim_v: of O.
        dtype: of O, "bf16" or "fp16".
        warpgroups: that multiply in the main kernel, ROWS rows each.
        sink: every q head has one score more, of a key without a value.
    """

    direction: ClassVar[str] = "fold"
    kernels: ClassVar[tuple[str, ...]] = ("Fold",)

    head_dim_v: int
    dtype: str
    warpgroups: int
    sink: bool

    @property
    def tile_m(self) -> int:
        return ROWS * self.warpgroups

    @property
    def partial_words(self) -> int:
        """As in :class:`ForwardConfig`."""
        return partial_words_of(self.head_dim_v)


def fold_config(config: ForwardConfig) -> FoldConfig:
    """What runs behind a variant of the forward, where it splits tiles."""
    return FoldConfig(config.head_dim_v, config.dtype, config.warpgroups, config.sink)

"""Two orders under a causal mask: one for short sequences, one for long ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ...errors import UnsupportedMaskError
from ...problem import SequenceGrid
from ..policy import Head, Policy, head_items
from ..tickets import SummationGroup, Visit
from .descending import Descending
from .spt import SPT

__all__ = ["ByLength"]

HEADS_TOGETHER = 16
"""Long heads whose items are claimed together. Fewer leave workers idle between one section of heads and the
next, more hold more of L2 than they need (docs/perf-log.md)."""


@dataclass(frozen=True)
class ByLength(Policy):
    """:class:`SPT` for sequences of fewer than ``long_from`` keys, :class:`Descending` for the others.

    SPT claims the longest items of a head last, and whoever has them at the end makes all others wait.
    Items of long sequences are claimed first, in sections of ``HEADS_TOGETHER`` heads and there the longest
    first, as in FlashAttention-4 (section 3.3); the short sequences fill the gap at the end.
    Every sequence is decided for itself, so its bits do not depend on its neighbours. Any mask.

    Args:
        long_from: keys of the shortest long sequence.

    >>> from dash_attn.problem import Mask, Problem
    >>> from dash_attn.schedule import build_plan
    >>> packed = Problem(((256, 256), (512, 512)), 1, 1, head_dim=64, mask=Mask.causal())
    >>> build_plan(packed, ByLength(long_from=512)).items[:, ::2].tolist()      # (sequence, kv tile)
    [[1, 0], [1, 1], [1, 2], [1, 3], [0, 1], [0, 0]]
    """

    name: ClassVar[str] = "by_length"
    long_from: int = 6144

    def __post_init__(self) -> None:
        self._require_integers("long_from")

    def check(self, grid: SequenceGrid) -> None:
        if self.long_from < 0:
            raise UnsupportedMaskError(f"long_from must be >= 0, got {self.long_from}")

    def _is_long(self, grid: SequenceGrid) -> bool:
        return grid.seqlen_k >= self.long_from

    def _policy(self, grid: SequenceGrid) -> Policy:
        return Descending() if self._is_long(grid) else SPT()

    def visits(self, grid: SequenceGrid) -> list[list[Visit]]:
        return self._policy(grid).visits(grid)

    def summation(self, grid: SequenceGrid) -> Sequence[SummationGroup]:
        return self._policy(grid).summation(grid)

    def place(self, heads: Sequence[Head]) -> NDArray[np.int32]:
        long = [head for head in heads if self._is_long(head.grid)]
        short = [head for head in heads if not self._is_long(head.grid)]
        parts = [
            _longest_first(long[start : start + HEADS_TOGETHER])
            for start in range(0, len(long), HEADS_TOGETHER)
        ]
        return np.concatenate([*parts, SPT().place(short)] if short else parts)


def _longest_first(heads: Sequence[Head]) -> NDArray[np.int32]:
    items = np.concatenate([head_items(head, np.arange(head.grid.kv_tiles)) for head in heads])
    tasks = np.concatenate([head.grid.q_last - head.grid.q_first + 1 for head in heads])
    return items[np.argsort(-np.maximum(tasks, 0), kind="stable")]

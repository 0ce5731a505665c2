"""Long sequences first, and of those the longest items first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ...machine import HEADS_TOGETHER
from ...problem import IntArray
from ..batch import Batch
from ..constants import LONG_FROM
from ..numerics import ByLength
from ..policy import Numerics, require_integers
from .base import Placement, sorted_by
from .in_order import downwards, heads_in_turns, queueing
from .pairs import Pairs

__all__ = ["LongFirst"]


@dataclass(frozen=True)
class LongFirst(Placement):
    """Sequences of ``long_from`` keys and more, then the others, whose items fill the gap at the end.

    Long sequences come in equal sections of up to ``HEADS_TOGETHER`` head groups, or where items queue of as
    many as keep all workers busy. There the longest items come first, as in FlashAttention-4 (section 3.3),
    and items of one length by kv tiles, so that heads take turns. The others come as `last_first` has them.
    Sequences that symmetric shift sums come before those that are not longer, as `pairs` has them.

    >>> from dash_attn.problem import Mask, Problem
    >>> from dash_attn.schedule import ByLength, build_plan
    >>> packed = Problem(((256, 256), (512, 512)), 1, 1, head_dim=64, mask=Mask.causal())
    >>> build_plan(packed, ByLength(long_from=512)).items[:, ::2].tolist()      # (sequence, kv tile)
    [[1, 0], [1, 1], [1, 2], [1, 3], [0, 1], [0, 0]]
    """

    name: ClassVar[str] = "long_first"
    long_from: int = LONG_FROM

    def __post_init__(self) -> None:
        require_integers(self, 0, "long_from")

    def place(self, batch: Batch, numerics: Numerics) -> IntArray:
        lengths = batch.problem.lengths
        shifted = numerics.shifts(*lengths.T) if isinstance(numerics, ByLength) else np.zeros(1, np.bool_)
        if not shifted.any():
            return self._by_length(batch)
        pairs = Pairs().place(batch, numerics)
        if shifted.all():
            return pairs
        longer = lengths[:, 1] > lengths[shifted, 1].max()
        turn = batch.per_item(np.repeat(np.where(shifted, 1, np.where(longer, 0, 2)), batch.groups))
        others = self._by_length(batch)
        return np.concatenate([others[turn[others] == 0], pairs[turn[pairs] == 1], others[turn[others] == 2]])

    def _by_length(self, batch: Batch) -> IntArray:
        of_group = np.repeat(batch.problem.lengths[:, 1] >= self.long_from, batch.groups)
        queues, codes = queueing(batch), np.arange(batch.item_count)
        tasks, kv = -batch.columns.tasks, batch.columns.kv
        if not of_group.all():
            codes = downwards(batch, ~of_group)
            if not of_group.any():
                return codes
            long = batch.per_item(of_group)
            codes, tasks, kv = np.where(long, np.arange(len(codes)), codes), tasks * long, kv * long
        count, queues = int(of_group.sum()), queues & of_group
        if not queues.any():
            section = _even_sections(of_group, -(-count // HEADS_TOGETHER))
            return sorted_by(codes, batch.per_item(section), tasks)
        section = _even_sections(of_group, max(1, int(count / heads_in_turns(batch, queues))))
        return sorted_by(codes, batch.per_item(section), tasks, kv)


def _even_sections(chosen: NDArray[np.bool_], number: int) -> IntArray:
    """Section of each chosen head group; the others are behind the last one. Sizes differ by one at most."""
    count = np.cumsum(chosen)
    section: IntArray = np.where(chosen, (count - 1) * number // count[-1], number)
    return section

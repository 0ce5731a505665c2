"""The sequences of a problem and their patterns as arrays, so that a packed batch costs array arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..problem import IntArray, Problem

if TYPE_CHECKING:
    from .plan import HeadPattern

__all__ = ["Batch", "Items", "first_of_each", "spread"]

Items = NDArray[np.int32]
"""(items, 3), rows (sequence, head group, kv tile) in the order in which workers claim them."""


def first_of_each(counts: IntArray) -> IntArray:
    """Sum of the counts before each one, and of all; shape (n + 1,)."""
    found = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=found[1:])
    return found


def spread(counts: IntArray) -> IntArray:
    """0, 1, ..., counts[0] - 1, 0, 1, ..., counts[1] - 1, and so on.

    >>> spread(np.array([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    first = first_of_each(counts)
    found: IntArray = np.arange(first[-1]) - np.repeat(first[:-1], counts)
    return found


class Batch:
    """Arrays over the sequences of a problem.

    Attributes:
        problem: the problem.
        patterns: the pattern of each sequence.
        distinct: every pattern once, in order of first appearance.
    """

    def __init__(self, problem: Problem, patterns: Mapping[tuple[int, ...], HeadPattern]) -> None:
        self.problem = problem
        self.patterns = [patterns[shape] for shape in problem.shapes]
        self.distinct = tuple(dict.fromkeys(self.patterns))

    @cached_property
    def pattern_of(self) -> IntArray:
        """Place of each sequence's pattern in ``distinct``, shape (sequences,)."""
        place = {pattern: at for at, pattern in enumerate(self.distinct)}
        return np.array([place[pattern] for pattern in self.patterns], dtype=np.int64)

    def per_sequence(self, values: Callable[[HeadPattern], int]) -> IntArray:
        """A number of each pattern, for every sequence; shape (sequences,)."""
        found: IntArray = np.array([values(p) for p in self.distinct], dtype=np.int64)[self.pattern_of]
        return found

    @cached_property
    def kv_tiles(self) -> IntArray:
        """kv tiles of each sequence, shape (sequences,)."""
        return self.per_sequence(lambda p: p.grid.kv_tiles)

    @cached_property
    def q_tiles(self) -> IntArray:
        """q tiles of each sequence, shape (sequences,)."""
        return self.per_sequence(lambda p: p.grid.q_tiles)

    @cached_property
    def head_groups(self) -> IntArray:
        """Head groups per kv head of each sequence, shape (sequences,)."""
        return self.per_sequence(lambda p: p.head_groups)

    @cached_property
    def group_first(self) -> IntArray:
        """Head groups of all sequences before each one, and of all; shape (sequences + 1,)."""
        return first_of_each(self.problem.kv_heads * self.head_groups)

    @cached_property
    def group_sum_first(self) -> IntArray:
        """Sums of dK and dV of head groups before each sequence, and of all; shape (sequences + 1,)."""
        counts = np.where(self.head_groups > 1, self.head_groups * self.kv_tiles, 0)
        return self.problem.kv_heads * first_of_each(counts)

    @cached_property
    def sequence_of_group(self) -> IntArray:
        """The sequence of each head group of the batch, shape (head groups,)."""
        return np.repeat(np.arange(len(self.patterns)), np.diff(self.group_first))

    @cached_property
    def item_first(self) -> IntArray:
        """Items of all head groups of the batch before each one, and of all; shape (head groups + 1,)."""
        return first_of_each(self.kv_tiles[self.sequence_of_group])

    def concatenated(self, values: Callable[[HeadPattern], Any]) -> tuple[Any, IntArray]:
        """Arrays of the distinct patterns behind one another, and where each sequence's begins."""
        arrays = [values(pattern) for pattern in self.distinct]
        first = first_of_each(np.array([len(x) for x in arrays], dtype=np.int64))
        return np.concatenate(arrays), first[self.pattern_of]

    def by_item(self, items: Items, values: Callable[[HeadPattern], IntArray]) -> IntArray:
        """(items,) what an array over the kv tiles of a pattern holds for each item."""
        table, first = self.concatenated(values)
        found: IntArray = table[first[items[:, 0]] + items[:, 2]]
        return found

    def kv_in_order(self, order: Callable[[HeadPattern], IntArray]) -> IntArray:
        """The kv tiles of each head group in the order of its pattern, group after group; (items,)."""
        table, first = self.concatenated(order)
        counts = np.diff(self.item_first)
        begin = first[self.sequence_of_group] - self.item_first[:-1]
        found: IntArray = table[np.repeat(begin, counts) + np.arange(self.item_first[-1])]
        return found

    def in_order(self, order: Callable[[HeadPattern], IntArray]) -> Items:
        """All items, head group after head group, the kv tiles of each in the order of its pattern."""
        counts = np.diff(self.item_first)
        sequence = self.sequence_of_group
        group = np.arange(len(sequence)) - self.group_first[sequence]
        items = np.empty((int(self.item_first[-1]), 3), dtype=np.int32)
        items[:, 0], items[:, 1] = np.repeat(sequence, counts), np.repeat(group, counts)
        items[:, 2] = self.kv_in_order(order)
        return items

    def group_of_item(self, items: Items) -> IntArray:
        """Which head group of the batch each item is of, shape (items,)."""
        found: IntArray = self.group_first[items[:, 0]] + items[:, 1]
        return found

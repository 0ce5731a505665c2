"""The sequences of a problem and their patterns as arrays, so that a packed batch costs array arithmetic.

Every item has a *code*: its number when items are counted over kv tiles, then head groups, then sequences.
What a pattern says about its items is the same wherever it stands, so it is kept with the pattern, already
repeated for all head groups of a sequence. An array over the items of a batch is a concatenation of these.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..problem import IntArray, Problem

if TYPE_CHECKING:
    from .plan import Claims, HeadPattern

__all__ = ["Batch", "Columns", "Items", "Sizes", "first_of_each"]

Items = NDArray[np.int32]
"""(items, 3), rows (sequence, head group, kv tile) in the order in which workers claim them."""


def first_of_each(counts: IntArray) -> IntArray:
    """Sum of the counts before each one, and of all; shape (n + 1,)."""
    found = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=found[1:])
    return found


class Sizes(NamedTuple):
    """Counts of one head: tiles, head groups per kv head, tasks, and q tiles that get contributions."""

    kv_tiles: Any
    q_tiles: Any
    head_groups: Any
    tasks: Any
    complete_q_tiles: Any


class Columns(NamedTuple):
    """What most batches need of their items, by code.

    Attributes:
        kv: the kv tile.
        turned: from it to the kv tile as far from the end of its head as it is from the beginning.
        tasks: of all q heads of the item, about: q heads that do not divide evenly are rounded.
        following, needed: of the pattern's latest :class:`~dash_attn.schedule.plan.Claims`.
    """

    kv: Any
    turned: Any
    tasks: Any
    following: Any
    needed: Any


class Batch:
    """Arrays over the sequences, head groups and items of a problem.

    Attributes:
        problem: the problem.
        patterns: the pattern of each sequence.
        distinct: every pattern once.
    """

    def __init__(self, problem: Problem, patterns: Mapping[tuple[int, ...], HeadPattern]) -> None:
        self.problem = problem
        self.patterns = [patterns[shape] for shape in problem.shapes]
        self.distinct = tuple(dict.fromkeys(self.patterns))

    def reordered(self, order: IntArray) -> Batch:
        """The batch with its sequences in another order; codes count them in that order."""
        found = object.__new__(Batch)
        found.problem = self.problem.reordered(order)
        found.patterns, found.distinct = [self.patterns[i] for i in order.tolist()], self.distinct
        found.pattern_of = self.pattern_of[order]
        found.sizes = Sizes(*(of_each[order] for of_each in self.sizes))
        return found

    @cached_property
    def pattern_of(self) -> IntArray:
        """Place of each sequence's pattern in ``distinct``, shape (sequences,)."""
        place = {pattern: at for at, pattern in enumerate(self.distinct)}
        return np.array([place[pattern] for pattern in self.patterns], dtype=np.int64)

    @cached_property
    def sizes(self) -> Sizes:
        """:class:`Sizes` of each sequence, arrays of shape (sequences,)."""
        flat = chain.from_iterable(p.sizes for p in self.distinct)
        each = np.fromiter(flat, np.int64, len(Sizes._fields) * len(self.distinct))
        return Sizes(*each.reshape(len(self.distinct), -1).T[:, self.pattern_of])

    def per_sequence(self, values: Callable[[HeadPattern], int]) -> IntArray:
        """A number of each pattern, for every sequence; shape (sequences,)."""
        found: IntArray = np.array([values(p) for p in self.distinct], dtype=np.int64)[self.pattern_of]
        return found

    @property
    def kv_tiles(self) -> IntArray:
        """kv tiles of each sequence, shape (sequences,)."""
        kv_tiles: IntArray = self.sizes.kv_tiles
        return kv_tiles

    @property
    def q_tiles(self) -> IntArray:
        """q tiles of each sequence, shape (sequences,)."""
        q_tiles: IntArray = self.sizes.q_tiles
        return q_tiles

    @property
    def head_groups(self) -> IntArray:
        """Head groups per kv head of each sequence, shape (sequences,)."""
        head_groups: IntArray = self.sizes.head_groups
        return head_groups

    @cached_property
    def task_count(self) -> int:
        """Tasks of all sequences and q heads."""
        return int(self.problem.heads * self.sizes.tasks.sum())

    @cached_property
    def groups(self) -> IntArray:
        """Head groups of each sequence, shape (sequences,)."""
        return self.problem.kv_heads * self.head_groups

    @cached_property
    def group_first(self) -> IntArray:
        """Head groups of all sequences before each one, and of all; shape (sequences + 1,)."""
        return first_of_each(self.groups)

    @cached_property
    def group_sum_first(self) -> IntArray:
        """Sums of dK and dV of head groups before each sequence, and of all; shape (sequences + 1,)."""
        counts = np.where(self.head_groups > 1, self.head_groups * self.kv_tiles, 0)
        return self.problem.kv_heads * first_of_each(counts)

    @cached_property
    def items_of_group(self) -> IntArray:
        """Items of each head group of the batch, shape (head groups,)."""
        return np.repeat(self.kv_tiles, self.groups)

    @cached_property
    def items_of_sequence(self) -> IntArray:
        """Items of each sequence, shape (sequences,)."""
        return self.kv_tiles * self.groups

    @cached_property
    def item_count(self) -> int:
        """Items of the batch."""
        return int(self.items_of_sequence.sum())

    @cached_property
    def code_first(self) -> IntArray:
        """Code of the first item of each head group, and the number of items; shape (head groups + 1,)."""
        return first_of_each(self.items_of_group)

    def concatenated(self, values: Callable[[HeadPattern], Any]) -> tuple[Any, IntArray]:
        """Arrays of the distinct patterns behind one another, and where each sequence's begins."""
        arrays = [values(pattern) for pattern in self.distinct]
        first = first_of_each(np.array([len(x) for x in arrays], dtype=np.int64))
        return np.concatenate(arrays), first[self.pattern_of]

    def flat(self, name: Hashable, values: Callable[[HeadPattern], Any]) -> Any:
        """By code, what an array over the kv tiles of a pattern holds for each item.

        ``name`` says what ``values`` computes; a pattern computes it once.
        """
        heads = self.problem.kv_heads
        tiled = [p.tiled(name, values, heads * p.head_groups) for p in self.distinct]
        return np.concatenate(tiled)[self.gather]

    @cached_property
    def gather(self) -> IntArray:
        """By code, the item's place if there were one sequence of each distinct pattern."""
        heads = self.problem.kv_heads
        sizes = np.array([p.grid.kv_tiles * p.head_groups * heads for p in self.distinct], dtype=np.int64)
        begin = first_of_each(sizes)[self.pattern_of] - first_of_each(self.items_of_sequence)[:-1]
        found: IntArray = np.repeat(begin, self.items_of_sequence) + np.arange(self.item_count)
        return found

    @cached_property
    def sequence(self) -> IntArray:
        """By code, the sequence."""
        return np.repeat(np.arange(len(self.patterns)), self.items_of_sequence)

    def per_item(self, of_group: NDArray[Any]) -> NDArray[Any]:
        """By code, what an array has for each head group of the batch."""
        return np.repeat(of_group, self.items_of_group)

    @cached_property
    def latest(self) -> list[Claims | None]:
        """What the verifier last found of the distinct patterns, when the columns were made."""
        return [p.proven.latest for p in self.distinct]

    @cached_property
    def columns(self) -> Columns:
        """Of all items, arrays of shape (items,)."""
        return Columns(*self._columns.T)

    @cached_property
    def _columns(self) -> IntArray:
        return self._columns_with(self.latest)

    def columns_with(self, claims: Sequence[Claims | None]) -> Columns:
        """:attr:`columns` with other claims of the distinct patterns than the latest."""
        return Columns(*self._columns_with(claims).T)

    def _columns_with(self, claims: Sequence[Claims | None]) -> IntArray:
        heads, group = self.problem.kv_heads, self.problem.group
        each = [p.columns(heads, group, c) for p, c in zip(self.distinct, claims)]
        # Of whole rows `take` is several times as fast as an index.
        found: IntArray = np.concatenate(each).take(self.gather, axis=0)
        return found

    @cached_property
    def items(self) -> Items:
        """Every item, by code."""
        found = np.empty((self.item_count, 3), dtype=np.int32)
        groups = np.arange(len(self.items_of_group))
        groups -= np.repeat(self.group_first[:-1], self.groups)
        found[:, 0], found[:, 1], found[:, 2] = self.sequence, self.per_item(groups), self.columns.kv
        return found

    def where(self, code: int) -> tuple[int, int, int]:
        """(sequence, head group, kv tile) of an item."""
        sequence, head_group, kv = self.items[code].tolist()
        return sequence, head_group, kv

    def codes_of(self, items: Items) -> IntArray:
        """The code of each item. Items must exist."""
        codes: IntArray = self.code_first[self.group_first[items[:, 0]] + items[:, 1]] + items[:, 2]
        return codes

"""The plan: what every worker does, in which order, and what it waits for. A schedule is data.

Words (docs/glossary.md maps them to the paper)
    head group  the q heads of one kv head that an item owns, mostly all (schedule/head_groups.py)
    item        all tasks of one kv tile of one (sequence, head group): one worker runs it without a break
    ticket      the place of a contribution in the fixed order in which a dQ tile is summed
    run         q tiles ``q_first, q_first + q_step, ...`` with affine tickets
    pattern     the runs of every kv tile of one head: the numerics, the same for every batch and head
    placement   the order in which workers claim items: it decides speed, never a bit

An item of a grouped-query problem runs every task of the pattern for all its q heads, one after the
other in ascending order, before the next task: dK and dV stay with the worker, and between two
contributions to one dQ tile lies a whole group of tasks. Where items are equally long, as under a
window, it may go through all tasks once per q head instead: between two contributions then lies one
task, so the tile is still in L2. (Others would drift apart: a short one reaches its second head while a
long one is still in its first, and waits for it.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import CoverageError, FingerprintError, PlacementError, PlanError
from ..problem import IntArray, Problem, TileGrid
from .batch import Batch, Columns, Items, Sizes
from .constants import NUMERICS_VERSION
from .head_groups import group_heads
from .tickets import RunTuple

__all__ = ["Claims", "HeadPattern", "Plan", "Proven", "Run", "Verdict", "named"]


_MOST_TILED, _LONGEST_TILED = 128, 2048
"""Arrays kept per pattern, and items of the longest. Names hold the order of items, and of those there may be
any number. A process that sees all lengths keeps a thousand patterns (``build.py``)."""


def _integers(what: str, given: Any, columns: int, dtype: type, error: type[PlanError]) -> NDArray[Any]:
    """What is given as an array of integers, with so many columns, or none."""
    rest = (columns,) if columns else ()
    if isinstance(given, np.ndarray) and given.dtype == dtype and given.ndim and given.shape[1:] == rest:
        return given
    shape = f"{what} must be (n, {columns})" if columns else f"{what} must be (n,)"
    expected = f"{shape} integers of {np.dtype(dtype).itemsize * 8} bits"
    try:
        found = np.asarray(given)
    except ValueError as failed:  # rows of unequal lengths
        raise error(f"{expected}: {failed}") from failed
    fits = found.dtype.kind in "iu" and found.ndim and found.shape[1:] == rest
    own: NDArray[Any] = found.astype(dtype) if fits else found
    if not fits or not np.array_equal(own, found):
        raise error(f"{expected}, got shape {found.shape} and {found.dtype}")
    return own


def _positive(name: str, value: object) -> int:
    """As a Python int: a fingerprint is made of how it prints."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise CoverageError(f"{name} of a pattern must be an integer >= 1, got {value!r}")
    return int(value)


class Run(NamedTuple):
    """``count`` tasks of one kv tile whose q tiles and tickets are affine.

    Task ``k`` of the run is q tile ``q_first + k * q_step`` with ticket
    ``t_first + t_step * (k // t_hold)``.

    >>> list(Run(4, 1, 4, 0, 1, 2).tasks())
    [(4, 0), (5, 0), (6, 1), (7, 1)]
    """

    q_first: int
    q_step: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    t_first: int
    t_step: int = 0
    t_hold: int = 1

    def tasks(self) -> Iterator[tuple[int, int]]:
        """(q tile, ticket) of every task, in order."""
        for k in range(self.count):
            yield self.q_first + k * self.q_step, self.t_first + self.t_step * (k // self.t_hold)


class Claims(NamedTuple):
    """The order in which a head claims its kv tiles, and what follows from it, as distances in kv tiles.

    Attributes:
        order: the kv tiles, as bytes.
        following: from each kv tile to the one claimed next, 0 from the last one.
        needed: from each kv tile to the last one of the order that its item depends on, 0 if to none later.
    """

    order: bytes
    following: IntArray
    needed: IntArray


class Proven:
    """What the verifier found out about a pattern, once for all plans.

    Attributes:
        covers: whether its runs do every task once.
        orders: what follows from an order of its items, by the order.
        latest: what followed in the last plan: probably that of the next one, too.
    """

    def __init__(self) -> None:
        self.covers = False
        self.orders: dict[bytes, Claims] = {}
        self.latest: Claims | None = None


@dataclass(frozen=True, eq=False)
class HeadPattern:
    """The runs of every kv tile of one head: what fixes dQ, dK and dV of a sequence bit for bit.

    Compared by identity: sequences that share a pattern share its proof.

    Attributes:
        grid: the tile grid, the same for all lengths that cut the same tiles.
        offsets: (kv_tiles + 1,) int64; runs of kv tile ``kv`` are ``runs[offsets[kv]:offsets[kv + 1]]``.
        runs: (runs, 6) int64, columns as in :class:`Run`.
        head_groups: head groups of each kv head.
        passes: how often an item goes through its runs. 1: once, for all its q heads at each q tile. More:
            once for each of its q heads, which are so many at most.
        proven: what is known about it; no part of it.
    """

    grid: TileGrid
    offsets: IntArray
    runs: IntArray
    head_groups: int = 1
    passes: int = 1
    proven: Proven = field(default_factory=Proven, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_tiled", {})
        for name in ("head_groups", "passes"):
            object.__setattr__(self, name, _positive(name, getattr(self, name)))
        # Copies that nobody else can write: a proof must stay true.
        for name, columns in (("offsets", 0), ("runs", 6)):
            given = _integers(f"{name} of a pattern", getattr(self, name), columns, np.int64, CoverageError)
            if name == "offsets" and not len(given):
                raise CoverageError("offsets of a pattern: there is none")
            own = np.array(given)
            own.setflags(write=False)
            object.__setattr__(self, name, own)

    def __reduce__(self) -> tuple[Any, ...]:
        # Through the constructor, so that nobody can write to a copy either.
        return HeadPattern, (self.grid, self.offsets, self.runs, self.head_groups, self.passes)

    @classmethod
    def from_runs(
        cls,
        grid: TileGrid,
        runs: Sequence[Sequence[RunTuple | Run]],
        head_groups: int = 1,
        passes: int = 1,
    ) -> HeadPattern:
        """A pattern from the list of runs of each kv tile."""
        offsets = np.cumsum([0, *(len(r) for r in runs)], dtype=np.int64)
        table = np.array([run for item in runs for run in item], dtype=np.int64).reshape(-1, 6)
        return cls(grid, offsets, table, head_groups, passes)

    def runs_of(self, kv_tile: int) -> list[Run]:
        """Runs of one kv tile, in order."""
        return [Run(*row) for row in self.runs[self.offsets[kv_tile] : self.offsets[kv_tile + 1]].tolist()]

    def tasks_of(self, kv_tile: int) -> tuple[IntArray, IntArray]:
        """(q tiles, tickets) of one kv tile, in the order of its item, of one q head; int64."""
        rows = self.runs[self.offsets[kv_tile] : self.offsets[kv_tile + 1]]
        if not len(rows):
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        steps = [np.arange(count, dtype=np.int64) for count in rows[:, 2]]
        q = np.concatenate([row[0] + row[1] * k for row, k in zip(rows, steps, strict=True)])
        t = np.concatenate([row[3] + row[4] * (k // row[5]) for row, k in zip(rows, steps, strict=True)])
        return q, t

    def tasks_of_heads(self, kv_tile: int, heads: int) -> tuple[IntArray, IntArray, IntArray]:
        """(q heads, q tiles, tickets) of an item of so many q heads, in its order; heads count from 0."""
        q, t = self.tasks_of(kv_tile)
        each = np.arange(heads, dtype=np.int64)
        if self.passes > 1:
            return np.repeat(each, len(q)), np.tile(q, heads), np.tile(t, heads)
        return np.tile(each, len(q)), np.repeat(q, heads), np.repeat(t, heads)

    def summation_orders(self) -> list[list[int]]:
        """For each q tile, its kv tiles in the order in which they are added."""
        orders = [[-1] * int(count) for count in self.grid.contributions]
        for kv in range(self.grid.kv_tiles):
            for q, t in zip(*(a.tolist() for a in self.tasks_of(kv)), strict=True):
                orders[q][t] = kv
        return orders

    def tiled(self, name: Hashable, values: Callable[[HeadPattern], Any], heads: int) -> Any:
        """An array over the kv tiles, behind itself for so many heads. Short ones are made once per name."""
        known: dict[object, Any] = self._tiled  # type: ignore[attr-defined]
        if (found := known.get((name, heads))) is None:
            found = np.concatenate([values(self)] * heads)
            if len(found) <= _LONGEST_TILED:
                if len(known) >= _MOST_TILED:
                    known.clear()
                known[name, heads] = found
        return found

    def columns(self, kv_heads: int, group: int, claims: Claims | None) -> IntArray:
        """:class:`Columns` of the items of one sequence, by code, shape (items, 5); claims None: zeros."""

        def of_one_head(pattern: HeadPattern) -> IntArray:
            kv = np.arange(pattern.grid.kv_tiles)
            tasks = pattern.task_counts * group // pattern.head_groups
            following, needed = (0 * kv, 0 * kv) if claims is None else claims[1:]
            return np.stack(Columns(kv, kv[::-1] - kv, tasks, following, needed), axis=1)

        name = ("columns", group, None if claims is None else claims.order)
        found: IntArray = self.tiled(name, of_one_head, kv_heads * self.head_groups)
        return found

    @cached_property
    def sizes(self) -> Sizes:
        """Counts of one head."""
        grid = self.grid
        return Sizes(grid.kv_tiles, grid.q_tiles, self.head_groups, grid.tasks, grid.complete_q_tiles)

    @cached_property
    def run_counts(self) -> IntArray:
        """Runs of each kv tile, shape (kv_tiles,)."""
        counts: IntArray = np.diff(self.offsets)
        return counts

    @cached_property
    def task_counts(self) -> IntArray:
        """Tasks of each kv tile, shape (kv_tiles,)."""
        sums = np.concatenate(([0], np.cumsum(self.runs[:, 2])))
        return sums[self.offsets[1:]] - sums[self.offsets[:-1]]


@dataclass(frozen=True)
class Verdict:
    """What the verifier established about a plan.

    Attributes:
        min_workers: with so many resident workers the plan cannot deadlock, with one less it can. (Where
            items take their q heads one after the other, and head groups have unequal numbers of heads, less
            may be enough: all groups are taken for the largest one.)
        tasks: number of tasks proven to run once each, over all sequences and q heads.
        needs: (items,) int64, the place in the list of the last item that each item depends on; its own if it
            depends on no later one.
    """

    min_workers: int
    tasks: int
    needs: IntArray = field(compare=False, repr=False)


def named(sequence: int, head_group: int, kv_tile: int) -> str:
    """An item, for messages."""
    return f"sequence {sequence}, head group {head_group}, kv tile {kv_tile}"


class Listed(NamedTuple):
    """The items of a plan in the order in which workers claim them.

    Attributes:
        batch: the plan's, or one whose sequences are in another order.
        codes: the code of each item in that batch.
    """

    batch: Batch
    codes: IntArray


@dataclass(frozen=True, eq=False)
class Plan:
    """Numerics and placement of one problem; :func:`dash_attn.schedule.build.build_plan` makes one.

    Attributes:
        problem: the problem it solves.
        policy: name and parameters of the policy that made it, or "table". Where it is one of this package,
            calls and :func:`.build_plan` take the name as ``policy``.
        patterns: the :class:`HeadPattern` of each distinct shape of a sequence (``Problem.shapes``).
            Read-only.
        items: (items, 3) int32, rows (sequence, head group, kv_tile) in the order workers claim them. Head
            groups count over all kv heads: with n per kv head, kv head i has groups i * n .. i * n + n - 1.
            Read-only.
        verdict: what the verifier computed, None before it ran; a copy starts without one.
    """

    problem: Problem
    policy: str
    patterns: Mapping[tuple[int, ...], HeadPattern]
    items: Items
    verdict: Verdict | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        # What a proof speaks of: nobody else may write to it, before the proof (arrays made from it are kept)
        # or after it.
        object.__setattr__(self, "patterns", MappingProxyType(dict(self.patterns)))
        own = _integers("items", self.items, 3, np.int32, PlacementError)
        if own is not self.items or own.flags.writeable or own.base is not None:
            own = own.copy()
            own.setflags(write=False)
            object.__setattr__(self, "items", own)

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, (self.problem, self.policy, dict(self.patterns), self.items)

    def pattern(self, sequence: int) -> HeadPattern:
        """The head pattern of one sequence."""
        return self.patterns[self.problem.shapes[sequence]]

    def q_heads(self, sequence: int, head_group: int) -> range:
        """The q heads of a head group."""
        kv_head, part = divmod(head_group, self.pattern(sequence).head_groups)
        heads = group_heads(self.problem.group, self.pattern(sequence).head_groups)[part]
        first = kv_head * self.problem.group
        return range(first + heads.start, first + heads.stop)

    @cached_property
    def batch(self) -> Batch:
        """Arrays over the sequences and their patterns."""
        return Batch(self.problem, self.patterns)

    @cached_property
    def codes(self) -> IntArray:
        """The items as codes of :attr:`batch`, in the order in which workers claim them. Read-only.

        Raises:
            PlacementError: an item does not exist.
        """
        items, batch = self.items, self.batch
        sequence = np.clip(items[:, 0], 0, len(batch.patterns) - 1)
        exists = (items >= 0).all(1) & (items[:, 0] == sequence)
        exists &= (items[:, 1] < batch.groups[sequence]) & (items[:, 2] < batch.kv_tiles[sequence])
        for at in np.flatnonzero(~exists)[:1]:
            raise PlacementError(f"item {at}: {named(*items[at].tolist())} does not exist")
        codes = batch.codes_of(items)
        codes.setflags(write=False)
        return codes

    @cached_property
    def listed(self) -> Listed:
        """The items as codes, in the batch in which they were placed."""
        return Listed(self.batch, self.codes)

    @property
    def group_first(self) -> IntArray:
        """Head groups of all sequences before each one, and of all; shape (sequences + 1,)."""
        return self.batch.group_first

    @property
    def group_sum_first(self) -> IntArray:
        """Sums of dK and dV before each sequence, and of all; shape (sequences + 1,).

        An item that owns only some q heads of its kv head leaves one.
        """
        return self.batch.group_sum_first

    @property
    def min_workers(self) -> int:
        """Smallest number of resident workers under which the plan cannot deadlock.

        Raises:
            PlanError: the plan was not verified.
        """
        if self.verdict is None:
            raise PlanError("min_workers is known only after the plan was verified")
        return self.verdict.min_workers

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the numerics, 64 hexadecimal digits; placement, batch and head count leave it alone.

        It covers the tile shape, head dimensions, dtype, mask, q heads per kv head, and the head groups,
        passes and runs of every distinct pattern. Two plans with one fingerprint produce the same bytes on
        one backend.
        """
        return self.fingerprint_under(NUMERICS_VERSION)

    def fingerprint_under(self, version: int) -> str:
        """The fingerprint of these numerics under a ``NUMERICS_VERSION``: for records of older ones."""
        p = self.problem
        digest = hashlib.sha256()
        head_dim = p.head_dim if p.head_dim_v == p.head_dim else (p.head_dim, p.head_dim_v)
        facts = (version, p.tile_m, p.tile_n, head_dim, p.dtype, p.mask.name, p.group)
        digest.update(repr(facts).encode())
        for shape in sorted(self.patterns):
            pattern = self.patterns[shape]
            digest.update(repr((*shape, pattern.head_groups)).encode())
            if pattern.passes > 1:
                digest.update(b"by head")
            digest.update(np.ascontiguousarray(pattern.offsets, dtype="<i8").tobytes())
            digest.update(np.ascontiguousarray(pattern.runs, dtype="<i8").tobytes())
        return digest.hexdigest()

    def check_fingerprint(self, expected: str) -> None:
        """Raise FingerprintError unless the numerics are the expected ones."""
        if self.fingerprint != expected:
            raise FingerprintError(f"expected numerics {expected}, the plan holds {self.fingerprint}")

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays of the plan."""
        arrays = [a for p in self.batch.distinct for a in (p.offsets, p.runs)]
        return self.items.nbytes + sum(a.nbytes for a in arrays)

    def with_items(self, items: NDArray[np.int32]) -> Plan:
        """The same numerics under another placement; verify before use.

        Raises:
            PlacementError: they are not (items, 3) integers of 32 bits.
        """
        return replace(self, items=items)

    def __repr__(self) -> str:
        return f"Plan({self.policy}, {len(self.items)} items, {self.problem.tasks} tasks)"

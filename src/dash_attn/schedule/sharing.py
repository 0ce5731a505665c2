"""Which rows of a sequence lie on which rank, and which rank works on which rows.

Imports neither torch nor a backend: all of it is plain data, the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..errors import InputError
from ..problem import IntArray, Mask
from .segments import Segment, segments_of

__all__ = [
    "LAYOUTS",
    "MODES",
    "Chunk",
    "Layout",
    "Route",
    "Rows",
    "Teams",
    "Work",
    "deal",
    "in_place",
    "routes",
    "teams_of",
]

LAYOUTS = ("zigzag", "contiguous")
"""How rows lie on ranks: :class:`Layout`."""

MODES = ("auto", "ulysses", "gather", "ring", "ulysses+gather", "ulysses+ring")
"""How ranks share a call: docs/distributed.md. "auto" chooses one of the others by heads and sizes."""


class Teams(NamedTuple):
    """What a mode means: so many ranks share the heads of the same rows; whether kv heads take turns."""

    head_ranks: int
    in_turns: bool


def teams_of(mode: str, ranks: int, kv_heads: int) -> Teams:
    """What a mode means for so many ranks.

    Raises:
        InputError: there is no such mode, or "ulysses" has no kv heads for some ranks.

    >>> teams_of("auto", 4, 8), teams_of("auto", 4, 6)
    (Teams(head_ranks=4, in_turns=False), Teams(head_ranks=2, in_turns=True))
    """
    if mode not in MODES:
        raise InputError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    common = math.gcd(ranks, kv_heads)
    if mode == "auto":
        return Teams(common, common < ranks)
    if mode == "ulysses" and common < ranks:
        raise InputError(
            f"mode 'ulysses' needs kv heads for every rank: {kv_heads} kv heads are no multiple of {ranks} "
            f"ranks; 'ulysses+gather' shares heads among {common}"
        )
    return Teams(common if "ulysses" in mode else 1, mode.endswith("ring"))


class Rows(NamedTuple):
    """Rows ``first`` to ``last - 1`` of a sequence."""

    sequence: int
    first: int
    last: int


class Chunk(NamedTuple):
    """Rows of a sequence that lie on a rank, from row ``offset`` of its tensors on."""

    rows: Rows
    offset: int


class Layout:
    """How sequences are spread over ranks: every sequence evenly.

    Args:
        lengths: rows of every sequence. The sequences of a dense batch are equal; there it is one length.
        ranks: how many there are.
        kind: "contiguous": rank r has the r-th part of each sequence. "zigzag": of 2 ``ranks`` parts it has
            the r-th from the front and the r-th from the back, so that all have the same work under a
            causal mask.

    Raises:
        InputError: a sequence cannot be spread evenly.

    >>> Layout((16,), 2, "zigzag").chunks[1]
    (Chunk(rows=Rows(sequence=0, first=4, last=12), offset=0),)
    """

    def __init__(self, lengths: tuple[int, ...], ranks: int, kind: str) -> None:
        if kind not in LAYOUTS:
            raise InputError(f"layout must be one of {', '.join(LAYOUTS)}, got {kind!r}")
        self.lengths, self.ranks, self.kind = lengths, ranks, kind
        parts = ranks if kind == "contiguous" else 2 * ranks
        for sequence, length in enumerate(lengths):
            if length % parts:
                raise InputError(
                    f"sequence {sequence} has {length} rows, no multiple of {parts}: layout {kind!r} deals "
                    f"every sequence to {ranks} ranks in {parts} equal parts"
                )

    @cached_property
    def chunks(self) -> tuple[tuple[Chunk, ...], ...]:
        """Of every rank, in the order of its rows."""
        return tuple(tuple(self._chunks(rank)) for rank in range(self.ranks))

    @property
    def local_rows(self) -> int:
        """Rows of each rank."""
        return sum(self.lengths) // self.ranks

    def held(self, rank: int) -> IntArray:
        """(local_rows,) the rows of a rank, counted over all sequences."""
        return self.counted([chunk.rows for chunk in self.chunks[rank]])

    def counted(self, rows: Sequence[Rows]) -> IntArray:
        """Some rows, counted over all sequences."""
        parts = [np.arange(self._first[r.sequence] + r.first, self._first[r.sequence] + r.last) for r in rows]
        return np.concatenate([np.zeros(0, dtype=np.int64), *parts])

    @cached_property
    def _first(self) -> IntArray:
        """Rows of all sequences before each one, and of all."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def _chunks(self, rank: int) -> Iterator[Chunk]:
        offset = 0
        for sequence, length in enumerate(self.lengths):
            for first, last in self._parts(rank, length):
                if first < last:
                    yield Chunk(Rows(sequence, first, last), offset)
                    offset += last - first

    def _parts(self, rank: int, length: int) -> list[tuple[int, int]]:
        if self.kind == "contiguous":
            part = length // self.ranks
            return [(rank * part, (rank + 1) * part)]
        part, back = length // (2 * self.ranks), 2 * self.ranks - 1 - rank
        if back == rank + 1:
            return [(rank * part, (back + 1) * part)]
        return [(rank * part, (rank + 1) * part), (back * part, (back + 1) * part)]


class Work(NamedTuple):
    """What a rank computes: all that these rows see, for some kv heads and their q heads.

    Attributes:
        rows: ascending; segments of q that follow each other are one.
        heads: kv heads, first and behind the last one.
    """

    rows: tuple[Rows, ...]
    heads: tuple[int, int]


class Cut(NamedTuple):
    """How the backward cuts sequences: the mask, rows per kv tile, rows per segment (0: not at all)."""

    mask: Mask
    tile_n: int
    q_segment: int

    def segments(self, length: int) -> tuple[Segment, ...]:
        """Of a sequence, ascending."""
        return _segments(self, length)


@lru_cache(1024)
def _segments(cut: Cut, length: int) -> tuple[Segment, ...]:
    if not cut.q_segment:
        return (Segment((0, length), (0, length)),)
    return segments_of(length, length, cut.mask, cut.tile_n, cut.q_segment)


def deal(layout: Layout, cut: Cut, kv_heads: int, head_ranks: int) -> list[Work]:
    """What every rank computes.

    Ranks form teams of ``head_ranks`` that follow each other. A team works on the rows that lie on it, and
    each of its ranks on a part of the heads. Where these rows are no whole segments of q, segments are dealt
    to teams anew, the longest first, each to the team that has least to do. This is placement: it decides
    no bit.

    Args:
        layout: where rows lie.
        cut: which segments there are.
        kv_heads: a multiple of ``head_ranks``.
        head_ranks: divides the number of ranks.
    """
    teams = layout.ranks // head_ranks
    own = [_rows_of_team(layout, range(t * head_ranks, (t + 1) * head_ranks)) for t in range(teams)]
    rows = own if all(_whole(mine, layout, cut) for mine in own) else _dealt(layout, cut, teams)
    each = kv_heads // head_ranks
    return [
        Work(tuple(rows[rank // head_ranks]), (rank % head_ranks * each, (rank % head_ranks + 1) * each))
        for rank in range(layout.ranks)
    ]


def in_place(layout: Layout, work: Sequence[Work]) -> bool:
    """Whether every rank computes the rows that lie on it, in their order."""
    return all(
        tuple(_joined([chunk.rows for chunk in layout.chunks[rank]])) == mine.rows
        for rank, mine in enumerate(work)
    )


def _rows_of_team(layout: Layout, ranks: range) -> list[Rows]:
    return _joined([chunk.rows for rank in ranks for chunk in layout.chunks[rank]])


def _joined(rows: Sequence[Rows]) -> list[Rows]:
    found: list[Rows] = []
    for mine in sorted(rows):
        if found and found[-1][0] == mine.sequence and found[-1].last == mine.first:
            found[-1] = found[-1]._replace(last=mine.last)
        else:
            found.append(mine)
    return found


def _whole(rows: list[Rows], layout: Layout, cut: Cut) -> bool:
    """Whether rows are whole segments."""
    for mine in rows:
        ends = {segment.rows[1] for segment in cut.segments(layout.lengths[mine.sequence])} | {0}
        if mine.first not in ends or mine.last not in ends:
            return False
    return True


def _dealt(layout: Layout, cut: Cut, teams: int) -> list[list[Rows]]:
    units = []
    for sequence, length in enumerate(layout.lengths):
        for segment in cut.segments(length):
            (first, last), (begin, end) = segment
            if first < last:
                units.append(((last - first) * (end - begin), Rows(sequence, first, last)))
    units.sort(key=lambda unit: (-unit[0], unit[1]))
    load, rows = [0] * teams, [[] for _ in range(teams)]  # type: list[int], list[list[Rows]]
    for cost, mine in units:
        team = load.index(min(load))
        load[team] += cost
        rows[team].append(mine)
    return [_joined(mine) for mine in rows]


class Route(NamedTuple):
    """Rows that lie on one rank and are needed by another one, or the same.

    Attributes:
        owner, worker: ranks.
        local: (n,) rows of the owner's tensors, ascending.
        at: (n,) rows of the worker's tensors: its blocks, one after the other.
    """

    owner: int
    worker: int
    local: IntArray
    at: IntArray

    @property
    def runs(self) -> list[tuple[slice, slice]]:
        """Stretches of rows that follow each other on both ranks."""
        breaks = np.flatnonzero((np.diff(self.local) != 1) | (np.diff(self.at) != 1)) + 1
        ends = [0, *breaks.tolist(), len(self.local)]
        found = []
        for first, last in pairwise(ends):
            local, at = int(self.local[first]), int(self.at[first])
            found.append((slice(local, local + last - first), slice(at, at + last - first)))
        return found


def routes(layout: Layout, blocks: Sequence[Sequence[Rows]], rank: int) -> list[Route]:
    """Where the rows lie that a rank has and others need, and that it needs; without empty ones.

    Args:
        layout: where rows lie.
        blocks: the rows that every worker needs, in the order of its tensors.
        rank: owner or worker of all routes.

    >>> (one, two) = routes(Layout((8,), 2, "zigzag"), [[Rows(0, 0, 8)], []], 0)
    >>> one.local.tolist(), one.at.tolist(), two.owner, two.local.tolist(), two.at.tolist()
    ([0, 1, 2, 3], [0, 1, 6, 7], 1, [0, 1, 2, 3], [2, 3, 4, 5])
    """
    held = [layout.held(owner) for owner in range(layout.ranks)]
    found = []
    for worker in range(layout.ranks):
        owners = range(layout.ranks) if worker == rank else [rank]
        place = np.full(sum(layout.lengths), -1, dtype=np.int64)
        needed = layout.counted(blocks[worker])
        place[needed] = np.arange(len(needed))
        for owner in owners:
            at = place[held[owner]]
            local = np.flatnonzero(at >= 0)
            if len(local):
                found.append(Route(owner, worker, local, at[local]))
    return found

"""Which rows of a sequence lie on which rank, and which rank works on which rows.

Imports neither torch nor a backend: all of it is plain data, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

from ..errors import InputError
from ..problem import Mask
from .segments import Segment, segments_of

__all__ = ["LAYOUTS", "Chunk", "Layout", "Piece", "Rows", "Work", "deal", "pieces"]

LAYOUTS = ("zigzag", "contiguous")


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


class Piece(NamedTuple):
    """Rows that lie on one rank and are needed by another one, or the same.

    Attributes:
        owner, worker: ranks.
        rows: which.
        local: the first one in the owner's tensors.
        block, at: the first one in the worker's block of rows.
    """

    owner: int
    worker: int
    rows: Rows
    local: int
    block: int
    at: int


def pieces(layout: Layout, blocks: Sequence[Sequence[Rows]]) -> list[Piece]:
    """Where the rows that every worker needs lie, in one order for all ranks. ``blocks``: of each worker."""
    of_sequence: dict[int, list[tuple[int, Chunk]]] = {}
    for owner, chunks in enumerate(layout.chunks):
        for chunk in chunks:
            of_sequence.setdefault(chunk.rows.sequence, []).append((owner, chunk))
    found = []
    for worker, wanted in enumerate(blocks):
        for block, (sequence, first, last) in enumerate(wanted):
            for owner, chunk in of_sequence.get(sequence, []):
                begin, end = max(first, chunk.rows.first), min(last, chunk.rows.last)
                if begin < end:
                    local = chunk.offset + begin - chunk.rows.first
                    rows = Rows(sequence, begin, end)
                    found.append(Piece(owner, worker, rows, local, block, begin - first))
    return found

"""What is decided once of a call that the ranks of a group share, and how its rows get from rank to rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..backends.cuda.upload import Upload
from ..backends.sums import accumulator
from ..ops.calls import Call, shaped_call
from ..ops.segments import CutSequence
from ..problem import IntArray
from ..schedule.constants import FORWARD_SEGMENT
from ..schedule.sharing import Cut, Layout, Route, Rows, deal, in_place, routes
from ..scores import Origin
from ..spec import AttentionSpec
from .exchange import Move, Moving, copy_rows, write
from .meeting import Meeting
from .team import Team
from .windows import window_of

__all__ = ["Given", "Heads", "Leg", "Shared", "finish", "places"]

MOST_RUNS = 4
"""Stretches of rows between two ranks that are copied one by one. More are copied at once, by indices."""

_PADDING = 4096
"""Bytes of a window that moves of one turn may lose between them."""

_ALL = slice(None)

Heads = tuple[int, int]
"""The first head, and the one behind the last."""


class Given(NamedTuple):
    """What decides how a call is shared; equal on all ranks.

    Attributes:
        lengths: rows of every sequence, over all ranks; one of a dense batch.
        packed: the tensors are.
        batch: of a dense batch; 1 if packed.
        heads, kv_heads, head_dim, head_dim_v: of the tensors.
        dtype: of q, k and v.
        layout: where rows lie.
        head_ranks: so many ranks share the heads of the same rows.
        in_turns: kv heads take turns: those of the next one come while one is computed.
    """

    lengths: tuple[int, ...]
    packed: bool
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    layout: str
    head_ranks: int
    in_turns: bool


def places(rows: Sequence[Rows]) -> Iterator[slice]:
    """Where rows lie in a tensor that has all of them, one after the other."""
    at = 0
    for mine in rows:
        yield slice(at, at + mine.last - mine.first)
        at += mine.last - mine.first


def _total(rows: Sequence[Rows]) -> int:
    return sum(mine.last - mine.first for mine in rows)


class Shared:
    """A call that a group shares, on one of its ranks.

    Attributes:
        work: what each rank computes.
        rows: those that this rank computes.
        keys: those that each rank needs, a stretch per sequence.
        cut: how sequences are cut.
        scores: what becomes of them.
        backend: the name of what runs it here.
        group: q heads that share one kv head.
    """

    def __init__(self, given: Given, spec: AttentionSpec, team: Team, device: torch.device) -> None:
        self.given, self.spec, self.team, self.device = given, spec, team, device
        self.scores, self.group = spec.scores, given.heads // given.kv_heads
        self._calls: dict[tuple[int, int, int], Call] = {}
        self.layout = Layout(given.lengths, team.size, given.layout)
        one = self.dense_call(1, 1, 1)
        self.backend = one.backend.name
        self.cut = Cut(spec.mask, one.problem.tile_n, spec.rows_per_segment)
        self.work = deal(self.layout, self.cut, given.kv_heads, given.head_ranks)
        self.rows = self.work[team.rank].rows
        self.keys = [self._keys(work.rows) for work in self.work]
        self._q_ways = self._ways([work.rows for work in self.work])
        self._k_ways = self._ways(self.keys)

    # What is where

    def seen(self, rows: Rows) -> tuple[int, int]:
        """The keys that rows see, from a place where a segment of the forward begins."""
        left, right = self.spec.left, self.spec.right
        last = rows.last if right == 0 else self.given.lengths[rows.sequence]
        first = max(rows.first - left, 0) // FORWARD_SEGMENT * FORWARD_SEGMENT if left >= 0 else 0
        return first, last

    def _keys(self, rows: Sequence[Rows]) -> list[Rows]:
        found: dict[int, Rows] = {}
        for mine in rows:
            first, last = self.seen(mine)
            so_far = found.get(mine.sequence, Rows(mine.sequence, first, last))
            found[mine.sequence] = Rows(mine.sequence, min(first, so_far.first), max(last, so_far.last))
        return list(found.values())

    @property
    def wide(self) -> torch.dtype:
        """Of lse, and of sums."""
        return accumulator(self.given.dtype)

    @cached_property
    def key_starts(self) -> dict[int, int]:
        """Where key 0 of each sequence would lie among the keys that this rank has."""
        mine = self.keys[self.team.rank]
        return {rows.sequence: place.start - rows.first for rows, place in zip(mine, places(mine))}

    @property
    def whole(self) -> bool:
        """Whether every rank has all rows of all sequences, for some heads."""
        return self.given.head_ranks == self.team.size

    @property
    def keeps_keys(self) -> bool:
        """Whether the backward finds k and v where the forward had them: they take no more memory there than
        where they lie."""
        return self.whole and not self.given.in_turns

    @property
    def through_windows(self) -> bool:
        """Whether rows may go through windows: all ranks have as many, and none comes while others are
        computed."""
        return self.keeps_keys

    @cached_property
    def in_place(self) -> bool:
        """Whether every rank works on the rows that lie on it, in their order, with all heads."""
        return self.given.head_ranks == 1 and in_place(self.layout, self.work)

    @cached_property
    def _home_ways(self) -> _Ways:
        """Of the keys of sequences that their worker has whole."""
        return self._ways(self.keys, lambda rank, rows: rows.sequence in self.complete[rank])

    def _ways(
        self, blocks: Sequence[Sequence[Rows]], wanted: Callable[[int, Rows], bool] | None = None
    ) -> _Ways:
        """Ways of the rows of these blocks, or of those that are wanted, from and to this rank."""
        found: list[_Way] = []
        indices: list[IntArray] = []
        many: list[Route] = []
        for route in routes(self.layout, blocks, self.team.rank):
            if wanted is not None:
                keep = self._kept(blocks[route.worker], route, wanted)
                route = route._replace(local=route.local[keep], at=route.at[keep])
            runs = route.runs if len(route.local) else []
            if len(runs) > MOST_RUNS:
                many.append(route)
                indices += [route.local, route.at]
            for local, at in runs if len(runs) <= MOST_RUNS else []:
                found.append(_Way(*route[:2], at.stop - at.start, local, at))
        there, upload = self._there(indices)
        for number, route in enumerate(many):
            found.append(_Way(*route[:2], len(route.at), *there[2 * number : 2 * number + 2]))
        return _Ways(sorted(found, key=lambda way: (way.owner, way.worker)), upload)

    def _there(self, indices: Sequence[IntArray]) -> tuple[list[Tensor], Upload | None]:
        """Indices on the device."""
        if self.device.type != "cuda" or not indices:
            return [torch.from_numpy(index).to(self.device) for index in indices], None
        words = [np.ascontiguousarray(index, np.int64).view(np.int32) for index in indices]
        upload = Upload("where the rows of a shared call lie", words, self.device)
        return [x.view(torch.int64) for x in upload.arrays], upload

    def _kept(
        self, blocks: Sequence[Rows], route: Route, wanted: Callable[[int, Rows], bool]
    ) -> NDArray[np.bool_]:
        each = [np.full(rows.last - rows.first, wanted(route.worker, rows)) for rows in blocks]
        kept: NDArray[np.bool_] = np.concatenate([np.zeros(0, dtype=bool), *each])[route.at]
        return kept

    @cached_property
    def complete(self) -> list[set[int]]:
        """The sequences all of whose rows a rank computes, of every rank."""
        lengths = self.given.lengths
        return [
            {mine.sequence for mine in work.rows if mine[1:] == (0, lengths[mine.sequence])}
            for work in self.work
        ]

    @cached_property
    def segments(self) -> list[list[tuple[int, int]]]:
        """(sequence, number of the segment) that a rank computes of sequences that it has not whole, of every
        rank."""
        return [
            [
                (mine.sequence, index)
                for mine in work.rows
                if mine.sequence not in complete
                for index, segment in enumerate(self.cut.segments(self.given.lengths[mine.sequence]))
                if mine.first <= segment.rows[0] < mine.last
            ]
            for work, complete in zip(self.work, self.complete)
        ]

    def steps(self, rank: int) -> list[Heads]:
        """The kv heads of a rank, as they are computed one after the other."""
        first, last = self.work[rank].heads
        if not self.given.in_turns:
            return [(first, last)]
        return [(head, head + 1) for head in range(first, last)]

    def of_step(self, step: int) -> list[Heads]:
        """The kv heads of every rank in a step."""
        return [self.steps(rank)[step] for rank in range(self.team.size)]

    def origin(self, heads: Heads, sequence: int = 0, row: int = 0, column: int = 0) -> Origin:
        """Where a call of some kv heads lies in the whole: a sequence of packed ones, a row and a column."""
        return Origin(sequence, heads[0] * self.group, row, column)

    # Calls of one GPU

    def _sizes(self, kv_heads: int) -> tuple[int, int, int, int]:
        return kv_heads * self.group, kv_heads, self.given.head_dim, self.given.head_dim_v

    def dense_call(self, seqlen_q: int, seqlen_k: int, kv_heads: int) -> Call:
        """Of rows that are the last ones of so many keys, or see all of them."""
        key = seqlen_q, seqlen_k, kv_heads
        if key not in self._calls:
            rest = self._sizes(kv_heads), self.given.dtype, self.device, False, self.spec
            self._calls[key] = shaped_call((key[:2],) * self.given.batch, *rest)
        return self._calls[key]

    def whole_call(self, kv_heads: int) -> Call:
        """Of all rows of all sequences."""
        if not self.given.packed:
            return self.dense_call(self.given.lengths[0], self.given.lengths[0], kv_heads)
        lengths = tuple((n, n) for n in self.given.lengths)
        return shaped_call(lengths, self._sizes(kv_heads), self.given.dtype, self.device, True, self.spec)

    def cut_of(self, sequence: int, kv_heads: int) -> CutSequence:
        """The segments of a sequence, as one GPU would run them."""
        length = self.given.lengths[sequence]
        call = self.dense_call(length, length, kv_heads)
        (part,) = call.parts
        assert part.cut is not None
        return part.cut

    # Moving rows

    def q_heads(self, step: int | None = None) -> list[Heads]:
        """The q heads of each worker: all of them, or those of a step."""
        of_kv = [work.heads for work in self.work] if step is None else self.of_step(step)
        return [(first * self.group, last * self.group) for first, last in of_kv]

    def move(
        self, legs: Sequence[Leg], meeting: Meeting | None = None, beside: Sequence[Move] = ()
    ) -> Moving | None:
        """Begin moves, behind a meeting. None: they have been made, through windows."""
        window = window_of(self.team, self.device) if self.through_windows else None
        rows = 0 if window is None else (window.room - _PADDING) // max(1, sum(leg.row_bytes for leg in legs))
        if window is None or not rows:
            moves = [move for leg in legs for move in leg.moves()]
            return Moving(self.team, [*moves, *beside], self.device, meeting)
        assert not beside, "ranks that have all rows have no sums for others"
        if meeting is not None:
            meeting.end()
        starts = range(0, self.layout.local_rows, rows)
        write(window, ([move for leg in legs for move in leg.moves(n, n + rows)] for n in starts))
        return None

    def rows_in(self, x: Tensor) -> tuple[Tensor, list[Leg]]:
        """Of a tensor like q: the rows that this rank works on, with its heads, and what fills them."""
        if self.in_place:
            return x, []
        heads = self.q_heads()
        first, last = heads[self.team.rank]
        flat = x.new_empty((x.shape[0], _total(self.rows), last - first, x.shape[3]))
        return flat, [Leg(x, flat, self._q_ways.use(), heads, True)]

    def home(self, like: Tensor) -> Tensor:
        """Room for the rows that lie on this rank, with all heads, of a tensor like out or like lse."""
        rows, heads = self.layout.local_rows, self.given.heads
        batch, *_, columns = like.shape
        return like.new_empty((batch, heads, rows) if like.ndim == 3 else (batch, rows, heads, columns))

    def rows_out(self, flat: Tensor, x: Tensor, step: int | None = None) -> Leg:
        """Rows like out, or of lse, to where they lie in x; of all heads, or those of a step."""
        return Leg(x, flat, self._q_ways.use(), self.q_heads(step), False)

    def begin_keys(
        self,
        k: Tensor,
        v: Tensor,
        step: int,
        beside: Sequence[Leg] = (),
        meeting: Meeting | None = None,
    ) -> tuple[Moving | None, Tensor, Tensor]:
        """Begin to bring the keys of a step, and other rows beside them, behind a meeting: (:meth:`move`, k,
        v)."""
        heads, mine = self.of_step(step), self.keys[self.team.rank]
        first, last = heads[self.team.rank]
        flat, legs = [], list(beside)
        for x in (k, v):
            flat.append(x.new_empty((x.shape[0], _total(mine), last - first, x.shape[3])))
            legs.append(Leg(x, flat[-1], self._k_ways.use(), heads, True))
        return self.move(legs, meeting), flat[0], flat[1]

    def rows_of_keys(self, *tensors: Tensor) -> list[Tensor]:
        """What stands beside each key, (batch, local rows), of all keys that this rank needs."""
        mine, everywhere = self.keys[self.team.rank], [(0, 1)] * self.team.size
        flat, legs = [], []
        for x in tensors:
            flat.append(x.new_empty((x.shape[0], 1, _total(mine))))
            legs.append(Leg(x[:, None], flat[-1], self._k_ways.use(), everywhere, True))
        finish(self.move(legs))
        return [x[:, 0] for x in flat]

    def keys_out(self, flat: Tensor, x: Tensor, step: int) -> Leg:
        """Rows like k, of sequences that their worker has whole, to where they lie in x."""
        return Leg(x, flat, self._home_ways.use(), self.of_step(step), False)


def finish(moving: Moving | None) -> None:
    """Wait for what :meth:`Shared.move` has begun."""
    if moving is not None:
        moving.end()


class _Way(NamedTuple):
    """Rows that go from an owner to a worker, or back: where they are in the tensors of both, as slices or as
    indices on the device."""

    owner: int
    worker: int
    size: int
    local: slice | Tensor
    at: slice | Tensor

    def some(self, first: int, last: int) -> _Way:
        """Of these rows, those from ``first`` on, up to ``last``."""
        local, at = (
            x[first:last] if isinstance(x, Tensor) else slice(x.start + first, x.start + last)
            for x in (self.local, self.at)
        )
        return self._replace(size=last - first, local=local, at=at)


class _Ways(NamedTuple):
    """Ways, and their indices on a GPU, if they have some."""

    ways: list[_Way]
    upload: Upload | None

    def use(self) -> list[_Way]:
        """The ways, for work that is next on the current stream."""
        if self.upload is not None:
            self.upload.use()
        return self.ways


class Leg(NamedTuple):
    """Rows that go from where they lie to their workers, or back.

    Attributes:
        x: as they lie, with all heads: (batch, local rows, heads, columns); lse (batch, heads, local rows).
        flat: of this rank as a worker, with its rows and heads.
        ways: which rows.
        heads: of x, those of each worker.
        out: to the workers, not back.
    """

    x: Tensor
    flat: Tensor
    ways: Sequence[_Way]
    heads: Sequence[Heads]
    out: bool

    @property
    def row_bytes(self) -> int:
        """Of a row, with the heads of the worker that has the most."""
        count = max(last - first for first, last in self.heads)
        columns = 1 if self.x.ndim == 3 else self.x.shape[3]
        return self.x.shape[0] * count * columns * self.x.element_size()

    def moves(self, first: int = 0, last: int = sys.maxsize) -> list[Move]:
        """Those of rows from ``first`` on, up to ``last``, counted between each owner and each worker."""
        found = []
        before: dict[tuple[int, int], int] = {}
        for way in self.ways:
            begin = before.get(way[:2], 0)
            before[way[:2]] = begin + way.size
            lower, upper = max(first - begin, 0), min(last - begin, way.size)
            if lower < upper:
                found.append(self._move(way.some(lower, upper)))
        return found

    def _move(self, way: _Way) -> Move:
        mine = slice(*self.heads[way.worker])
        count = mine.stop - mine.start
        if self.x.ndim == 3:
            there, here = _Part(self.x, (_ALL, mine, way.local)), _Part(self.flat, (_ALL, _ALL, way.at))
            shape: tuple[int, ...] = (self.x.shape[0], count, way.size)
        else:
            there, here = _Part(self.x, (_ALL, way.local, mine)), _Part(self.flat, (_ALL, way.at))
            shape = (self.x.shape[0], way.size, count, self.x.shape[3])
        ends = (way.owner, way.worker) if self.out else (way.worker, way.owner)
        source, target = (there, here) if self.out else (here, there)
        return Move(*ends, shape, self.x.dtype, source.take, target.put)


class _Part(NamedTuple):
    """A part of a tensor, looked at when it is needed."""

    x: Tensor
    at: tuple[slice | Tensor, ...]

    def take(self) -> Tensor:
        return self.x[self.at]

    def put(self, value: Tensor) -> None:
        if all(isinstance(at, slice) for at in self.at):
            copy_rows(self.x[self.at], value)
        else:
            self.x[self.at] = value

"""Gradients on their way to the ranks where rows and keys lie, and how dK and dV are finished there."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..backends.base import as_current
from ..ops.segments import CutSequence
from ..schedule.sharing import Rows
from .exchange import Move
from .shared import Heads, Shared, finish

__all__ = ["Leaving", "Made"]


class Made(NamedTuple):
    """What a rank made of a step.

    Attributes:
        dq: of its rows.
        dsink: of its heads, None without a sink.
        dk, dv: of its keys; only those of sequences that it has whole mean something.
        sums: of the segments of other sequences, by (sequence, number of the segment).
    """

    dq: Tensor
    dsink: Tensor | None
    dk: Tensor
    dv: Tensor
    sums: dict[tuple[int, int], Tensor]


class Leaving:
    """Gradients of a step on their way to the ranks where rows and keys lie; :meth:`end` finishes dK and dV.

    Args:
        shared: the call.
        step: which heads.
        made: what this rank made.
        grads: dq, dk and dv of what lies on this rank; they are written. dq is None where it need not move.
    """

    def __init__(
        self, shared: Shared, step: int, made: Made, grads: tuple[Tensor | None, Tensor, Tensor]
    ) -> None:
        self._shared, self._step, self._made, self._grads = shared, step, made, grads[1:]
        self._arrived: dict[tuple[int, Heads], list[tuple[int, int, Tensor]]] = {}
        legs = [] if grads[0] is None else [shared.rows_out(made.dq, grads[0], step)]
        legs += [shared.keys_out(flat, x, step) for flat, x in zip((made.dk, made.dv), self._grads)]
        self._moving = shared.move(legs, beside=self._sums())

    def _sums(self) -> list[Move]:
        """Moves of the segments' sums, to every chunk of keys that they have a part in."""
        shared, moves = self._shared, []
        tile_n = shared.cut.tile_n
        for worker, heads in enumerate(shared.of_step(self._step)):
            for sequence, index in shared.segments[worker]:
                cut = shared.cut_of(sequence, heads[1] - heads[0])
                first, last = cut.tiles_of(index)
                for owner, chunks in enumerate(shared.layout.chunks):
                    for number, chunk in enumerate(chunks):
                        begin = max(first, chunk.rows.first // tile_n)
                        end = min(last, -(-chunk.rows.last // tile_n))
                        if chunk.rows.sequence == sequence and begin < end:
                            part = _Sums(self, (sequence, index), slice(begin - first, end - first))
                            goal = _Arriving(self, (number, heads), index, begin)
                            shape = (end - begin, *_shape(cut))
                            moves.append(Move(worker, owner, shape, shared.wide, part.take, goal.put))
        return moves

    def end(self) -> None:
        """Wait, and write dK and dV."""
        finish(self._moving)
        shared, rank = self._shared, self._shared.team.rank
        for (number, heads), parts in self._arrived.items():
            rows, offset = shared.layout.chunks[rank][number]
            with as_current(shared.device):
                self._finish(rows, offset, heads, sorted(parts, key=lambda part: part[0]))
        # Moves know this object, and it knows them: without this their memory would wait for the collector.
        self._moving = None
        self._arrived.clear()

    def _finish(self, rows: Rows, offset: int, heads: Heads, parts: list[tuple[int, int, Tensor]]) -> None:
        """Add up the sums of all segments, in ascending order, and make dK and dV of a chunk of keys."""
        cut = self._shared.cut_of(rows.sequence, heads[1] - heads[0])
        tile_n = self._shared.cut.tile_n
        first, last = rows.first // tile_n, -(-rows.last // tile_n)
        total = cut.new_sums(self._grads[0], last - first)
        for _, begin, part in parts:
            cut.backend.add_sums(total[begin - first : begin - first + len(part)], part)
        scores = self._shared.scores
        at = slice(None), slice(offset, offset + rows.last - rows.first), slice(*heads)
        lead = rows.first - first * tile_n
        targets = [x[at] for x in self._grads]
        if not lead:
            cut.backend.finish_keys(total, scores, *targets)
            return
        whole = [x.new_empty((x.shape[0], lead + x.shape[1], *x.shape[2:])) for x in targets]
        cut.backend.finish_keys(total, scores, *whole)
        for target, x in zip(targets, whole):
            target.copy_(x[:, lead:])


class _Sums(NamedTuple):
    """Some kv tiles of the sums of a segment, on the rank that made them."""

    leaving: Leaving
    segment: tuple[int, int]
    tiles: slice

    def take(self) -> Tensor:
        return self.leaving._made.sums[self.segment][self.tiles]


class _Arriving(NamedTuple):
    """Where sums of a segment arrive. goal: number of the chunk of keys, and the heads."""

    leaving: Leaving
    goal: tuple[int, Heads]
    segment: int
    first_tile: int

    def put(self, value: Tensor) -> None:
        self.leaving._arrived.setdefault(self.goal, []).append((self.segment, self.first_tile, value))


def _shape(cut: CutSequence) -> tuple[int, ...]:
    """Of sums, per kv tile."""
    problem = cut.problem
    return len(problem.sequences), problem.kv_heads, *cut.backend.key_sums(problem, cut.head_groups)

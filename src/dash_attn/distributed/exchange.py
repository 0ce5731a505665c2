"""Moving rows between ranks: by an all-to-all, or through windows. It moves bytes and adds nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .meeting import Meeting
from .team import Team, errors_of
from .windows import Window

__all__ = ["Move", "Moving", "copy_rows", "of_first_rank", "write"]


def of_first_rank(team: Team, x: Tensor) -> Tensor:
    """What rank 0 of the group has in place of x. On a GPU the host does not wait."""
    found = x.clone()
    if team.size > 1:
        with errors_of(team):
            dist.broadcast(found, group=team.group, group_src=0)
    return found


_STEP = 16
"""Bytes: where a tensor begins in a buffer is a multiple of so many, whatever its dtype."""


class Move(NamedTuple):
    """A tensor that goes from one rank to another.

    Attributes:
        source, target: ranks.
        shape, dtype: of the tensor.
        take: makes it, on the source.
        put: takes it, on the target.
    """

    source: int
    target: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    take: Callable[[], Tensor]
    put: Callable[[Tensor], None]


class Moving:
    """Moves that have begun; :meth:`end` waits for them.

    Args:
        team: all its ranks begin the same moves, in the same order.
        moves: those of this rank, and perhaps others. Between two ranks they have one order on both; those
            within a rank are copies.
        device: of the tensors.
        meeting: of the ranks, which ends before anything moves.
    """

    def __init__(
        self, team: Team, moves: Sequence[Move], device: torch.device, meeting: Meeting | None = None
    ) -> None:
        self._team = team
        out, self._into, within = _sorted(moves, team.rank)
        self._work = None
        if team.size > 1:
            sizes_out = _sizes(out, "target", team.size)
            sizes_in = _sizes(self._into, "source", team.size)
            self._received, self._sent = (
                torch.empty(sum(sizes), dtype=torch.uint8, device=device) for sizes in (sizes_in, sizes_out)
            )
            for move, place in _places(out, self._sent):
                copy_rows(place, move.take())
            if meeting is not None:
                meeting.end()
            with errors_of(team):
                self._work = dist.all_to_all_single(
                    self._received, self._sent, sizes_in, sizes_out, group=team.group, async_op=True
                )
        for move in within:
            move.put(move.take())

    def end(self) -> None:
        """Wait, and put what has come."""
        if self._work is None:
            return
        with errors_of(self._team):
            self._work.wait()
        for move, place in _places(self._into, self._received):
            move.put(place)
        self._into.clear()
        self._work = None  # it holds the buffers, too
        del self._sent, self._received


def write(window: Window, turns: Iterable[Sequence[Move]]) -> None:
    """Make moves through windows: rows are written to where another rank reads them, without packing.

    Args:
        window: of the group. All its ranks are here.
        turns: moves as for :class:`Moving`, one turn after the other. All ranks have as many. What goes from
            one rank to another in a turn has room in a window.
    """
    try:
        for moves in turns:
            _turn(window, moves)
    finally:  # after an error, too: nothing that is read or written beside may be used for something else
        window.join()


def _turn(window: Window, moves: Sequence[Move]) -> None:
    out, into, within = _sorted(moves, window.team.rank)
    theirs, mine = window.turn()
    with window.beside():
        for move in within:
            move.put(move.take())
    for target, place in theirs.items():
        for move, part in _places([move for move in out if move.target == target], place):
            copy_rows(part, move.take())
    window.join()  # with what came in the turn before: its place is free for the next one
    with errors_of(window.team):
        window.barrier()
    with window.beside():
        for source, place in mine.items():
            for move, part in _places([move for move in into if move.source == source], place):
                move.put(part)


def _sorted(moves: Sequence[Move], rank: int) -> tuple[list[Move], list[Move], list[Move]]:
    """Moves from a rank to others, by target; from others to it, by source; and within it."""
    out = [move for move in moves if move.source == rank != move.target]
    into = [move for move in moves if move.target == rank != move.source]
    within = [move for move in moves if move.source == rank == move.target]
    return (
        sorted(out, key=lambda move: move.target),
        sorted(into, key=lambda move: move.source),
        within,
    )


_UNIT = torch.complex128  # nothing is computed with it


def copy_rows(target: Tensor, source: Tensor) -> None:
    """Copy between tensors of one shape and dtype: by 16 bytes where both are made of such units. For rows of
    some of the heads PyTorch's copy is twice as fast so on a GPU."""
    if _of_units(target) and _of_units(source):
        target, source = target.view(_UNIT), source.view(_UNIT)
    target.copy_(source)


def _of_units(x: Tensor) -> bool:
    size, unit = x.element_size(), _UNIT.itemsize
    steps = *x.stride()[:-1], x.storage_offset(), x.shape[-1]
    return x.stride(-1) == 1 and not x.data_ptr() % unit and not any(n * size % unit for n in steps)


def _size(move: Move) -> int:
    """Bytes of the tensor."""
    return int(torch.Size(move.shape).numel()) * move.dtype.itemsize


def _room(move: Move) -> int:
    """Bytes that it has in a buffer."""
    return -(-_size(move) // _STEP) * _STEP


def _places(moves: Sequence[Move], buffer: Tensor) -> Iterator[tuple[Move, Tensor]]:
    """Where each tensor is in a buffer that has them one after the other."""
    at = 0
    for move in moves:
        yield move, buffer[at : at + _size(move)].view(move.dtype).view(move.shape)
        at += _room(move)


def _sizes(moves: Sequence[Move], end: str, ranks: int) -> list[int]:
    found = [0] * ranks
    for move in moves:
        found[getattr(move, end)] += _room(move)
    return found

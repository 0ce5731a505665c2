"""Moving rows between ranks: one all-to-all per exchange. It moves bytes and adds nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CommunicationError, InputError
from .notes import Notes, message_of, notes_of

__all__ = [
    "Meeting", "Move", "Moving", "Step", "Team", "backing_out", "copy_rows", "errors_of", "exchanging",
    "of_first_rank", "team_of", "usable_notes",
]  # fmt: skip


class Team(NamedTuple):
    """A process group, with what this process is in it.

    Attributes:
        known: the group. What is kept for later calls keeps no group that is destroyed.
        rank: of this process.
        size: how many ranks there are.
    """

    known: ref[Any]
    rank: int
    size: int

    @property
    def group(self) -> Any:
        """The process group.

        Raises:
            CommunicationError: it is gone.
        """
        group = self.known()
        if group is None:  # to torch.distributed this would be the group of all processes
            raise CommunicationError(f"rank {self.rank} of {self.size}: the process group was destroyed")
        return group

    @property
    def notes(self) -> Notes:
        """What its ranks tell each other."""
        return notes_of(self.group, self.rank, self.size)


def team_of(group: Any) -> Team:
    """A process group, or a DeviceMesh of one dimension, or None for all processes.

    Raises:
        InputError: torch.distributed is not initialised, this process is not in the group, or the mesh has
            several dimensions.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise InputError("torch.distributed is not initialised: call torch.distributed.init_process_group")
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise InputError(
                f"group is a DeviceMesh of {group.ndim} dimensions: give one of them, mesh['cp'] for instance"
            )
        group = dist.GroupMember.NON_GROUP_MEMBER if group.get_coordinate() is None else group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives to those outside
        raise InputError("this process is not in the group")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise InputError(f"group must be a process group or a DeviceMesh, got {type(group).__name__}")
    try:
        rank = dist.get_rank(group)
    except ValueError as error:
        raise InputError(f"the process group was destroyed: {error}") from error
    if rank < 0:
        raise InputError("this process is not in the group")
    return Team(ref(dist.group.WORLD if group is None else group), rank, dist.get_world_size(group))


class Step(NamedTuple):
    """Where a rank is.

    Attributes:
        call: a number that counts the calls of the group.
        checksum: 32 bits, of what the call was given.
        backward: whether this is its backward.
    """

    call: int
    checksum: int
    backward: bool = False

    @property
    def tag(self) -> int:
        """The step in 63 bits: the checksum, and the number of the pass."""
        return self.checksum * _PASSES + (2 * self.call + self.backward) % _PASSES


_PASSES = 1 << 31
"""So many passes have numbers of their own: forwards even ones, backwards odd ones."""

_OUT_OF_STEP = (
    "dash_attn.distributed: the ranks of a group are at different calls: backwards ran in another order, one "
    "was left out, a refused call was skipped, or lengths or other arguments differ"
)


class OutOfStep(CommunicationError):
    """Ranks are not at one step, and nothing has moved."""


class Meeting:
    """Are all ranks at one step? Asked when this is made; :meth:`end`, before anything moves, has the answer.
    What a GPU is given between the two runs meanwhile.

    Args:
        team: all its ranks meet.
        at: where this one is.
        device: of what will move.
    """

    def __init__(self, team: Team, at: Step, device: torch.device) -> None:
        self._team, self.at = team, at
        self._work: Any = None
        if team.size == 1:
            return
        usable_notes(team)
        self._mine = torch.full((team.size,), at.tag, dtype=torch.int64, device=device)
        self._every = torch.empty_like(self._mine)
        with errors_of(team):
            self._work = dist.all_to_all_single(self._every, self._mine, group=team.group, async_op=True)

    def end(self) -> None:
        """On a GPU the host does not wait. Nothing happens the second time.

        Raises:
            OutOfStep: the ranks are not at one step. On a GPU no kernel behind this runs then, and
                PyTorch's next synchronisation raises.
        """
        team, work, self._work = self._team, self._work, None
        if work is None:
            return
        with errors_of(team):
            work.wait()
        if self._every.is_cuda:
            torch._assert_async((self._every == self._mine).all(), _OUT_OF_STEP)
            return
        for rank, tag in enumerate(self._every.tolist()):
            if tag != self.at.tag:
                raise OutOfStep(
                    f"rank {team.rank} of {team.size} is in {_named(self.at.tag)}, rank {rank} in "
                    f"{_named(tag)}: all ranks make the same calls, and run their backwards in the same order"
                )


def _named(tag: int) -> str:
    checksum, number = divmod(tag, _PASSES)
    way = "backward" if number & 1 else "forward"
    return f"the {way} of call {number >> 1} (checksum of arguments and lengths {checksum:08x})"


def usable_notes(team: Team) -> Notes:
    """The notes of a group, whose ranks are where they should be as far as this one knows.

    Raises:
        CommunicationError: an earlier call of the group has failed on this rank after it had begun.
    """
    notes = team.notes
    if notes.broken:
        raise CommunicationError(
            f"rank {team.rank} of {team.size}: an earlier call of this group has failed here "
            f"({notes.broken}), and other ranks may still be in it: make a new group"
        )
    return notes


@contextmanager
def exchanging(team: Team) -> Iterator[None]:
    """Inside, this rank has a part in what others wait for. They are told of an error, and no later call of
    this rank is taken for the one that it has left."""
    try:
        yield
    except OutOfStep:
        raise
    except BaseException as error:  # after Ctrl-C, too
        _leave(team, error, ends=True)
        raise


@contextmanager
def backing_out(team: Team) -> Iterator[None]:
    """Inside, before a backward has met others, an error is told to them."""
    try:
        yield
    except BaseException as error:
        _leave(team, error, ends=False)
        raise


def _leave(team: Team, error: BaseException, *, ends: bool) -> None:
    """Tell the others of an error, once. ``ends``: this rank does not use the group again."""
    if team.size == 1:
        return
    with suppress(RuntimeError):  # the error is that of this rank, also without a store
        notes = team.notes
        if notes.broken:
            return
        why = f"{type(error).__name__}: {message_of(error)}"
        if ends:
            notes.broken = why
        notes.give_up(why)


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
        out, self._into, within = [], [], []  # type: list[Move], list[Move], list[Move]
        for move in moves:
            if move.source == move.target == team.rank:
                within.append(move)
            elif move.source == team.rank:
                out.append(move)
            elif move.target == team.rank:
                self._into.append(move)
        out.sort(key=lambda move: move.target)
        self._into.sort(key=lambda move: move.source)
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


class errors_of:
    """Errors of the communication, with the rank and the size of its group, and why others are not there if
    they have said so."""

    def __init__(self, team: Team) -> None:
        self._team = team

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, _: Any) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, CommunicationError):
            team = self._team
            why = ""
            with suppress(RuntimeError):  # the store may have ended with a rank
                notes = team.notes
                notes.broken = "an exchange failed"
                why = notes.why_not_here()
            said = f"rank {team.rank} of {team.size}: exchange failed: {why or error}"
            raise CommunicationError(said) from error

"""A process group, what this process is in it, and errors of which its ranks tell each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from weakref import ref

import torch.distributed as dist

from ..errors import CommunicationError, InputError
from .notes import Notes, message_of, notes_of

__all__ = ["OutOfStep", "Team", "backing_out", "errors_of", "exchanging", "team_of", "usable_notes"]


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


class OutOfStep(CommunicationError):
    """Ranks are not at one step, and nothing has moved."""


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

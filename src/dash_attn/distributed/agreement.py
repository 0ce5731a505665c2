"""Whether all ranks of a group have arguments that go together: asked the first time that they are seen."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..errors import CommunicationError
from .exchange import Team
from .notes import notes_of

__all__ = ["agree", "refuse"]


def refuse(team: Team, error: Exception) -> None:
    """Tell the other ranks that this one has refused its arguments. Nobody is waited for: raise it then."""
    if team.size == 1:
        return
    with suppress(RuntimeError):  # the error is that of this rank, also without a store
        notes_of(team.group, team.rank, team.size).refuse(f"{error}")


def agree(team: Team, signature: tuple[Any, ...], numbers: Callable[[], tuple[Any, ...]]) -> None:
    """Return if all ranks have the same signature; else raise on every rank that is asked.

    Args:
        team: all its ranks call this, or :func:`refuse`.
        signature: names and values of what must be equal, of things whose ``str`` says it.
        numbers: names and values of what is new in every call. They are compared when the signature is.

    Raises:
        CommunicationError: signatures differ, another rank has refused its arguments, or not all ranks ask.
    """
    if team.size == 1:
        return
    notes = notes_of(team.group, team.rank, team.size)
    if signature not in notes.agreed:
        said = [f"{name}={value}" for name, value in (*signature, *numbers())]
        try:
            why = notes.compare(said)
        except (RuntimeError, TimeoutError) as error:
            raise CommunicationError(
                f"rank {team.rank} of {team.size}: the arguments of a call that is new here could not be "
                f"compared: {error}. Other ranks have ended, or make other calls"
            ) from error
        if why:
            raise CommunicationError(why)
        notes.agreed.add(signature)
    notes.last = signature

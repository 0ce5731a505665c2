"""Whether all ranks of a group have arguments that go together: asked the first time that they are seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from zlib import crc32

from ..errors import CommunicationError
from .meeting import Step
from .notes import message_of
from .team import Team, usable_notes

__all__ = ["agree", "telling"]


@contextmanager
def telling(team: Team) -> Iterator[None]:
    """Inside, an error that comes before the ranks have met is told to the others, and nobody is waited for.

    Args:
        team: all its ranks come here, or to :func:`agree`.
    """
    if team.size == 1:
        yield
        return
    notes = team.notes
    before = notes.calls
    try:
        yield
    except BaseException as error:  # after Ctrl-C, too
        if notes.calls == before and not notes.broken:
            notes.calls += 1
            with suppress(RuntimeError):  # the error is that of this rank, also without a store
                notes.refuse(message_of(error))
        raise


def agree(
    team: Team,
    signature: tuple[tuple[str, Any], ...],
    lengths: tuple[int, ...],
    beside: Callable[[], tuple[tuple[str, Any], ...]] = tuple,
    keep: bool = True,
) -> Step:
    """Return if all ranks have the same signature; else raise on every rank that is asked.

    Args:
        team: all its ranks call this, or raise in :func:`telling`.
        signature: names and values of what must be equal, of things whose ``str`` says it.
        lengths: of sequences. They may be new in every call, and are compared when the signature is.
        beside: gives names and values of what else may be new, and is compared then.
        keep: whether the signature need not be compared again. Only of calls in which ranks meet.

    Returns:
        Which call of the group this is. All ranks have the same one if they have made the same calls.

    Raises:
        CommunicationError: signatures differ, another rank has refused its arguments, or not all ranks ask.
    """
    if team.size == 1:
        return Step(0, 0)
    notes = usable_notes(team)
    notes.calls += 1
    number = notes.calls
    known = notes.agreed.get(signature)
    if known is None:
        said = [
            (name, str(value))
            for name, value in (*signature, *beside(), ("lengths of sequences", _short(lengths)))
        ]
        try:
            why = notes.compare(said)
        except (RuntimeError, TimeoutError) as error:
            raise CommunicationError(
                f"rank {team.rank} of {team.size}: the arguments of a call that is new here could not be "
                f"compared: {error}. Other ranks have ended, or make other calls"
            ) from error
        if why:
            raise CommunicationError(why)
        known = crc32(str(signature).encode())
        if keep:
            notes.agreed[signature] = known
    notes.last = signature
    return Step(number, crc32(str(lengths).encode(), known))


_LONGEST_SAID = 200
"""Characters of lengths that ranks compare; of longer ones these and a checksum."""


def _short(lengths: tuple[int, ...]) -> str:
    said = str(lengths)
    if len(said) <= _LONGEST_SAID:
        return said
    return f"{said[:_LONGEST_SAID]}... ({len(lengths)}, checksum {crc32(said.encode()):08x})"

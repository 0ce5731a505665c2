"""What the arguments of both directions have in common. No cutlass here: launchers import it."""

from __future__ import annotations

from typing import Any, NamedTuple


def regrouped(flat: tuple[Any, ...], *kinds: Any) -> list[Any]:
    """The arguments of a compiled function, one named tuple after the other, by name again."""
    found, first = [], 0
    for kind in kinds:
        last = first + len(kind._fields)
        found.append(kind(*flat[first:last]))
        first = last
    return found


class Copy(NamedTuple):
    """An operation of the copy engine."""

    atom: Any
    tensor: Any  # in global memory, as `plan_view.tma_rows` says

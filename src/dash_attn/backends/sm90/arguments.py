"""What the arguments of both directions have in common. No cutlass here: launchers import it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .places import Place, Sizes


@dataclass(frozen=True)
class Given:
    """The arguments of a compiled function, in their order.

    Attributes:
        tensors: those that are passed as tensors; the plan table and the buffer of the call are among them.
        places: matrices, which are passed as numbers.
        lse: the address of the forward's LSE, contiguous.
        sizes: extents of all matrices.
        parts: of the buffer: address, a multiple of 128 bytes, and fp32 words.
        launch: the numbers of the call.
        cap: of variants with a softcap, see `Cap`.
    """

    tensors: dict[str, Any]
    places: dict[str, Place]
    lse: Any
    sizes: Sizes
    parts: list[tuple[Any, Any]]
    launch: Any
    cap: Sequence[Any]

    @classmethod
    def of(
        cls,
        arguments: Sequence[Any],
        tensors: Sequence[str],
        matrices: Sequence[str],
        parts: int,
        launch: Any,
    ) -> Given:
        """The arguments by name again. ``tensors`` and ``matrices`` are names, ``parts`` is a number, and
        ``launch`` holds the numbers of a call."""
        flat = iter(arguments)

        def take(number: int) -> list[Any]:
            return [next(flat) for _ in range(number)]

        found = cls(
            dict(zip(tensors, take(len(tensors)))),
            {name: Place(*take(len(Place._fields))) for name in matrices},
            next(flat),
            Sizes(*take(len(Sizes._fields))),
            list(zip(take(parts), take(parts))),
            launch(*take(len(launch._fields))),
            tuple(flat),
        )
        assert len(found.cap) in (0, 2)  # no more arguments than names
        return found


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

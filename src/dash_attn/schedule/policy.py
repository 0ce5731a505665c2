"""What a policy is: it chooses visits and summation orders, and nothing else. That is the numerics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ..errors import InputError
from ..problem import TileGrid
from .tickets import SummationGroup, Visit

__all__ = ["Numerics", "Policy", "printed", "require_integers", "sweep"]


def printed(choice: object, name: str) -> str:
    """A frozen dataclass of parameters by its name, such as "shift(ring=64)", without those that are None."""
    given = [f"{f.name}={v}" for f in fields(choice) if (v := getattr(choice, f.name)) is not None]  # type: ignore[arg-type]
    return f"{name}({', '.join(given)})" if given else name


def require_integers(choice: Any, least: int, *parameters: str) -> None:
    """Raise InputError unless these are integers >= ``least``, or None where that is the default."""
    for parameter in parameters:
        value = getattr(choice, parameter)
        if value is None and getattr(type(choice), parameter) is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{choice.name}: {parameter} must be an integer >= {least}, got {value!r}")


@dataclass(frozen=True)
class Numerics(ABC):
    """Base of what decides how a batch is summed. A frozen dataclass; its fields are its parameters."""

    name: ClassVar[str]

    def __str__(self) -> str:
        return printed(self, self.name)

    @abstractmethod
    def for_lengths(self, seqlen_q: int, seqlen_k: int) -> Policy:
        """The policy of one sequence: it may look at the lengths of that sequence alone."""


@dataclass(frozen=True)
class Policy(Numerics):
    """Base of all policies: the order of one head, from the tiles that its mask leaves."""

    def for_lengths(self, seqlen_q: int, seqlen_k: int) -> Policy:
        return self

    @property
    def by_head(self) -> bool:
        """Whether an item takes its q heads one after the other, each at all q tiles; else all at each."""
        return False

    def check(self, grid: TileGrid) -> None:
        """Raise UnsupportedMaskError if the policy does not cover this grid."""

    @abstractmethod
    def visits(self, grid: TileGrid) -> list[list[Visit]]:
        """For each kv tile, the q tiles its item visits, in order."""

    @abstractmethod
    def summation(self, grid: TileGrid) -> Sequence[SummationGroup]:
        """The summation order of every q tile."""


def sweep(grid: TileGrid, *, descending: bool = False) -> list[list[Visit]]:
    """Visits of items that go through their q tiles in one direction."""
    visits: list[list[Visit]] = []
    for first, last in zip(grid.q_first.tolist(), grid.q_last.tolist(), strict=True):
        if last < first:
            visits.append([])
        else:
            visits.append([(last, -1, last - first + 1) if descending else (first, 1, last - first + 1)])
    return visits

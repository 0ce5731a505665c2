"""A schedule: numerics and placement, with a name that can be logged and given back."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ..errors import ScheduleNameError
from .numerics import POLICIES
from .placement import PLACEMENTS, Placement, default_placement
from .policy import Numerics

__all__ = ["Schedule"]


class Schedule(NamedTuple):
    """What decides the bits, and what decides only the speed.

    Attributes:
        numerics: visits and summation orders.
        placement: the order in which workers claim items.

    >>> chosen = Schedule.parse("descending + lpt")
    >>> str(chosen), Schedule.parse(str(chosen)) == chosen, str(Schedule.parse("shift(ring=16) + rings"))
    ('descending + lpt', True, 'shift(ring=16)')
    """

    numerics: Numerics
    placement: Placement

    @classmethod
    def of(cls, numerics: Numerics, placement: str | Placement = "policy") -> Schedule:
        """Numerics with a placement, or a placement's name; "policy" is the one that suits the numerics.

        Raises:
            ScheduleNameError: there is no such placement.
            InputError: a parameter of it is out of range.
        """
        if isinstance(placement, Placement):
            return cls(numerics, placement)
        if not isinstance(placement, str):
            raise ScheduleNameError(f"a placement is a name or a Placement, got {placement!r:.40}")
        if placement == "policy":
            return cls(numerics, default_placement(numerics))
        name, parameters = _name_and_parameters(placement)
        try:
            return cls(numerics, PLACEMENTS[name](**parameters))
        except (KeyError, TypeError) as error:
            raise ScheduleNameError(
                f"unknown placement {placement!r}; known: policy, {', '.join(PLACEMENTS)}"
            ) from error

    @classmethod
    def parse(cls, name: str) -> Schedule:
        """The schedule that prints as this name, such as "spt", "shift(ring=64)" or "descending + lpt".

        Raises:
            ScheduleNameError: there is none.
            InputError: a parameter is out of range.
        """
        if not isinstance(name, str):
            raise ScheduleNameError(f"a schedule's name must be a string, got {name!r:.80}")
        if name == "auto":
            raise ScheduleNameError("auto is no schedule: choose_policy(problem) says which one it takes")
        policy, plus, placement = name.partition(" + ")
        kind, parameters = _name_and_parameters(policy)
        try:
            numerics = POLICIES[kind](**parameters)
        except (KeyError, TypeError) as error:
            raise ScheduleNameError(
                f"unknown policy {name!r}; known: auto, {', '.join(POLICIES)}, those with parameters such "
                "as shift(ring=64), and those with a placement such as descending + lpt"
            ) from error
        return cls.of(numerics, placement if plus else "policy")

    def __str__(self) -> str:
        return _name(self)


@lru_cache(256)
def _name(schedule: Schedule) -> str:
    if schedule.placement == default_placement(schedule.numerics):
        return str(schedule.numerics)
    return f"{schedule.numerics} + {schedule.placement}"


def _name_and_parameters(text: str) -> tuple[str, dict[str, int]]:
    """The parts of "name(key=1, other=2)"; a name that fits nothing where it is not of that form."""
    name, bracket, fields = text.partition("(")
    if not bracket:
        return name, {}
    try:
        pairs = [field.split("=") for field in fields.removesuffix(")").split(", ")]
        found = {key: int(value) for key, value in pairs}
    except ValueError:
        return text, {}
    whole = f"{name}({', '.join(f'{key}={value}' for key, value in found.items())})"
    return (name, found) if whole == text else (text, {})

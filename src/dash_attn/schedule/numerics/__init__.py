"""The policies, by the names the command line knows."""

from __future__ import annotations

from ..policy import Numerics
from .by_length import ByLength
from .descending import Descending
from .fa3 import FA3
from .shift import Shift
from .spt import SPT
from .symmetric_shift import SymmetricShift

__all__ = [
    "FA3",
    "POLICIES",
    "SPT",
    "ByLength",
    "Descending",
    "Shift",
    "SymmetricShift",
    "policy_by_name",
]

POLICIES: dict[str, type[Numerics]] = {
    policy.name: policy for policy in (FA3, Descending, Shift, SymmetricShift, SPT, ByLength)
}


def policy_by_name(name: str, **parameters: int | None) -> Numerics:
    """The policy of this name.

    Raises:
        ValueError: there is none.
        TypeError: it has no such parameter.
        InputError: a parameter is out of range.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name](**parameters)

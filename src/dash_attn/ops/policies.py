"""Policies by the names that operators carry: operators take no Python objects."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import InputError, ScheduleNameError
from ..schedule import POLICIES, Numerics, Schedule
from ..schedule.placement import PLACEMENTS

__all__ = ["forget", "forget_with", "policy_key", "schedule_named"]

_OWN: dict[str, Numerics] = {}
"""Policies of users by their string. The built-in ones are made from it."""

_FORGET: list[Callable[[], None]] = []


def forget_with(clear: Callable[[], None]) -> None:
    """Call this when a name begins to mean another policy: what was made with the old one must go."""
    _FORGET.append(clear)


def forget() -> None:
    """Forget what was made of earlier calls, so that the next ones choose anew."""
    for clear in _FORGET:
        clear()


def policy_key(policy: str | Numerics | Schedule) -> str:
    """The name of a policy or schedule, so that :func:`schedule_named` finds it.

    Raises:
        InputError: an unknown name, neither a policy nor a schedule, a policy that cannot be hashed, or one
            that prints like another policy; a schedule whose placement is not a built-in one.
    """
    if isinstance(policy, str):
        if policy != "auto" and policy not in POLICIES:
            schedule_named(policy)
        return policy
    if isinstance(policy, Schedule):
        placement = policy.placement
        if PLACEMENTS.get(placement.name) is not type(placement):
            raise InputError(
                f"placement {placement!r} is none of the built-in ones, {', '.join(PLACEMENTS)}: give it to "
                "build_plan, and the plan to apply_plan"
            )
        policy_key(policy.numerics)
        return str(policy)
    if not isinstance(policy, Numerics):
        raise InputError(f"policy must be a name, a Policy or a Schedule, got {policy!r}")
    name = str(policy)
    if POLICIES.get(policy.name) is not type(policy):
        _remember(name, policy)
    return name


def schedule_named(name: str) -> Schedule:
    """The schedule that prints as this name, such as "spt", "shift(ring=64)" or "descending + lpt".

    Raises:
        InputError: there is none, or a parameter of it is out of range.
    """
    own, _, placement = name.partition(" + ")
    try:
        if own in _OWN:
            return Schedule.of(_OWN[own], placement or "policy")
        return Schedule.parse(name)
    except ScheduleNameError as error:
        hint = "a Policy of your own is known once a call outside of torch.compile has used it"
        raise InputError(f"{error}; {hint}") from error


def _remember(name: str, policy: Numerics) -> None:
    """Keep a user's policy for the operator, which knows only its name."""
    try:
        hash(policy)
    except TypeError as error:
        raise InputError(f"policy {name} cannot be hashed, give it immutable fields") from error
    known = _OWN.get(name)
    if name.partition("(")[0] in POLICIES or (known and known != policy and not _redefined(known, policy)):
        raise InputError(f"policy {policy!r} prints as {name!r}, like another policy")
    if known != policy:
        _OWN[name] = policy
        forget()


def _redefined(old: Numerics, new: Numerics) -> bool:
    """Whether the class was defined again, as by running a notebook's cell twice."""
    before, after = type(old), type(new)
    same = (before.__module__, before.__qualname__) == (after.__module__, after.__qualname__)
    return same and before is not after

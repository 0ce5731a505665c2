"""From the shapes of a call to its plan, cached, and policies by the names that operators carry."""

from __future__ import annotations

from functools import lru_cache

import torch

from ..backends.base import backend_for
from ..errors import InputError, ProblemError
from ..problem import DTYPES, Mask, Problem
from ..schedule import POLICIES, Numerics, Plan, Policy, build_plan, choose_policy

__all__ = ["DTYPE_NAMES", "find_plan", "policy_key"]

_PLANS = 64
"""Plans kept for reuse; a model uses one for each of its attention shapes."""

DTYPE_NAMES = {getattr(torch, name): name for name in DTYPES}

_OWN_POLICIES: dict[str, Policy] = {}
"""Policies of users by their string. The built-in ones are made from it."""


def policy_key(policy: str | Policy) -> str:
    """The string by which an operator names a policy: operators take no Python objects.

    Raises:
        InputError: an unknown name, not a policy, a policy that cannot be hashed, or one that prints
            like another policy.
    """
    if isinstance(policy, str):
        if policy != "auto" and policy not in POLICIES:
            _policy(policy)
        return policy
    if not isinstance(policy, Policy):
        raise InputError(f"policy must be a name or a Policy, got {policy!r}")
    name = str(policy)
    if POLICIES.get(policy.name) is not type(policy):
        _remember(name, policy)
    return name


def _remember(name: str, policy: Policy) -> None:
    """Keep a user's policy for the operator, which knows only its name."""
    try:
        hash(policy)
    except TypeError as error:
        raise InputError(f"policy {name} cannot be hashed, give it immutable fields") from error
    known = _OWN_POLICIES.get(name)
    if name.partition("(")[0] in POLICIES or (known and known != policy and not _redefined(known, policy)):
        raise InputError(f"policy {policy!r} prints as {name!r}, like another policy")
    if known != policy:
        _OWN_POLICIES[name] = policy
        find_plan.cache_clear()
        _plan.cache_clear()


def _redefined(old: Policy, new: Policy) -> bool:
    """Whether the class was defined again, as by running a notebook's cell twice."""
    before, after = type(old), type(new)
    same = (before.__module__, before.__qualname__) == (after.__module__, after.__qualname__)
    return same and before is not after


def _policy(name: str) -> Numerics:
    """The policy that prints as this name, such as "spt" or "shift(ring=64)".

    Raises:
        InputError: there is none.
    """
    if name in _OWN_POLICIES:
        return _OWN_POLICIES[name]
    kind, _, fields = name.removesuffix(")").partition("(")
    try:
        pairs = (field.split("=") for field in fields.split(", ") if field)
        policy = POLICIES[kind](**{key: int(value) for key, value in pairs})
    except (KeyError, TypeError, ValueError):
        policy = None
    if policy is None or name not in (kind, str(policy)):
        raise InputError(
            f"unknown policy {name!r}; known: auto, {', '.join(POLICIES)}, those with parameters such as "
            "shift(ring=64), and a Policy of your own that a call outside of torch.compile has used"
        )
    return policy


@lru_cache(maxsize=_PLANS)
def find_plan(
    device: torch.device,
    packed: bool,
    dtype: torch.dtype,
    seqlens_q: tuple[int, ...],
    seqlens_k: tuple[int, ...],
    heads: int,
    kv_heads: int,
    head_dim: int,
    left: int,
    right: int,
    policy: str,
) -> Plan:
    """The plan of a call; ``left`` and ``right`` are -1 where unbounded, ``policy`` is a :func:`policy_key`.

    Raises:
        InputError: the device's backend does not cover it, or a size is out of range.
        UnsupportedMaskError: the policy does not cover the mask.
    """
    try:
        problem = Problem(
            tuple(zip(seqlens_q, seqlens_k)),
            heads,
            kv_heads,
            head_dim,
            Mask(None if left < 0 else left, None if right < 0 else right),
            DTYPE_NAMES[dtype],
        )
    except ProblemError as error:
        raise InputError(str(error)) from error
    if reason := backend_for(device).why_not(problem, device, packed):
        raise InputError(reason)
    return _plan(problem, policy)


@lru_cache(maxsize=_PLANS)
def _plan(problem: Problem, policy: str) -> Plan:
    if policy == "auto":
        return build_plan(problem, *choose_policy(problem))
    return build_plan(problem, _policy(policy))

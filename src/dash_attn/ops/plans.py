"""From the shapes of a call to its plan, cached, and policies by the names that operators carry."""

from __future__ import annotations

from functools import lru_cache

import torch

from ..errors import InputError, ProblemError
from ..problem import DTYPES, Mask, Problem
from ..schedule import POLICIES, Plan, Policy, build_plan, choose_policy
from .backends import backend_for

__all__ = ["DTYPE_NAMES", "find_plan", "keep_plan", "policy_key"]

_PLANS = 64
"""Plans kept for reuse; a model uses one for each of its attention shapes."""

DTYPE_NAMES = {getattr(torch, name): name for name in DTYPES}

_POLICIES: dict[str, Policy] = {name: policy() for name, policy in POLICIES.items()}
"""Policies by their string, the built-in ones and every one that was passed to :func:`policy_key`."""

_KEPT: set[Plan] = set()


def policy_key(policy: str | Policy) -> str:
    """The string by which an operator names a policy: operators take no Python objects.

    Raises:
        InputError: an unknown name, not a policy, a policy that cannot be hashed, or one that prints
            like another policy.
    """
    if isinstance(policy, str):
        if policy != "auto" and policy not in _POLICIES:
            raise InputError(f"unknown policy {policy!r}; known: auto, {', '.join(POLICIES)}")
        return policy
    if not isinstance(policy, Policy):
        raise InputError(f"policy must be a name or a Policy, got {policy!r}")
    name = str(policy)
    try:
        hash(policy)
    except TypeError as error:
        raise InputError(f"policy {name} cannot be hashed, give it immutable fields") from error
    if _POLICIES.setdefault(name, policy) != policy:
        raise InputError(f"policy {policy!r} has the name of another policy, {_POLICIES[name]!r}")
    return name


@lru_cache(maxsize=_PLANS)
def find_plan(
    device: torch.device,
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
    if reason := backend_for(device).why_not(problem, device):
        raise InputError(reason)
    return _plan(problem, policy)


@lru_cache(maxsize=_PLANS)
def _plan(problem: Problem, policy: str) -> Plan:
    if policy == "auto":
        return build_plan(problem, *choose_policy(problem))
    return build_plan(problem, _POLICIES[policy])


def keep_plan(plan: Plan) -> None:
    """Keep a plan for the life of the process: a captured CUDA graph holds the address of its table."""
    _KEPT.add(plan)

"""From a problem and a policy to a verified plan."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from ..errors import PlacementError
from ..problem import Problem, SequenceGrid
from .head_groups import default_head_groups
from .numerics import POLICIES, lpt_placement
from .plan import HeadPattern, Plan
from .policy import Head, Policy
from .proof import prove
from .tickets import derive_runs

__all__ = ["PLACEMENTS", "Placement", "build_plan"]

Placement = Literal["policy", "lpt"]
PLACEMENTS: tuple[Placement, ...] = ("policy", "lpt")

_KEPT_PATTERNS, _KEPT_KV_TILES = 2048, 512
"""Patterns kept, and kv tiles of the largest: the next packed batch has other lengths, but not all."""


def build_plan(
    problem: Problem, policy: Policy, placement: Placement = "policy", *, head_groups: int | None = None
) -> Plan:
    """Build and verify a plan.

    Args:
        problem: what to compute.
        policy: chooses the numerics, and the placement where that is "policy".
        placement: "policy" for the policy's own order of items, "lpt" for the longest first in groups
            of heads that fit L2 (:func:`~dash_attn.schedule.numerics.lpt_placement`).
        head_groups: head groups of each kv head, by default what
            :func:`~dash_attn.schedule.head_groups.default_head_groups` says for each sequence.

    Raises:
        PlacementError: unknown placement, or ``head_groups`` is not in 1..q heads a kv head.
        UnsupportedMaskError: the policy does not cover a sequence of the problem.
        PlanError: the verifier refuses the plan (a defect of the policy).

    >>> from dash_attn.problem import Mask
    >>> from dash_attn.schedule.numerics import Shift, SymmetricShift
    >>> full = Problem.dense(batch=2, heads=8, seqlen=4096, head_dim=128)
    >>> plan = build_plan(full, Shift(ring=16))
    >>> plan, plan.min_workers
    (Plan(shift(ring=16), 512 items, 32768 tasks), 16)
    """
    if placement not in PLACEMENTS:
        raise PlacementError(f"unknown placement {placement!r}; known: {', '.join(PLACEMENTS)}")
    if head_groups is not None and not (type(head_groups) is int and 1 <= head_groups <= problem.group):
        raise PlacementError(f"head_groups must be in 1..{problem.group}, got {head_groups}")
    patterns = {}
    for pair, grid in problem.grids.items():
        groups = default_head_groups(problem.group, grid) if head_groups is None else head_groups
        keep = type(policy) in POLICIES.values() and grid.kv_tiles <= _KEPT_KV_TILES
        patterns[pair] = (_kept_pattern if keep else _pattern)(policy, grid, groups)
    heads = [
        Head(sequence, head_group, problem.grids[pair])
        for sequence, pair in enumerate(problem.sequences)
        for head_group in range(problem.kv_heads * patterns[pair].head_groups)
    ]
    name = str(policy) if placement == "policy" else f"{policy} + {placement}"
    plan = Plan(problem, name, patterns, policy.place(heads))
    return prove(plan.with_items(lpt_placement(plan)) if placement == "lpt" else plan)


def _pattern(policy: Policy, grid: SequenceGrid, head_groups: int) -> HeadPattern:
    policy.check(grid)
    runs = derive_runs(grid, policy.visits(grid), policy.summation(grid))
    return HeadPattern.from_runs(grid, runs, head_groups)


_kept_pattern = lru_cache(_KEPT_PATTERNS)(_pattern)

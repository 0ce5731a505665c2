"""From a problem and a policy to a verified plan."""

from __future__ import annotations

from typing import Literal

from ..errors import PlacementError
from ..problem import Problem
from .plan import HeadPattern, Plan
from .policies import lpt_placement
from .policy import Head, Policy
from .tickets import derive_runs
from .verify import verify

__all__ = ["PLACEMENTS", "Placement", "build_plan"]

Placement = Literal["policy", "lpt"]
PLACEMENTS: tuple[Placement, ...] = ("policy", "lpt")


def build_plan(problem: Problem, policy: Policy, placement: Placement = "policy") -> Plan:
    """Build and verify a plan.

    Args:
        problem: what to compute.
        policy: chooses the numerics, and the placement where that is "policy".
        placement: "policy" for the policy's own order of items, "lpt" for the longest first in groups
            of heads that fit L2 (:func:`~dash_attn.schedule.policies.lpt_placement`).

    Raises:
        UnsupportedMaskError: the policy does not cover a sequence of the problem.
        PlanError: the verifier refuses the plan (a defect of the policy).

    >>> from dash_attn.problem import Mask
    >>> from dash_attn.schedule.policies import Shift, SymmetricShift
    >>> full = Problem.dense(batch=2, heads=8, seqlen=4096, head_dim=128)
    >>> plan = build_plan(full, Shift(ring=16))
    >>> plan, plan.min_workers
    (Plan(shift(ring=16), 512 items, 32768 tasks), 16)
    """
    if placement not in PLACEMENTS:
        raise PlacementError(f"unknown placement {placement!r}; known: {', '.join(PLACEMENTS)}")
    patterns = {}
    for pair, grid in problem.grids.items():
        policy.check(grid)
        runs = derive_runs(grid, policy.visits(grid), policy.summation(grid))
        patterns[pair] = HeadPattern.from_runs(grid, runs)
    heads = [
        Head(sequence, kv_head, problem.grids[pair])
        for sequence, pair in enumerate(problem.sequences)
        for kv_head in range(problem.kv_heads)
    ]
    items = policy.place(heads)
    if placement == "lpt":
        items = lpt_placement(problem, items)
    name = str(policy) if placement == "policy" else f"{policy} + {placement}"
    return verify(Plan(problem, name, patterns, items))

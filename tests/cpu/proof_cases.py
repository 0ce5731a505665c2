"""Small plans for tests of the verifier, and how to change single tasks of them."""

from __future__ import annotations

from dataclasses import replace

from dash_attn.problem import Mask, Problem
from dash_attn.schedule import FA3, HeadPattern, Plan, Run, Shift, build_plan

RunLists = list[list[Run]]


def single_tasks(plan: Plan) -> RunLists:
    """Runs of the only pattern, one for each task, so that single tasks can be changed."""
    (pattern,) = plan.patterns.values()
    return [
        [Run(q, 1, 1, t) for q, t in zip(*(a.tolist() for a in pattern.tasks_of(kv)))]
        for kv in range(pattern.grid.kv_tiles)
    ]


def with_runs(plan: Plan, runs: RunLists) -> Plan:
    ((pair, pattern),) = plan.patterns.items()
    return replace(plan, patterns={pair: HeadPattern.from_runs(pattern.grid, runs, pattern.head_groups)})


def causal_plan(tiles: int = 4, heads: int = 2) -> Plan:
    return build_plan(Problem.dense(heads=heads, seqlen=128 * tiles, head_dim=64, mask=Mask.causal()), FA3())


def full_plan() -> Plan:
    return build_plan(Problem.dense(heads=2, seqlen=512, head_dim=64), Shift())

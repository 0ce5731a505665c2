"""Plans that hang, released past the verifier."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dash_attn.schedule import FA3, HeadPattern, Plan, Run, Verdict, build_plan
from gpu_cases import FULL, dense


def broken_plan() -> Plan:
    """Kv tile 1 waits at q tile 2 for ticket 3, which never comes; released past the verifier."""
    problem = dense(FULL, seqlen=256)
    plan = build_plan(problem, FA3())
    (pair, pattern), one = next(iter(plan.patterns.items())), pattern_runs(plan)
    assert one[1] == [Run(0, 1, 4, 1, 0, 1)]
    one[1] = [Run(0, 1, 2, 1), Run(2, 1, 1, 3), Run(3, 1, 1, 1)]
    broken = HeadPattern.from_runs(pattern.grid, one)
    return released(replace(plan, patterns={pair: broken}))


def released(plan: Plan) -> Plan:
    """A plan with a forged verdict: any number of workers will do."""
    forged = replace(plan)
    object.__setattr__(forged, "verdict", Verdict(1, plan.problem.tasks, np.arange(len(plan.items))))
    return forged


def pattern_runs(plan: Plan) -> list[list[Run]]:
    pattern = plan.pattern(0)
    return [pattern.runs_of(kv) for kv in range(pattern.grid.kv_tiles)]

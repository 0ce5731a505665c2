"""Lower bounds on the makespan of a problem, and the closed forms of the paper."""

from __future__ import annotations

import numpy as np

from ..problem import Problem
from ..schedule.head_groups import default_head_groups
from .cost import Costs, require_workers

__all__ = ["closed_form", "lower_bounds"]


def lower_bounds(problem: Problem, costs: Costs, workers: int) -> dict[str, float]:
    """Cycles below which no deterministic schedule of the problem can end, by reason.

    "work": all tasks and item launches shared out evenly (where reductions overlap compute, the larger
    of the two shares). "item": the longest item, which one worker runs without a break, owning as many
    q heads as by default. "summation": the dQ tile with the most contributions, one after the other.

    >>> from dash_attn.problem import Mask
    >>> lower_bounds(Problem.dense(heads=2, seqlen=512, head_dim=64, mask=Mask.causal()), Costs(2, 1), 4)
    {'work': 15.0, 'item': 12.0, 'summation': 6.0}
    """
    require_workers(workers)
    tasks = launches = item = summation = 0.0
    shapes = {pair: problem.sequences.count(pair) for pair in problem.grids}
    for pair, count in shapes.items():
        grid = problem.grids[pair]
        tasks += count * problem.heads * grid.tasks
        groups = default_head_groups(problem.group, grid)
        launches += count * problem.kv_heads * groups * grid.kv_tiles * costs.launch
        owned = -(-problem.group // groups)
        longest = owned * int(np.maximum(grid.q_last - grid.q_first + 1, 0).max(initial=0))
        if longest:
            pipeline_ends = costs.compute + costs.reduce - costs.per_task
            item = max(item, costs.launch + longest * costs.per_task + pipeline_ends)
        most = int(grid.contributions.max(initial=0))
        if most:
            chain = most * costs.reduce + (most - 1) * costs.latency
            summation = max(summation, costs.launch + costs.compute + chain)
    if costs.dq_buffers:
        work = max(tasks * costs.compute + launches, tasks * costs.reduce)
    else:
        work = tasks * (costs.compute + costs.reduce) + launches
    return {"work": work / workers, "item": item, "summation": summation}


def closed_form(policy: str, mask: str, n: int, m: int, c: float, r: float) -> float | None:
    """The paper's makespan for n kv tiles, n workers and m heads, or None where it gives none.

    FA3 (section 3.2): ``m n (c+r) + (n-1) r`` for both masks. Shift (3.4), full mask: ``m n (c+r)``.
    Descending (3.3), causal, even m and c >= r: ``m (n+1) (c+r) / 2 + (n-1) r``. Symmetric shift (3.4),
    causal, even m and even n: ``m (n+1) (c+r) / 2``.

    >>> closed_form("shift", "full", 8, 3, 5, 2), closed_form("descending", "causal", 8, 3, 5, 2)
    (168, None)
    """
    if policy == "fa3":
        return m * n * (c + r) + (n - 1) * r
    if policy == "shift" and mask == "full":
        return m * n * (c + r)
    if mask == "causal" and m % 2 == 0:
        if policy == "descending" and c >= r:
            return m * (n + 1) * (c + r) / 2 + (n - 1) * r
        if policy == "symmetric_shift" and n % 2 == 0:
            return m * (n + 1) * (c + r) / 2
    return None

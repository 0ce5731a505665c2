"""Lower bounds on the makespan of a problem, and the closed forms of the paper."""

from __future__ import annotations

from collections import Counter

import numpy as np

from ..errors import ProblemError
from ..problem import Mask, Problem
from ..schedule.head_groups import default_head_groups, most_heads
from ..schedule.numerics import Descending
from ..schedule.policy import Numerics
from .cost import Costs, require_workers

__all__ = ["closed_form", "lower_bounds", "paper_makespan"]

_TOGETHER = Descending()


def lower_bounds(
    problem: Problem,
    costs: Costs,
    workers: int,
    head_groups: int | None = None,
    numerics: Numerics = _TOGETHER,
) -> dict[str, float]:
    """Cycles below which no plan of the problem with these head groups can end, by reason.

    These are bounds on what :func:`~dash_attn.model.simulate.simulate` gives, for any policy and any
    placement. In a plan one worker runs a whole item without a break. An item is one kv tile for the q
    heads of one head group. So a plan with other head groups has other items and may end earlier. So may a
    schedule that is no plan, for example one that splits an item among workers.

    "work": all tasks and item launches shared out evenly (where reductions overlap compute, the larger
    of the two shares). "item": the longest item. "summation": the dQ tile with the most contributions, one
    after the other.

    Args:
        problem: what is computed.
        costs: cycles of a task's parts.
        workers: resident workers.
        head_groups: head groups of each kv head, by default those that
            :func:`~dash_attn.schedule.build.build_plan` makes for each sequence under ``numerics``.
        numerics: whether items take their q heads one after the other; by default they do not.

    Raises:
        CostError: ``workers`` is not a positive integer.
        ProblemError: more head groups than q heads per kv head, or less than one.

    >>> from dash_attn.problem import Mask
    >>> lower_bounds(Problem.dense(heads=2, seqlen=512, head_dim=64, mask=Mask.causal()), Costs(2, 1), 4)
    {'work': 15.0, 'item': 12.0, 'summation': 6.0}
    """
    require_workers(workers)
    if head_groups is not None and (type(head_groups) is not int or not 1 <= head_groups <= problem.group):
        raise ProblemError(
            f"head_groups must be in 1..{problem.group} (q heads per kv head), got {head_groups!r}"
        )
    tasks = launches = item = summation = 0.0
    for shape, count in Counter(problem.shapes).items():
        grid = problem.tile_grids[shape]
        tasks += count * problem.heads * grid.tasks
        by_head = numerics.for_lengths(*shape[:2]).by_head
        groups = head_groups or default_head_groups(problem.group, grid, by_head=by_head)
        launches += count * problem.kv_heads * groups * grid.kv_tiles * costs.launch
        longest = int(np.maximum(grid.q_last - grid.q_first + 1, 0).max(initial=0))
        longest *= most_heads(problem.group, groups)
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


def closed_form(policy: str, mask: Mask, n: int, m: int, c: float, r: float) -> float | None:
    """The paper's makespan for n kv tiles by n q tiles, n workers and m heads; None where it gives none.

    FA3 (section 3.2): ``m n (c+r) + (n-1) r`` for the full and the causal mask. Shift (3.4), full mask:
    ``m n (c+r)``. Descending (3.3), causal, even m and c >= r: ``m (n+1) (c+r) / 2 + (n-1) r``. Symmetric
    shift (3.4), causal, even m and even n: ``m (n+1) (c+r) / 2``. There is none for a window.

    >>> closed_form("shift", Mask.full(), 8, 3, 5, 2), closed_form("descending", Mask.causal(), 8, 3, 5, 2)
    (168, None)
    >>> closed_form("fa3", Mask.window(128, 0), 8, 3, 5, 2) is None
    True
    """
    if policy == "fa3" and (mask.is_full or mask.is_causal):
        return m * n * (c + r) + (n - 1) * r
    if policy == "shift" and mask.is_full:
        return m * n * (c + r)
    if mask.is_causal and m % 2 == 0:
        if policy == "descending" and c >= r:
            return m * (n + 1) * (c + r) / 2 + (n - 1) * r
        if policy == "symmetric_shift" and n % 2 == 0:
            return m * (n + 1) * (c + r) / 2
    return None


def paper_makespan(policy: str, problem: Problem, costs: Costs, workers: int) -> float | None:
    """:func:`closed_form` of a problem; None unless the problem and the machine are the paper's.

    That is: sequences of one length, as many q tiles as kv tiles, the tasks of a whole square or triangle, a
    kv head for each q head, compute and reduce in series, hand-overs and launches that cost nothing, and as
    many workers as kv tiles.
    """
    grid = problem.grid(0)
    n, m = grid.kv_tiles, problem.heads * len(problem.sequences)
    tasks = n * n if problem.mask.is_full else n * (n + 1) // 2
    square = len(problem.grids) == 1 and grid.q_tiles == n and grid.tasks == tasks
    plain = problem.group == 1 and costs == Costs(costs.compute, costs.reduce) and workers == n
    if not (square and plain):
        return None
    return closed_form(policy, problem.mask, n, m, costs.compute, costs.reduce)

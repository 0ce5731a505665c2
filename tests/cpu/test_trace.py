"""Timelines from recorded traces: a simulated run, recorded and read back."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from strategies import plans

from dash_attn.model import Costs, Timeline, simulate
from dash_attn.model.trace import measured_timeline
from dash_attn.schedule import Plan
from dash_attn.schedule.interleave import item_tasks


def recorded(timeline: Timeline, first_sm: int) -> np.ndarray:
    """The trace a GPU would have written, one nanosecond a cycle."""
    plan, problem = timeline.plan, timeline.plan.problem
    tiles = [problem.grid(s).q_tiles * problem.heads for s in range(len(problem.sequences))]
    widest = max(max(g.kv_tiles for g in problem.grids.values()), 1)
    trace = np.zeros((sum(tiles), widest, 4), dtype=np.int64)
    for item in range(len(plan.items)):
        for k, task in enumerate(item_tasks(plan, item), start=int(timeline.first_task[item])):
            row = (
                sum(tiles[: task.sequence]) + task.q_head * problem.grid(task.sequence).q_tiles + task.q_tile
            )
            worker = timeline.item_worker[item] + first_sm
            times = timeline.reduce_start[k], timeline.compute_end[k], timeline.reduce_end[k]
            trace[row, task.ticket] = (*(int(t) + 1000 for t in times), worker)
    return trace


@given(plans())
def test_a_recorded_simulation(plan: Plan) -> None:
    timeline = simulate(plan, Costs(compute=3, reduce=2, dq_buffers=2), plan.min_workers + 1)
    measured = measured_timeline(plan, recorded(timeline, first_sm=7), clock_ghz=2.0)
    if not plan.problem.tasks:
        assert measured.makespan == 0
        return
    shift = timeline.reduce_start.min()
    assert measured.makespan == 2 * (timeline.makespan - shift) or plan.problem.tasks == 0
    for name in ("compute_end", "reduce_start", "reduce_end"):
        assert np.array_equal(getattr(measured, name), 2 * (getattr(timeline, name) - shift))
    used = [
        w
        for w in range(timeline.workers)
        if any(
            timeline.first_task[i] < timeline.first_task[i + 1]
            for i in np.flatnonzero(timeline.item_worker == w)
        )
    ]
    assert measured.workers == len(used)
    assert (measured.compute_start <= measured.compute_end).all()

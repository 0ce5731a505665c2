"""A timeline from what a GPU recorded, to be drawn beside the simulated one."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..errors import PlanMismatchError
from ..schedule import ForwardPlan
from ..schedule.interleave import item_tasks
from ..schedule.plan import Plan
from .cost import Costs
from .forward import ForwardCosts, ForwardTimeline, least_makespan
from .simulate import Timeline

__all__ = ["measured_forward", "measured_timeline"]

USUAL = 1.5
"""Medians up to which a task counts as computing without waiting."""


def measured_timeline(plan: Plan, trace: NDArray[np.int64], clock_ghz: float) -> Timeline:
    """What happened when on a GPU, in cycles from the first event.

    Args:
        plan: the plan that ran, a dense batch.
        trace: (dQ tiles, kv tiles, 4) int64, as :class:`dash_attn.backends.sm90.launch.Result` gives it: for
            every contribution the nanoseconds at which its ticket was granted, it was ready in shared
            memory, and it was performed in global memory, and the SM.
        clock_ghz: SM clock that turns nanoseconds into cycles.

    Returns:
        A timeline whose workers are the SMs in ascending order. Compute of a task lasts from the end of
        the compute before it in the same item to the moment its contribution was ready. The trace does not
        know when the first one of an item began: it is given the median length, and the gap before it is
        the change of items and waiting for its ticket. ``costs.compute`` is ``USUAL`` medians: what a task
        takes beyond that is drawn as waiting. Waiting for a ticket cannot be told from waiting for the
        contribution itself. At head dims 72 to 128 a contribution is told some 500 cycles after it is stored,
        but for the last one of an item.
    """
    tasks = [item_tasks(plan, item) for item in range(len(plan.items))]
    first = np.concatenate(([0], np.cumsum([len(t) for t in tasks], dtype=np.int64)))
    tiles = {s: plan.problem.grid(s).q_tiles for s in range(len(plan.problem.sequences))}
    base = np.concatenate(([0], np.cumsum([tiles[s] * plan.problem.heads for s in tiles])))
    rows = [
        (base[t.sequence] + t.q_head * tiles[t.sequence] + t.q_tile, t.ticket) for item in tasks for t in item
    ]
    records = trace[tuple(np.array(rows, dtype=np.int64).reshape(-1, 2).T)]
    origin = records[:, 0].min(initial=np.iinfo(np.int64).max)
    granted, ready, done = ((records[:, k] - origin) * clock_ghz for k in range(3))
    item_sm = np.array([records[a, 3] if a < b else -1 for a, b in pairwise(first)], dtype=np.int64)
    sms = np.unique(item_sm[item_sm >= 0])
    worker = np.maximum(np.searchsorted(sms, item_sm), 0)
    starts = first[:-1][first[:-1] < first[1:]]
    compute_start = np.concatenate((ready[:1], ready[:-1]))
    within = np.ones(len(ready), dtype=bool)
    within[starts] = False
    lengths = (ready - compute_start)[within]
    usual = float(np.median(lengths)) if len(lengths) else 0.0
    for sm in range(len(sms)):
        mine = [i for i in np.flatnonzero(worker == sm) if first[i] < first[i + 1]]
        mine.sort(key=lambda i: ready[first[i]])
        ends = [0.0, *(ready[first[i + 1] - 1] for i in mine[:-1])]
        for item, before in zip(mine, ends):
            compute_start[first[item]] = min(max(ready[first[item]] - usual, before), ready[first[item]])
    item_start = np.array([compute_start[a] if a < b else 0.0 for a, b in pairwise(first)])
    return Timeline(
        plan=plan,
        costs=Costs(compute=USUAL * usual, dq_buffers=1),
        workers=max(len(sms), 1),
        makespan=float(done.max(initial=0.0)),
        item_worker=worker,
        item_start=item_start,
        first_task=first,
        compute_start=compute_start,
        compute_end=ready,
        reduce_start=np.maximum(granted, ready),
        reduce_end=done,
        stalls={
            "ticket": float(np.maximum(granted - ready, 0).sum()),
            "reduce": 0.0,
            "launch": 0.0,
            "idle": 0.0,
        },
    )


def measured_forward(plan: ForwardPlan, trace: NDArray[np.int64], clock_ghz: float) -> ForwardTimeline:
    """What happened when on a GPU, in cycles from the first event.

    Args:
        plan: the plan that ran.
        trace: (items, 3) int64, items in the order of claims, as
            :class:`dash_attn.backends.sm90.forward.traced.Traced` gives it: nanoseconds at which an item
            began and was done, and the SM.
        clock_ghz: SM clock that turns nanoseconds into cycles.

    Returns:
        A timeline whose workers are the SMs in ascending order, as far as they ran an item. ``costs`` come
        nearest to the items' lengths (least squares). ``lower_bound`` is of these lengths and workers. In the
        gaps between the items of a worker it waits for Q.

    Raises:
        PlanMismatchError: the trace has other items than the plan, or an item left no record.
    """
    if trace.shape != (plan.items, 3):
        raise PlanMismatchError(f"the trace has shape {trace.shape}, the plan has {plan.items} items")
    if (missing := np.flatnonzero((trace[:, :2] == 0).any(axis=1))).size:
        raise PlanMismatchError(f"item {missing[0]} of {plan.items} left no record")
    origin = trace[:, 0].min(initial=np.iinfo(np.int64).max)
    start, end = ((trace[:, k] - origin) * clock_ghz for k in range(2))
    sms, worker = np.unique(trace[:, 2], return_inverse=True)
    workers = max(len(sms), 1)
    costs = _fitted(plan.tiles_of_items(), end - start)
    bound = least_makespan(end - start, workers)
    makespan = float(end.max(initial=0.0))
    return ForwardTimeline(plan, costs, workers, makespan, bound, worker.reshape(-1), start, end)


def _fitted(kv_tiles: NDArray[np.int64], cycles: NDArray[np.float64]) -> ForwardCosts:
    """Costs of a kv tile and of an item. Where items have one length, kv tiles cost all of it."""
    if not kv_tiles.any():
        return ForwardCosts(0.0, float(cycles.mean()) if len(cycles) else 0.0)
    if kv_tiles.min() < kv_tiles.max():
        tile, item = np.polyfit(kv_tiles, cycles, 1).tolist()
        if min(tile, item) >= 0:
            return ForwardCosts(tile, item)
    return ForwardCosts(float(cycles.sum() / kv_tiles.sum()))

"""A timeline from what a GPU recorded, to be drawn beside the simulated one."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..schedule.interleave import item_tasks
from ..schedule.plan import Plan
from .cost import Costs
from .simulate import Timeline

__all__ = ["measured_timeline"]


def measured_timeline(plan: Plan, trace: NDArray[np.int64], clock_ghz: float) -> Timeline:
    """What happened when on a GPU, in cycles from the first event.

    Args:
        plan: the plan that ran, a dense batch.
        trace: (dQ tiles, kv tiles, 4) int64, as :class:`dash_attn.kernels.launch.Result` gives it: for
            every contribution the nanoseconds at which its ticket was granted, it was ready in shared
            memory, and it was performed in global memory, and the SM.
        clock_ghz: SM clock that turns nanoseconds into cycles.

    Returns:
        A timeline whose workers are the SMs in ascending order. Compute of a task lasts from the end of
        the compute before it on the same SM (or from the item's claim, of which the trace knows only the
        first contribution) to the moment its contribution was ready.
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
    item_start = np.array([ready[a] if a < b else 0.0 for a, b in pairwise(first)])
    compute_start = ready.copy()
    for sm in range(len(sms)):
        mine = [i for i in np.flatnonzero(worker == sm) if first[i] < first[i + 1]]
        mine.sort(key=lambda i: item_start[i])
        order = np.concatenate([np.arange(first[i], first[i + 1]) for i in mine])
        compute_start[order[1:]] = ready[order[:-1]]
        item_start[mine] = compute_start[first[mine]]
    return Timeline(
        plan=plan,
        costs=Costs(dq_buffers=1),
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

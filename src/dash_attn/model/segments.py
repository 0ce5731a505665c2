"""What a timeline says, as arrays: stretches of computing, reducing and waiting, and whose they are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..problem import IntArray
from .simulate import Timeline, Times

__all__ = ["Segments", "describe", "segments", "task_heads", "task_tiles", "task_workers"]


class Segments(NamedTuple):
    """Stretches of one kind: worker, start and end of each, and the task or item they belong to."""

    worker: IntArray
    start: Times
    end: Times

    def longer_than(self, least: float) -> Segments:
        keep = self.end - self.start > least
        return Segments(self.worker[keep], self.start[keep], self.end[keep])


def segments(timeline: Timeline) -> dict[str, Segments]:
    """What every worker does, by kind: launch, compute, reduce, wait (compute stands), held (a reduction)."""
    t, c = timeline, timeline.costs.compute
    worker = task_workers(t)
    working = np.minimum(t.compute_start + c, t.compute_end)
    # Workers claim items in list order, so a stable sort by worker is a sort by time within each.
    order = np.argsort(worker, kind="stable")
    before = np.zeros(len(worker))
    same = worker[order][1:] == worker[order][:-1]
    before[order[1:]] = np.where(same, t.reduce_end[order[:-1]], 0.0)
    tiny = 1e-9 * t.makespan
    return {
        "launch": Segments(t.item_worker, t.item_start, t.item_start + t.costs.launch).longer_than(tiny),
        "wait": Segments(worker, working, t.compute_end).longer_than(tiny),
        "held": Segments(worker, np.maximum(before, t.compute_end), t.reduce_start).longer_than(tiny),
        "reduce": Segments(worker, t.reduce_start, t.reduce_end),
        "compute": Segments(worker, t.compute_start, working),
    }


def task_heads(timeline: Timeline) -> IntArray:
    """For each task the index of its (sequence, head group)."""
    items = timeline.plan.items.astype(np.int64)
    heads = timeline.plan.group_first[items[:, 0]] + items[:, 1]
    return np.repeat(heads, np.diff(timeline.first_task))


def task_tiles(timeline: Timeline) -> tuple[IntArray, IntArray]:
    """(kv tiles, q tiles) of all tasks of a timeline."""
    plan = timeline.plan
    kv = np.repeat(plan.items[:, 2].astype(np.int64), np.diff(timeline.first_task))
    visited = [
        plan.pattern(s).tasks_of_heads(k, len(plan.q_heads(s, g)))[1] for s, g, k in plan.items.tolist()
    ]
    return kv, np.concatenate([np.zeros(0, dtype=np.int64), *visited])


def task_workers(timeline: Timeline) -> IntArray:
    """For each task the worker that ran it."""
    return np.repeat(timeline.item_worker, np.diff(timeline.first_task))


def describe(timeline: Timeline) -> str:
    """One line: policy, makespan, workers, utilization and waiting."""
    t = timeline
    return (
        f"{t.plan.policy}: makespan {t.makespan:,.10g} cycles on {t.workers} worker{'s' * (t.workers != 1)}, "
        f"{t.utilization:.0%} busy, {t.stall:.0%} waiting"
    )

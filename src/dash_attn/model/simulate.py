"""Event-driven simulation of a plan: when would every worker do what, and why does it wait?

Workers claim items in list order whenever they are free. Task k of a worker is computed after task
k - 1; its reduction follows once the reduction before it has ended and its ticket's turn has come. With
``Costs(latency=0, dq_buffers=0)`` and as many workers as kv tiles this is the DAG model of DASH section
3.1, and gives its closed forms exactly (tests/cpu/test_simulate.py).

Times depend on no order of evaluation: a worker is advanced until it waits for somebody, and the next
item is claimed only when nobody can move. Whoever still waits then depends on an item nobody has
claimed, so it cannot come free before the earliest free worker has claimed it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from ..errors import TooFewWorkersError
from ..schedule.plan import Plan
from ..schedule.proof import check_workers
from .cost import Costs, require_workers

__all__ = ["Timeline", "simulate"]

Times = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Timeline:
    """What happened when; times in cycles from the start.

    Attributes:
        plan, costs, workers: what was simulated.
        makespan: when the last reduction ended.
        item_worker: (items,) worker that ran each item.
        item_start: (items,) when it was claimed.
        first_task: (items + 1,) index of each item's first task in the arrays below.
        compute_start, compute_end, reduce_start, reduce_end: (tasks,), tasks item by item in the order
            of the item; a compute that has to wait for a dQ buffer ends when it gets it.
        stalls: worker cycles lost, by reason: "ticket" (waiting for one's turn), "reduce" (for a dQ
            buffer that a running reduction holds), "launch", "idle" (no item left, or none yet).
    """

    plan: Plan
    costs: Costs
    workers: int
    makespan: float
    item_worker: NDArray[np.int64]
    item_start: Times
    first_task: NDArray[np.int64]
    compute_start: Times
    compute_end: Times
    reduce_start: Times
    reduce_end: Times
    stalls: dict[str, float]

    @property
    def utilization(self) -> float:
        """Share of worker cycles spent on tasks; 1 for a plan without tasks."""
        busy = len(self.compute_start) * self.costs.per_task
        return busy / (self.makespan * self.workers) if self.makespan else 1.0

    @property
    def stall(self) -> float:
        """Share of worker cycles lost waiting for tickets and dQ buffers."""
        lost = self.stalls["ticket"] + self.stalls["reduce"]
        return lost / (self.makespan * self.workers) if self.makespan else 0.0

    def items_of_workers(self) -> list[list[int]]:
        """For each worker the items it ran, in order."""
        lists: list[list[int]] = [[] for _ in range(self.workers)]
        for item in np.argsort(self.item_start, kind="stable").tolist():
            lists[self.item_worker[item]].append(item)
        return lists


def simulate(plan: Plan, costs: Costs, workers: int) -> Timeline:
    """Simulate a verified plan.

    Args:
        plan: a verified plan.
        costs: cycles of a task's parts.
        workers: resident workers.

    Raises:
        CostError: ``workers`` is not a positive integer.
        TooFewWorkersError: fewer workers than ``plan.min_workers``.

    >>> from dash_attn.problem import Mask, Problem
    >>> from dash_attn.schedule import FA3, Shift, build_plan
    >>> full = Problem.dense(heads=3, seqlen=8 * 128, head_dim=64)      # n = 8, m = 3
    >>> [simulate(build_plan(full, p), Costs(5, 2), 8).makespan for p in (FA3(), Shift())]
    [182.0, 168.0]
    """
    require_workers(workers)
    check_workers(plan, workers)
    return _Simulation(plan, costs, int(workers)).run()


class _Worker:
    """One worker: its item, where it stands in it, and the dQ buffers in flight."""

    __slots__ = ("buffers", "compute_free", "item", "place", "reduce_free", "tickets", "tiles", "waited")

    def __init__(self, dq_buffers: int) -> None:
        # (end of the reduction, whether it waited for its ticket) of the last dq_buffers tasks
        self.buffers: deque[tuple[float, bool]] = deque([(0.0, False)] * dq_buffers)
        self.item, self.place = -1, 0
        self.tiles: list[int] = []
        self.tickets: list[int] = []
        self.compute_free = self.reduce_free = 0.0
        self.waited = False


class _Simulation:
    def __init__(self, plan: Plan, costs: Costs, workers: int) -> None:
        self.plan, self.costs = plan, costs
        p = plan.problem
        self.workers = [_Worker(costs.dq_buffers) for _ in range(workers)]
        q_tiles = [p.tile_grids[shape].q_tiles for shape in p.shapes]
        self.tile_base = np.concatenate(([0], np.cumsum(np.array(q_tiles) * p.heads))).tolist()
        self.turn = [0] * self.tile_base[-1]  # contributions finished, per (sequence, q head, q tile)
        self.turn_at = [0.0] * self.tile_base[-1]  # when the latest became visible
        self.waiting: dict[tuple[int, int], int] = {}  # (tile, ticket): worker
        self.free = [(0.0, w) for w in range(workers)]
        heapify(self.free)
        self._tasks_of = lru_cache(maxsize=1 << 16)(self._item_tasks)

    def _item_tasks(self, shape: tuple[int, ...], kv: int, heads_owned: int) -> tuple[list[int], list[int]]:
        """(tile, ticket) lists of an item; tiles count from the first of its first q head."""
        pattern = self.plan.patterns[shape]
        heads, q, t = pattern.tasks_of_heads(kv, heads_owned)
        return (q + heads * pattern.grid.q_tiles).tolist(), t.tolist()

    def run(self) -> Timeline:
        p, items = self.plan.problem, self.plan.items.tolist()
        owned = [self.plan.q_heads(sequence, group) for sequence, group, _ in items]
        counts = [len(self._tasks_of(p.shapes[i[0]], i[2], len(h))[0]) for i, h in zip(items, owned)]
        self.first_task = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        self.offsets = self.first_task.tolist()
        tasks = self.offsets[-1]
        self.compute_start, self.compute_end = [0.0] * tasks, [0.0] * tasks
        self.reduce_start, self.reduce_end = [0.0] * tasks, [0.0] * tasks
        self.lost = {"ticket": 0.0, "reduce": 0.0, "launch": 0.0}
        item_worker, item_start = np.zeros(len(items), dtype=np.int64), np.zeros(len(items))
        for item, ((sequence, _, kv), heads) in enumerate(zip(items, owned)):
            if not self.free:
                raise TooFewWorkersError(f"item {item} of {self.plan!r} is never claimed: all workers wait")
            now, w = heappop(self.free)
            item_worker[item], item_start[item] = w, now
            self._claim(w, item, sequence, heads, kv, now)
            self._advance_all([w])
        ends = np.array(self.reduce_end)
        makespan = max(float(ends.max(initial=0.0)), float((item_start + self.costs.launch).max(initial=0.0)))
        busy = tasks * (self.costs.compute + (0 if self.costs.dq_buffers else self.costs.reduce))
        idle = makespan * len(self.workers) - busy - sum(self.lost.values())
        return Timeline(
            plan=self.plan,
            costs=self.costs,
            workers=len(self.workers),
            makespan=makespan,
            item_worker=item_worker,
            item_start=item_start,
            first_task=self.first_task,
            compute_start=np.array(self.compute_start),
            compute_end=np.array(self.compute_end),
            reduce_start=np.array(self.reduce_start),
            reduce_end=ends,
            stalls={**self.lost, "idle": max(idle, 0.0)},
        )

    def _claim(self, w: int, item: int, sequence: int, heads: range, kv: int, now: float) -> None:
        worker, p = self.workers[w], self.plan.problem
        shape = p.shapes[sequence]
        tiles, worker.tickets = self._tasks_of(shape, kv, len(heads))
        base = self.tile_base[sequence] + heads.start * p.tile_grids[shape].q_tiles
        worker.tiles = [base + tile for tile in tiles]
        worker.item, worker.place = item, 0
        worker.compute_free = now + self.costs.launch
        self.lost["launch"] += self.costs.launch

    def _advance_all(self, runnable: list[int]) -> None:
        while runnable:
            w = runnable.pop()
            if self._advance(w, runnable):
                worker = self.workers[w]
                heappush(self.free, (worker.compute_free, w))

    def _advance(self, w: int, runnable: list[int]) -> bool:
        """Advance a worker until it waits for somebody (False) or its item ends (True)."""
        # Local names: this loop runs once for every task of the plan.
        worker, lost, turn, turn_at = self.workers[w], self.lost, self.turn, self.turn_at
        c, r, latency = self.costs.compute, self.costs.reduce, self.costs.latency
        tiles, tickets, buffers = worker.tiles, worker.tickets, worker.buffers
        first, series = self.offsets[worker.item], not self.costs.dq_buffers
        place, end = worker.place, len(tiles)
        while place < end:
            slot, tile = first + place, tiles[place]
            if not worker.waited:
                start = worker.compute_free
                compute_end = start + c
                if not series:
                    held_until, by_ticket = buffers.popleft()
                    if held_until > compute_end:
                        lost["ticket" if by_ticket else "reduce"] += held_until - compute_end
                        compute_end = held_until
                self.compute_start[slot], self.compute_end[slot] = start, compute_end
                worker.compute_free = compute_end
            if turn[tile] != tickets[place]:
                self.waiting[tile, tickets[place]] = w
                worker.waited, worker.place = True, place
                return False
            worker.waited = False
            could = max(worker.compute_free, worker.reduce_free)
            begin = max(could, turn_at[tile])
            finish = begin + r
            self.reduce_start[slot], self.reduce_end[slot] = begin, finish
            worker.reduce_free = finish
            turn[tile] += 1
            turn_at[tile] = finish + latency
            if self.waiting and (other := self.waiting.pop((tile, turn[tile]), None)) is not None:
                runnable.append(other)
            place += 1
            if series:
                lost["ticket"] += begin - could
                worker.compute_free = finish
            else:
                buffers.append((finish, begin > could))
                if place == end and begin > worker.compute_free:
                    # The next item is claimed when the last reduction has started.
                    lost["ticket" if begin > could else "reduce"] += begin - worker.compute_free
                    worker.compute_free = begin
        worker.place = place
        return True

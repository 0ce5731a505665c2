"""Orders in which a machine could run a plan, and an exhaustive search over all of them.

:func:`task_order` produces one legal order of all tasks for a number of resident workers: the CPU
executor runs it. :func:`can_deadlock` explores every order and is the yardstick for the verifier's
``min_workers``; it is for plans of a few dozen tasks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..errors import TooFewWorkersError
from .plan import Plan

__all__ = ["Task", "can_deadlock", "item_tasks", "task_order"]


class Task(NamedTuple):
    """One step of a worker: item (index into ``plan.items``), q head, kv tile, q tile and ticket."""

    item: int
    sequence: int
    q_head: int
    kv_tile: int
    q_tile: int
    ticket: int


def item_tasks(plan: Plan, item: int) -> list[Task]:
    """All tasks of an item in the order in which its worker runs them."""
    sequence, head_group, kv = plan.items[item].tolist()
    heads = plan.q_heads(sequence, head_group)
    tasks = np.stack(plan.pattern(sequence).tasks_of_heads(kv, len(heads)), axis=1).tolist()
    return [Task(item, sequence, heads[h], kv, q, t) for h, q, t in tasks]


def task_order(
    plan: Plan, workers: int, rng: random.Random | None = None, *, ordered: bool = True
) -> Iterator[Task]:
    """Tasks in an order in which ``workers`` resident workers could finish them.

    Without ``rng`` each worker runs until it has to wait, the lowest first; with it, a random worker
    that can move makes one step at a time. ``ordered=False`` ignores tickets: contributions come as
    they happen, as with atomic adds, and a random worker makes some steps, as if the others were late.

    Raises:
        TooFewWorkersError: no worker can move, though tasks are left.
    """
    done: dict[tuple[int, int, int], int] = {}
    claimed = 0
    active: list[list[Task]] = []  # per worker, its remaining tasks, next one last

    def ready(tasks: list[Task]) -> bool:
        task = tasks[-1]
        return not ordered or done.get((task.sequence, task.q_head, task.q_tile), 0) == task.ticket

    while True:
        active = [tasks for tasks in active if tasks]
        while len(active) < workers and claimed < len(plan.items):
            if tasks := item_tasks(plan, claimed):
                active.append(tasks[::-1])
            claimed += 1
        movable = [tasks for tasks in active if ready(tasks)]
        if not movable:
            break
        chosen = movable[0] if rng is None else rng.choice(movable)
        left = len(chosen)
        if rng is not None:
            left = 1 if ordered else rng.randint(1, left)
        while left and ready(chosen):
            task = chosen.pop()
            tile = (task.sequence, task.q_head, task.q_tile)
            done[tile] = done.get(tile, 0) + 1
            left -= 1
            yield task
    if active:
        task = active[0][-1]
        raise TooFewWorkersError(
            f"deadlock with {workers} workers: item {task.item} (sequence {task.sequence}, q head "
            f"{task.q_head}, kv tile {task.kv_tile}) waits at q tile {task.q_tile} for ticket {task.ticket}"
        )


def can_deadlock(plan: Plan, workers: int) -> bool:
    """True if some order of events leaves all of ``workers`` workers waiting with items unfinished.

    Explores every reachable state: any worker that can move may move next, and any free worker may
    claim the next item of the list before or after anything else happens.
    """
    tasks = [item_tasks(plan, item) for item in range(len(plan.items))]
    # A state is the number of tasks done of every claimed item; it determines the ticket counters.
    start: tuple[int, ...] = ()
    seen, frontier = {start}, [start]
    while frontier:
        state = frontier.pop()
        counters: dict[tuple[int, int, int], int] = {}
        for item, count in enumerate(state):
            for task in tasks[item][:count]:
                tile = (task.sequence, task.q_head, task.q_tile)
                counters[tile] = counters.get(tile, 0) + 1
        unfinished = [item for item, count in enumerate(state) if count < len(tasks[item])]
        following = []
        if len(unfinished) < workers and len(state) < len(tasks):
            following.append((*state, 0))
        for item in unfinished:
            task = tasks[item][state[item]]
            if counters.get((task.sequence, task.q_head, task.q_tile), 0) == task.ticket:
                following.append((*state[:item], state[item] + 1, *state[item + 1 :]))
        if not following and (unfinished or len(state) < len(tasks)):
            return True
        for new in following:
            if new not in seen:
                seen.add(new)
                frontier.append(new)
    return False

"""Intervals of rows leave tasks of a proven plan out. What is left ends, for thousands of random intervals.

The kernels decide on the GPU what is left (backward/seen.py). Here is the same rule in Python, and the
machine of the protocol runs what it leaves. Who adds waits for the last ticket below its own that is left.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator

import counts
from machine import (
    AT_ONCE,
    Contribution,
    Order,
    Tile,
    contributions,
    deadlock_is_possible,
    run,
    run_randomly,
)
from test_liveness import SMALL, larger_plans, needs_of

from dash_attn.backends.base import RowIntervals
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import Plan, build_plan, policy_by_name
from interval_cases import random_intervals, seen_elements


def drawn(problem: Problem, rng: random.Random) -> list[RowIntervals]:
    """Of the keys of every sequence. One per kv tile is seen at most: many would be seen by all rows."""
    found = []
    for rows, keys in problem.sequences:
        intervals, size = random_intervals(keys, rows, rng.randrange(10**9)), problem.tile_n
        kept = {rng.randrange(first, min(first + size, keys)) for first in range(0, keys, size)}
        intervals.ends[[key for key in range(keys) if key not in kept]] = 0
        found.append(intervals)
    return found


def bounds_of(rows: RowIntervals, kv_tile: int, problem: Problem) -> tuple[int, int]:
    """The first and the last q tile that see any key of a kv tile, by the ends of their intervals."""
    keys = slice(kv_tile * problem.tile_n, (kv_tile + 1) * problem.tile_n)
    pairs = [(max(start, 0), end) for start, end in zip(rows.starts[keys].tolist(), rows.ends[keys].tolist())]
    pairs = [(start, end) for start, end in pairs if start < end]
    if not pairs:
        return 0, -1
    return min(start for start, _ in pairs) // problem.tile_m, (
        max(end for _, end in pairs) - 1
    ) // problem.tile_m


def left_of(plan: Plan, rows: list[RowIntervals]) -> Order:
    """The contributions that are made, with the plan's tickets."""
    found = []
    for (sequence, _, kv_tile), tasks in zip(plan.items.tolist(), contributions(plan)):
        first, last = bounds_of(rows[sequence], kv_tile, plan.problem)
        found.append([task for task in tasks if first <= task.tile[2] <= last])
    return found


def ticket_before(tickets: int, ticket: int) -> int:
    """The last one below ``ticket`` of those that are left, a bit each; -1 if there is none."""
    return (tickets & (1 << ticket) - 1).bit_length() - 1


def renumbered(items: Order) -> Order:
    """With the number of contributions for which each one waits in place of its ticket."""
    tickets: dict[Tile, int] = defaultdict(int)
    for tasks in items:
        for _, tile, ticket in tasks:
            assert not tickets[tile] >> ticket & 1
            tickets[tile] |= 1 << ticket

    def waits_for(tile: Tile, ticket: int) -> int:
        before = ticket_before(tickets[tile], ticket)
        return 0 if before < 0 else waits_for(tile, before) + 1

    return [
        [Contribution(item, tile, waits_for(tile, ticket)) for item, tile, ticket in tasks] for tasks in items
    ]


def test_every_order_of_events_of_what_is_left_of_small_plans() -> None:
    """A deadlock is not possible from the plan's ``min_workers`` on, items claimed ahead or not."""
    rng, shorter, stored = random.Random(0), 0, 0
    for number in range(counts.SMALL_INTERVALS):
        plan = SMALL[number % len(SMALL)]
        items = renumbered(left_of(plan, drawn(plan.problem, rng)))
        shorter += sum(map(len, items)) < plan.problem.tasks
        stored += sum(task.ticket == 0 for tasks in items for task in tasks)
        workers = rng.randint(plan.min_workers, len(items)) if items else 1
        ahead, slots = rng.choice((0, 1, 3, AT_ONCE)), rng.choice((1, 2, 8))
        assert not deadlock_is_possible(items, workers, slots, ahead, needs_of(plan)), (plan, workers, ahead)
    assert shorter > counts.SMALL_INTERVALS // 2
    assert stored > counts.SMALL_INTERVALS


def large(rng: random.Random) -> Iterator[tuple[Plan, list[RowIntervals]]]:
    for number in range(counts.LARGE_INTERVALS // (10 * counts.PLACEMENTS_TRIED)):
        for plan in larger_plans(5000 + number, problems=1, most_tasks=150):
            for _ in range(10):
                yield plan, drawn(plan.problem, rng)


def test_what_is_left_of_larger_plans_ends() -> None:
    """With ``min_workers``, as far as each worker can and in a random order."""
    rng, shorter, dependent, masks = random.Random(1), 0, 0, 0
    for plan, rows in large(rng):
        items, needs = renumbered(left_of(plan, rows)), needs_of(plan)
        for ahead in (0, AT_ONCE):
            assert run(items, plan.min_workers, 8, ahead, needs)[0].finished, (plan, ahead)
        assert run_randomly(items, plan.min_workers, 2, rng, 3, needs).finished, plan
        shorter += 0 < sum(map(len, items)) < plan.problem.tasks
        dependent += plan.min_workers > 1
        masks += 1
    assert masks == counts.LARGE_INTERVALS
    assert shorter > masks // 3
    assert dependent > masks // 3


def test_what_any_row_sees_is_left() -> None:
    """By elements: every tile with one that is seen. Of the others most are left out."""
    rng, seen_tiles, others, left = random.Random(2), 0, 0, 0
    for _ in range(200):
        rows, keys = rng.randint(1, 700), rng.randint(1, 700)
        mask = rng.choice((Mask.full(), Mask.causal(), Mask.window(rng.randint(0, rows), 0)))
        problem = Problem(((rows, keys),), 1, 1, 64, mask)
        plan = build_plan(problem, policy_by_name("descending"))
        (intervals,) = drawn(problem, rng)
        seen = seen_elements(intervals, mask, rows)
        for (_, _, kv_tile), planned, tasks in zip(
            plan.items.tolist(), contributions(plan), left_of(plan, [intervals])
        ):
            columns = seen[:, kv_tile * problem.tile_n : (kv_tile + 1) * problem.tile_n]
            for task in planned:
                top = task.tile[2] * problem.tile_m
                if columns[top : top + problem.tile_m].any():
                    assert task in tasks
                    seen_tiles += 1
                else:
                    others += 1
                    left += task in tasks
    assert seen_tiles > 500
    assert left < others // 2


def test_who_waits_for_tickets_that_are_left_out_hangs() -> None:
    """The control: with the plan's own tickets."""
    rng, hang = random.Random(3), 0
    for plan in SMALL[::4]:
        items = left_of(plan, drawn(plan.problem, rng))
        hang += not run(items, max(len(items), 1))[0].finished
    assert hang > 20

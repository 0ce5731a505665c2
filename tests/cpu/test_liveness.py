"""Liveness: the kernels' protocol explored event by event, and an order that deadlocks where one exists.

``test_proof.py`` explores the executor's machine, in which a task is one step. Here a contribution is
granted and performed apart, as in the kernels (``machine.py``), and the plans are those of packed batches,
windows, head groups and every placement as well.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import counts
import numpy as np
import pytest
from machine import (
    AT_ONCE,
    Event,
    IllegalEventError,
    Machine,
    Order,
    contributions,
    deadlock_is_possible,
    deepest_item,
    left_at_claim,
    replay,
    run,
    run_randomly,
)
from test_many_plans import named_plan, random_problem

from dash_attn.errors import TooFewWorkersError, UnsupportedMaskError
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import COMMON_PLACEMENTS, POLICIES, Plan, Shift, build_plan, policy_by_name, prove
from dash_attn.schedule.interleave import can_deadlock, task_order

MASKS = (Mask.full(), Mask.causal(), Mask.window(1, 0), Mask.window(0, 1), Mask.window(None, 1))
LENGTHS = (
    ((1, 1),),
    ((2, 2),),
    ((3, 3),),
    ((4, 4),),
    ((2, 3),),
    ((4, 2),),
    ((2, 2), (1, 2)),
    ((1, 0), (2, 2)),
)
HEADS = ((1, 1), (2, 1), (3, 1), (2, 2))
MOST_TASKS = 7
"""Of a plan whose every order of events is explored."""


def placements(plan: Plan, rng: random.Random) -> Iterator[Plan]:
    """The plan with its items as they are, from the last to the first, and in random order."""
    yield plan
    yield prove(plan.with_items(plan.items[::-1]))
    order = list(range(len(plan.items)))
    rng.shuffle(order)
    yield prove(plan.with_items(plan.items[order]))


def small_plans() -> Iterator[Plan]:
    """Every policy under every mask, placement and deal of heads, one token a tile."""
    rng, seen = random.Random(0), set()
    for lengths in LENGTHS:
        for heads, kv_heads in HEADS:
            for mask in MASKS:
                problem = Problem(lengths, heads, kv_heads, 1, mask, tile_m=1, tile_n=1)
                if not 0 < problem.tasks <= MOST_TASKS:
                    continue
                policies = [*map(policy_by_name, POLICIES), Shift(ring=2)]
                for policy in policies:
                    for placement in COMMON_PLACEMENTS:
                        for groups in range(1, problem.group + 1):
                            try:
                                plan = build_plan(problem, policy, placement, head_groups=groups)
                            except UnsupportedMaskError:
                                continue
                            for other in placements(plan, rng):
                                key = str(contributions(other))  # many are the same machine
                                if key not in seen:
                                    seen.add(key)
                                    yield other


SMALL = list(small_plans())


def explain(machine: Machine) -> list[str]:
    """Why nobody can move: for each waiting worker the tile and ticket it waits for."""
    return [machine.why_not(Event("grant", at)) for at, left in enumerate(machine.granting) if left]


def counter_example(plan: Plan) -> list[Event]:
    """An order of events that ends in a deadlock of ``min_workers - 1`` workers; proven, not believed.

    The events are run again by a machine that refuses impossible ones. What is left at the end is compared
    with what the dependences say: every worker holds an item that depends on one nobody has claimed.
    """
    items, workers = contributions(plan), plan.min_workers - 1
    _, events = run(items, workers)
    stuck = replay(items, workers, 8, events)
    assert not any(map(stuck.possible, range(workers)))
    assert not stuck.finished
    assert len(explain(stuck)) == workers
    assert all("is at" in reason for reason in explain(stuck)), "something else than tickets stops a worker"
    deepest = deepest_item(items)
    needing = [item for item in range(stuck.claimed) if deepest[item] >= stuck.claimed]
    assert stuck.waiting_items() == needing
    return events


def refuses(plan: Plan, workers: int) -> bool:
    """Whether the executor's machine ends in a deadlock, too."""
    try:
        done = sum(1 for _ in task_order(plan, workers))
    except TooFewWorkersError:
        return True
    assert done == plan.problem.tasks
    return False


def test_every_order_of_events_of_small_plans() -> None:
    """Every number of workers and of slots: a deadlock is possible exactly below ``min_workers``."""
    searched = deadlocks = 0
    for plan in SMALL:
        items = contributions(plan)
        for workers in range(1, min(len(items), plan.min_workers + 1) + 1):
            expected = workers < plan.min_workers
            assert can_deadlock(plan, workers) == expected, (plan, workers)
            for slots in (1, 2, 8):
                assert deadlock_is_possible(items, workers, slots) == expected, (plan, workers, slots)
            searched, deadlocks = searched + 1, deadlocks + expected
    assert len(SMALL) >= counts.SMALL_PLANS
    assert searched >= counts.SMALL_PAIRS
    assert deadlocks > 100


def test_every_small_plan_has_its_counter_example() -> None:
    found = 0
    for plan in SMALL:
        if plan.min_workers > 1:
            counter_example(plan)
            assert refuses(plan, plan.min_workers - 1)
            found += 1
    assert found >= counts.DEPENDENT_SMALL_PLANS


def test_where_a_machine_stops_does_not_depend_on_the_order() -> None:
    """Where items are not claimed ahead, events enable others and disable none, so one order decides for all.

    Random ones end in the same place. This is what lets a single run stand for every order in the tests of
    larger plans."""
    stopped = 0
    for number in range(60):
        rng = random.Random(number)
        plan = SMALL[rng.randrange(len(SMALL))]
        items = contributions(plan)
        for workers in range(1, plan.min_workers + 1):
            places = [run_randomly(items, workers, slots, rng) for slots in (1, 2, 8, 8, 8)]
            assert len({tuple(sorted(place.counters.items())) for place in places}) == 1
            assert len({tuple(place.waiting_items()) for place in places}) == 1
            stopped += not places[0].finished
    assert stopped > 20


def larger_plans(seed: int, problems: int, most_tasks: int) -> Iterator[Plan]:
    """Plans of random problems, each as placed, reversed and shuffled."""
    rng = random.Random(seed)
    while problems:
        problem = random_problem(rng)
        if 20 <= problem.tasks <= most_tasks:
            problems -= 1
            yield from placements(named_plan(problem, rng), rng)


@pytest.mark.parametrize("chunk", range(counts.LARGER_CHUNKS))
def test_larger_plans_with_every_number_of_workers(chunk: int) -> None:
    """From ``min_workers`` to one worker per item, all tasks run."""
    runs = plans = 0
    for plan in larger_plans(1000 + chunk, counts.EVERY_WORKER_PROBLEMS, most_tasks=150):
        plans += 1
        items = contributions(plan)
        for workers in range(plan.min_workers, len(items) + 1):
            assert run(items, workers)[0].finished, (plan, workers)
            runs += 1
    assert plans == counts.PLACEMENTS_TRIED * counts.EVERY_WORKER_PROBLEMS
    assert runs >= counts.EVERY_WORKER_PAIRS


@pytest.mark.parametrize("chunk", range(counts.LARGER_CHUNKS))
def test_larger_plans_have_their_counter_example(chunk: int) -> None:
    """With ``min_workers - 1`` workers there is a deadlock, and with ``min_workers`` none."""
    found, most = 0, 0
    for plan in larger_plans(2000 + chunk, counts.COUNTER_PROBLEMS, most_tasks=1000):
        assert run(contributions(plan), plan.min_workers)[0].finished
        if plan.min_workers > 1:
            counter_example(plan)
            assert refuses(plan, plan.min_workers - 1)
            found, most = found + 1, max(most, plan.min_workers)
    assert found > 100
    assert most > 20


# Items claimed ahead


def needs_of(plan: Plan) -> list[int]:
    assert plan.verdict is not None
    return plan.verdict.needs.tolist()


def test_needs_is_the_last_item_that_an_item_depends_on() -> None:
    """The verifier's, against a computation that goes from task to task."""
    dependent = 0
    for plan in [*SMALL, *larger_plans(4000, problems=40, most_tasks=300)]:
        needs = deepest_item(contributions(plan))
        assert needs_of(plan) == needs, plan
        dependent += needs != list(range(len(needs)))
    assert dependent > 300


def explore_claims_ahead(plans: list[Plan], slots: int) -> tuple[int, int]:
    """Every order of events, from one worker to one per item: however early a worker claims, a deadlock is
    possible exactly below ``min_workers``, as without claims ahead.

    Returns how many pairs of a plan and a number of workers were searched, and how many of them deadlock.
    """
    searched = deadlocks = 0
    for plan in plans:
        items, needs = contributions(plan), needs_of(plan)
        # Short items make several of them the same machine.
        machines = {tuple(left_at_claim(len(i), ahead) for i in items): ahead for ahead in (1, 3, AT_ONCE)}
        for workers in range(1, len(items) + 1):
            expected = workers < plan.min_workers
            for ahead in machines.values():
                found = deadlock_is_possible(items, workers, slots, ahead, needs)
                assert found == expected, (plan, workers, ahead)
            searched, deadlocks = searched + 1, deadlocks + expected
    return searched, deadlocks


@pytest.mark.parametrize("slots", [1, 8])
def test_claiming_ahead_behind_what_an_item_depends_on_is_safe(slots: int) -> None:
    """The smallest plans, and one in eight of the others."""
    smallest = [plan for plan in SMALL if plan.problem.tasks <= 5]
    others = [plan for plan in SMALL if plan.problem.tasks > 5][::8]
    searched, deadlocks = explore_claims_ahead(smallest + others, slots)
    assert searched > 400
    assert deadlocks > 100


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 8])
def test_claiming_ahead_is_safe_in_all_small_plans(slots: int) -> None:
    searched, deadlocks = explore_claims_ahead(SMALL, slots)
    assert searched >= counts.AHEAD_PAIRS
    assert deadlocks > 300


def test_claiming_ahead_without_looking_can_deadlock() -> None:
    """With ``min_workers`` workers: in every plan in which an item depends on a later one if workers claim at
    once, in many if one task ahead. To look for one item less than an item needs is as bad."""
    dependent = [plan for plan in SMALL if plan.min_workers > 1]
    found, too_early = (dict.fromkeys((1, 3, AT_ONCE), 0) for _ in range(2))
    for plan in dependent:
        items, less = contributions(plan), [last - 1 for last in needs_of(plan)]
        for ahead in found:
            found[ahead] += deadlock_is_possible(items, plan.min_workers, 8, ahead)
            too_early[ahead] += deadlock_is_possible(items, plan.min_workers, 8, ahead, less)
    for deadlocks in (found, too_early):
        assert counts.UNSAFE_ONE_AHEAD <= deadlocks[1] <= deadlocks[3] < deadlocks[AT_ONCE] == len(dependent)


def test_more_workers_do_not_help_who_claims_without_looking() -> None:
    """Two kv tiles in a ring: worker 0 claims both and waits in the first for the second."""
    plan, items = ring(2)
    events = [Event(kind, 0) for kind in ("claim", "grant", "claim", "perform")]
    for workers in (2, 3, 4):
        machine = replay(items, workers, 8, events, ahead=1)
        assert not any(map(machine.possible, range(workers)))
        assert not machine.finished
        assert explain(machine) == ["tile (0, 0, 1) is at 0, worker 0 has ticket 1"]
        assert deepest_item(items)[0] == 1 in machine.waiting_items()
        with pytest.raises(IllegalEventError, match="item 0 depends on one that nobody has claimed"):
            replay(items, workers, 8, events, 1, needs_of(plan))


def test_claims_ahead_take_items_from_others() -> None:
    """Then events disable others, and orders end differently: one order does not decide for all any more."""
    _, items = ring(2)
    rng = random.Random(0)
    ends = {run_randomly(items, 2, 8, rng, ahead=1).finished for _ in range(50)}
    assert ends == {True, False}


@pytest.mark.parametrize(
    "chunk",
    [pytest.param(at, marks=[pytest.mark.slow] if at else []) for at in range(counts.LARGER_CHUNKS)],
)
def test_larger_plans_with_items_claimed_ahead(chunk: int) -> None:
    """A sample: orders in which each worker goes as far as it can, and random ones.

    Without looking whether an item may be claimed, the random ones find deadlocks."""
    rng, dependent, orders, stopped = random.Random(chunk), 0, 0, 0
    for plan in larger_plans(3000 + chunk, counts.AHEAD_PROBLEMS, most_tasks=120):
        items, needs, least = contributions(plan), needs_of(plan), plan.min_workers
        dependent += least > 1
        for ahead in (1, 3, AT_ONCE):
            for workers in sorted({least, min(least + 1, len(items)), rng.randint(least, len(items))}):
                assert run(items, workers, 8, ahead, needs)[0].finished, (plan, workers, ahead)
                for slots in (1, 8):
                    assert run_randomly(items, workers, slots, rng, ahead, needs).finished, (plan, workers)
                    orders += 1
            if least > 1:
                stopped += not run_randomly(items, least, 8, rng, ahead).finished
    assert dependent > 30
    assert orders >= counts.AHEAD_ORDERS
    assert stopped > 40


# The machine and its proofs can fail


def ring(tiles: int) -> tuple[Plan, Order]:
    plan = build_plan(Problem(((tiles, tiles),), 1, 1, 1, tile_m=1, tile_n=1), Shift())
    assert plan.min_workers == tiles
    return plan, contributions(plan)


def test_a_counter_example_in_words() -> None:
    """Two kv tiles in a ring on one worker: it adds to q tile 0 and waits at q tile 1 for the other item."""
    plan, items = ring(2)
    events = counter_example(plan)
    assert [event.kind for event in events] == ["claim", "grant", "perform"]
    assert explain(replay(items, 1, 8, events)) == ["tile (0, 0, 1) is at 0, worker 0 has ticket 1"]


def test_enough_workers_have_no_counter_example() -> None:
    _, items = ring(3)
    machine, events = run(items, 3)
    assert machine.finished
    assert replay(items, 3, 8, events).finished


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda events: events[1:], "worker 0 has no task"),
        (lambda events: [events[0], *events], "worker 0 still waits for tickets of item 0"),
        (lambda events: [*events, Event("grant", 0)], r"tile \(0, 0, 1\) is at 0, worker 0 has ticket 1"),
        (lambda events: [*events, Event("perform", 0)], "worker 0 holds no granted contribution"),
    ],
)
def test_the_machine_refuses_what_cannot_happen(change, reason) -> None:
    plan, items = ring(2)
    events = counter_example(plan)
    with pytest.raises(IllegalEventError, match=reason):
        replay(items, 1, 8, change(events))


def test_slots_are_limited_and_items_run_out() -> None:
    problem = Problem(((3, 1),), 1, 1, 1, tile_m=1, tile_n=1)
    items = contributions(build_plan(problem, Shift()))
    machine = replay(items, 1, 2, [Event("claim", 0), Event("grant", 0), Event("grant", 0)])
    assert machine.why_not(Event("grant", 0)) == "worker 0 holds 2 granted contributions"
    machine.apply(Event("perform", 0))
    machine.apply(Event("grant", 0))
    assert machine.why_not(Event("claim", 0)) == "no item is left"
    assert not machine.finished


def test_claiming_ahead_waits_for_the_first_grant_and_for_older_items() -> None:
    """Two tasks per item: a worker claims again when the second one waits, and a third item not yet then."""
    _, items = ring(2)
    events = [Event("claim", 0), Event("grant", 0), Event("claim", 0)]
    with pytest.raises(IllegalEventError, match="worker 0 still waits for tickets of item 0"):
        replay(items, 1, 8, events)
    with pytest.raises(IllegalEventError, match="worker 0 still waits for tickets of item 0"):
        replay(items, 1, 8, [events[0], events[2]], ahead=1)
    machine = replay(items, 1, 8, events, ahead=1)
    assert machine.waiting_items() == [0, 1]
    assert machine.why_not(Event("claim", 0)) == "worker 0 still waits for tickets of item 0"
    assert replay(items, 1, 8, [events[0], events[2]], ahead=AT_ONCE).claimed == 2


def test_claiming_ahead_waits_until_what_the_item_needs_is_claimed() -> None:
    """Two rings of two: in item 0, worker 0 may claim item 2 once item 1 is claimed, then no other."""
    problem = Problem(((2, 2),), 2, 2, 1, tile_m=1, tile_n=1)
    plan = build_plan(problem, Shift())
    items, needs = contributions(plan), needs_of(plan)
    assert needs == [1, 1, 3, 3]
    machine = replay(items, 2, 8, [Event("claim", 0), Event("grant", 0)], 1, needs)
    assert machine.why_not(Event("claim", 0)) == "item 0 depends on one that nobody has claimed"
    for event in (Event("claim", 1), Event("claim", 0)):
        machine.apply(event)
    assert machine.waiting_items() == [0, 1, 2]
    assert machine.why_not(Event("claim", 0)) == "worker 0 still waits for tickets of item 0"


def test_dependences_of_a_triangle() -> None:
    """Causal, kv tiles claimed upwards, sums descending: item 0 depends on the last, the last on none."""
    problem = Problem(((3, 3),), 1, 1, 1, Mask.causal(), tile_m=1, tile_n=1)
    plan = build_plan(problem, policy_by_name("spt"))
    upwards = prove(plan.with_items(np.sort(plan.items, axis=0)))
    assert deepest_item(contributions(upwards)) == [2, 2, 2]
    assert upwards.min_workers == 3
    assert deepest_item(contributions(plan)) == [0, 1, 2]
    assert plan.min_workers == 1

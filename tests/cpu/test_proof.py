"""The verifier: it accepts what policies make, refuses every mutation by name, and counts workers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import plans

from dash_attn.errors import (
    CoverageError,
    CycleError,
    FingerprintError,
    PlacementError,
    PlanError,
    ScheduleNameError,
    TicketError,
    TooFewWorkersError,
    UnsupportedMaskError,
)
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import (
    COMMON_PLACEMENTS,
    FA3,
    POLICIES,
    SPT,
    Descending,
    HeadPattern,
    Plan,
    Run,
    Shift,
    build_plan,
    check_workers,
    policy_by_name,
    prove,
)
from dash_attn.schedule.batch import Batch
from dash_attn.schedule.interleave import can_deadlock, task_order
from dash_attn.schedule.placement import Placement
from dash_attn.schedule.policy import Numerics
from dash_attn.schedule.proof import _block_of_q_tiles
from dash_attn.schedule.tickets import MAX_HOLD

RunLists = list[list[Run]]


def single_tasks(plan: Plan) -> RunLists:
    """Runs of the only pattern, one for each task, so that single tasks can be changed."""
    (pattern,) = plan.patterns.values()
    return [
        [Run(q, 1, 1, t) for q, t in zip(*(a.tolist() for a in pattern.tasks_of(kv)))]
        for kv in range(pattern.grid.kv_tiles)
    ]


def with_runs(plan: Plan, runs: RunLists) -> Plan:
    ((pair, pattern),) = plan.patterns.items()
    return replace(plan, patterns={pair: HeadPattern.from_runs(pattern.grid, runs, pattern.head_groups)})


def causal_plan(tiles: int = 4, heads: int = 2) -> Plan:
    return build_plan(Problem.dense(heads=heads, seqlen=128 * tiles, head_dim=64, mask=Mask.causal()), FA3())


def full_plan() -> Plan:
    return build_plan(Problem.dense(heads=2, seqlen=512, head_dim=64), Shift())


@given(plans())
def test_every_plan_of_a_policy_is_safe_and_runs(plan: Plan) -> None:
    assert plan.verdict is not None
    assert plan.verdict.tasks == plan.problem.tasks == len(list(task_order(plan, plan.min_workers)))


# Mutations. Each changes one thing in a good plan and names the error and the place it must report.


def drop_a_task(runs: RunLists) -> None:
    del runs[1][1]


def double_a_task(runs: RunLists) -> None:
    runs[1].append(runs[1][1])


def invent_a_task(runs: RunLists) -> None:
    runs[1].append(Run(0, 1, 1, 0))


def swap_two_tickets(runs: RunLists) -> None:
    # kv tile 0 was second on q tile 1 and third on q tile 2.
    _, a, b, _ = runs[0]
    runs[0][1:3] = [a._replace(t_first=b.t_first), b._replace(t_first=a.t_first)]


def use_a_ticket_twice(runs: RunLists) -> None:
    runs[2][0] = runs[2][0]._replace(t_first=1)


def make_a_gap(runs: RunLists) -> None:
    runs[2][1] = runs[2][1]._replace(t_first=3)


def ticket_beyond_the_end(runs: RunLists) -> None:
    runs[3][0] = runs[3][0]._replace(t_first=4)


def empty_run(runs: RunLists) -> None:
    runs[3].append(Run(3, 1, 0, 0))


@pytest.mark.parametrize(
    ("mutate", "error", "place"),
    [
        (drop_a_task, CoverageError, "sequence 0 .*kv tile 1, q tile 2: the task is missing"),
        (double_a_task, CoverageError, "kv tile 1, q tile 2: the task is there 2 times"),
        (invent_a_task, CoverageError, "kv tile 1, q tile 0: the mask leaves no such task"),
        (use_a_ticket_twice, TicketError, "head group 0, kv tile 2, q tile 2: ticket 1 is used twice"),
        (ticket_beyond_the_end, TicketError, "kv tile 3, q tile 3: ticket 4, the tile has 4 contributions"),
        (empty_run, CoverageError, "kv tile 3: malformed Run.*count=0"),
        (make_a_gap, TicketError, "kv tile 2, q tile 3: waits for ticket 3, nobody has ticket 2"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_mutations_have_named_errors(
    mutate: Callable[[RunLists], None], error: type[PlanError], place: str
) -> None:
    plan = causal_plan()
    runs = single_tasks(plan)
    prove(with_runs(plan, runs))
    mutate(runs)
    with pytest.raises(error, match=place):
        prove(with_runs(plan, runs))


FULL = Mask.full()


@pytest.mark.parametrize(
    ("lengths", "mask", "runs", "place"),
    [
        (
            (4, 3),
            FULL,
            [[Run(0, 1, 4, 0)], [Run(0, 1, 4, 1)], []],
            "kv tile 2, q tile 0: the task is missing",
        ),
        ((4, 2), FULL, [[Run(0, 1, 4, 0)], [Run(0, 1, 3, 1)]], "kv tile 1, q tile 3: .* missing"),
        ((4, 2), FULL, [[Run(0, 1, 4, 0)], [Run(1, 1, 3, 1)]], "kv tile 1, q tile 0: .* missing"),
        ((3, 2), FULL, [[Run(0, 1, 3, 0)], [Run(0, 2, 2, 1)]], "kv tile 1, q tile 1: .* missing"),
        ((3, 2), FULL, [[Run(0, 1, 3, 0)], [Run(2, -2, 2, 1)]], "kv tile 1, q tile 1: .* missing"),
        (
            (3, 3),
            Mask.window(1, 0),
            [[Run(0, 1, 2, 0), Run(2, 1, 1, 2)], [Run(1, 1, 1, 1), Run(2, 1, 1, 0)], [Run(2, 1, 1, 1)]],
            "kv tile 0, q tile 2: the mask leaves no such task",
        ),
    ],
    ids=["no run", "no end", "no begin", "a stride", "a stride down", "behind the mask"],
)
def test_tasks_that_no_ticket_misses(
    lengths: tuple[int, int], mask: Mask, runs: RunLists, place: str
) -> None:
    """What is missing or too much has the last ticket of its q tile, so that tickets leave no gap."""
    plan = build_plan(Problem((lengths,), 1, 1, 1, mask, tile_m=1, tile_n=1), FA3())
    with pytest.raises(CoverageError, match=place):
        prove(with_runs(plan, runs))


@given(plans(), st.randoms(use_true_random=False))
def test_any_task_too_few_or_too_many_is_found(plan: Plan, rng: random.Random) -> None:
    if len(plan.patterns) != 1:
        return
    runs = single_tasks(plan)
    some = [tasks for tasks in runs if tasks]
    if not some:
        return
    tasks = rng.choice(some)
    if rng.random() < 0.5:
        del tasks[rng.randrange(len(tasks))]
    else:
        rng.choice(runs).append(
            rng.choice(tasks)._replace(q_first=rng.randrange(plan.pattern(0).grid.q_tiles))
        )
    with pytest.raises(CoverageError):
        prove(with_runs(plan, runs))


@pytest.mark.parametrize("offsets", [(1, 2, 3, 4), (0, 2, 1, 4), (0, 1, 2, 3)])
def test_offsets_that_do_not_divide_the_runs(offsets: tuple[int, ...]) -> None:
    plan = build_plan(Problem(((4, 3),), 1, 1, 1, tile_m=1, tile_n=1), FA3())
    ((pair, pattern),) = plan.patterns.items()
    runs = np.concatenate([pattern.runs, pattern.runs[-1:]])
    for at, message in ((offsets, rf"offsets \[{offsets[0]}, .*\] do not divide 4 runs"),
                           ((0, 1, 2, 3, 4), "runs for 4 kv tiles, the grid has 3")):  # fmt: skip
        other = HeadPattern(pattern.grid, np.array(at), runs, 1, 1)
        with pytest.raises(CoverageError, match=message):
            prove(replace(plan, patterns={pair: other}))


@pytest.mark.parametrize(
    ("field", "values", "error"),
    [
        ("q_first", (-1, 4, 10**12), CoverageError),
        ("q_step", (0, 5, -5, -(2**63)), CoverageError),
        ("count", (0, -1, 5, 10**12), CoverageError),
        ("t_first", (-1, 5, 10**12), TicketError),
        ("t_step", (5, -5, 10**12, -(2**63)), TicketError),
        ("t_hold", (0, -1, MAX_HOLD + 1), TicketError),
    ],
)
def test_fields_beyond_every_plan_of_four_tiles(
    field: str, values: tuple[int, ...], error: type[PlanError]
) -> None:
    """Fields that say where tasks are: CoverageError. Fields that make their tickets: TicketError."""
    plan = causal_plan(tiles=4)
    for value in values:
        runs = single_tasks(plan)
        runs[3][0] = runs[3][0]._replace(**{field: value})
        with pytest.raises(PlanError, match=rf"kv tile 3: malformed Run.*{field}={value}\b") as caught:
            prove(with_runs(plan, runs))
        assert caught.type is error, value


@pytest.mark.parametrize("name", ["spt", "by_length"])
def test_tickets_may_step_by_more_than_there_are_q_tiles(name: str) -> None:
    """Two q tiles of four rows, eight kv tiles of one: kv tile 0 comes fourth, then eighth."""
    problem = Problem(((8, 8),), 1, 1, 1, Mask.causal(), tile_m=4, tile_n=1)
    plan = build_plan(problem, policy_by_name(name))
    assert plan.pattern(0).runs_of(0) == [Run(0, 1, 2, 3, 4)]
    assert plan.pattern(0).grid.q_tiles == 2
    assert plan.pattern(0).summation_orders() == [[3, 2, 1, 0], [7, 6, 5, 4, 3, 2, 1, 0]]


def test_a_ticket_step_of_more_than_the_kv_tiles_is_a_ticket_error() -> None:
    """Eight q tiles and two kv tiles: a step of 3 fits the q tiles, and no order of two contributions."""
    plan = build_plan(Problem(((8, 2),), 1, 1, 1, tile_m=1, tile_n=1), FA3())
    for step in (3, 8):
        with pytest.raises(TicketError, match=f"kv tile 1: malformed Run.*t_step={step}"):
            prove(with_runs(plan, [[Run(0, 1, 8, 0)], [Run(0, 1, 8, 1, step)]]))


def test_swapping_two_tickets_of_an_item() -> None:
    plan = full_plan()
    runs = single_tasks(plan)
    swap_two_tickets(runs)
    with pytest.raises(TicketError, match=r"kv tile \d, q tile [12]: (ticket . is used twice|waits for)"):
        prove(with_runs(plan, runs))


def swapped_on_one_q_tile(plan: Plan, q: int, a: int, b: int) -> Plan:
    """The plan with the tickets of kv tiles a and b exchanged on q tile q."""
    runs = single_tasks(plan)
    at = {kv: next(i for i, run in enumerate(runs[kv]) if run.q_first == q) for kv in (a, b)}
    ticket_a, ticket_b = runs[a][at[a]].t_first, runs[b][at[b]].t_first
    runs[a][at[a]] = runs[a][at[a]]._replace(t_first=ticket_b)
    runs[b][at[b]] = runs[b][at[b]]._replace(t_first=ticket_a)
    return with_runs(plan, runs)


def test_two_swapped_tickets_of_one_tile_are_another_order() -> None:
    """Still a safe plan, so only its fingerprint can tell: it must."""
    plan = causal_plan()
    swapped = prove(swapped_on_one_q_tile(plan, q=3, a=0, b=2))
    with pytest.raises(FingerprintError, match=f"expected numerics {plan.fingerprint}"):
        swapped.check_fingerprint(plan.fingerprint)


def test_cycle_is_named_with_its_links() -> None:
    """Item 0 goes 0, 1 and item 1 goes 1, 0; each waits for the other's second task."""
    plan = build_plan(Problem.dense(seqlen=256, head_dim=64), FA3())
    runs = [[Run(0, 1, 1, 1), Run(1, 1, 1, 0)], [Run(1, 1, 1, 1), Run(0, 1, 1, 0)]]
    with pytest.raises(CycleError) as caught:
        prove(with_runs(plan, runs))
    assert "sequence 0, head group 0" in str(caught.value)
    assert "kv tile 0 at q tile 0 (ticket 1) waits for kv tile 1" in str(caught.value)
    assert "kv tile 1 at q tile 1 (ticket 1) waits for kv tile 0" in str(caught.value)


@given(plans(), st.randoms(use_true_random=False))
def test_swapping_any_two_tickets_never_passes_unseen(plan: Plan, rng: random.Random) -> None:
    """Exchange the tickets of two tasks: an error of the verifier or another fingerprint."""
    if len(plan.patterns) != 1:
        return
    runs = single_tasks(plan)
    spots = [(kv, i) for kv, tasks in enumerate(runs) for i in range(len(tasks))]
    # The same plan, written task by task: fingerprints are compared in that form.
    original = with_runs(plan, [list(tasks) for tasks in runs]).fingerprint
    if len(spots) < 2:
        return
    (kv_a, a), (kv_b, b) = rng.sample(spots, 2)
    first, second = runs[kv_a][a], runs[kv_b][b]
    if first.t_first == second.t_first:
        return
    runs[kv_a][a], runs[kv_b][b] = (
        first._replace(t_first=second.t_first),
        second._replace(t_first=first.t_first),
    )
    mutant = with_runs(plan, runs)
    try:
        prove(mutant)
    except (TicketError, CycleError):
        return
    assert first.q_first == second.q_first, "only an exchange on one dQ tile can leave a permutation"
    assert mutant.fingerprint != original


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda items: items[1:], "sequence 0, head group 0, kv tile 0 is in no item"),
        (lambda items: np.concatenate((items, items[3:4])), "item 3: .*kv tile 3 is listed twice"),
        (lambda items: items + np.array([0, 0, 1]), "kv tile 4 does not exist"),
        (lambda items: items + np.array([0, 1, 0]), "head group 2, kv tile 0 does not exist"),
        (lambda items: items - np.array([1, 0, 0]), "sequence -1.* does not exist"),
    ],
)
def test_placements_that_are_no_list_of_items(
    change: Callable[[np.ndarray], np.ndarray], message: str
) -> None:
    plan = causal_plan()
    with pytest.raises(PlacementError, match=message):
        prove(plan.with_items(change(plan.items)))


@dataclass(frozen=True)
class Wrong(Placement):
    """Lists the first item twice, or leaves it out, of the batch that it is given."""

    name: ClassVar[str] = "wrong"
    twice: bool = True

    def place(self, batch: Batch, numerics: Numerics) -> np.ndarray:
        codes = np.arange(batch.item_count)
        return np.concatenate((codes, codes[:1])) if self.twice else codes[1:]


@pytest.mark.parametrize(
    ("twice", "message"),
    [
        (True, "sequence 1, head group 0, kv tile 0 is listed twice"),
        (False, "sequence 1, .* 0 is in no item"),
    ],
)
def test_a_wrong_placement_is_told_the_sequence_of_the_caller(twice: bool, message: str) -> None:
    """Placements see the longest sequence first: here that is the second one."""
    problem = Problem.varlen([128, 512], heads=1, head_dim=64)
    with pytest.raises(PlacementError, match=message):
        build_plan(problem, FA3(), Wrong(twice))


def test_a_large_cycle_is_refused_quickly() -> None:
    """Every item waits: naming the links must not look through the whole plan once an item."""
    n = 256
    plan = build_plan(Problem.dense(seqlen=128 * n, head_dim=64), Shift())
    runs = [[run._replace(t_first=n - 1 - run.t_first, t_step=-run.t_step) for run in item] for item in
            (plan.pattern(0).runs_of(kv) for kv in range(n))]  # fmt: skip
    with pytest.raises(CycleError, match="waits for kv tile"):
        prove(with_runs(plan, runs))


def test_a_verified_plan_cannot_be_changed() -> None:
    plan = causal_plan()
    with pytest.raises(ValueError, match="read-only"):
        plan.pattern(0).runs[0, 3] = 1
    with pytest.raises(ValueError, match="read-only"):
        plan.items[0, 0] = 1
    assert plan.verdict is not None
    for made in (plan.listed.codes, plan.verdict.needs):  # the table is made of these
        with pytest.raises(ValueError, match="read-only"):
            made[0] = 1
    assert replace(plan, policy="copy").verdict is None


def test_min_workers_needs_a_verified_plan() -> None:
    plan = causal_plan()
    with pytest.raises(PlanError, match="known only after"):
        _ = plan.with_items(plan.items).min_workers


def test_patterns_must_be_those_of_the_sequences() -> None:
    plan = causal_plan()
    with pytest.raises(PlanError, match="patterns for"):
        prove(replace(plan, patterns={}))


def test_too_few_workers() -> None:
    plan = full_plan()
    check_workers(plan, 4)
    with pytest.raises(TooFewWorkersError, match="shift needs 4 resident workers.*got 3"):
        check_workers(plan, 3)
    with pytest.raises(TooFewWorkersError, match=r"deadlock with 3 workers: item \d.*q head 0, kv tile"):
        list(task_order(plan, 3))


def small_plans() -> list[Plan]:
    found = []
    for tiles in (1, 2, 3, 4, 5):
        for heads, kv_heads in ((1, 1), (2, 1), (2, 2)):
            for mask in (Mask.full(), Mask.causal(), Mask.window(128, 0)):
                if kv_heads * tiles > 6 or heads * tiles > 8:
                    continue
                problem = Problem.dense(
                    heads=heads, kv_heads=kv_heads, seqlen=128 * tiles, head_dim=64, mask=mask
                )
                for name in POLICIES:
                    for placement in COMMON_PLACEMENTS:
                        try:
                            found.append(build_plan(problem, policy_by_name(name), placement))
                        except ValueError:
                            continue
    return found + [by_head(plan) for plan in found if plan.problem.group > plan.pattern(0).head_groups]


def by_head(plan: Plan) -> Plan:
    """The same runs, once per q head of an item."""
    passes = -(-plan.problem.group // plan.pattern(0).head_groups)
    patterns = {shape: replace(p, passes=passes) for shape, p in plan.patterns.items()}
    return prove(replace(plan, patterns=patterns))


def test_min_workers_against_exhaustive_search() -> None:
    """Every residency from 1 upward, every order of events: deadlock exactly below min_workers."""
    searched = 0
    for plan in small_plans():
        for workers in range(1, len(plan.items) + 1):
            assert can_deadlock(plan, workers) == (workers < plan.min_workers), (plan, workers)
            searched += 1
    assert searched > 500


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x + 0.5, lambda x: x.astype(np.int64) + 2**32, lambda x: x[:, :2], lambda x: x.ravel(),
        lambda x: 3, lambda x: [[1, 2], [3]], lambda x: None,
    ],
)  # fmt: skip
def test_items_that_are_none_are_refused(change: Callable[[Any], Any]) -> None:
    plan = build_plan(Problem.dense(seqlen=256, head_dim=64), "spt")
    for make in (plan.with_items, lambda items: Plan(plan.problem, "own", plan.patterns, items)):
        with pytest.raises(PlacementError, match=r"items must be \(n, 3\) integers of 32 bits"):
            make(change(plan.items))
    assert plan.with_items(plan.items.tolist()).items.dtype == np.int32


@pytest.mark.parametrize("policy", [None, 5, b"spt"])
def test_what_is_no_policy_is_named(policy: Any) -> None:
    problem = Problem.dense(seqlen=256, head_dim=64)
    with pytest.raises(ScheduleNameError, match=f"a policy is a name, .* got {policy!r}"):
        build_plan(problem, policy)
    with pytest.raises(ScheduleNameError, match="unknown placement ''; known: policy, "):
        build_plan(problem, "spt + ")
    with pytest.raises(ScheduleNameError, match="a placement is a name or a Placement, got None"):
        build_plan(problem, "spt", None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("offsets", "runs", "message"),
    [
        (np.zeros(0, int), np.zeros((0, 6), int), "offsets of a pattern: there is none"),
        ([[0, 1]], np.zeros((1, 6), int), r"offsets of a pattern must be \(n,\) integers of 64 bits"),
        ([0, 1], np.zeros((1, 5), int), r"runs of a pattern must be \(n, 6\) integers of 64 bits, got"),
        ([0, 1], np.zeros((1, 6)), r"runs of a pattern must be .*, got shape \(1, 6\) and float64"),
    ],
)
def test_patterns_that_are_no_arrays_of_integers(offsets: Any, runs: Any, message: str) -> None:
    with pytest.raises(CoverageError, match=message):
        HeadPattern(causal_plan().pattern(0).grid, offsets, runs)


@settings(max_examples=60)
@given(st.sampled_from([p for p in small_plans() if len(p.items) > 1]), st.randoms(use_true_random=False))
def test_min_workers_of_shuffled_placements(plan: Plan, rng: random.Random) -> None:
    order = list(range(len(plan.items)))
    rng.shuffle(order)
    shuffled = prove(plan.with_items(plan.items[order]))
    assert shuffled.fingerprint == plan.fingerprint
    for workers in range(1, len(order) + 1):
        assert can_deadlock(shuffled, workers) == (workers < shuffled.min_workers)


def test_legal_orders_keep_item_and_ticket_order() -> None:
    plan = full_plan()
    seen = set()
    for seed in range(5):
        order = list(task_order(plan, plan.min_workers + seed, random.Random(seed)))
        seen.add(tuple(order))
        done: dict[tuple[int, int, int], int] = {}
        for task in order:
            tile = (task.sequence, task.q_head, task.q_tile)
            assert done.get(tile, 0) == task.ticket
            done[tile] = task.ticket + 1
    assert len(seen) > 1
    unordered = list(task_order(plan, 8, random.Random(0), ordered=False))
    assert sorted(unordered) == sorted(order)


def test_blocks_of_q_tiles_give_the_same_verdict() -> None:
    """Large plans are verified in blocks. Written task by task a plan has none."""
    problem = Problem.dense(heads=2, seqlen=32 * 128, head_dim=128)
    for policy in (FA3(), Descending(), SPT(), Shift(ring=4), Shift(ring=8, stride=2), Shift(ring=5)):
        plan = build_plan(problem, policy)
        assert _block_of_q_tiles(plan.pattern(0)) > 1 or policy == Shift(ring=5)
        single = prove(with_runs(plan, single_tasks(plan)))
        assert single.min_workers == plan.min_workers


@pytest.mark.parametrize(
    ("first", "second", "block"),
    [
        ([Run(0, 1, 4, 0, 1, 2)], [Run(0, 1, 4, 1, -1, 2)], 2),
        ([Run(3, -1, 4, 0, 1, 2)], [Run(3, -1, 4, 1, -1, 2)], 2),
        ([Run(0, 1, 3, 0, 1, 2)], [Run(0, 1, 3, 1, -1, 2)], 2),  # the last block is short
        ([Run(0, 1, 6, 0, 1, 3)], [Run(0, 1, 6, 1, -1, 3)], 3),
        (
            [Run(0, 1, 4, 0, 1, 2), Run(4, 1, 4, 0, 1, 2)],
            [Run(0, 1, 4, 1, -1, 2), Run(4, 1, 4, 1, -1, 2)],
            2,
        ),
    ],
    ids=["upwards", "downwards", "short", "hold of 3", "two runs"],
)
def test_a_hold_smaller_than_any_run_limits_the_block(
    first: list[Run], second: list[Run], block: int
) -> None:
    """Two kv tiles whose tickets change in the middle of every run: each item needs the other one.

    A block as long as a run would hide the change. The plan would then count as one for a single worker.
    """
    q_tiles = sum(run.count for run in first)
    problem = Problem(((q_tiles, 2),), 1, 1, 1, tile_m=1, tile_n=1)
    plan = prove(with_runs(build_plan(problem, FA3()), [first, second]))
    assert plan.min_workers == 2
    assert can_deadlock(plan, 1)
    assert not can_deadlock(plan, 2)
    assert plan.verdict is not None
    assert plan.verdict.needs.tolist() == [1, 1]
    assert _block_of_q_tiles(plan.pattern(0)) == block


@pytest.mark.parametrize("tile_m", [1, 2, 4, 8])
@pytest.mark.parametrize("tile_n", [1, 2, 4, 8])
def test_tiles_of_every_shape(tile_m: int, tile_n: int) -> None:
    """Whatever a policy makes for a grid is proven, and written task by task it has the same verdict."""
    proven = 0
    for pair in ((8, 8), (24, 24), (9, 30), (30, 9)):
        for mask in (Mask.full(), Mask.causal(), Mask.window(3, 0), Mask.window(5, 4)):
            problem = Problem((pair,), 1, 1, 1, mask, tile_m=tile_m, tile_n=tile_n)
            for name in POLICIES:
                try:
                    plan = build_plan(problem, policy_by_name(name))
                except UnsupportedMaskError:
                    continue
                single = prove(with_runs(plan, single_tasks(plan)))
                assert single.min_workers == plan.min_workers, (pair, mask, name)
                proven += 1
    assert proven > 60


def test_an_error_in_a_plan_of_blocks_is_exact() -> None:
    problem = Problem.dense(heads=1, seqlen=32 * 128, head_dim=128)
    plan = build_plan(problem, Shift(ring=4))
    (pattern,) = plan.patterns.values()
    runs = [pattern.runs_of(kv) for kv in range(pattern.grid.kv_tiles)]
    assert _block_of_q_tiles(pattern) == 16
    runs[2][0] = runs[2][0]._replace(t_first=1)
    with pytest.raises(TicketError, match=r"q tile \d+: "):
        prove(with_runs(plan, runs))


def test_a_pattern_of_another_mask_or_length_is_refused() -> None:
    full = Problem.dense(seqlen=256, head_dim=64)
    causal = build_plan(Problem.dense(seqlen=256, head_dim=64, mask=Mask.causal()), Descending())
    with pytest.raises(CoverageError, match="the pattern is for 3 tasks of 2 x 2 tiles"):
        prove(Plan(full, "of another mask", causal.patterns, causal.items))
    longer = build_plan(Problem.dense(seqlen=512, head_dim=64), Descending())
    shorter = Problem.dense(seqlen=300, head_dim=64)
    with pytest.raises(CoverageError, match="the pattern is for 16 tasks of 4 x 4 tiles"):
        prove(Plan(shorter, "of another length", {(300, 300): longer.pattern(0)}, longer.items))


def test_a_pattern_serves_all_lengths_that_cut_the_same_tiles() -> None:
    longer = build_plan(Problem.dense(seqlen=512, head_dim=64), Descending())
    shorter = Problem.dense(seqlen=500, head_dim=64)
    assert prove(Plan(shorter, "shorter", {(500, 500): longer.pattern(0)}, longer.items)).min_workers == 1


def test_what_a_pattern_was_made_of_can_be_written_and_the_pattern_cannot() -> None:
    """A proof is kept, so nothing may change what was proven."""
    pattern = causal_plan().pattern(0)
    runs = pattern.runs.copy()
    mine = HeadPattern(pattern.grid, pattern.offsets, runs)
    runs[0, 3] = 99
    assert np.array_equal(mine.runs, pattern.runs)
    for array in (mine.runs, mine.offsets):
        assert array.base is None
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0

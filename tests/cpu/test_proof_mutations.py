"""The verifier refuses every mutation of a plan by name and place."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from proof_cases import RunLists, causal_plan, full_plan, single_tasks, with_runs
from strategies import plans

from dash_attn.errors import (
    CoverageError,
    CycleError,
    FingerprintError,
    PlacementError,
    PlanError,
    TicketError,
)
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import FA3, HeadPattern, Plan, Run, Shift, build_plan, policy_by_name, prove
from dash_attn.schedule.batch import Batch
from dash_attn.schedule.placement import Placement
from dash_attn.schedule.policy import Numerics
from dash_attn.schedule.tickets import MAX_HOLD

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


def plans_of_one_pattern(tasks: int) -> st.SearchStrategy[Plan]:
    """Those that :func:`single_tasks` can write task by task, with at least so many of these."""
    return plans().filter(lambda plan: len(plan.patterns) == 1 and plan.pattern(0).grid.tasks >= tasks)


@given(plans_of_one_pattern(1), st.randoms(use_true_random=False))
def test_any_task_too_few_or_too_many_is_found(plan: Plan, rng: random.Random) -> None:
    runs = single_tasks(plan)
    tasks = rng.choice([tasks for tasks in runs if tasks])
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


@given(plans_of_one_pattern(2), st.randoms(use_true_random=False))
def test_swapping_any_two_tickets_never_passes_unseen(plan: Plan, rng: random.Random) -> None:
    """Exchange the tickets of two tasks: an error of the verifier or another fingerprint."""
    runs = single_tasks(plan)
    spots = [(kv, i) for kv, tasks in enumerate(runs) for i in range(len(tasks))]
    # The same plan, written task by task: fingerprints are compared in that form.
    original = with_runs(plan, [list(tasks) for tasks in runs]).fingerprint
    kv_a, a = rng.choice(spots)
    first = runs[kv_a][a]
    others = [(kv, i) for kv, i in spots if runs[kv][i].t_first != first.t_first]
    assume(others)
    kv_b, b = rng.choice(others)
    second = runs[kv_b][b]
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

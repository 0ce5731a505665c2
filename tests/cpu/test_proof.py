"""The verifier: it accepts what policies make, keeps what it has proven, and counts workers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proof_cases import causal_plan, full_plan, single_tasks, with_runs
from strategies import plans

from dash_attn.errors import (
    CoverageError,
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
    Schedule,
    Shift,
    build_plan,
    check_workers,
    policy_by_name,
    prove,
)
from dash_attn.schedule.interleave import can_deadlock, task_order
from dash_attn.schedule.proof import _block_of_q_tiles


@given(plans())
def test_every_plan_of_a_policy_is_safe_and_runs(plan: Plan) -> None:
    assert plan.verdict is not None
    assert plan.verdict.tasks == plan.problem.tasks == len(list(task_order(plan, plan.min_workers)))


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


def test_a_fingerprint_does_not_know_where_integers_came_from() -> None:
    plan = full_plan()
    pattern = plan.pattern(0)
    for ones in (np.int64(1), np.int8(1)):
        same = HeadPattern(pattern.grid, pattern.offsets, pattern.runs, ones, ones)  # type: ignore[arg-type]
        assert (
            Plan(plan.problem, "x", {plan.problem.shapes[0]: same}, plan.items).fingerprint
            == plan.fingerprint
        )
    for wrong in (True, 1.0, "1", 0, -1):
        for how in ({"head_groups": wrong}, {"passes": wrong}):
            with pytest.raises(CoverageError, match=f"of a pattern must be an integer >= 1, got {wrong!r}"):
                HeadPattern(pattern.grid, pattern.offsets, pattern.runs, **how)  # type: ignore[arg-type]


def test_a_name_that_is_no_string_is_no_schedule() -> None:
    with pytest.raises(ScheduleNameError, match="a schedule's name must be a string, got 5"):
        Schedule.parse(5)  # type: ignore[arg-type]

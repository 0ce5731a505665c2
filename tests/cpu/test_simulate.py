"""The simulator: the paper's closed forms, conservation of time, and a slow model it must equal."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import plans

from dash_attn.errors import CostError, ProblemError, TooFewWorkersError
from dash_attn.machine import L2_BYTES
from dash_attn.model import H200, H200_WORKERS, Costs, Timeline, closed_form, lower_bounds, simulate
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import (
    FA3,
    POLICIES,
    SPT,
    Descending,
    Plan,
    Shift,
    SymmetricShift,
    build_plan,
    choose_policy,
    lpt_placement,
    prove,
)
from dash_attn.schedule.head_groups import default_head_groups
from dash_attn.schedule.interleave import item_tasks

costs = st.builds(
    Costs,
    compute=st.integers(1, 9).map(float),
    reduce=st.integers(0, 9).map(float),
    latency=st.integers(0, 5).map(float),
    dq_buffers=st.integers(0, 3),
    launch=st.integers(0, 4).map(float),
)


def by_relaxation(plan: Plan, costs: Costs, timeline: Timeline) -> np.ndarray:
    """Ends of all reductions by repeated relaxation of the model's equations, items as assigned."""
    ends: dict[tuple[int, int, int, int], float] = {}
    result = np.zeros(len(timeline.reduce_end))
    queues = timeline.items_of_workers()
    changed = True
    while changed:
        changed = False
        for queue in queues:
            compute_free = reduce_free = 0.0
            buffers: deque[float] = deque([0.0] * costs.dq_buffers)
            for item in queue:
                compute_free += costs.launch
                tasks = item_tasks(plan, item)
                for k, task in enumerate(tasks):
                    compute_end = compute_free + costs.compute
                    if costs.dq_buffers:
                        compute_end = max(compute_end, buffers.popleft())
                    tile = (task.sequence, task.q_head, task.q_tile)
                    turn = ends.get((*tile, task.ticket - 1), -np.inf) + costs.latency if task.ticket else 0.0
                    begin = max(compute_end, reduce_free, turn)
                    reduce_free = begin + costs.reduce
                    if ends.get((*tile, task.ticket)) != reduce_free:
                        ends[(*tile, task.ticket)], changed = reduce_free, True
                    result[timeline.first_task[item] + k] = reduce_free
                    if costs.dq_buffers:
                        buffers.append(reduce_free)
                        compute_free = max(compute_end, begin) if k == len(tasks) - 1 else compute_end
                    else:
                        compute_free = reduce_free
    return result


@settings(max_examples=150)
@given(plans(), costs, st.integers(0, 6))
def test_against_relaxation(plan: Plan, costs: Costs, spare: int) -> None:
    timeline = simulate(plan, costs, plan.min_workers + spare)
    assert np.array_equal(timeline.reduce_end, by_relaxation(plan, costs, timeline))
    patterns = plan.patterns.values()
    groups = {pattern.head_groups for pattern in patterns}
    by_default = all(p.head_groups == default_head_groups(plan.problem.group, p.grid) for p in patterns)
    if by_default or len(groups) == 1:
        bounds = lower_bounds(plan.problem, costs, timeline.workers, None if by_default else groups.pop())
        assert timeline.makespan >= max(bounds.values()) - 1e-9
    assert 0 <= timeline.utilization <= 1 + 1e-12
    # Items are claimed in list order.
    assert (np.diff(timeline.item_start) >= 0).all()


@given(plans(), st.integers(1, 5), st.integers(0, 5), st.integers(0, 6))
def test_every_cycle_is_accounted_for(plan: Plan, compute: int, reduce: int, spare: int) -> None:
    """In series: work, launches, waits and idle time add up to workers times makespan."""
    costs = Costs(compute, reduce, latency=2, launch=3)
    timeline = simulate(plan, costs, plan.min_workers + spare)
    work = plan.problem.tasks * (compute + reduce)
    assert work + sum(timeline.stalls.values()) == timeline.makespan * timeline.workers
    waits = timeline.reduce_start - timeline.compute_end
    assert (waits >= 0).all()
    assert timeline.stalls["ticket"] == waits.sum()
    assert timeline.stalls["reduce"] == 0


def test_other_head_groups_have_other_bounds() -> None:
    """Items that own fewer q heads are shorter: such a plan beats the bound of the default head groups."""
    problem = Problem.dense(heads=16, kv_heads=1, seqlen=1024, head_dim=64, mask=Mask.causal())
    costs, workers = Costs(5, 2), 64
    plan = build_plan(problem, Descending(), head_groups=16)
    makespan = simulate(plan, costs, workers).makespan
    assert max(lower_bounds(problem, costs, workers, head_groups=16).values()) <= makespan
    assert makespan < max(lower_bounds(problem, costs, workers).values())


def test_no_closed_form_for_windows() -> None:
    for policy in POLICIES:
        for mask in (Mask.window(128, 0), Mask.window(0, 128), Mask(None, 128)):
            assert closed_form(policy, mask, 8, 2, 5, 2) is None


CLOSED_FORMS = [
    (FA3(), Mask.full()), (FA3(), Mask.causal()), (Shift(), Mask.full()),
    (Descending(), Mask.causal()), (SymmetricShift(), Mask.causal()),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "mask"), CLOSED_FORMS, ids=str)
@pytest.mark.parametrize(("c", "r"), [(5, 2), (3, 3), (2.5, 0.25)])
def test_closed_forms(policy: object, mask: Mask, c: float, r: float) -> None:
    compared = 0
    for n in range(2, 33):
        for m in range(1, 9):
            expected = closed_form(policy.name, mask, n, m, c, r)
            if expected is not None:
                plan = build_plan(Problem.dense(heads=m, seqlen=128 * n, head_dim=64, mask=mask), policy)
                assert simulate(plan, Costs(c, r), n).makespan == expected, (n, m)
                compared += 1
    assert compared >= 16 * 4


@pytest.mark.parametrize(("n", "m"), [(8, 4), (8, 6), (5, 4), (16, 8)])
def test_descending_needs_c_of_at_least_r(n: int, m: int) -> None:
    """With r > c every pair of heads after the first starts later: the stated condition is needed."""
    plan = build_plan(Problem.dense(heads=m, seqlen=128 * n, head_dim=64, mask=Mask.causal()), Descending())
    c, r = 1, 3
    formula = m * (n + 1) * (c + r) / 2 + (n - 1) * r
    assert simulate(plan, Costs(c, r), n).makespan == formula + (m / 2 - 1) * (n - 1) * (r - c)


@pytest.mark.parametrize("n", [2, 5, 8])
@pytest.mark.parametrize("m", [1, 3, 5])
def test_odd_heads_under_descending(n: int, m: int) -> None:
    """The paper asks for even m: the last odd head is not balanced by another, and takes n (c + r)."""
    problem = Problem.dense(heads=m, seqlen=128 * n, head_dim=64, mask=Mask.causal())
    makespan = simulate(build_plan(problem, Descending()), Costs(5, 2), n).makespan
    assert makespan == (m - 1) * (n + 1) * 7 / 2 + n * 7


def test_ranking_on_an_h200_matches_measurements() -> None:
    """16k tokens, head dim 128, causal: measured 0.96 of no order for descending + LPT, 0.93 for SPT."""
    problem = Problem.dense(heads=16, seqlen=16384, head_dim=128, mask=Mask.causal())
    plans = [build_plan(problem, policy) for policy in (FA3(), SPT(), Descending())]
    # With the sections that were measured: as many heads as fit L2.
    plans[2] = prove(plans[2].with_items(lpt_placement(plans[2], l2_bytes=L2_BYTES)))
    used = [simulate(plan, H200, H200_WORKERS).utilization for plan in plans]
    assert used[0] < 0.6 < used[1] < used[2]
    assert used[1] == pytest.approx(0.93, abs=0.015)
    assert used[2] == pytest.approx(0.96, abs=0.015)


def head_after_head(plan: Plan) -> Plan:
    """The same order of sums; the items of a head stay together, in the order in which they were."""
    head = plan.items[:, 0].astype(np.int64) * plan.problem.heads + plan.items[:, 1]
    return prove(plan.with_items(plan.items[np.argsort(head, kind="stable")]))


def behind(seqlen_q: int, seqlen_k: int, heads: int, **options: int) -> Problem:
    return Problem.dense(seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads=heads, mask=Mask.causal(), **options)


RECTANGLES = {
    "spt": (behind(1024, 8192, 32, batch=4, head_dim=64), 0.85),
    "by_length": (behind(1024, 8192, 32), 0.85),
    "short of by_length": (behind(512, 4096, 64), 0.84),
    "one q tile of by_length": (behind(64, 4096, 192), 0.45),
    "lpt": (behind(256, 8192, 64, kv_heads=16), 0.85),
    "few q tiles": (behind(100, 3000, 200, head_dim=64), 0.4),
    "window": (Problem.dense(heads=32, seqlen=4096, head_dim=64, mask=Mask.window(4095, 0)), 0.8),
    "packed": (Problem.varlen([(700, 6000)] * 4, heads=32, head_dim=64, mask=Mask.causal()), 0.8),
}


@pytest.mark.parametrize("name", RECTANGLES)
def test_heads_take_turns_behind_many_keys(name: str) -> None:
    problem, least = RECTANGLES[name]
    plan = build_plan(problem, choose_policy(problem))
    queued = head_after_head(plan)
    assert plan.fingerprint == queued.fingerprint
    assert plan.min_workers == queued.min_workers == 1
    used, before = (simulate(p, H200, H200_WORKERS).utilization for p in (plan, queued))
    assert used > least
    assert before < 0.7 * used


@pytest.mark.usefixtures("large_heads")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("more", [0, 100, 511])
def test_squares_are_head_after_head(more: int, head_dim: int) -> None:
    lengths = [(1500, 1500 + more), (1000, 1000 + more), (64, 64)]
    problem = Problem.varlen(lengths, heads=3, head_dim=head_dim, mask=Mask.causal())
    plan = build_plan(problem, choose_policy(problem))
    assert np.array_equal(plan.items, head_after_head(plan).items)


def test_rows_that_are_aligned_elsewhere() -> None:
    """Rows 200 to 499 of 500 are aligned with the last keys; with the first ones they see fewer tasks."""
    last = Problem(((300, 500),), 2, 2, 64, Mask.causal())
    named, first = replace(last, q_starts=(200,)), replace(last, q_starts=(0,))
    timelines = [simulate(build_plan(p, FA3()), Costs(5, 2), 4) for p in (last, named, first)]
    assert timelines[0].makespan == timelines[1].makespan > timelines[2].makespan > 0


@pytest.mark.usefixtures("large_heads")
def test_only_those_that_queue_take_turns() -> None:
    """In a packed batch: squares between rectangles, empty ones, and neighbours of other lengths."""
    lengths = [(300, 300), (128, 2000), (128, 900), (0, 700), (500, 500), (1, 5000), (129, 640)]
    problem = Problem.varlen(lengths, heads=2, head_dim=64, mask=Mask.causal())
    plan = build_plan(problem, choose_policy(problem))
    sequences = plan.items[:, 0].tolist()
    assert sequences[:12] == [5, 5, 1, 1, 2, 2] * 2
    assert list(dict.fromkeys(sequences)) == [5, 1, 2, 4, 6, 0, 3]  # those that take longest first
    square = [at for at, sequence in enumerate(sequences) if sequence == 4]
    assert square == list(range(square[0], square[0] + 8))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_chunks_of_unequal_keys_take_turns(head_dim: int) -> None:
    """Also where all heads fit L2 together: they have unequal numbers of kv tiles, and queue all the same."""
    lengths = [(128, keys) for keys in (800, 4000, 1200, 3100, 2300, 900, 3700, 1700)]
    problem = Problem.varlen(lengths, heads=8, head_dim=head_dim, mask=Mask.causal())
    plan = build_plan(problem, choose_policy(problem))
    used, before = (simulate(p, H200, H200_WORKERS).makespan for p in (plan, head_after_head(plan)))
    assert used < 0.7 * before


@pytest.mark.parametrize("kv_heads", [16, 4])
@pytest.mark.parametrize("mask", [Mask.full(), Mask.causal(), Mask.window(500, 0)], ids=str)
def test_the_order_of_sequences_in_a_batch_does_not_matter(mask: Mask, kv_heads: int) -> None:
    """Whoever comes last should be short: a batch is claimed longest first, wherever its sequences stand."""
    lengths = [300, 6144, 17, 900, 2500, 128, 400, 700]
    used, claims, placed = [], [], []
    for seqlens in (sorted(lengths, reverse=True), lengths, sorted(lengths)):
        problem = Problem.varlen(seqlens, heads=16, kv_heads=kv_heads, mask=mask)
        chosen = choose_policy(problem)
        plan = build_plan(problem, chosen)
        used.append(simulate(plan, H200, H200_WORKERS).makespan)
        sequences = problem.lengths[plan.items[:, 0], 0]
        claims.append((sequences.tolist(), plan.items[:, 1:].tolist()))
        as_given = chosen.placement.place(plan.batch, chosen.numerics)
        placed.append(
            simulate(prove(plan.with_items(plan.batch.items[as_given])), H200, H200_WORKERS).makespan
        )
    assert used[0] == used[1] == used[2]
    assert claims[0] == claims[1] == claims[2]
    # In the model windows and groups lose a little: the longest sequence overlaps with the others either way.
    room = 1.01 if mask.is_full or (mask.is_causal and kv_heads == 16) else 1.1
    assert placed[0] == used[0] <= room * placed[2]
    if mask.is_full:  # the longest sequence came last
        assert used[0] < 0.95 * placed[2]


@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1])
def test_grouped_heads_wait_no_more_than_single_ones(kv_heads: int) -> None:
    """Heads of a group go task by task, so items stay in step as they do without groups."""
    problem = Problem.dense(heads=8, kv_heads=kv_heads, seqlen=4096, head_dim=128, mask=Mask.causal())
    plan = build_plan(problem, Descending(), "lpt")
    assert simulate(plan, H200, 16).stall < 0.02


def test_slack_hides_the_hand_over() -> None:
    """A ring with two q tiles between members does not wait where one with a single q tile does."""
    problem = Problem.dense(heads=8, seqlen=4096, head_dim=128)
    costs = Costs(compute=10, reduce=4, latency=9, dq_buffers=1)
    stalls = [simulate(build_plan(problem, Shift(ring=32, stride=s)), costs, 64).stall for s in (1, 2)]
    assert stalls[0] > 0.05
    assert stalls[1] < 0.01


@pytest.mark.parametrize("name", ["compute", "reduce", "latency", "launch", "dq_buffers"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "512", None])
def test_bad_costs_are_named(name: str, value: float) -> None:
    with pytest.raises(CostError, match=f"{name} must be finite and >= 0, got {value!r}"):
        Costs(**{name: value})  # type: ignore[arg-type]


def test_half_a_buffer() -> None:
    with pytest.raises(CostError, match=r"dq_buffers must be an integer, got 0.5"):
        Costs(dq_buffers=0.5)  # type: ignore[arg-type]
    with pytest.raises(CostError, match="dq_buffers must be at most 1024, got 10000000000"):
        Costs(dq_buffers=10**10)
    with pytest.raises(CostError, match=r"reduce must be at most 1e\+15, got 1e\+308"):
        Costs(reduce=1e308)


def test_buffers_are_integers_whatever_they_came_from() -> None:
    plan = build_plan(Problem.dense(seqlen=512, head_dim=64), Shift())
    costs = Costs(2, 1, dq_buffers=np.float64(2))  # type: ignore[arg-type]
    assert simulate(plan, costs, 4).makespan == simulate(plan, Costs(2, 1, dq_buffers=2), 4).makespan


@pytest.mark.parametrize("groups", [-1, 0, 3, 1.0, "1"])
def test_head_groups_that_there_cannot_be_have_no_bounds(groups: int) -> None:
    problem = Problem.dense(seqlen=512, heads=4, kv_heads=2)
    with pytest.raises(ProblemError, match=rf"head_groups must be in 1\.\.2 \(.*\), got {groups!r}"):
        lower_bounds(problem, Costs(), 4, groups)


def test_worker_counts() -> None:
    plan = build_plan(Problem.dense(seqlen=512, head_dim=64), Shift())
    for wrong in (float("nan"), float("inf"), None, "4", 0.5):
        with pytest.raises(CostError, match=f"workers must be an integer >= 1, got {wrong!r}"):
            simulate(plan, Costs(), wrong)  # type: ignore[arg-type]
    with pytest.raises(CostError, match="1,099,511,627,776 workers, the limit is 1,048,576"):
        lower_bounds(Problem.dense(seqlen=128), Costs(), 2**40)
    with pytest.raises(CostError, match="workers must be an integer >= 1, got 0"):
        simulate(plan, Costs(), 0)
    with pytest.raises(TooFewWorkersError, match="needs 4 resident workers"):
        simulate(plan, Costs(), 3)


def test_nothing_to_do() -> None:
    plan = build_plan(Problem.dense(seqlen_q=0, seqlen_k=256, head_dim=64), FA3())
    timeline = simulate(plan, Costs(launch=3), 2)
    assert (timeline.makespan, timeline.utilization, timeline.stall) == (3.0, 0.0, 0.0)

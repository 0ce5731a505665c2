"""Bytes: the same on every replay, whatever else changes, and not the same without tickets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from dash_attn.backends.cpu import fold_partials
from dash_attn.backends.sm90.launch import Debug, Result, run_backward
from dash_attn.problem import Problem
from dash_attn.schedule import FA3, SPT, Descending, Plan, Shift, build_plan, choose_policy, prove
from dash_attn.testing import assert_same_bytes, same_bytes
from dash_attn.tools.verify.checks import contention
from golden_cases import auto_problems, ring_problems
from gpu_cases import (
    CAUSAL,
    FULL,
    GRADS,
    POLICIES,
    WINDOW,
    Case,
    Inputs,
    any_case,
    auto_plan,
    dense,
    differing,
    launch,
    make_case,
)

BOUNDED = Debug(bounded=True)
"""Run first where workers are scarce, so that a plan that would hang is a failure with a message."""

BOTH_DIMS = pytest.mark.parametrize("head_dim", [64, 128])
AUTO = {name: replace(p, dtype="bfloat16") for name, p in (auto_problems(4) | ring_problems(4)).items()}
"""What "auto" runs, with heads enough for all workers; of one dtype, for kernels that other tests compile."""

EVERY_POLICY = pytest.mark.parametrize(("mask", "policy"), POLICIES, ids=lambda x: getattr(x, "name", str(x)))


def shuffled(plan: Plan, seed: int) -> Plan:
    """The same numerics with the items in random order."""
    order = np.random.default_rng(seed).permutation(len(plan.items))
    return prove(plan.with_items(plan.items[order]))


def resident() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def assert_replays(first: Result, again: Callable[[], Result], replays: int) -> None:
    for replay in range(replays):
        assert not (names := differing(first, again())), f"replay {replay}: {names} differ"


@BOTH_DIMS
@EVERY_POLICY
def test_replays(mask, policy, head_dim, replays):
    problem = dense(mask, seqlen=1100, heads=8, kv_heads=4, head_dim=head_dim)
    plan, case = build_plan(problem, policy), make_case(problem)
    first = launch(plan, case)
    assert_replays(first, lambda: launch(plan, case), replays)
    lpt = build_plan(problem, policy, "lpt")
    if lpt.min_workers <= resident():
        assert_replays(first, lambda: launch(lpt, case), 5)


@BOTH_DIMS
@EVERY_POLICY
def test_replays_beside_a_busy_stream(mask, policy, head_dim, replays):
    problem = dense(mask, seqlen=1100, heads=8, kv_heads=4, head_dim=head_dim)
    plan, case = build_plan(problem, policy), make_case(problem)
    first = launch(plan, case)
    with contention("cuda") as product:

        def again() -> Result:
            product()
            return launch(plan, case)

        assert_replays(first, again, replays // 2)


@pytest.mark.parametrize("name", AUTO)
def test_what_auto_runs_repeats_and_differs_without_order(name, replays):
    """Long rings, long sequences and head groups: bytes on replays, and fp32 sums without tickets."""
    plan, case = auto_plan(AUTO[name]), any_case(AUTO[name])
    first = launch(plan, case)
    assert_replays(first, lambda: launch(plan, case), replays // 4)
    dump = {"debug": Debug(contributions=True)}
    sums = launch(plan, case, **dump).dq_tiles
    with contention("cuda") as product:

        def loose() -> Result:
            product()
            return launch(plan, case, ordered=False, **dump)

        assert same_bytes(sums, launch(plan, case, **dump).dq_tiles)
        assert any(not same_bytes(sums, loose().dq_tiles) for _ in range(20))
        for _ in range(3):
            assert set(differing(first, launch(plan, case, ordered=False))) <= {"dq"}


def last_head_first(plan: Plan) -> Plan:
    """The same numerics head after head, from the last head to the first; within a head as before."""
    sequence, head_group, _ = plan.items.T.astype(np.int64)
    return prove(plan.with_items(plan.items[np.argsort(-(sequence << 32) - head_group, kind="stable")]))


@pytest.mark.parametrize("name", AUTO)
def test_what_auto_runs_does_not_depend_on_placement_and_workers(name):
    plan, case = auto_plan(AUTO[name]), any_case(AUTO[name])
    first, other = launch(plan, case), last_head_first(plan)
    assert (other.fingerprint, other.min_workers) == (plan.fingerprint, plan.min_workers)
    for placed, workers in ((other, None), (plan, plan.min_workers), (other, other.min_workers)):
        launch(placed, case, workers=workers, debug=BOUNDED)
        assert not differing(first, launch(placed, case, workers=workers)), f"{workers} workers"


@BOTH_DIMS
@EVERY_POLICY
def test_fewer_workers(mask, policy, head_dim):
    problem = dense(mask, seqlen=900, head_dim=head_dim)
    plan, case = build_plan(problem, policy), make_case(problem)
    first = launch(plan, case)
    least = plan.min_workers
    for workers in sorted({least, least + 1, (least + resident()) // 2, resident() - 1}):
        launch(plan, case, workers=workers, debug=BOUNDED)
        assert not differing(first, launch(plan, case, workers=workers)), f"{workers} workers"


@BOTH_DIMS
@EVERY_POLICY
def test_permuted_placement(mask, policy, head_dim):
    problem = dense(mask, seqlen=900, head_dim=head_dim)
    plan, case = build_plan(problem, policy), make_case(problem)
    first = launch(plan, case)
    for seed in range(5):
        other = shuffled(plan, seed)
        assert other.fingerprint == plan.fingerprint
        assert other.min_workers <= resident()
        assert not differing(first, launch(other, case)), f"placement {seed}"
        launch(other, case, workers=other.min_workers, debug=BOUNDED)
        assert not differing(first, launch(other, case, workers=other.min_workers)), f"placement {seed}"


@BOTH_DIMS
@pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOW], ids=lambda mask: mask.name)
def test_a_sequence_alone_in_a_batch_and_at_another_index(mask, head_dim):
    together = dense(mask, batch=5, seqlen=777, head_dim=head_dim)
    alone = dense(mask, batch=1, seqlen=777, head_dim=head_dim)
    case = make_case(together)
    batch = launch(auto_plan(together), case)
    turned = launch(auto_plan(together), _rows(case, [3, 4, 0, 2, 1]))
    one = launch(auto_plan(alone), _rows(case, [3]))
    for name in GRADS:
        assert_same_bytes(getattr(batch, name)[3], getattr(one, name)[0], name)
        assert_same_bytes(getattr(batch, name)[3], getattr(turned, name)[0], name)
        assert_same_bytes(getattr(batch, name)[2], getattr(turned, name)[3], name)


def _rows(case: Case, rows: list[int]) -> Case:
    """The case with these sequences of its batch."""
    return Case(case.problem, Inputs(*(x[rows].contiguous() for x in case.inputs)), case.scale, {})


@BOTH_DIMS
@pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOW], ids=lambda mask: mask.name)
def test_bytes_of_a_head_do_not_depend_on_the_other_heads(mask, head_dim):
    case = make_case(dense(mask, heads=6, kv_heads=3, head_dim=head_dim))
    together = launch(auto_plan(case.problem), case)
    dout, q, k, v, out, lse = case.inputs
    own, kv = slice(2, 4), slice(1, 2)  # the q heads of kv head 1
    alone = Problem.dense(batch=2, heads=2, kv_heads=1, seqlen=700, head_dim=head_dim, mask=mask)
    tensors = (dout[:, :, own], q[:, :, own], k[:, :, kv], v[:, :, kv], out[:, :, own], lse[:, own])
    found = run_backward(auto_plan(alone), tensors, case.scale)
    for name, heads in (("dq", own), ("dk", kv), ("dv", kv)):
        assert same_bytes(getattr(found, name), getattr(together, name)[:, :, heads].contiguous()), name


@BOTH_DIMS
def test_without_tickets_dq_differs_and_nothing_else_does(head_dim):
    problem = dense(CAUSAL, batch=1, heads=16, kv_heads=16, seqlen=4096, head_dim=head_dim)
    plan, case = build_plan(problem, Descending(), "lpt"), make_case(problem)
    first = launch(plan, case)
    assert_replays(first, lambda: launch(plan, case), 10)
    loose = [launch(plan, case, ordered=False) for _ in range(10)]
    assert any(not same_bytes(loose[0].dq, other.dq) for other in loose[1:])
    for other in loose:
        assert set(differing(first, other)) <= {"dq"}


@BOTH_DIMS
def test_other_tickets_give_other_bytes(head_dim):
    problem = dense(CAUSAL, seqlen=1100, head_dim=head_dim)
    case = make_case(problem)
    one, other = (launch(build_plan(problem, policy), case) for policy in (FA3(), SPT()))
    assert "dq" in differing(one, other)


# The GPU follows the plan


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@BOTH_DIMS
@pytest.mark.parametrize(
    ("mask", "policy"),
    [(FULL, Shift(ring=3)), (CAUSAL, None), (CAUSAL, SPT()), (WINDOW, Descending())],
    ids=["shift", "auto", "spt", "window"],
)
def test_partials_folded_in_ticket_order_are_dq(mask, policy, head_dim, dtype):
    problem = dense(mask, seqlen=1000, head_dim=head_dim, dtype=dtype)
    plan = build_plan(problem, policy) if policy else build_plan(problem, *choose_policy(problem))
    case = make_case(problem)
    result = launch(plan, case, debug=Debug(contributions=True))
    partials, sums = result.dq_contributions.cpu(), result.dq_tiles.cpu()
    grid, dq = problem.grid(0), result.dq.cpu()
    height = problem.tile_m
    tile = 0
    for sequence in range(len(problem.sequences)):
        for head in range(problem.heads):
            for q_tile, contributions in enumerate(grid.contributions.tolist()):
                where = f"sequence {sequence}, head {head}, q tile {q_tile}"
                by_ticket = list(partials[tile, :contributions])
                folded = fold_partials(by_ticket, 1.0, torch.float32)
                assert_same_bytes(folded, sums[tile], f"fp32 sum of {where}")
                rows = slice(q_tile * height, min((q_tile + 1) * height, grid.seqlen_q))
                rounded = fold_partials(by_ticket, case.scale, dq.dtype)[: rows.stop - rows.start]
                assert_same_bytes(rounded, dq[sequence, rows, head], f"dq of {where}")
                tile += 1
    assert tile == len(partials)
    assert not differing(result, launch(plan, case)), "the debug variant computes something else"


def test_folding_in_another_order_would_show():
    problem = dense(FULL, batch=1, heads=1, kv_heads=1, seqlen=1000)
    result = launch(auto_plan(problem), make_case(problem), debug=Debug(contributions=True))
    backwards = fold_partials(list(result.dq_contributions[0].cpu())[::-1], 1.0, torch.float32)
    assert not torch.equal(backwards, result.dq_tiles[0].cpu())


@BOTH_DIMS
def test_fp32_sums_repeat_and_differ_without_tickets(head_dim):
    problem = dense(FULL, batch=1, heads=16, kv_heads=16, seqlen=2048, head_dim=head_dim)
    plan, case, debug = build_plan(problem, FA3()), make_case(problem), Debug(contributions=True)
    first = launch(plan, case, debug=debug).dq_tiles
    for _ in range(20):
        assert same_bytes(first, launch(plan, case, debug=debug).dq_tiles)
    loose = [launch(plan, case, debug=debug, ordered=False).dq_tiles for _ in range(6)]
    assert any(not same_bytes(loose[0], other) for other in loose[1:])

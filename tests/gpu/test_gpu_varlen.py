"""Packed batches: the same bytes as alone, nothing from a neighbour, and as accurate as the peer."""

from __future__ import annotations

import random

import pytest
import torch
from test_gpu_accuracy import BOUND, PROBLEMS, bounds_of, configurations, random_length

from dash_attn.backends.cpu import fold_partials
from dash_attn.backends.sm90 import launch as launch_module
from dash_attn.backends.sm90.launch import Debug
from dash_attn.errors import InputError
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import SPT, Plan, Shift, build_plan, prove
from dash_attn.testing import assert_same_bytes
from gpu_cases import (
    CAUSAL,
    FULL,
    GRADS,
    WINDOW,
    Case,
    Inputs,
    auto_plan,
    dense,
    differing,
    forward,
    grads,
    launch,
    make_case,
    make_packed_case,
    packed,
    relative_error,
    sequence_rows,
    take_sequence,
)

BOTH_DIMS = pytest.mark.parametrize("head_dim", [64, 128])
EVERY_MASK = pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOW], ids=lambda mask: mask.name)

RAGGED = (700, (130, 515), 64, (999, 257), 1, 700)


def alone(problem: Problem, index: int) -> Problem:
    """One sequence of a packed problem as a dense problem."""
    seqlen_q, seqlen_k = problem.sequences[index]
    return dense(
        problem.mask, batch=1, heads=problem.heads, kv_heads=problem.kv_heads, head_dim=problem.head_dim,
        dtype=problem.dtype, seqlen=None, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
    )  # fmt: skip


def reordered(case: Case, order: list[int]) -> Case:
    """The packed case with its sequences in another order."""
    rows = sequence_rows(case.problem)
    dout, q, k, v, out, lse = case.inputs
    q_order = torch.cat([torch.arange(*rows[i].q.indices(len(q))) for i in order]).cuda()
    k_order = torch.cat([torch.arange(*rows[i].k.indices(len(k))) for i in order]).cuda()
    problem = packed(
        *(case.problem.sequences[i] for i in order), mask=case.problem.mask, heads=case.problem.heads,
        kv_heads=case.problem.kv_heads, head_dim=case.problem.head_dim, dtype=case.problem.dtype,
    )  # fmt: skip
    inputs = Inputs(dout[q_order], q[q_order], k[k_order], v[k_order], out[q_order], lse[:, q_order])
    return Case(problem, inputs, case.scale, {})


def assert_accurate(result, case: Case) -> None:
    for name, grad in grads(result).items():
        assert relative_error(grad, case.exact[name]) <= BOUND[case.problem.dtype], name


# The same bytes, wherever a sequence is


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@BOTH_DIMS
@EVERY_MASK
def test_a_sequence_has_the_same_bytes_packed_alone_and_elsewhere(mask, head_dim, kv_heads):
    problem = packed(*RAGGED, mask=mask, heads=8, kv_heads=kv_heads, head_dim=head_dim)
    case = make_packed_case(problem)
    together = launch(auto_plan(problem), case)
    assert_accurate(together, case)
    order = [3, 5, 0, 4, 2, 1]
    turned = reordered(case, order)
    elsewhere = launch(auto_plan(turned.problem), turned)
    new_rows = sequence_rows(turned.problem)
    for index, rows in enumerate(sequence_rows(problem)):
        one = alone(problem, index)
        single = launch(auto_plan(one), Case(one, take_sequence(case, index), case.scale, {}))
        there = new_rows[order.index(index)]
        for name in GRADS:
            side = "q" if name == "dq" else "k"
            mine = getattr(together, name)[getattr(rows, side)]
            assert_same_bytes(mine, getattr(single, name)[0], f"{name} of sequence {index}, alone")
            other = getattr(elsewhere, name)[getattr(there, side)]
            assert_same_bytes(mine, other, f"{name} of sequence {index}, at another index")


@BOTH_DIMS
@pytest.mark.parametrize("batch", [0, 1, 2], ids=["packed", "batch of one", "batch of two"])
def test_nothing_is_written_behind_a_gradient(batch, head_dim, monkeypatch):
    """The last tiles are ragged; tensors end in memory that belongs to somebody else."""
    how = {"heads": 2, "kv_heads": 2, "head_dim": head_dim}
    case = (
        make_case(dense(CAUSAL, batch=batch, seqlen=130, **how))
        if batch
        else make_packed_case(packed(70, 130, **how))
    )
    case_plan, behind = auto_plan(case.problem), []

    def with_rows_behind(x, **_):
        whole = torch.full((x.numel() + 256 * 2 * head_dim,), 7.0, dtype=x.dtype, device=x.device)
        behind.append(whole[x.numel() :])
        return whole[: x.numel()].view(x.shape)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty_like", with_rows_behind)
        result = launch(case_plan, case)
    assert_accurate(result, case)
    assert len(behind) == 3
    assert all(bool((x == 7).all()) for x in behind)


@BOTH_DIMS
@EVERY_MASK
def test_a_dense_batch_has_the_same_bytes_packed(mask, head_dim):
    problem = packed(777, 777, 777, mask=mask, head_dim=head_dim)
    case = make_packed_case(problem)
    plan = auto_plan(problem)
    batch = Inputs(
        *(x.unflatten(0, (3, 777)) for x in case.inputs[:5]),
        case.inputs.lse.unflatten(1, (3, 777)).transpose(0, 1),
    )
    first, other = launch(plan, case), launch(plan, Case(problem, batch, case.scale, {}))
    for name in GRADS:
        assert_same_bytes(getattr(first, name), getattr(other, name).flatten(0, 1), name)


@BOTH_DIMS
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=lambda mask: mask.name)
def test_many_ragged_sequences_repeat(mask, head_dim, replays):
    rng = random.Random(5)
    lengths = [rng.randint(1, 700) for _ in range(64)]
    problem = packed(*lengths, mask=mask, heads=8, kv_heads=2, head_dim=head_dim)
    plan, case = auto_plan(problem), make_packed_case(problem)
    first = launch(plan, case)
    assert_accurate(first, case)
    for replay in range(max(replays, 1000)):
        assert not differing(first, launch(plan, case)), f"replay {replay}"


# Nothing from a neighbour


@BOTH_DIMS
@pytest.mark.parametrize("which", ["dout", "q", "k", "v", "out", "lse"])
def test_nan_in_a_neighbour_does_not_leak(which, head_dim):
    problem = packed(300, 77, 513, mask=FULL, head_dim=head_dim)
    case = make_packed_case(problem)
    bad = getattr(case.inputs, which).clone()
    first, middle, last = sequence_rows(problem)
    if which == "lse":
        bad[:, middle.q] = float("nan")
    else:
        bad[middle.k if which in ("k", "v") else middle.q] = float("nan")
    plan = auto_plan(problem)
    clean = launch(plan, case)
    result = launch(plan, Case(problem, case.inputs._replace(**{which: bad}), case.scale, {}))
    touched = {"dout": ("dk", "dv"), "v": ("dq", "dk"), "out": ("dq", "dk"), "lse": ("dk", "dv")}
    for name in GRADS:
        side = "q" if name == "dq" else "k"
        x, y = getattr(clean, name), getattr(result, name)
        for rows in (first, last):
            assert_same_bytes(x[getattr(rows, side)], y[getattr(rows, side)], name)
        if name in touched.get(which, GRADS):
            assert y[getattr(middle, side)].isnan().any(), f"{name} hides the NaN"


@pytest.mark.parametrize("lengths", [((0, 100), (300, 300), (100, 0), (0, 0), (200, 5)), ((0, 3), (5, 0))])
@BOTH_DIMS
@EVERY_MASK
def test_empty_sequences(mask, head_dim, lengths):
    problem = packed(*lengths, mask=mask, head_dim=head_dim)
    case = make_packed_case(problem)
    result = launch(auto_plan(problem), case)
    assert_accurate(result, case)
    for (seqlen_q, seqlen_k), rows in zip(problem.sequences, sequence_rows(problem)):
        if not seqlen_q or not seqlen_k:
            assert not result.dq[rows.q].any()
            assert not result.dk[rows.k].any()
            assert not result.dv[rows.k].any()


def test_nothing_at_all():
    q = torch.zeros(0, 4, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.zeros(0, 2, 64, device="cuda", dtype=torch.bfloat16)
    plan = auto_plan(packed(0, 0, head_dim=64))
    out, lse = forward(plan, q, k, k, 1.0)
    assert (out.shape, lse.shape) == ((0, 4, 64), (4, 0))
    result = launch_module.run_backward(plan, (q, q, k, k, out, lse), 1.0)
    assert [x.shape for x in (result.dq, result.dk, result.dv)] == [q.shape, k.shape, k.shape]


# Layouts


@BOTH_DIMS
def test_packed_qkv_is_read_in_place(head_dim, monkeypatch):
    problem = packed(300, 77, 513, kv_heads=4, head_dim=head_dim)
    plan, case = auto_plan(problem), make_packed_case(problem)
    dout, q, k, v, out, lse = case.inputs
    qkv = torch.stack([q, k, v], 1)
    views = Inputs(dout, qkv[:, 0], qkv[:, 1], qkv[:, 2], out, lse)
    first = launch(plan, case)
    copied = []
    loadable = launch_module.loadable
    monkeypatch.setattr(
        launch_module, "loadable", lambda x: copied.append(loadable(x) is not x) or loadable(x)
    )
    assert not differing(first, launch(plan, Case(problem, views, case.scale, {})))
    assert copied
    assert not any(copied)


# The GPU follows the plan


@pytest.mark.parametrize(
    ("mask", "policy"), [(FULL, Shift(ring=3)), (CAUSAL, None), (CAUSAL, SPT()), (WINDOW, None)]
)
@BOTH_DIMS
def test_partials_folded_in_ticket_order_are_dq(mask, policy, head_dim):
    problem = packed(*RAGGED, mask=mask, heads=6, kv_heads=1, head_dim=head_dim)
    plan = build_plan(problem, policy) if policy else auto_plan(problem)
    case = make_packed_case(problem)
    result = launch(plan, case, debug=Debug(contributions=True))
    assert not differing(result, launch(plan, case)), "the debug variant computes something else"
    partials, dq, tile = result.dq_contributions.cpu(), result.dq.cpu(), 0
    height = problem.tile_m
    for sequence, rows in enumerate(sequence_rows(problem)):
        for head in range(problem.heads):
            for q_tile, contributions in enumerate(problem.grid(sequence).contributions.tolist()):
                first = rows.q.start + q_tile * height
                here = slice(first, min(first + height, rows.q.stop))
                tickets = list(partials[tile, :contributions]) or [torch.zeros_like(partials[tile, 0])]
                folded = fold_partials(tickets, case.scale, dq.dtype)
                where = f"dq of sequence {sequence}, head {head}, q tile {q_tile}"
                assert_same_bytes(folded[: here.stop - here.start], dq[here, head], where)
                tile += 1
    assert tile == len(partials)


def test_workers_and_placement_leave_every_byte_alone():
    problem = packed(*RAGGED, heads=8, kv_heads=1)
    plan, case = auto_plan(problem), make_packed_case(problem)
    assert plan.group_sum_first[-1] > 0
    first = launch(plan, case)
    for seed in range(5):
        items = plan.items[torch.randperm(len(plan.items), generator=torch.Generator().manual_seed(seed))]
        other: Plan = prove(plan.with_items(items))
        launch(other, case, workers=other.min_workers, debug=Debug(bounded=True))
        for workers in (other.min_workers, 100, None):
            assert not differing(first, launch(other, case, workers=workers)), f"{workers} workers"


# Head groups


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@BOTH_DIMS
@EVERY_MASK
def test_head_groups_change_the_order_of_dk_and_dv_and_nothing_else(mask, head_dim, dtype):
    problem = packed(1111, (300, 700), mask=mask, heads=14, kv_heads=2, head_dim=head_dim, dtype=dtype)
    case = make_packed_case(problem)
    whole = launch(auto_plan(problem, head_groups=1), case)
    assert_accurate(whole, case)
    for groups in (2, 3, 7):
        plan = auto_plan(problem, head_groups=groups)
        assert plan.group_sum_first[-1] == 2 * groups * (9 + 6)
        found = launch(plan, case)
        assert_accurate(found, case)
        assert_same_bytes(found.dq, whole.dq, "dq")
        assert set(differing(whole, found)) == {"dk", "dv"}, "the order of heads does not show"
        for _ in range(20):
            assert not differing(found, launch(plan, case))


@BOTH_DIMS
def test_head_groups_under_every_batch_extent(head_dim):
    """Dense batches of two, of which one sequence alone has the same bytes."""
    two = dense(CAUSAL, batch=2, heads=8, kv_heads=1, seqlen=900, head_dim=head_dim)
    flat = packed(900, 900, heads=8, kv_heads=1, head_dim=head_dim)
    case = make_packed_case(flat)
    rows = [take_sequence(case, index) for index in range(2)]
    batch = Inputs(*(torch.cat(pair) for pair in zip(*rows)))
    plan = auto_plan(two)
    assert plan.group_sum_first[-1] > 0
    dense_batch, one = launch(plan, Case(two, batch, case.scale, {})), launch(auto_plan(flat), case)
    for name in GRADS:
        assert_same_bytes(getattr(dense_batch, name).flatten(0, 1), getattr(one, name), name)


# Accuracy


def random_packed_problem(number: int) -> Problem:
    rng = random.Random(1000 + number)
    every = configurations()
    head_dim, dtype, name, group = every[number % len(every)]
    lengths = []
    for _ in range(rng.randint(1, 6)):
        seqlen_q = rng.choice((random_length(rng), rng.randint(0, 200)))
        lengths.append((seqlen_q, seqlen_q if rng.random() < 0.5 else random_length(rng)))
    masks = {"full": FULL, "causal": CAUSAL, "window": Mask.window(rng.randint(0, 600), rng.randint(0, 50))}
    kv_heads = rng.choice((1, 1, 2, 3))
    return packed(
        *lengths, mask=masks[name], heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype
    )


@pytest.mark.parametrize("number", range(PROBLEMS))
def test_error_is_no_worse_than_the_peers(number):
    problem = random_packed_problem(number)
    case = make_packed_case(problem, seed=number, outliers=number % 4 == 3)
    ours = grads(launch(auto_plan(problem), case))
    bounds = bounds_of(case)
    for name in GRADS:
        error = relative_error(ours[name], case.exact[name])
        assert error <= bounds[name], f"{name} of {problem}: error {error:.3e}, allowed {bounds[name]:.3e}"


# Forward and CUDA graphs


@BOTH_DIMS
@EVERY_MASK
def test_forward(mask, head_dim):
    problem = packed(*RAGGED, (50, 0), (0, 50), mask=mask, head_dim=head_dim)
    case = make_packed_case(problem)
    out, lse = forward(auto_plan(problem), *case.inputs[1:4], case.scale)
    assert relative_error(out, case.exact["out"]) <= 4e-3
    hidden = case.exact["lse"].isinf()
    assert torch.equal(lse.isinf(), hidden)
    assert not out[hidden.mT].any()
    torch.testing.assert_close(lse[~hidden].double(), case.exact["lse"][~hidden], atol=1e-3, rtol=1e-4)
    for index, rows in enumerate(sequence_rows(problem)):
        one = alone(problem, index)
        single = take_sequence(case, index)
        their_out, their_lse = forward(auto_plan(one), *single[1:4], case.scale)
        assert_same_bytes(out[rows.q], their_out[0], f"out of sequence {index}")
        assert_same_bytes(lse[:, rows.q], their_lse[0], f"lse of sequence {index}")


@BOTH_DIMS
def test_a_captured_call_repeats_its_bytes(head_dim):
    problem = packed(*RAGGED, heads=8, kv_heads=2, head_dim=head_dim)
    plan, case = auto_plan(problem), make_packed_case(problem)
    dout, q, k, v, _, _ = case.inputs

    def step() -> list[torch.Tensor]:
        out, lse = forward(plan, q, k, v, case.scale)
        result = launch_module.run_backward(plan, (dout, q, k, v, out, lse), case.scale)
        return [out, lse, result.dq, result.dk, result.dv]

    expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(20):
        graph.replay()
    for x, y in zip(expected, found):
        assert_same_bytes(x, y)


def test_a_plan_is_not_uploaded_while_a_graph_is_captured():
    problem = packed(100, 200, head_dim=64)
    plan, case = auto_plan(problem), make_packed_case(problem)
    launch(auto_plan(problem), case)  # compiled, but another plan
    torch.cuda.synchronize()
    with (
        pytest.raises(InputError, match="make the same call once before capturing it"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        launch(plan, case)
    torch.cuda.synchronize()
    assert_accurate(launch(plan, case), case)

"""The Triton kernels on a GPU, any that they run on: numbers, bytes, replays."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dash_attn
from dash_attn.backends.base import Tensors
from dash_attn.backends.shapes import Keys
from dash_attn.backends.triton import launch
from dash_attn.backends.triton.backend import BACKEND
from dash_attn.backends.triton.tiles import forward_numerics
from dash_attn.problem import Mask
from dash_attn.schedule import FA3, SPT, Descending, Plan, Shift, build_plan, prove
from dash_attn.scores import PLAIN, Scores
from dash_attn.testing import assert_same_bytes, same_bytes
from gpu_cases import CAUSAL, FULL, WINDOW, Case, any_case, auto_plan, relative_error, sequence_rows
from interval_cases import ends_of_documents, random_tree
from triton_cases import GPU_BOUND, NAMES, triton_problem

pytest.importorskip("triton", reason="Triton is not installed")

DEVICE = torch.device("cuda", 0)
DTYPES = sorted(GPU_BOUND)
LENGTHS = ((700, 700), (0, 30), (300, 0), (130, 900), (900, 130), (1, 515))

problem_of = partial(triton_problem, head_dim=64, mask=CAUSAL, dtype="bfloat16", heads=4, kv_heads=2)


def run(plan: Plan, case: Case, **how: Any) -> dict[str, Tensor]:
    """out and lse of the forward, and the gradients from these."""
    dout, q, k, v = case.inputs[:4]
    assert BACKEND.why_not(plan.problem, DEVICE, q.ndim == 3) == ""
    prepared = BACKEND.prepare(plan.problem, DEVICE, packed=q.ndim == 3)
    out, lse = prepared.forward(q, k, v, Scores(case.scale))
    grads = prepared.backward(plan, Tensors(dout, q, k, v, out, lse), Scores(case.scale), **how)
    return dict(zip(NAMES, (out, lse, *grads)))


def assert_accurate(case: Case, found: dict[str, Tensor]) -> None:
    for name, exact in case.exact.items():
        got = found[name].double()
        nothing = exact == -torch.inf
        assert torch.equal(got == -torch.inf, nothing), name
        got, exact = got.masked_fill(nothing, 0), exact.masked_fill(nothing, 0)
        assert relative_error(got, exact) <= (1e-4 if name == "lse" else GPU_BOUND[case.problem.dtype]), name


# Numbers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 16, 40, 64, 80, 96, 128, 192, 256])
def test_head_dims_and_dtypes(head_dim: int, dtype: str) -> None:
    case = any_case(problem_of(*LENGTHS, head_dim=head_dim, dtype=dtype))
    assert_accurate(case, run(auto_plan(case.problem), case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (64, 128), (72, 96), (40, 200), (24, 16)])
def test_head_dims_of_v(head_dim: int, head_dim_v: int, dtype: str) -> None:
    case = any_case(problem_of(*LENGTHS, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype))
    found = run(auto_plan(case.problem), case)
    assert_accurate(case, found)
    for name, again in run(auto_plan(case.problem), case).items():
        assert_same_bytes(again, found[name], name)


@pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOW, Mask.window(40, 70)], ids=lambda mask: mask.name)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (7, 1)])
def test_masks_and_heads(mask: Mask, heads: int, kv_heads: int) -> None:
    for head_groups in {1, heads // kv_heads}:
        for lengths in (LENGTHS, (513, 513)):
            case = any_case(problem_of(*lengths, mask=mask, heads=heads, kv_heads=kv_heads))
            assert_accurate(case, run(auto_plan(case.problem, head_groups=head_groups), case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_intervals_of_documents(head_dim: int, dtype: str) -> None:
    """As packed sequences, within rounding; twice the same bytes. A tree against PyTorch's attention."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    lengths = (300, 1, 700, 499)
    sizes = [(1500, heads, head_dim) for heads in (4, 4, 2, 2)]
    like = {"generator": generator, "device": DEVICE}
    dout, *leaves = (torch.randn(size, **like).to(getattr(torch, dtype)) for size in sizes)
    leaves = [x.requires_grad_() for x in leaves]
    rows = ends_of_documents(*lengths).to(DEVICE)
    one, many = (torch.tensor([0, *n]).cumsum(0).int().to(DEVICE) for n in ((1500,), lengths))
    how: dict[str, Any] = {"causal": True, "backend": "triton"}
    calls = [(one, {"row_ends": rows}), (one, {"row_ends": rows.cpu()}), (many, {})]
    results = []
    for bounds, intervals in calls:
        out = dash_attn.flash_attn_varlen_func(*leaves, bounds, bounds, **intervals, **how)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, dout)))
    for found, again, packed in zip(*results):
        assert_same_bytes(found, again)
        assert relative_error(found.double(), packed.double()) <= 2 * GPU_BOUND[dtype]
    ends, seen = random_tree(1500, 1)
    q, k, v = (x.detach()[None] for x in leaves)
    found = dash_attn.attention(q, k, v, row_ends=ends[None].to(DEVICE), **how)
    wide = [x.double().transpose(1, 2) for x in (q, k, v)]
    exact = F.scaled_dot_product_attention(*wide, seen.to(DEVICE), enable_gqa=True)
    assert relative_error(found.double(), exact.transpose(1, 2)) <= GPU_BOUND[dtype]


def test_rows_without_keys() -> None:
    case = any_case(problem_of((300, 0), (300, 100)))
    found = run(auto_plan(case.problem), case)
    blind = found["lse"][0] == -torch.inf
    assert int(blind.sum()) == 300 + 200
    for name in ("out", "dq"):
        assert not found[name][blind].any()


@pytest.mark.parametrize("growth", [(0.1, 12.0), (12.0, 0.1)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_maxima_that_rise(head_dim: int, growth: tuple[float, float]) -> None:
    case = any_case(problem_of(2500, head_dim=head_dim, heads=2))
    _, q, k, v, _, _ = case.inputs
    k = (k * torch.linspace(*growth, k.shape[1], device=DEVICE)[None, :, None, None]).to(k.dtype)
    out, lse = BACKEND.prepare(case.problem, DEVICE, packed=False).forward(q, k, v, Scores(case.scale))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * case.scale
    scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    exact = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double())
    assert relative_error(out, exact) < 4e-3
    assert float((lse.double() - scores.logsumexp(-1)).abs().max()) < 2e-4


# Bytes of the forward


def rows_of(case: Case, q: slice, keys: int, mask: Mask, heads: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """out and lse of some rows of a dense batch of one, which see the first keys."""
    inputs = case.inputs
    group = case.problem.group
    kv = slice(heads.start and heads.start // group, heads.stop and heads.stop // group)
    parts = inputs.q[:, q, heads], inputs.k[:, :keys, kv], inputs.v[:, :keys, kv]
    p = case.problem
    problem = problem_of(
        (parts[0].shape[1], keys), mask=mask, head_dim=p.head_dim, dtype=p.dtype, heads=parts[0].shape[2],
        kv_heads=parts[1].shape[2],
    )  # fmt: skip
    return BACKEND.prepare(problem, DEVICE, packed=False).forward(*parts, Scores(case.scale))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [CAUSAL, WINDOW], ids=lambda mask: mask.name)
@pytest.mark.parametrize("head_dim", [40, 64, 80, 128, 256])
def test_a_rows_bytes_depend_on_what_it_sees_and_on_where_that_stands(
    head_dim: int, mask: Mask, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With short segments, so that there are several: a prefix, a chunk, one row, fewer heads, packed."""
    monkeypatch.setattr(launch, "forward_numerics", lambda *of: replace(forward_numerics(*of), segment=512))
    rng = random.Random(head_dim)
    length = 1500
    case = any_case(problem_of(length, mask=mask, head_dim=head_dim, dtype=dtype))
    whole = rows_of(case, slice(None), length, mask)

    def check(found: tuple[Tensor, Tensor], start: int, end: int, heads: slice = slice(None)) -> None:
        assert_same_bytes(found[0], whole[0][:, start:end, heads].contiguous(), "out")
        assert_same_bytes(found[1], whole[1][:, heads, start:end].contiguous(), "lse")

    for _ in range(5):
        start, end = sorted(rng.sample(range(1, length), 2))
        check(rows_of(case, slice(end), end, mask), 0, end)
        check(rows_of(case, slice(start, end), end, mask), start, end)
        alone = slice(end - 1, end)
        check(rows_of(case, alone, end, mask), end - 1, end)
        if mask.is_causal:
            check(rows_of(case, alone, end, FULL), end - 1, end)
    heads = slice(2, 4)
    check(rows_of(case, slice(None), length, mask, heads), 0, length, heads)
    other = any_case(problem_of(77, mask=mask, head_dim=head_dim, dtype=dtype))
    packed = problem_of(77, length, mask=mask, head_dim=head_dim, dtype=dtype)
    both = [torch.cat([a[0], b[0]]) for a, b in zip(other.inputs[1:4], case.inputs[1:4])]
    out, lse = BACKEND.prepare(packed, DEVICE, packed=True).forward(*both, Scores(case.scale))
    check((out[None, 77:], lse[None, :, 77:].contiguous()), 0, length)


def test_another_segment_gives_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    case = any_case(problem_of(1500))
    whole = rows_of(case, slice(None), 1500, CAUSAL)
    monkeypatch.setattr(launch, "forward_numerics", lambda *of: replace(forward_numerics(*of), segment=512))
    assert not same_bytes(rows_of(case, slice(None), 1500, CAUSAL)[0], whole[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_neighbours_values_do_not_leak(bad: float) -> None:
    case = any_case(problem_of(130, 300, 70))
    plan = auto_plan(case.problem)
    wanted = run(plan, case)
    spoilt = [x.clone() for x in case.inputs]
    for x in spoilt[:4]:
        x[130:430] = bad
    found = run(plan, replace(case, inputs=Tensors(*spoilt)))
    for name in NAMES:
        for rows in (slice(130), slice(430, 500)):
            at = (slice(None), rows) if name == "lse" else (rows,)
            assert_same_bytes(found[name][at].contiguous(), wanted[name][at].contiguous(), name)


def test_used_keys() -> None:
    """The first keys of a cache, with NaN behind them."""
    problem = problem_of((3, 400), (3, 0), (3, 700))
    case = any_case(problem)
    _, q, k, v = case.inputs[:4]
    wanted = BACKEND.prepare(problem, DEVICE, packed=True).forward(q, k, v, Scores(case.scale))
    caches = [torch.full((3, 800, *k.shape[1:]), torch.nan, dtype=k.dtype, device=DEVICE) for _ in "kv"]
    for x, cache in zip((k, v), caches):
        for place, part in zip(cache, x.split([400, 0, 700])):
            place[: len(part)] = part
    dense = BACKEND.prepare(problem, DEVICE, packed=True, keys=Keys(tuple(caches[0].shape), None))
    flat = [cache.flatten(0, 1) for cache in caches]
    packed = BACKEND.prepare(problem, DEVICE, packed=True, keys=Keys(tuple(flat[0].shape), (0, 800, 1600)))
    for found in (
        dense.forward(q, *caches, Scores(case.scale)),
        packed.forward(q, *flat, Scores(case.scale)),
    ):
        assert_same_bytes(found[0], wanted[0], "out")
        assert_same_bytes(found[1], wanted[1], "lse")


def test_zeros_have_no_sign() -> None:
    """A product that underflows below 0 is 0, whether or not the row's neighbours see one more segment."""
    q, k, v = (torch.zeros(1, 16_393, 1, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
    q[..., 0], k[:, 8192:16_384, :, 0], v[:, :8192] = 1, 64, -1e-30
    problem = problem_of((101, 16_393), head_dim=128, heads=1, kv_heads=1)
    chunk = BACKEND.prepare(problem, DEVICE, packed=False).forward(q[:, 16_292:], k, v, PLAIN)[0]
    alone = problem_of((1, 16_384), head_dim=128, heads=1, kv_heads=1)
    parts = q[:, :1], k[:, :16_384], v[:, :16_384]
    one = BACKEND.prepare(alone, DEVICE, packed=False).forward(*parts, PLAIN)[0]
    assert same_bytes(one[0, 0], chunk[0, 16_383 - 16_292])
    assert not torch.signbit(one).any()


# Bytes of the backward

CASES = {
    "causal 64": problem_of(2000),
    "full 128": problem_of(1500, mask=FULL, head_dim=128),
    "window 96, fp16": problem_of(1500, mask=WINDOW, head_dim=96, dtype="float16"),
    "packed 80": problem_of(*LENGTHS, head_dim=80),
    "causal 256": problem_of(900, head_dim=256, kv_heads=1),
    "causal fp32": problem_of(700, dtype="float32"),
}


@pytest.mark.parametrize("name", CASES)
def test_replays(name: str, replays: int) -> None:
    case = any_case(CASES[name])
    plan = auto_plan(case.problem)
    first = run(plan, case)
    assert_accurate(case, first)
    for _ in range(replays):
        again = run(plan, case)
        assert all(same_bytes(again[name], first[name]) for name in NAMES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_the_order_of_sums_is_that_of_the_plan(head_dim: int, dtype: str) -> None:
    """fa3 visits the same q tiles in the same order as spt, and sums dQ from the other end."""
    case = any_case(problem_of(1500, head_dim=head_dim, dtype=dtype))
    plan = build_plan(case.problem, SPT())
    found = run(plan, case)
    order = torch.randperm(len(plan.items)).numpy()
    shuffled = run(prove(plan.with_items(plan.items[order])), case)
    for name in NAMES:
        assert_same_bytes(shuffled[name], found[name], name)
    other = run(build_plan(case.problem, FA3()), case)
    assert not same_bytes(other["dq"], found["dq"])
    for name in ("dk", "dv"):
        assert_same_bytes(other[name], found[name], name)
    disordered = run(plan, case, disorder=random.Random(1))
    assert not same_bytes(disordered["dq"], found["dq"])
    assert_accurate(case, disordered)


def test_dq_is_the_sum_of_contributions_in_ticket_order() -> None:
    """Of one kv tile alone, dQ is its contribution. These, added in ticket order, are dQ bit for bit."""
    case = any_case(problem_of(640, mask=FULL, dtype="float32", heads=1, kv_heads=1))
    scale = replace(case, scale=0.125)  # a power of two, as gradients are scaled at the end
    for policy in (FA3(), SPT(), Shift()):
        plan = build_plan(case.problem, policy)
        whole = run(plan, scale)
        orders = plan.pattern(0).summation_orders()
        one_by_one = [_only(plan, scale, whole, kv) for kv in range(plan.pattern(0).grid.kv_tiles)]
        tile = case.problem.tile_m
        for q_tile, order in enumerate(orders):
            rows = slice(q_tile * tile, (q_tile + 1) * tile)
            total = one_by_one[order[0]][:, rows].clone()
            for kv in order[1:]:
                total += one_by_one[kv][:, rows]
            assert torch.equal(total, whole["dq"][:, rows]), (policy, q_tile)


def _only(plan: Plan, case: Case, whole: dict[str, Tensor], kv: int) -> Tensor:
    """dQ of a kv tile: the others' keys are 0, and what is subtracted and divided by stays."""
    dout, q, k, v = case.inputs[:4]
    prepared = BACKEND.prepare(plan.problem, DEVICE, packed=False)
    only = torch.zeros_like(k)
    at = slice(kv * plan.problem.tile_n, (kv + 1) * plan.problem.tile_n)
    only[:, at] = k[:, at]
    return prepared.backward(
        plan, Tensors(dout, q, only, v, whole["out"], whole["lse"]), Scores(case.scale)
    ).dq


def test_a_sequence_has_the_same_bytes_packed_and_alone() -> None:
    case = any_case(problem_of(*LENGTHS, head_dim=96))
    together = run(auto_plan(case.problem), case)
    for index, rows in enumerate(sequence_rows(case.problem)):
        problem = problem_of(LENGTHS[index], head_dim=96)
        sides = (rows.q, rows.q, rows.k, rows.k, rows.q)
        parts = [x[side][None] for x, side in zip(case.inputs[:5], sides)]
        inputs = Tensors(*parts, case.inputs.lse[None, :, rows.q])
        alone = run(auto_plan(problem), Case(problem, inputs, case.scale, {}))
        for name in ("out", "dq", "dk", "dv"):
            side = rows.k if name in ("dk", "dv") else rows.q
            assert_same_bytes(together[name][side], alone[name][0], f"{name} of sequence {index}")


def test_layout_of_the_inputs_leaves_every_byte_alone() -> None:
    case = any_case(problem_of((500, 500), (500, 500), head_dim=80))
    plan = auto_plan(case.problem)
    wanted = run(plan, case)
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in case.inputs[:5]]
    odd = [torch.cat([x, x[..., :1]], -1)[..., :-1] for x in case.inputs[:5]]
    for tensors in (transposed, odd):
        found = run(plan, replace(case, inputs=Tensors(*tensors, case.inputs.lse)))
        for name in NAMES:
            assert_same_bytes(found[name], wanted[name], name)


def test_a_captured_graph_replays_the_same_bytes() -> None:
    case = any_case(problem_of(700))
    plan = build_plan(case.problem, Descending())
    dout, q, k, v = case.inputs[:4]
    prepared = BACKEND.prepare(case.problem, DEVICE, packed=False)

    def step() -> tuple[Tensor, ...]:
        out, lse = prepared.forward(q, k, v, Scores(case.scale))
        grads = prepared.backward(plan, Tensors(dout, q, k, v, out, lse), Scores(case.scale))
        return out, lse, grads.dq, grads.dk, grads.dv

    wanted = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        for x in captured:
            x.fill_(7)
        graph.replay()
        for name, a, b in zip(NAMES, captured, wanted):
            assert_same_bytes(a, b, name)

"""The Triton kernels, run by Triton's interpreter; ``test_triton.py`` starts this file in processes.

The interpreter must be chosen before Triton is loaded, which other tests of a process may have done. By hand:

    TRITON_INTERPRET=1 OPENBLAS_CORETYPE=SANDYBRIDGE .venv/bin/pytest tests/cpu/triton_interpreted.py

It multiplies bfloat16 wrongly: these tests are of float16 and float32, and bfloat16 is for a GPU. Its sums
are NumPy's, so bytes here show what programs read and in which order they add, and not what a compiler makes
of it.
"""

from __future__ import annotations

import math
import random
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from attention_cases import (
    SCALE,
    executed,
    packed_tensors,
    shuffled_placement,
    split,
)
from torch import Tensor
from triton_runs import (
    BOUND,
    CPU,
    LENGTHS,
    MASKS,
    NAMES,
    SCORES,
    assert_accurate,
    few_keys,
    forward,
    problem_of,
    run,
)

import dash_attn
from dash_attn.backends.base import Tensors
from dash_attn.backends.cached import CachedProblem, CachedTensors
from dash_attn.backends.cpu import dq_partials, fold_partials
from dash_attn.backends.cpu import forward as reference
from dash_attn.backends.shapes import Keys
from dash_attn.backends.triton import backward_kernels, launch
from dash_attn.backends.triton.append import append
from dash_attn.backends.triton.backend import BACKEND
from dash_attn.backends.triton.parts import whole_columns, whole_part, whole_rows
from dash_attn.backends.triton.tables import backward_tables
from dash_attn.backends.triton.tiles import TILES, forward_numerics
from dash_attn.errors import InputError, PlanError, PlanMismatchError
from dash_attn.problem import Mask
from dash_attn.schedule import FA3, SPT, Descending, Plan, Shift, SymmetricShift, build_plan, prove
from dash_attn.scores import Scores
from dash_attn.testing import assert_same_bytes, same_bytes
from kvcache_cases import random_history

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in rows that see nothing


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
def test_masks_and_lengths(mask: Mask) -> None:
    """Also rows without keys, keys without rows, and sequences without either."""
    problem = problem_of(*LENGTHS, (0, 0), mask=mask)
    tensors = packed_tensors(problem)
    plan = build_plan(problem, Descending())
    found = run(plan, tensors)
    assert_accurate(problem, tensors, found)
    blind = found["lse"][0] == -torch.inf
    assert blind[70:110].all()  # of the sequence without keys
    for name in ("out", "dq"):
        assert not found[name][blind].any()


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("head_dim", [8, 40, 64, 96, 128, 200])
def test_head_dims(head_dim: int, dtype: str) -> None:
    problem = problem_of((70, 90), mask=Mask.causal(), head_dim=head_dim, dtype=dtype, heads=1)
    tensors = packed_tensors(problem)
    tensors[1] = tensors[1] / head_dim**0.5  # the scale of these tests is for small head dims
    found = run(build_plan(problem, SPT()), tensors)
    assert {found[name].dtype for name in NAMES if name != "lse"} == {getattr(torch, dtype)}
    assert_accurate(problem, tensors, found)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(24, 16), (16, 40), (72, 96), (192, 128), (8, 136)])
def test_head_dims_of_v(head_dim: int, head_dim_v: int, dtype: str) -> None:
    """Several head groups: their sums have both head dims."""
    problem = problem_of(
        (70, 90), (33, 20), mask=Mask.causal(), head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype
    )
    tensors = packed_tensors(problem)
    tensors[1] = tensors[1] / head_dim**0.5
    for head_groups in (1, 2):
        plan = build_plan(problem, SPT(), head_groups=head_groups)
        found = run(plan, tensors)
        assert [x.shape[-1] for x in (found["out"], found["dq"], found["dk"], found["dv"])] == [
            head_dim_v, head_dim, head_dim, head_dim_v
        ]  # fmt: skip
        assert_accurate(problem, tensors, found)


def test_head_dims_of_v_in_dense_batches() -> None:
    """To the byte as packed; and a cache of keys."""
    problem = problem_of((40, 60), (40, 60), mask=Mask.window(30, 0), head_dim=24, head_dim_v=16)
    plan, packed = build_plan(problem, SPT()), packed_tensors(problem)
    wanted = run(plan, packed)
    dense = [x.unflatten(0, (2, -1)) for x in packed]
    found = run(plan, dense)
    for name in ("out", "dq", "dk", "dv"):
        assert_same_bytes(found[name].flatten(0, 1), wanted[name], name)
    _, q, k, v = dense
    keys = Keys((2, 70, 1, 24), None)
    caches = [torch.cat([x, torch.full_like(x[:, :10], torch.nan)], 1) for x in (k, v)]
    used = BACKEND.prepare(problem, CPU, packed=False, keys=keys).forward(q, *caches, SCORES)
    assert_same_bytes(used[0], found["out"], "out")


@pytest.mark.parametrize("head_groups", [1, 2, 3])
def test_head_groups(head_groups: int) -> None:
    problem = problem_of((50, 70), (30, 10), heads=6, kv_heads=2)
    tensors = packed_tensors(problem)
    plan = build_plan(problem, Descending(), head_groups=head_groups)
    assert {pattern.head_groups for pattern in plan.patterns.values()} == {head_groups}
    assert_accurate(problem, tensors, run(plan, tensors))


def test_dense_batches_and_strides() -> None:
    """(batch, seqlen, heads, head_dim), also transposed, and with strides that the kernels cannot read."""
    problem = problem_of((40, 60), (40, 60), mask=Mask.causal(), heads=2, kv_heads=1)
    plan, packed = build_plan(problem, SPT()), packed_tensors(problem)
    wanted = run(plan, packed)
    dense = [x.unflatten(0, (2, -1)) for x in packed]
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in dense]
    odd = [torch.cat([x, x[..., :1]], -1)[..., :-1] for x in dense]
    for tensors in (dense, transposed, odd):
        found = run(plan, tensors)
        for name in ("out", "dq", "dk", "dv"):
            assert_same_bytes(found[name].flatten(0, 1), wanted[name], name)
        assert_same_bytes(found["lse"].transpose(0, 1).flatten(1), wanted["lse"], "lse")


def test_positions() -> None:
    """A slice of the rows of a longer sequence."""
    whole = problem_of(90, mask=Mask.window(30, 0))
    tensors = packed_tensors(whole)
    plan = build_plan(replace(whole, sequences=((30, 90),), q_starts=(20,)), Descending())
    part = [x[20:50] for x in tensors[:2]] + tensors[2:]
    found, wanted = run(plan, part), executed(plan, part)
    for name in NAMES:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-5)


# The forward's numerics


@pytest.mark.parametrize("dtype", BOUND)
def test_the_forward_is_that_of_the_reference(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several segments, and scores that rise late. q and k are whole eighths, so scores are exact, in
    whatever order a CPU adds. Rounded in two ways, scores of 30 move out by more than is allowed here."""
    few_keys(monkeypatch, 128)
    problem = problem_of((40, 300), mask=Mask.causal(), head_dim=16, dtype=dtype, heads=1)
    _, q, k, v = packed_tensors(problem)
    q = (8 * q).round() / 8
    for growth in ((0.1, 6.0), (6.0, 0.1)):
        grown = ((8 * k * torch.linspace(*growth, 300)[:, None, None]).round() / 8).to(k.dtype)
        numerics = replace(forward_numerics(problem), segment=128)
        wanted = reference(problem, q, grown, v, SCALE, numerics=numerics)
        found = BACKEND.prepare(problem, CPU, packed=True).forward(q, grown, v, SCORES)
        torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=2e-5)
        unit = torch.finfo(getattr(torch, dtype)).eps
        assert (found[0].double() - wanted[0].double()).abs().max() <= 4 * unit * wanted[0].abs().max()


def test_the_order_of_tiles_is_that_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte, where no sum within a tile is rounded: one key per kv tile counts, scores are integers.

    The reference divides by a row's sum, Triton multiplies by its reciprocal.
    """
    module = sys.modules["dash_attn.backends.cpu.forward"]
    results = module._results

    def by_reciprocals(state: Any, rescale: float) -> tuple[Tensor, Tensor]:
        return state.out * state.total.reciprocal(), results(state, rescale)[1]

    monkeypatch.setattr(module, "_results", by_reciprocals)
    few_keys(monkeypatch, 256)
    problem = problem_of((48, 1024), head_dim=16, heads=1)
    numerics = replace(forward_numerics(problem), segment=256)
    generator = torch.Generator().manual_seed(3)
    _, q, k, v = packed_tensors(problem)
    q = torch.randint(-1, 2, q.shape, generator=generator).float()
    k = torch.zeros_like(k)
    q[..., 0], k[..., 0] = 1, -500
    counts = slice(3, None, numerics.tile)
    k[counts] = torch.randint(-3, 4, k[counts].shape, generator=generator).float()
    scale = math.log(2.0)  # scores are in base 2
    wanted = reference(problem, q, k, v, scale, numerics=numerics)
    found = BACKEND.prepare(problem, CPU, packed=True).forward(q, k, v, Scores(scale))
    assert_same_bytes(found[0], wanted[0], "out")
    other = reference(problem, q, k, v, scale, numerics=replace(numerics, segment=512))
    assert not same_bytes(other[0], wanted[0]), "the example shows nothing"


def test_maxima_rise_as_in_the_reference() -> None:
    """P of float16 is rounded elsewhere with other maxima. Another order within a product seldom shows."""
    problem = problem_of((60, 300), mask=Mask.window(150, 0), head_dim=16, dtype="float16", heads=1)
    numerics = forward_numerics(problem)
    _, q, k, v = packed_tensors(problem)
    k = (k * torch.linspace(3.0, 0.5, 300)[:, None, None]).to(k.dtype)  # scores rise along the tiles' order
    wanted, _ = reference(problem, q, k, v, SCALE, numerics=numerics)
    found, _ = BACKEND.prepare(problem, CPU, packed=True).forward(q, k, v, SCORES)

    def differing(x: Tensor) -> float:
        return float((x != wanted).float().mean())

    assert differing(found) < 0.002
    others: list[dict[str, Any]] = [{"keep": 0.0}, {"keep": 4.0}, {"room": 0}, {"room": 4}]
    for numbers in others:
        other = replace(numerics, **numbers)
        assert differing(reference(problem, q, k, v, SCALE, numerics=other)[0]) > 0.01, numbers


@pytest.mark.parametrize("mask", [Mask.causal(), Mask.window(60, 0)], ids=lambda mask: mask.name)
@pytest.mark.parametrize("dtype", BOUND)
def test_a_rows_bytes_depend_on_what_it_sees_and_on_where_that_stands(
    dtype: str, mask: Mask, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_keys(monkeypatch, 128)
    length = 280
    _, q, k, v = packed_tensors(problem_of(length, head_dim=8, dtype=dtype, heads=1, kv_heads=1))
    whole = forward(q, k, v, mask)

    def check(found: tuple[Tensor, Tensor], rows: slice) -> None:
        assert_same_bytes(found[0], whole[0][rows], "out")
        assert_same_bytes(found[1], whole[1][:, rows].contiguous(), "lse")

    check(forward(q[:150], k[:150], v[:150], mask), slice(150))  # a prefix
    check(forward(q[117:270], k[:270], v[:270], mask), slice(117, 270))  # a chunk behind it
    for one in (3, 129, 279):
        alone = slice(one, one + 1)
        check(forward(q[alone], k[: one + 1], v[: one + 1], mask), alone)  # a step of decoding
        if mask.is_causal:
            check(forward(q[alone], k[: one + 1], v[: one + 1], Mask.full()), alone)
    group = torch.cat([-q, q], 1)
    found = forward(group, k, v, mask)
    check((found[0][:, 1:], found[1][1:]), slice(None))
    problem = problem_of(50, length, mask=mask, head_dim=8, dtype=dtype, heads=1, kv_heads=1)
    pair = [torch.cat([x[200:250], x]) for x in (q, k, v)]
    out, lse = BACKEND.prepare(problem, CPU, packed=True).forward(*pair, SCORES)
    check((out[50:], lse[:, 50:].contiguous()), slice(None))


def test_another_segment_gives_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    _, q, k, v = packed_tensors(problem_of((10, 280), head_dim=8))
    one = forward(q, k, v, Mask.full())
    few_keys(monkeypatch, 128)
    assert not same_bytes(forward(q, k, v, Mask.full())[0], one[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_hidden_may_be_anything(bad: float) -> None:
    """In neighbours, in k of the sequence, and in v where no row of the q tile sees it."""
    problem = problem_of(70, 100, 70, mask=Mask.causal(), heads=1)
    _, q, k, v = packed_tensors(problem)
    prepared = BACKEND.prepare(problem, CPU, packed=True)
    out, lse = prepared.forward(q, k, v, SCORES)
    spoilt = [x.clone() for x in (q, k, v)]
    for x in spoilt:
        x[70:170] = bad
    found, other = prepared.forward(*spoilt, SCORES)
    for rows in (slice(70), slice(170, 240)):
        assert_same_bytes(found[rows], out[rows], "out")
        assert_same_bytes(other[:, rows].contiguous(), lse[:, rows].contiguous(), "lse")
    spoilt = [q, k.clone(), v.clone()]
    spoilt[1][120] = bad
    spoilt[2][140] = bad
    found, _ = prepared.forward(*spoilt, SCORES)
    assert_same_bytes(found[70:120], out[70:120], "out")
    assert not found[140:170].isfinite().any()


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_used_keys(packed: bool) -> None:
    """The first keys of a cache, dense or packed, with NaN behind them."""
    problem = problem_of((3, 40), (3, 0), (3, 70), mask=Mask.causal())
    _, q, k, v = packed_tensors(problem)
    wanted = BACKEND.prepare(problem, CPU, packed=True).forward(q, k, v, SCORES)
    places = [80, 80, 80] if packed else [90, 90, 90]
    caches = [torch.full((3, places[0], *k.shape[1:]), torch.nan) for _ in "kv"]
    for x, cache in zip((k, v), caches):
        for place, part in zip(cache, x.split([40, 0, 70])):
            place[: len(part)] = part
    starts = (0, 80, 160) if packed else None
    if packed:
        caches = [cache.flatten(0, 1) for cache in caches]
    keys = Keys(tuple(caches[0].shape), starts)
    prepared = BACKEND.prepare(problem, CPU, packed=True, keys=keys)
    found = prepared.forward(q, *caches, SCORES)
    assert_same_bytes(found[0], wanted[0], "out")
    assert_same_bytes(found[1], wanted[1], "lse")
    dense = BACKEND.prepare(problem, CPU, packed=False, keys=keys).forward(
        q.unflatten(0, (3, 3)), *caches, SCORES
    )
    assert_same_bytes(dense[0].flatten(0, 1), wanted[0], "out")
    plan = build_plan(problem, FA3())
    with pytest.raises(InputError, match="seqused_k"):
        prepared.backward(plan, Tensors(q, q, k, v, q, wanted[1]), SCORES)


# The order of the plan


LONG = problem_of(200, mask=Mask.causal(), head_dim=72, heads=2, kv_heads=1)
"""Four q tiles and four kv tiles."""


@pytest.fixture(scope="module")
def long_tensors() -> list[Tensor]:
    return packed_tensors(LONG)


def test_the_order_of_sums_is_that_of_the_plan(long_tensors: list[Tensor]) -> None:
    """Another order gives other bytes of dQ; another placement and another run do not."""
    found = run(build_plan(LONG, SPT()), long_tensors)
    assert_accurate(LONG, long_tensors, found)
    shuffled = prove(shuffled_placement(build_plan(LONG, SPT()), 5))
    again = run(shuffled, long_tensors)
    for name in NAMES:
        assert_same_bytes(again[name], found[name], name)
    # fa3 visits the same q tiles in the same order, and sums dQ from the other end.
    other = run(build_plan(LONG, FA3()), long_tensors)
    assert not same_bytes(other["dq"], found["dq"])
    for name in ("dk", "dv"):
        assert_same_bytes(other[name], found[name], name)
    disordered = run(shuffled, long_tensors, disorder=random.Random(1))
    assert not same_bytes(disordered["dq"], found["dq"])
    assert_same_bytes(disordered["dk"], found["dk"], "dk")


def test_one_head_after_the_other(long_tensors: list[Tensor]) -> None:
    """dQ keeps its bytes; dK and dV are summed in another order than with all heads at every q tile."""
    together, by_head = (
        run(build_plan(LONG, Descending(by_head_from=n), head_groups=1), long_tensors) for n in (None, 0)
    )
    assert_accurate(LONG, long_tensors, by_head)
    assert_same_bytes(by_head["dq"], together["dq"], "dq")
    for name in ("dk", "dv"):
        assert not same_bytes(by_head[name], together[name]), name


def test_dq_is_the_sum_of_contributions_in_ticket_order() -> None:
    """Contributions are so different in size that another order is far off."""
    problem = problem_of((1, 384), head_dim=8, heads=1, kv_heads=1)
    q, k, v, dout = (torch.zeros(n, 1, 8) for n in (1, 384, 384, 1))
    # All scores are 0, so P is 1/384, and dS is (dO V - delta) / 384. One key per tile has 3, 2^25, -2^25.
    dout[0, 0, 0] = 1
    for tile, size in enumerate((3.0, 2.0**25, -(2.0**25))):
        v[128 * tile, 0, 0] = size
        k[128 * tile, 0, 1] = 1.0
    tensors = [dout, q, k, v]
    results = {}
    for policy in (FA3(), SPT()):
        plan = build_plan(problem, policy)
        partials = executed_partials(plan, tensors)
        wanted = fold_partials(partials, SCALE, torch.float32)
        found = run(plan, tensors)["dq"]
        results[policy.name] = found[0, 0, 1]
        torch.testing.assert_close(found[:, 0], wanted, rtol=1e-6, atol=0)
    assert results["fa3"] != results["spt"]


def executed_partials(plan: Plan, tensors: list[Tensor]) -> list[Tensor]:
    dout, q, k, v = tensors
    out, lse = reference(plan, q, k, v, SCALE)
    return dq_partials(plan, Tensors(dout, q, k, v, out, lse), SCALE)[0, 0, 0]


def test_a_sequence_has_the_same_bytes_alone() -> None:
    problem = problem_of(70, 150, mask=Mask.causal())
    tensors = packed_tensors(problem)
    found = run(build_plan(problem, SPT()), tensors)
    for index, (part, begin) in enumerate(zip(split(problem, tensors), (0, 70))):
        length = problem.sequences[index][0]
        alone = run(build_plan(problem_of(length, mask=Mask.causal()), SPT()), part)
        for name in ("out", "dq", "dk", "dv"):
            assert_same_bytes(found[name][begin : begin + length], alone[name], name)


TABLED = [Shift(2), SymmetricShift(), SPT(), FA3(), Descending(), Descending(by_head_from=300)]


@pytest.mark.parametrize("policy", TABLED, ids=str)
@pytest.mark.parametrize("head_dim", sorted(TILES))
def test_tables_say_what_the_plan_says(policy: Any, head_dim: int) -> None:
    mask = Mask.full() if isinstance(policy, Shift) else Mask.causal()
    problem = problem_of(700, 130, 0, mask=mask, head_dim=head_dim, heads=6, kv_heads=2)
    plan = build_plan(problem, policy, head_groups=2)
    tables = backward_tables(plan, packed=True)
    seen = set()
    for record in tables.items.tolist():
        sequence = [0, 700, 830].index(record[1]) if record[4] else 2
        stretch = tables.visits[record[8] : record[8] + record[9]].tolist()
        q_tiles = [first + step * k for first, step, count in stretch for k in range(count)]
        assert q_tiles == plan.pattern(sequence).tasks_of(record[7])[0].tolist()
        heads = range(record[10], record[10] + record[11])
        assert record[13] == (1 if plan.pattern(sequence).passes > 1 else len(heads))
        seen.add((sequence, heads, record[7]))
    wanted = {(s, plan.q_heads(s, group), kv) for s, group, kv in plan.items.tolist()}
    assert seen == wanted
    assert len({record[12] for record in tables.items.tolist()}) == len(plan.items)
    assert tables.sums == len(plan.items) == 2 * len(tables.folds)
    for record in tables.q_tiles.tolist():
        sequence = [0, 700].index(record[1])
        stretch = tables.stretches[record[8] : record[8] + record[9]].tolist()
        order = [first + step * k for first, step, count in stretch for k in range(count)]
        assert order == plan.pattern(sequence).summation_orders()[record[7]]


# What is refused


def test_what_is_refused() -> None:
    problem = problem_of(30)
    dout, q, k, v = packed_tensors(problem)
    prepared = BACKEND.prepare(problem, CPU, packed=True)
    out, lse = prepared.forward(q, k, v, SCORES)
    tensors = Tensors(dout, q, k, v, out, lse)
    with pytest.raises(PlanMismatchError, match="tiles"):
        prepared.backward(build_plan(replace(problem, tile_m=64), SPT()), tensors, SCORES)
    with pytest.raises(PlanMismatchError, match="the plan is for"):
        prepared.backward(build_plan(problem_of(31), SPT()), tensors, SCORES)
    with pytest.raises(PlanMismatchError, match="lse has shape"):
        prepared.backward(build_plan(problem, SPT()), tensors._replace(lse=lse[:1]), SCORES)
    plan = build_plan(problem, SPT())
    with pytest.raises(PlanError, match="verified"):
        prepared.backward(plan.with_items(plan.items), tensors, SCORES)
    with pytest.raises(PlanMismatchError, match="q has shape"):
        prepared.forward(q[1:], k, v, SCORES)
    with pytest.raises(PlanMismatchError, match="v has shape .* dtype torch.float64"):
        prepared.forward(q, k, v.double(), SCALE)


def test_public_functions() -> None:
    """By ``backend="triton"``: the same bytes as the prepared call, with the tiles and the name of Triton."""
    problem = problem_of((90, 90), (20, 130), mask=Mask.causal(), head_dim=40)
    dout, q, k, v = packed_tensors(problem)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ends = [torch.tensor([0, *side]).cumsum(0).int() for side in zip(*problem.sequences)]
    how: dict[str, Any] = {"causal": True, "softmax_scale": SCALE, "backend": "triton"}
    out, lse = dash_attn.flash_attn_varlen_func(*leaves, *ends, return_lse=True, **how)
    grads = torch.autograd.grad(out, leaves, dout)
    plan = dash_attn.plan_for(*leaves, *ends, causal=True, backend="triton")
    assert (plan.problem.tile_m, plan.problem.tile_n) == BACKEND.tiles(40, 40)
    found = run(plan, [x.detach() for x in (dout, q, k, v)])
    for name, got in zip(NAMES, (out, lse, *grads)):
        assert_same_bytes(got, found[name], name)
    assert dash_attn.is_supported(*leaves, *ends, backend="triton").backend == "triton"
    assert dash_attn.is_supported(*leaves, *ends).backend == "cpu"
    mine, cpu = (
        dash_attn.fingerprints(*leaves, *ends, causal=True, backend=name) for name in ("triton", "cpu")
    )
    assert (mine.backend, cpu.backend) == ("triton", "cpu")
    assert mine.forward != cpu.forward
    assert mine.backward == BACKEND.fingerprint_of(plan.fingerprint) != plan.fingerprint


# Which tiles a mask leaves whole


@triton.jit
def ends_kernel(
    out, top, begin, first, step, count, diagonal, seqlen_q, seqlen_k, left, right, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """What all rows of a tile see; which tiles of rows see all of some keys; where in a stretch they are."""
    a, b = whole_columns(top, ROWS, diagonal, seqlen_q, seqlen_k, left, right)
    c, d = whole_rows(begin, KEYS, ROWS, diagonal, seqlen_q, seqlen_k, left, right)
    e, f = whole_part(first, step, count, c, d)
    tl.store(out, a)
    tl.store(out + 1, b)
    tl.store(out + 2, c)
    tl.store(out + 3, d)
    tl.store(out + 4, e)
    tl.store(out + 5, f)


def test_whole_tiles_are_those_that_the_mask_leaves_whole() -> None:
    """Against every element, for random bands."""
    rng, rows, keys = random.Random(0), 8, 8
    found = torch.empty(6, dtype=torch.int32)
    some = 0
    for _ in range(200):
        seqlen_q, seqlen_k = rng.randint(1, 60), rng.randint(1, 60)
        left, right = (rng.choice([-1, 0, 3, 9, 30]) for _ in "lr")
        diagonal = seqlen_k - seqlen_q
        q = torch.arange(seqlen_q)[:, None] + diagonal
        k = torch.arange(seqlen_k)
        seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
        if left >= 0:
            seen &= k >= q - left
        if right >= 0:
            seen &= k <= q + right
        tiles, kv_tiles = -(-seqlen_q // rows), -(-seqlen_k // keys)
        tile, kv = rng.randrange(tiles), rng.randrange(kv_tiles)
        step, count = rng.choice([1, -1]), rng.randint(1, tiles)
        first = rng.randint(0, tiles - count) if step > 0 else rng.randint(count - 1, tiles - 1)
        given = (tile * rows, kv * keys, first, step, count, diagonal, seqlen_q, seqlen_k, left, right)
        ends_kernel[(1,)](found, *given, rows, keys)
        a, b, _, _, e, f = found.tolist()
        of_rows = seen[tile * rows : (tile + 1) * rows].all(0)
        assert [a <= column <= b for column in range(seqlen_k)] == of_rows.tolist(), given
        there = (kv + 1) * keys <= seqlen_k
        part = seen[:, kv * keys : (kv + 1) * keys]
        whole = [bool(there and part[t * rows : (t + 1) * rows].all()) for t in range(tiles)]
        visited = [whole[first + step * at] for at in range(count)]
        assert [e <= at < f for at in range(count)] == visited, given
        some += any(visited) and not all(visited)
    assert some > 10


@pytest.mark.parametrize("mask", [Mask.causal(), Mask.window(150, 20)], ids=lambda mask: mask.name)
def test_whole_tiles_have_the_bytes_of_masked_ones(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of((300, 300), mask=mask, dtype="float16")
    tensors, plan = packed_tensors(problem), build_plan(problem, FA3())
    first = run(plan, tensors)
    monkeypatch.setattr(
        backward_kernels, "whole_part", lambda first, step, count, low, high: (count * 0,) * 2
    )
    for name, got in run(plan, tensors).items():
        assert_same_bytes(got, first[name], name)


def test_rows_that_are_far_apart_are_copied() -> None:
    """Places within a tile are counted in 32 bits."""
    near, far = (
        torch.empty_strided((2, 300, 1, 64), (stride * 300, stride, 64, 1), device="meta")
        for stride in (2**24 - 8, 2**24)
    )
    assert launch.aligned(near) is near
    assert launch.aligned(far).stride(-3) == 64


# Caches of keys


@pytest.mark.parametrize(("number", "longest"), [*((n, 150) for n in range(4)), (10, 300)])
def test_histories_over_a_cache(number: int, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths, bounds and pages are read by the programs, which also append new keys."""
    head_dims = ((16, 24), (72, 88))[number == 3]
    monkeypatch.setattr("dash_attn.backends.cpu.cached.append", append)
    dtype = (torch.float16, torch.float32)[number % 2]
    history = random_history(number, "cpu", dtype, longest, head_dims=head_dims, backend="triton")
    assert (history.shared > 0) == (number == 10)  # it has a prefix that two requests share
    history.run()


@pytest.mark.parametrize(("rows", "keys", "causal"), [(200, 77, False), (200, 150, True)])
def test_a_segment_that_sees_less_than_a_tile_of_keys(rows: int, keys: int, causal: bool) -> None:
    q, k = torch.randn(1, rows, 2, 16).requires_grad_(), torch.randn(1, keys, 1, 16).requires_grad_()
    found = []
    for backend in ("triton", "cpu"):
        out = dash_attn.attention(q, k, k, causal=causal, backend=backend, q_segment=128)
        found.append(torch.autograd.grad(out.square().sum(), (q, k)))
    for mine, wanted in zip(*found):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)


def test_lengths_pages_and_bounds_out_of_range_are_clamped() -> None:
    """As on a GPU, where nobody sees them before."""
    k = torch.randn(4, 16, 1, 16)
    q, table = torch.randn(3, 1, 2, 16), torch.tensor([[3, -9], [10**6, 1], [0, 2]]).int()
    lengths = torch.tensor([20, 10**9, -5]).int()
    problem = CachedProblem(3, 2, 1, 16, 16, "float32", (-1, 0), 1, 3, 1, 16, 4, 2)
    prepared = BACKEND.prepare_cached(problem, CPU)
    out, lse = prepared.forward(CachedTensors(q, k, k, lengths, table), SCORES)
    for i, (pages, length) in enumerate((((3, 0), 20), ((3, 1), 32))):
        keys = k[list(pages)].flatten(0, 1)[:length]
        wanted = forward(q[i], keys, keys, Mask.causal())
        assert_same_bytes(out[i], wanted[0])
        assert_same_bytes(lse[i], wanted[1])
    assert not out[2].any()
    packed = problem._replace(seqlen_q=-1, longest_q=3)
    bounds = torch.tensor([-7, 1, 2, 10**6]).int()
    tensors = CachedTensors(q.flatten(0, 1), k, k, lengths, table, bounds)
    found = BACKEND.prepare_cached(packed, CPU).forward(tensors, SCORES)
    assert_same_bytes(found[0], out.flatten(0, 1))
    cache, new = torch.zeros(4, 16, 1, 16), torch.ones(3, 2, 1, 16)
    append((cache, cache), (new, new), torch.tensor([15, 31, -1]).int(), table)
    assert cache[3, 15].all()  # the second token has no page
    assert cache[1, 15].all()  # the second one has no room
    assert cache[0, 0].all()  # the first one has no place
    assert cache.sum() == 3 * 16
    # Rows of no sequence, and a cache of no pages: there is nothing to read.
    nobody = CachedTensors(q.flatten(0, 1), k, k, lengths[:0], table[:0], bounds[:1] * 0)
    for none, given in (
        (packed._replace(batch=0), nobody),
        (problem._replace(pages=0), CachedTensors(q, k[:0], k[:0], lengths, table)),
    ):
        out, lse = BACKEND.prepare_cached(none, CPU).forward(given, SCORES)
        assert not out.any()
        assert (lse == -torch.inf).all()

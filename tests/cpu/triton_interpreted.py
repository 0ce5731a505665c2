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
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from attention_cases import (
    SCALE,
    executed,
    expected,
    packed_tensors,
    shuffled_placement,
    split,
)
from torch import Tensor

import dash_attn
from dash_attn.backends.base import NO_AUX, AuxTensors, Keys, RowIntervals, Tensors
from dash_attn.backends.cached import CachedProblem, CachedTensors
from dash_attn.backends.cpu import dq_partials, fold_partials
from dash_attn.backends.cpu import forward as reference
from dash_attn.backends.cpu.dropout import Dropout
from dash_attn.backends.triton import backward_kernels, forward_kernel, launch
from dash_attn.backends.triton.append import append
from dash_attn.backends.triton.backend import BACKEND
from dash_attn.backends.triton.parts import capped, kept, whole_columns, whole_part, whole_rows
from dash_attn.backends.triton.tables import backward_tables
from dash_attn.backends.triton.tiles import TILES, forward_numerics
from dash_attn.errors import InputError, PlacementError, PlanMismatchError
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import FA3, SPT, Descending, Plan, Shift, SymmetricShift, build_plan, prove
from dash_attn.scores import Origin, Scores
from dash_attn.testing import assert_same_bytes, same_bytes
from interval_cases import beside, ends_of_documents, random_intervals, random_tree, starts_of_prefix
from kvcache_cases import random_history
from triton_cases import triton_problem

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in rows that see nothing

CPU = torch.device("cpu")
NAMES = ("out", "lse", "dq", "dk", "dv")
SCORES = Scores(SCALE)
BOUND = {"float32": 2e-6, "float16": 2e-3}

problem_of = partial(triton_problem, head_dim=16, mask=None, dtype="float32", heads=2, kv_heads=1)


def run(
    plan: Plan, tensors: list[Tensor], scores: Scores = SCORES, aux: AuxTensors = NO_AUX, **how: Any
) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv, and dsink if there is a sink."""
    dout, q, k, v = tensors
    prepared = BACKEND.prepare(plan.problem, CPU, packed=q.ndim == 3)
    out, lse = prepared.forward(q, k, v, scores, aux)
    grads = prepared.backward(plan, Tensors(dout, q, k, v, out, lse), scores, aux, **how)
    found = {"out": out, "lse": lse, **grads._asdict()}
    return {name: x for name, x in found.items() if x is not None}


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """Of one packed sequence."""
    dtype = str(q.dtype).removeprefix("torch.")
    problem = problem_of(
        (len(q), len(k)), mask=mask, head_dim=q.shape[2], dtype=dtype, heads=q.shape[1], kv_heads=k.shape[1]
    )
    return BACKEND.prepare(problem, CPU, packed=True).forward(q, k, v, SCORES)


def assert_accurate(
    problem: Problem, tensors: list[Tensor], found: dict[str, Tensor], slack: int = 1, **how: Any
) -> None:
    for name, exact in expected(problem, tensors, **how).items():
        got = found[name].double()
        assert got.shape == exact.shape
        nothing = exact == -torch.inf
        assert torch.equal(got == -torch.inf, nothing)
        error, size = (got - exact)[~nothing].abs(), exact[~nothing].abs()
        if error.numel():
            bound = BOUND[problem.dtype] * (2 if name == "dsink" else slack)
            assert error.max() <= bound * max(size.max(), 1.0), name


def few_keys(monkeypatch: pytest.MonkeyPatch, segment: int) -> None:
    """Short segments, so that short sequences have several."""
    monkeypatch.setattr(
        launch, "forward_numerics", lambda *of: replace(forward_numerics(*of), segment=segment)
    )


# Numbers

MASKS = [Mask.full(), Mask.causal(), Mask.window(40, 0), Mask.window(9, 30)]
LENGTHS = ((70, 70), (0, 30), (40, 0), (33, 150), (150, 33))
SHORT = ((33, 150), (40, 0), (0, 10), (50, 30))


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


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
@pytest.mark.parametrize(("head_dim", "head_dim_v", "dtype"), [(24, 16, "float32"), (8, 136, "float16")])
def test_head_dims_of_v_with_a_sink_and_alibi(mask: Mask, head_dim: int, head_dim_v: int, dtype: str) -> None:
    """With a softcap, too; several head groups. Delta is a sum over the columns of v."""
    problem = problem_of((70, 90), (33, 20), mask=mask, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype)
    tensors, scores = packed_tensors(problem), Scores(SCALE, 5.0, sink=True, alibi=True)
    aux = AuxTensors(torch.tensor([0.5, 3.0]), torch.tensor([[0.02, 0.3], [0.1, 0.0]]))
    for head_groups in (1, 2):
        plan = build_plan(problem, Descending(), head_groups=head_groups)
        found = run(plan, tensors, scores, aux)
        assert list(found) == [*NAMES, "dsink"]
        assert_accurate(problem, tensors, found, scores=scores, aux=aux)


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


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_that_are_not_positive(scale: float) -> None:
    """The largest product is then not the largest score."""
    problem = problem_of((40, 300), mask=Mask.causal(), head_dim=16, heads=1)
    _, q, k, v = packed_tensors(problem)
    wanted = reference(problem, q, k, v, scale, numerics=forward_numerics(problem))
    found = BACKEND.prepare(problem, CPU, packed=True).forward(q, k, v, Scores(scale))
    for x, y in zip(found, wanted):
        torch.testing.assert_close(x, y, rtol=0, atol=2e-5)


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
    with pytest.raises(PlacementError, match="verified"):
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


@pytest.mark.parametrize("softcap", [0.5, 30.0, 1e8])
@pytest.mark.parametrize("mask", [Mask.causal(), Mask.window(60, 0)], ids=lambda mask: mask.name)
def test_softcap(mask: Mask, softcap: float) -> None:
    """Cut tiles and whole ones; caps that all scores meet, few, and none."""
    problem = problem_of((160, 160), (20, 130), mask=mask, dtype="float16")
    tensors = packed_tensors(problem)
    plan = build_plan(problem, FA3())
    found = run(plan, tensors, Scores(SCALE, softcap))
    assert_accurate(problem, tensors, found, scores=Scores(SCALE, softcap))
    assert softcap > 1 or not same_bytes(found["out"], run(plan, tensors)["out"])


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
@pytest.mark.parametrize(("head_dim", "dtype"), [(16, "float32"), (64, "float16")])
def test_sinks(mask: Mask, head_dim: int, dtype: str) -> None:
    """Also rows without keys and sequences without rows; the gradient of the sink is summed over all."""
    lengths = SHORT[: 4 if head_dim == 16 else 1]
    problem = problem_of(*lengths, mask=mask, head_dim=head_dim, dtype=dtype)
    tensors, sink = packed_tensors(problem), torch.tensor([0.5, 3.0])
    plan, aux = build_plan(problem, Descending()), AuxTensors(sink)
    found = run(plan, tensors, Scores(SCALE, sink=True), aux)
    assert_accurate(problem, tensors, found, aux=aux)
    blind = found["out"].flatten(1).eq(0).all(1)
    assert head_dim != 16 or blind[33:73].all()  # of the sequence without keys
    torch.testing.assert_close(found["lse"][:, blind], sink[:, None].expand(-1, int(blind.sum())))
    for name, got in run(plan, tensors, Scores(SCALE, sink=True), aux).items():
        assert_same_bytes(got, found[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
@pytest.mark.parametrize(("head_dim", "dtype", "by_batch"), [(16, "float32", False), (64, "float16", True)])
def test_alibi(mask: Mask, head_dim: int, dtype: str, by_batch: bool) -> None:
    """Slopes of heads, or of heads of a sequence; with a softcap and a sink, which are not biased."""
    lengths = SHORT if head_dim == 16 else SHORT[::3]
    problem = problem_of(*lengths, mask=mask, head_dim=head_dim, dtype=dtype)
    tensors, slopes = packed_tensors(problem), torch.tensor([0.02, 0.3])
    by_sequence = slopes * torch.arange(1, len(lengths) + 1)[:, None]
    plan, sink = build_plan(problem, Descending()), torch.tensor([0.5, -1.0])
    scores = Scores(SCALE, 5.0, sink=True, alibi=True)
    aux = AuxTensors(sink, by_sequence if by_batch else slopes)
    found = run(plan, tensors, scores, aux)
    assert_accurate(problem, tensors, found, scores=scores, aux=aux)
    for name, got in run(plan, tensors, scores._replace(alibi=False), AuxTensors(sink)).items():
        assert not same_bytes(got, found[name]), name


@pytest.mark.parametrize("mask", MASKS[:2], ids=lambda mask: mask.name)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_alibi_that_grows_with_the_distance(mask: Mask, dtype: str) -> None:
    """Slopes below 0. A last q tile of 72 rows: what the bias makes of the others must not be infinite."""
    problem = problem_of((200, 200), mask=mask, dtype=dtype)
    tensors, scores = packed_tensors(problem), SCORES._replace(alibi=True)
    aux = AuxTensors(None, torch.tensor([-0.2, -1.0]))
    found = run(build_plan(problem, Descending()), tensors, scores, aux)
    assert_accurate(problem, tensors, found, slack=8, scores=scores, aux=aux)


def test_alibi_in_the_public_functions() -> None:
    """Dense and packed have the same bytes, which are those of the prepared call."""
    problem = problem_of((90, 90), (90, 90), mask=Mask.causal(), head_dim=40, dtype="float16")
    tensors = packed_tensors(problem)
    slopes, ends = torch.tensor([[0.1, 0.5], [0.2, 0.0]]), torch.tensor([0, 90, 180], dtype=torch.int32)
    how: dict[str, Any] = {
        "causal": True,
        "softmax_scale": SCALE,
        "backend": "triton",
        "alibi_slopes": slopes,
    }
    dense = dash_attn.attention(*(x.unflatten(0, (2, 90)) for x in tensors[1:]), **how)
    packed = dash_attn.flash_attn_varlen_func(*tensors[1:], ends, ends, **how)
    found = run(build_plan(problem, SPT()), tensors, Scores(SCALE, alibi=True), AuxTensors(None, slopes))
    assert_same_bytes(packed, found["out"])
    assert_same_bytes(dense.flatten(0, 1), found["out"])


@triton.jit
def kept_kernel(
    out, seed, record, threshold, sequence0, head0, row0, quarter0, head, top, begin,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    rows = top + tl.arange(0, ROWS)
    origin = (sequence0, head0, row0, quarter0)
    keep = kept(tl.load(seed), threshold, origin, record, head.to(tl.int64), rows, begin, KEYS)
    tl.store(out + tl.arange(0, ROWS)[:, None] * KEYS + tl.arange(0, KEYS)[None, :], keep.to(tl.int8))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("seed", [0, 7, 2**40 + 3, 2**63 - 1])
def test_dropout_keeps_what_the_cpu_keeps(p: float, seed: int) -> None:
    """Bit for bit, at any tile."""
    record, found = torch.zeros(16, dtype=torch.int32), torch.empty(32, 64, dtype=torch.int8)
    threshold = Scores(1.0, dropout_p=p).dropout_threshold
    share = 0.0
    for sequence, head, top, begin in ((0, 0, 0, 0), (3, 1, 64, 192), (70000, 127, 100000, 1 << 20)):
        wanted = Dropout(seed, (head, sequence), threshold, 1.0).kept(top, begin, 32, 64)
        for part in (0, 1):  # a call of its own, and a part that begins elsewhere
            record[14] = sequence - part * (sequence // 2)
            origin = [part * (x // 2) for x in (sequence, head, top, begin // 4)]
            here = head - origin[1], top - origin[2], begin - 4 * origin[3]
            kept_kernel[(1,)](found, torch.tensor(seed), record, threshold, *origin, *here, 32, 64)
            assert torch.equal(found.bool(), wanted)
        share += wanted.float().mean().item() / 3
    assert abs(share - (1 - p)) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
@pytest.mark.parametrize(("head_dim", "dtype"), [(16, "float32"), (64, "float16")])
def test_dropout(mask: Mask, head_dim: int, dtype: str) -> None:
    """In float16 with a sink, a softcap and ALiBi: out, lse and all gradients; one or two head groups."""
    both = head_dim == 64
    problem = problem_of(*SHORT, mask=mask, head_dim=head_dim, dtype=dtype)
    tensors, sink, seed = packed_tensors(problem), torch.tensor([0.5, 2.0]), torch.tensor(11)
    scores = Scores(SCALE, 5.0, True, True, 0.4) if both else Scores(SCALE, dropout_p=0.2)
    aux = AuxTensors(sink, torch.tensor([0.02, 0.2]), seed) if both else AuxTensors(dropout_seed=seed)
    plan = build_plan(problem, Descending(), head_groups=2 if both else 1)
    assert_accurate(problem, tensors, run(plan, tensors, scores, aux), 2, scores=scores, aux=aux)


def test_another_seed_of_dropout_gives_other_bytes() -> None:
    """But of lse. Two runs with one seed have the same."""
    problem = problem_of((33, 150))
    tensors, plan = packed_tensors(problem), build_plan(problem, SPT())
    scores = Scores(SCALE, dropout_p=0.2)
    one, again, other = (
        run(plan, tensors, scores, AuxTensors(dropout_seed=torch.tensor(seed))) for seed in (11, 11, 12)
    )
    for name in NAMES:
        assert_same_bytes(one[name], again[name], name)
        assert same_bytes(one[name], other[name]) == (name == "lse"), name


def test_a_part_of_a_call_drops_what_the_whole_call_drops() -> None:
    """To the byte, by its origin: q heads of one kv head, a sequence, and in the forward rows."""
    problem = problem_of((40, 40), (70, 90), mask=Mask.causal(), heads=4, kv_heads=2)
    tensors, aux = packed_tensors(problem), AuxTensors(dropout_seed=torch.tensor(11))
    scores = Scores(SCALE, dropout_p=0.4)
    whole = run(build_plan(problem, SPT()), tensors, scores, aux)

    def part(of: Problem, mine: list[Tensor], origin: Origin) -> dict[str, Tensor]:
        return run(build_plan(of, SPT()), [x.contiguous() for x in mine], scores.at(origin), aux)

    heads = part(
        replace(problem, heads=2, kv_heads=1),
        [x[:, x.shape[1] // 2 :] for x in tensors],
        Origin(head=2),
    )
    second = part(replace(problem, sequences=((70, 90),)), [x[40:] for x in tensors], Origin(sequence=1))
    for name in NAMES:
        x = whole[name]
        of_heads = x[2:] if name == "lse" else x[:, x.shape[1] // 2 :]
        assert_same_bytes(heads[name], of_heads.contiguous(), name)
        of_second = x[:, 40:] if name == "lse" else x[40:]
        assert_same_bytes(second[name], of_second.contiguous(), name)
    _, q, k, v = tensors
    chunk = BACKEND.prepare(replace(problem, sequences=((37, 90),)), CPU, packed=True)
    given, origin = (q[73:], k[40:], v[40:]), Origin(1, 0, 33)
    assert_same_bytes(chunk.forward(*given, scores.at(origin), aux)[0], whole["out"][73:])
    for lost in ("sequence", "row"):  # the control: counted from 0
        other = chunk.forward(*given, scores.at(origin._replace(**{lost: 0})), aux)[0]
        assert not same_bytes(other, whole["out"][73:]), lost
    local = part(replace(problem, heads=2, kv_heads=1), [x[:, x.shape[1] // 2 :] for x in tensors], Origin())
    assert not same_bytes(local["dq"], heads["dq"])


def test_dropout_counts_keys_from_the_first_one_of_the_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows behind a window, whose keys begin at another segment of keys."""
    few_keys(monkeypatch, 128)
    problem = problem_of(300, mask=Mask.window(40, 0))
    (_, q, k, v), aux = packed_tensors(problem), AuxTensors(dropout_seed=torch.tensor(11))
    scores = Scores(SCALE, dropout_p=0.4)
    out, lse = BACKEND.prepare(problem, CPU, packed=True).forward(q, k, v, scores, aux)
    prepared = BACKEND.prepare(replace(problem, sequences=((100, 172),)), CPU, packed=True)
    given = q[200:], k[128:], v[128:]
    found = prepared.forward(*given, scores.at(Origin(row=200, column=128)), aux)
    assert_same_bytes(found[0], out[200:])
    assert_same_bytes(found[1], lse[:, 200:].contiguous())
    assert not same_bytes(prepared.forward(*given, scores.at(Origin(row=200)), aux)[0], out[200:])
    with pytest.raises(InputError, match="column 130 of .* is no multiple of 4"):
        prepared.forward(*given, scores.at(Origin(row=200, column=130)), aux)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, (40, 0)])
def test_dropout_in_segments_of_rows(window: tuple[int, int] | None) -> None:
    """The same weights are dropped as in whole sequences: of packed ones only the second one is cut."""
    generator = torch.Generator().manual_seed(0)
    lengths = (40, 300, 50)
    ends = torch.tensor([0, 40, 340, 390], dtype=torch.int32)
    leaves = [torch.randn(sum(lengths), n, 16, generator=generator).requires_grad_() for n in (2, 1, 1)]
    how: dict[str, Any] = {"causal": True, "backend": "triton", "dropout_p": 0.3, "dropout_seed": 5}
    how["window_size"] = window or (-1, -1)
    found = []
    for q_segment in (128, None):
        out = dash_attn.flash_attn_varlen_func(*leaves, ends, ends, q_segment=q_segment, **how)
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    assert_same_bytes(found[0][0], found[1][0])
    for cut, whole in zip(*found):
        torch.testing.assert_close(cut, whole, rtol=1e-5, atol=1e-5)


def test_dropout_in_the_public_functions() -> None:
    """A seed given as a number or a tensor at any place, or drawn; dense and packed have the same bytes."""
    problem = problem_of((90, 90), (90, 90), mask=Mask.causal(), head_dim=40, dtype="float16")
    tensors = packed_tensors(problem)
    dout, *leaves = (x.unflatten(0, (2, 90)) for x in tensors)
    leaves = [x.requires_grad_() for x in leaves]
    how: dict[str, Any] = {"causal": True, "softmax_scale": SCALE, "backend": "triton", "dropout_p": 0.3}
    found = run(
        build_plan(problem, SPT()),
        tensors,
        Scores(SCALE, dropout_p=0.3),
        AuxTensors(dropout_seed=torch.tensor(5)),
    )
    for seed in (5, torch.tensor([1, 5])[1]):
        out = dash_attn.attention(*leaves, dropout_seed=seed, **how)
        grads = torch.autograd.grad(out, leaves, dout)
        for name, got in zip(("out", "dq", "dk", "dv"), (out, *grads)):
            assert_same_bytes(got.flatten(0, 1), found[name], name)
    ends = torch.tensor([0, 90, 180], dtype=torch.int32)
    packed = dash_attn.flash_attn_varlen_func(*tensors[1:], ends, ends, dropout_seed=5, **how)
    assert_same_bytes(packed, found["out"])


@pytest.mark.slow
def test_the_gradient_of_a_sink_is_that_of_each_sequence_added_in_the_order_of_the_batch() -> None:
    """To the byte, whatever the plan."""
    problem = problem_of(20, 130, 30, mask=Mask.causal(), heads=4)
    tensors, sink = packed_tensors(problem), torch.linspace(0.5, 3.0, 4)
    scores = Scores(SCALE, sink=True)
    found = run(build_plan(problem, SPT()), tensors, scores, AuxTensors(sink))["dsink"]
    assert_same_bytes(run(build_plan(problem, FA3()), tensors, scores, AuxTensors(sink))["dsink"], found)
    total, others = torch.zeros(4), torch.zeros(4)
    parts = []
    for (length, _), one in zip(problem.sequences, split(problem, tensors)):
        plan = build_plan(problem_of(length, mask=Mask.causal(), heads=4), SPT())
        parts.append(run(plan, one, scores, AuxTensors(sink))["dsink"])
    for part, other in zip(parts, reversed(parts)):
        total, others = total + part, others + other
    assert_same_bytes(total, found)
    assert not same_bytes(others, found), "the example shows nothing"


def test_a_sink_without_weight_changes_no_byte() -> None:
    problem = problem_of((70, 70), (33, 150), (90, 4), mask=Mask.causal())
    tensors, plan = packed_tensors(problem), build_plan(problem, SPT())
    found = run(plan, tensors, Scores(SCALE, sink=True), AuxTensors(torch.full((2,), -torch.inf)))
    for name, wanted in run(plan, tensors).items():
        assert_same_bytes(found[name], wanted, name)
    assert not found["dsink"].any()


def test_sinks_in_the_public_functions() -> None:
    """The bytes of the prepared call; a sink that is no contiguous fp32; dense."""
    problem = problem_of((90, 90), (90, 90), mask=Mask.causal(), head_dim=40, dtype="float16")
    dout, q, k, v = (x.unflatten(0, (2, 90)) for x in packed_tensors(problem))
    sink = torch.tensor([[1.0, 9.0], [2.0, 9.0]]).half()[:, 0].requires_grad_()
    leaves = [*(x.requires_grad_() for x in (q, k, v)), sink]
    how: dict[str, Any] = {
        "causal": True,
        "softmax_scale": SCALE,
        "backend": "triton",
        "learnable_sink": sink,
    }
    out = dash_attn.attention(q, k, v, **how)
    grads = torch.autograd.grad(out, leaves, dout)
    plan = dash_attn.plan_for(q, k, v, causal=True, backend="triton", learnable_sink=sink)
    found = run(plan, [x.detach() for x in (dout, q, k, v)], Scores(SCALE, sink=True), AuxTensors(sink))
    for name, got in zip(("out", "dq", "dk", "dv", "dsink"), (out, *grads)):
        assert_same_bytes(got, found[name], name)


# Intervals of rows that see each key


def intervals(problem: Problem, seed: int) -> AuxTensors:
    """Random ones of all sequences, packed."""
    parts = [random_intervals(n, m, seed + at) for at, (m, n) in enumerate(problem.sequences)]
    return beside(RowIntervals(*(torch.cat(side) for side in zip(*parts))))


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
@pytest.mark.parametrize("dtype", BOUND)
def test_intervals_beside_masks(mask: Mask, dtype: str) -> None:
    problem = problem_of(*LENGTHS, (200, 200), mask=mask, dtype=dtype, heads=2, kv_heads=1)
    tensors, aux = packed_tensors(problem), intervals(problem, 1)
    found = run(build_plan(problem, Descending()), tensors, SCORES, aux)
    assert_accurate(problem, tensors, found, aux=aux)
    blind = found["lse"][0] == -torch.inf
    assert blind.any()
    for name in ("out", "dq"):
        assert not found[name][blind].any()


def test_maxima_with_intervals_are_those_of_the_reference() -> None:
    """A row's first one looks at how many keys it sees. P of float16 is rounded elsewhere with others."""
    problem = problem_of((60, 300), dtype="float16", heads=1)
    _, q, k, v = packed_tensors(problem)
    k = (k * torch.linspace(3.0, 0.5, 300)[:, None, None]).to(k.dtype)  # scores rise along the tiles' order
    ends = torch.where(torch.arange(300) % 16 == 0, 60, 0).int()
    aux = beside(RowIntervals(torch.zeros_like(ends), ends))

    numerics = forward_numerics(problem)
    found, _ = BACKEND.prepare(problem, CPU, packed=True).forward(q, k, v, SCORES, aux)

    def differing(**numbers: Any) -> float:
        other = replace(numerics, **numbers)
        wanted, _ = reference(problem, q, k, v, SCALE, aux, numerics=other)
        return float((found != wanted).float().mean())

    assert differing() < 0.002
    assert differing(room=0) > 0.01  # as if rows saw whole tiles


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [40, 72, 200])
def test_intervals_and_head_dims(head_dim: int) -> None:
    """Tiles of every size; with a softcap, head groups and a head dim of its own for V."""
    problem = problem_of((170, 170), mask=Mask.causal(), head_dim=head_dim, head_dim_v=24)
    tensors, aux = packed_tensors(problem), intervals(problem, 2)
    tensors[1] = tensors[1] / head_dim**0.5
    plan = build_plan(problem, SPT(), head_groups=2)
    scores = Scores(SCALE, 5.0)
    assert_accurate(problem, tensors, run(plan, tensors, scores, aux), scores=scores, aux=aux)


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
@pytest.mark.parametrize(
    ("dtype", "dropout_p"), [pytest.param("float32", 0.3, marks=pytest.mark.slow), ("float16", 0.0)]
)
def test_intervals_with_all_that_scores_take(mask: Mask, dtype: str, dropout_p: float) -> None:
    """A sink, ALiBi, dropout, a softcap, head groups and a head dim of its own for V. Rows that see nothing
    have the sink for their log-sum-exp."""
    problem = problem_of((70, 90), (0, 30), (40, 0), (33, 150), mask=mask, head_dim_v=24, dtype=dtype)
    tensors, scores = packed_tensors(problem), Scores(SCALE, 5.0, True, True, dropout_p, row_intervals=True)
    slopes = torch.tensor([[0.02, 0.3], [0.1, 0.0]]).repeat(2, 1)
    aux = AuxTensors(torch.tensor([0.5, 3.0]), slopes, torch.tensor(11), *intervals(problem, 5).rows or ())
    assert aux.row_starts is not None
    aux.row_starts[:90].clamp_(min=5)  # the first rows see nothing
    found = run(build_plan(problem, Descending(), head_groups=2), tensors, scores, aux)
    assert_accurate(problem, tensors, found, 2, scores=scores, aux=aux)
    blind = found["out"].flatten(1).eq(0).all(1)
    assert blind[:5].all()
    assert blind[70:110].all()
    assert not found["dq"][blind].any()
    unseen = found["lse"][1, :5], found["lse"][1, 70:110]
    torch.testing.assert_close(torch.cat(unseen), torch.full((45,), 3.0))


@pytest.mark.slow
def test_intervals_of_documents_prefixes_and_trees() -> None:
    """Long enough that tiles of rows and of keys are left out."""
    nothing = torch.zeros(400, dtype=torch.int32)
    for mask, rows in (
        (Mask.causal(), RowIntervals(nothing, ends_of_documents(30, 250, 1, 119))),
        (Mask.full(), RowIntervals(starts_of_prefix(150, 400), nothing + 400)),
        (Mask.causal(), RowIntervals(nothing, random_tree(400, 1)[0])),
    ):
        problem = problem_of(400, mask=mask, head_dim=72, heads=1)
        tensors = packed_tensors(problem)
        tensors[1] = tensors[1] / 4
        found = run(build_plan(problem, FA3()), tensors, SCORES, beside(rows))
        assert_accurate(problem, tensors, found, aux=beside(rows))


def test_intervals_of_dense_batches() -> None:
    problem = problem_of((60, 60), (60, 60), mask=Mask.causal())
    plan, packed, aux = build_plan(problem, SPT()), packed_tensors(problem), intervals(problem, 3)
    assert aux.rows is not None
    wanted = run(plan, packed, SCORES, aux)
    whole = beside(RowIntervals(*(x.view(2, 60) for x in aux.rows)))
    found = run(plan, [x.unflatten(0, (2, -1)) for x in packed], SCORES, whole)
    for name in ("out", "dq", "dk", "dv"):
        assert_same_bytes(found[name].flatten(0, 1), wanted[name], name)


@pytest.mark.parametrize("policy", [Shift(2), FA3()], ids=str)
@pytest.mark.slow
def test_tiles_that_intervals_empty_may_be_left_out(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving them out changes no byte. What is hidden in them may be anything, as it is not read."""
    few_keys(monkeypatch, 128)
    problem = problem_of(500, mask=Mask.full(), head_dim=72, heads=1, dtype="float16")
    last = ends_of_documents(130, 190, 180)
    lengths = torch.tensor((130, 190, 180))
    aux = beside(RowIntervals(last - lengths.repeat_interleave(lengths).int(), last))
    tensors, plan = packed_tensors(problem), build_plan(problem, policy)
    first = run(plan, tensors, SCORES, aux)
    spoilt = [x.clone() for x in tensors]
    for x in spoilt:
        x[320:] = torch.nan  # another document, which begins where a tile does
    clean = run(plan, spoilt, SCORES, aux)
    for name in ("out", "dq", "dk", "dv"):
        assert_same_bytes(clean[name][:320], first[name][:320], name)
    for module in (backward_kernels, forward_kernel):
        monkeypatch.setattr(module, "keys_within", lambda starts, ends, low, high, *_: (low, high))
    monkeypatch.setattr(backward_kernels, "visible_part", lambda first, step, count, *_: (count * 0, count))
    for name, got in run(plan, tensors, SCORES, aux).items():
        assert_same_bytes(got, first[name], name)
    for name, got in run(plan, spoilt, SCORES, aux).items():
        assert name == "lse" or not got[:320].isfinite().all(), "the example shows nothing"


def test_keys_that_intervals_hide_may_be_anything() -> None:
    """Within tiles that rows see: q and k of another document."""
    problem = problem_of(150, mask=Mask.causal(), heads=1)
    _, q, k, v = packed_tensors(problem)
    aux = beside(RowIntervals(torch.zeros(150, dtype=torch.int32), ends_of_documents(40, 110)))
    prepared = BACKEND.prepare(problem, CPU, packed=True)
    out, lse = prepared.forward(q, k, v, SCORES, aux)
    q[:40], k[:40] = torch.nan, torch.inf
    found, other = prepared.forward(q, k, v, SCORES, aux)
    assert_same_bytes(found[40:], out[40:], "out")
    assert_same_bytes(other[:, 40:].contiguous(), lse[:, 40:].contiguous(), "lse")


def test_intervals_that_hide_nothing_change_no_byte() -> None:
    problem = problem_of(200, (30, 90), mask=Mask.causal(), dtype="float16")
    tensors, plan = packed_tensors(problem), build_plan(problem, SPT())
    nothing = torch.zeros(290, dtype=torch.int32)
    found = run(plan, tensors, SCORES, beside(RowIntervals(nothing, nothing + 200)))
    for name, wanted in run(plan, tensors).items():
        assert_same_bytes(found[name], wanted, name)


def test_public_functions_with_intervals() -> None:
    problem = problem_of((90, 90), (20, 130), mask=Mask.causal(), head_dim=40)
    dout, q, k, v = packed_tensors(problem)
    aux = intervals(problem, 4)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ends = [torch.tensor([0, *side]).cumsum(0).int() for side in zip(*problem.sequences)]
    how = {"causal": True, "backend": "triton", "row_starts": aux.row_starts, "row_ends": aux.row_ends}
    out = dash_attn.flash_attn_varlen_func(*leaves, *ends, softmax_scale=SCALE, **how)
    plan = dash_attn.plan_for(*leaves, *ends, **how)
    found = run(plan, [x.detach() for x in (dout, q, k, v)], SCORES, aux)
    for name, got in zip(("out", "dq", "dk", "dv"), (out, *torch.autograd.grad(out, leaves, dout))):
        assert_same_bytes(got, found[name], name)


def test_capped_is_tanh() -> None:
    x = torch.cat([torch.linspace(-9, 9, 2001), torch.logspace(-20, 0, 400), torch.zeros(1)])
    exact = (x.double() / 7).tanh()
    found = torch.empty_like(x)

    @triton.jit
    def kernel(source, target, scale, n: tl.constexpr, size: tl.constexpr):
        at = tl.arange(0, size)
        tl.store(target + at, capped(tl.load(source + at, mask=at < n), scale), mask=at < n)

    kernel[(1,)](x, found, 1 / 7, len(x), 4096)
    assert ((found - exact).abs() <= 2e-6 * exact.abs()).all()


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


def test_a_large_sink_has_a_gradient_where_rows_end_within_a_tile() -> None:
    q, k, v = (torch.randn(1, 100, 1, 16) for _ in range(3))
    sink = torch.tensor([100.0], requires_grad=True)
    out = dash_attn.attention(q, k, v, causal=True, learnable_sink=sink, backend="triton")
    assert torch.autograd.grad(out.sum(), sink)[0].isfinite()


def test_a_scale_that_is_0_in_float32() -> None:
    q, k, v = (torch.randn(1, 20, 1, 16) for _ in range(3))
    out, wanted = (dash_attn.attention(q, k, v, softmax_scale=s, backend="triton") for s in (1e-46, 0.0))
    assert_same_bytes(out, wanted)


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

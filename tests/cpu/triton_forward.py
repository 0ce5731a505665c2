"""The forward's numerics by the Triton kernels, interpreted: those of the reference.

``test_triton.py`` starts this file in processes, see ``triton_interpreted.py``.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import SCALE, packed_tensors
from torch import Tensor
from triton_runs import BOUND, CPU, SCORES, few_keys, forward, problem_of

from dash_attn.backends.base import Tensors
from dash_attn.backends.cpu import forward as reference
from dash_attn.backends.shapes import Keys
from dash_attn.backends.triton.backend import BACKEND
from dash_attn.backends.triton.tiles import forward_numerics
from dash_attn.errors import InputError
from dash_attn.problem import Mask
from dash_attn.schedule import FA3, build_plan
from dash_attn.scores import Scores
from dash_attn.testing import assert_same_bytes, same_bytes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in rows that see nothing


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

"""The forward: what its numerics say, and that a row's bytes depend on nothing else."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from attention_cases import SCALE
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dash_attn.backends.cpu import forward, oracle_forward
from dash_attn.errors import ProblemError
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import ForwardNumerics
from dash_attn.testing import assert_same_bytes, same_bytes

HEAD_DIM = 16
NARROW = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}


def short(dtype: str = "float32", **numbers: float) -> ForwardNumerics:
    """Segments of three tiles of 16 keys: sequences of 200 keys have several."""
    return ForwardNumerics(HEAD_DIM, dtype, **({"tile": 16, "segment": 48} | numbers))  # type: ignore[arg-type]


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    numerics: ForwardNumerics | None = None,
    seed: int | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse of one sequence, (rows, heads, head_dim) and (heads, rows)."""
    dtype = str(q.dtype).removeprefix("torch.")
    problem = Problem(((len(q), len(k)),), q.shape[1], k.shape[1], q.shape[2], mask, dtype)
    rng = None if seed is None else random.Random(seed)
    return forward(problem, q, k, v, SCALE, numerics=numerics or short(dtype), rng=rng)


class Sequence(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor


def sequence(length: int, seed: int = 0, heads: int = 2, dtype: str = "float32") -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    return Sequence(
        *(torch.randn(length, heads, HEAD_DIM, generator=generator).to(NARROW[dtype]) for _ in range(3))
    )


def assert_rows(found: tuple[Tensor, Tensor], whole: tuple[Tensor, Tensor], rows: slice) -> None:
    assert_same_bytes(found[0], whole[0][rows], "out")
    assert_same_bytes(found[1], whole[1][:, rows].contiguous(), "lse")


# What the numerics say


def test_segments_stand_at_fixed_columns() -> None:
    numerics = short()
    assert numerics.segments(0, 0) == [[0]]
    assert numerics.segments(0, 111) == [[2, 1, 0], [5, 4, 3], [6]]
    assert numerics.segments(40, 100) == [[2], [5, 4, 3], [6]]
    every = [tile for segment in numerics.segments(0, 1000) for tile in segment]
    assert sorted(every) == list(range(63))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"tile": 0}, "tile must be an integer >= 1, got 0"),
        ({"segment": 40}, r"segment \(40\) must be a multiple of tile \(16\)"),
        ({"tile": 12, "segment": 48}, "tile must be a multiple of 8, got 12"),
        ({"keep": 16.0}, "keep must be in 0..15, got 16.0"),
        ({"room": 9}, "room must be an integer in 0..8, got 9"),
    ],
)
def test_bad_numbers_are_named(numbers: dict[str, float], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        short(**numbers)


def test_every_number_is_in_the_fingerprint() -> None:
    others = [
        short(), short("bfloat16"), short(tile=8), short(segment=96), short(keep=7.0), short(room=3),
        ForwardNumerics(HEAD_DIM + 1, "float32", tile=16, segment=48),
    ]  # fmt: skip
    assert len({x.fingerprint for x in others}) == len(others)
    assert short(keep=5).fingerprint == short().fingerprint
    assert len(short().fingerprint) == 64


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("keep", [0.0, 6.0])
def test_the_formulas(keep: float, dtype: str) -> None:
    """Two segments of two tiles, step by step, for one head of 64 rows, with scores that grow."""
    q, k, v = (x[:, 0] for x in sequence(64, 3, 1, dtype))
    k = k * torch.linspace(6, 0.1, 64)[:, None].to(k.dtype)  # the later segment has the smaller scores
    numerics = ForwardNumerics(HEAD_DIM, dtype, tile=16, segment=32, keep=keep, room=6)
    states, raised, kept = [], 0, 0
    for tiles in ((1, 0), (3, 2)):
        m = torch.full((64, 1), -torch.inf)
        total, out = torch.zeros(64, 1), torch.zeros(64, HEAD_DIM)
        for tile in tiles:
            at = slice(16 * tile, 16 * tile + 16)
            s = (q.float() @ k[at].float().T) * (SCALE * math.log2(math.e))
            largest = s.amax(1, keepdim=True)
            first = largest + 2  # of 16 keys: 6 - log2(16)
            new = torch.where(m == -torch.inf, first, torch.where(largest > m + keep, largest, m))
            raised += int(((new > m) & (m > -torch.inf)).sum())
            kept += int((largest > new).sum())
            decay, p = (m - new).exp2(), (s - new).exp2()
            total = total * decay + p.sum(1, keepdim=True)
            out = (out * decay).addmm_(p.to(q.dtype).float(), v[at].float())
            m = new
        states.append((m, total, out))
    (m, total, out), (m2, total2, out2) = states
    new = torch.maximum(m, m2)
    a, b = (m - new).exp2(), (m2 - new).exp2()
    total, out = total * a + total2 * b, out * a + out2 * b
    found, lse = run(q[:, None], k[:, None], v[:, None], Mask.full(), numerics)
    assert_same_bytes(found[:, 0], (out / total).to(q.dtype), "out")
    assert_same_bytes(lse[0], ((new + total.log2()) * math.log(2.0))[:, 0], "lse")
    assert raised > 0, "the example shows nothing"
    assert (kept > 0) == (keep > 0), "the example shows nothing"


@pytest.mark.parametrize(
    "mask", [Mask.full(), Mask.causal(), Mask.window(70, 0), Mask.window(9, 30)], ids=str
)
@pytest.mark.parametrize(
    "numerics", [short("float64"), short("float64", keep=0.0), ForwardNumerics(16, "float64")]
)
def test_it_agrees_with_the_oracle(mask: Mask, numerics: ForwardNumerics) -> None:
    """Also with scores that rise over the sequence, where maxima are raised late."""
    q, k, v = sequence(150, dtype="float64")
    k = k * torch.linspace(0.1, 40, 150, dtype=torch.float64)[:, None, None]
    out, lse = run(q, k, v, mask, numerics)
    expected = oracle_forward(q[None], k[None], v[None], mask, SCALE)
    torch.testing.assert_close(out, expected[0][0], rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected[1][0], rtol=0, atol=1e-11)


# Bytes


@settings(max_examples=40)
@given(st.data())
def test_a_rows_bytes_depend_on_what_it_sees_and_on_where_that_stands(data: st.DataObject) -> None:
    length, seed = data.draw(st.integers(1, 230), "length"), data.draw(st.integers(0, 99), "seed")
    dtype = data.draw(st.sampled_from(sorted(NARROW)), "dtype")
    mask = data.draw(st.sampled_from([Mask.causal(), Mask.window(60, 0), Mask.window(5, 0)]), "mask")
    q, k, v = sequence(length, seed, dtype=dtype)
    whole = run(q, k, v, mask)
    start, end = sorted(data.draw(st.tuples(st.integers(0, length), st.integers(0, length)), "chunk"))
    assert_rows(run(q[:end], k[:end], v[:end], mask), whole, slice(end))  # a prefix
    assert_rows(run(q[start:end], k[:end], v[:end], mask), whole, slice(start, end))  # a chunk behind it
    one = data.draw(st.integers(0, length - 1), "row")
    alone = slice(one, one + 1)
    assert_rows(run(q[alone], k[: one + 1], v[: one + 1], mask), whole, alone)  # a step of decoding
    if mask.is_causal:
        full = run(q[alone], k[: one + 1], v[: one + 1], Mask.full())
        assert_rows(full, whole, alone)
    assert_rows(run(q, k, v, mask, seed=seed), whole, slice(None))  # whoever computes which segment
    group = torch.cat([q, q.flip(0), -q], 1)  # six q heads: three for each kv head, by kv head
    grouped = run(group[:, [0, 2, 4, 1, 3, 5]], k, v, mask)
    assert_rows((grouped[0][:, [0, 3]], grouped[1][[0, 3]].contiguous()), whole, slice(None))


@pytest.mark.parametrize("dtype", sorted(NARROW))
def test_the_same_with_the_numbers_of_the_product(dtype: str) -> None:
    """More keys than a segment has."""
    numerics = ForwardNumerics(HEAD_DIM, dtype)
    length = numerics.segment + 300
    q, k, v = sequence(length, dtype=dtype)
    whole = run(q, k, v, Mask.causal(), numerics)
    for start, end in ((0, 1000), (numerics.segment - 10, length - 7), (length - 1, length)):
        found = run(q[start:end], k[:end], v[:end], Mask.causal(), numerics, seed=start)
        assert_rows(found, whole, slice(start, end))


@pytest.mark.parametrize(("head_dim", "of_v"), [(1, 3), (7, 64), (33, 9), (40, 24)])
def test_products_have_columns_that_8_divides(head_dim: int, of_v: int) -> None:
    """By how many there are PyTorch chooses how to multiply, and not every way treats all rows alike."""
    found = set()
    mm, addmm = torch.mm, torch.Tensor.addmm_

    def seen(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *given: found.update(x.shape[1] for x in given) or product(*given)

    q, k, v = (torch.randn(90, 1, n) for n in (head_dim, head_dim, of_v))
    with mock.patch("torch.mm", seen(mm)), mock.patch.object(torch.Tensor, "addmm_", seen(addmm)):
        problem = Problem(((90, 90),), 1, 1, head_dim, Mask.causal(), "float32", head_dim_v=of_v)
        out, _ = forward(problem, q, k, v, SCALE)
    assert out.shape == v.shape
    assert {-(-n // 8) * 8 for n in (head_dim, of_v)} <= found
    assert not any(n % 8 for n in found)


@settings(max_examples=15)
@given(st.lists(st.integers(0, 150), min_size=1, max_size=4), st.sampled_from([Mask.full(), Mask.causal()]))
def test_packed_beside_others_a_sequence_has_its_own_bytes(lengths: list[int], mask: Mask) -> None:
    parts = [sequence(length, seed) for seed, length in enumerate(lengths)]
    q, k, v = (torch.cat(tensors) for tensors in zip(*parts))
    problem = Problem(tuple((n, n) for n in lengths), 2, 2, HEAD_DIM, mask, "float32")
    out, lse = forward(problem, q, k, v, SCALE, numerics=short())
    ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    for part, (begin, end) in zip(parts, pairwise(ends)):
        if end > begin:
            assert_rows(run(*part, mask), (out, lse), slice(begin, end))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_neighbours_values_do_not_leak(bad: float) -> None:
    q, k, v = (torch.cat([x, x, x]) for x in sequence(70))
    problem = Problem(((70, 70),) * 3, 2, 2, HEAD_DIM, Mask.causal(), "float32")
    out, lse = forward(problem, q, k, v, SCALE, numerics=short())
    assert_same_bytes(out[:70], out[140:], "the same sequence at another place of the batch")
    for tensor in (q, k, v):
        kept = tensor[70:140].clone()
        tensor[70:140] = bad
        found, other = forward(problem, q, k, v, SCALE, numerics=short())
        for rows in (slice(70), slice(140, 210)):
            assert_same_bytes(found[rows], out[rows], "out")
            assert_same_bytes(other[:, rows].contiguous(), lse[:, rows].contiguous(), "lse")
        tensor[70:140] = kept


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mask", [Mask.causal(), Mask.window(20, 0)], ids=str)
def test_what_a_row_does_not_look_at_may_be_anything(mask: Mask, bad: float) -> None:
    q, k, v = sequence(130)
    whole = run(q, k, v, mask)
    for tensor in ("q", "k", "v"):
        spoilt = Sequence(q.clone(), k.clone(), v.clone())
        getattr(spoilt, tensor)[70] = bad
        out, lse = run(*spoilt, mask)
        sees = torch.zeros(130, dtype=torch.bool)
        sees[70:] = True
        if tensor == "q":
            sees[71:] = False
        if mask.left is not None:
            sees[70 + mask.left + 1 :] = False
        assert_same_bytes(out[~sees], whole[0][~sees], tensor)
        assert_same_bytes(lse[:, ~sees], whole[1][:, ~sees], tensor)
        if tensor == "v":
            assert not out[sees].isfinite().any()


def test_another_segment_or_tile_gives_other_bytes() -> None:
    """The negative control: these numbers are the numerics."""
    parts = sequence(200)
    results = [
        run(*parts, Mask.causal(), numerics)[0]
        for numerics in (short(), short(segment=96), short(segment=4096), short(tile=24))
    ]
    for at, one in enumerate(results):
        torch.testing.assert_close(one, results[0], rtol=1e-5, atol=1e-5)
        assert not any(same_bytes(one, other) for other in results[at + 1 :])

"""The Triton kernels, run by Triton's interpreter; ``test_triton.py`` starts this file in processes.

The interpreter must be chosen before Triton is loaded, which other tests of a process may have done. By hand:

    TRITON_INTERPRET=1 OPENBLAS_CORETYPE=SANDYBRIDGE .venv/bin/pytest tests/cpu/triton_interpreted.py

It multiplies bfloat16 wrongly: these tests are of float16 and float32, and bfloat16 is for a GPU. Its sums
are NumPy's, so bytes here show what programs read and in which order they add, and not what a compiler makes
of it.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from attention_cases import SCALE, executed, packed_tensors
from triton_runs import BOUND, CPU, LENGTHS, MASKS, SCORES, assert_accurate, problem_of, run

import dash_attn
from dash_attn.backends.base import Tensors
from dash_attn.backends.shapes import Keys
from dash_attn.backends.triton import backward_kernels, launch
from dash_attn.backends.triton.backend import BACKEND
from dash_attn.backends.triton.parts import whole_columns, whole_part, whole_rows
from dash_attn.errors import PlanError, PlanMismatchError
from dash_attn.problem import Mask
from dash_attn.schedule import FA3, SPT, Descending, build_plan
from dash_attn.testing import assert_same_bytes
from triton_cases import NAMES

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in rows that see nothing


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.parametrize(("rows", "keys", "causal"), [(200, 77, False), (200, 150, True)])
def test_a_segment_that_sees_less_than_a_tile_of_keys(rows: int, keys: int, causal: bool) -> None:
    q, k = torch.randn(1, rows, 2, 16).requires_grad_(), torch.randn(1, keys, 1, 16).requires_grad_()
    found = []
    for backend in ("triton", "cpu"):
        out = dash_attn.attention(q, k, k, causal=causal, backend=backend, q_segment=128)
        found.append(torch.autograd.grad(out.square().sum(), (q, k)))
    for mine, wanted in zip(*found):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)


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


@pytest.mark.slow
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

"""Intervals of rows in the Hopper kernels: accuracy, bytes, and what is left out."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn import attention, flash_attn_varlen_func, plan_for
from dash_attn.backends.base import RowIntervals, Tensors
from dash_attn.backends.sm90.launch import run_backward
from dash_attn.problem import Mask
from dash_attn.testing import assert_same_bytes, same_bytes
from gpu_cases import relative_error
from interval_cases import (
    ends_of_documents,
    random_intervals,
    random_tree,
    seen_elements,
    starts_of_prefix,
)

NAMES = ("out", "lse", "dq", "dk", "dv")
BOUND = {torch.bfloat16: 0.008, torch.float16: 0.001}


def drawn(
    rows: int,
    head_dim: int,
    heads: tuple[int, int] = (4, 2),
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> tuple[list[Tensor], Tensor]:
    """q, k and v of one sequence, and the gradient of out."""
    generator = torch.Generator("cuda").manual_seed(seed)
    sizes = [(1, rows, n, head_dim) for n in (heads[0], heads[1], heads[1], heads[0])]
    q, k, v, dout = (torch.randn(s, generator=generator, device="cuda").to(dtype) for s in sizes)
    return [x.requires_grad_() for x in (q, k, v)], dout


def run(tensors: list[Tensor], dout: Tensor, rows: RowIntervals, **how: Any) -> list[Tensor]:
    """out, lse, dq, dk, dv."""
    starts, ends = (x[None].cuda() for x in rows)
    how = {"backend": "sm90", "return_lse": True, "row_starts": starts, "row_ends": ends} | how
    out, lse = attention(*tensors, **how)
    return [out.detach(), lse, *torch.autograd.grad(out, tensors, dout)]


def any_intervals(length: int, rng: random.Random) -> RowIntervals:
    """Documents, a tree, a prefix, padding, or anything."""
    kind = rng.choice(("documents", "tree", "prefix", "padding", "any"))
    starts, ends = torch.zeros(length, dtype=torch.int32), torch.full((length,), length, dtype=torch.int32)
    if kind == "documents":
        cuts = sorted(rng.sample(range(1, length), min(6, length - 1)))
        ends = ends_of_documents(*(b - a for a, b in zip([0, *cuts], [*cuts, length])))
    elif kind == "tree":
        ends = random_tree(length, rng.randrange(99))[0]
    elif kind == "prefix":
        starts = starts_of_prefix(rng.randrange(length), length)
    elif kind == "padding":
        ends[rng.randrange(length) :] = 0
    else:
        return random_intervals(length, length, rng.randrange(99))
    return RowIntervals(starts, ends)


def exact(tensors: list[Tensor], dout: Tensor, seen: Tensor) -> list[Tensor]:
    """out, dq, dk, dv in float64 under a mask of elements; rows that see nothing are zero."""
    q, k, v = (x.detach().double().transpose(1, 2) for x in tensors)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    p = scores.softmax(-1).nan_to_num(0.0)
    do = dout.double().transpose(1, 2)
    dp = do @ v.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    found = [p @ v, ds @ k, *(x.unflatten(1, (-1, group)).sum(2) for x in (ds.mT @ q, p.mT @ do))]
    return [x.transpose(1, 2) for x in found]


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("head_dim", [40, 64, 72, 80, 88, 96, 128])
def test_random_problems(head_dim: int, dtype: torch.dtype) -> None:
    """Against float64, beside what Triton's kernels reach; twice the same bytes."""
    rng = random.Random(head_dim)
    for seed in range(8):
        length = rng.choice((33, 63, 129, 400, 777, 1100))
        heads = rng.choice(((1, 1), (2, 2), (4, 2), (4, 1)))
        tensors, dout = drawn(length, head_dim, heads, dtype, seed)
        rows = any_intervals(length, rng)
        causal = rng.random() < 0.5
        seen = seen_elements(rows, Mask.causal() if causal else Mask.full(), length).cuda()
        found, again, theirs = (
            run(tensors, dout, rows, causal=causal, backend=backend) for backend in ("sm90", "sm90", "triton")
        )
        for name, x, same in zip(NAMES, found, again):
            assert_same_bytes(x, same, name)
        blind = ~seen.any(1)
        assert not found[0][:, blind].any()
        assert not found[2][:, blind].any()
        assert (found[1][:, :, blind] == -torch.inf).all()
        for name, wanted in zip(("out", "dq", "dk", "dv"), exact(tensors, dout, seen)):
            x, other = found[NAMES.index(name)].double(), theirs[NAMES.index(name)].double()
            if wanted.norm() > 0:
                most = max(BOUND[dtype], 1.1 * relative_error(other, wanted))
                assert relative_error(x, wanted) <= most, (name, length, heads, causal, seed)
            else:
                assert not x.any()


@pytest.mark.parametrize("head_dim", [64, 72, 80, 88, 96, 128])
def test_a_row_has_the_bytes_of_what_it_sees(head_dim: int) -> None:
    """Whether the mask hides a key or its interval does, and whether there are intervals at all."""
    length = 1500
    tensors, dout = drawn(length, head_dim)
    everything = RowIntervals(torch.zeros(length).int(), torch.full((length,), 2**31 - 1).int())
    plain = attention(*tensors, causal=True, backend="sm90", return_lse=True)
    for x, y in zip(run(tensors, dout, everything, causal=True)[:2], plain):
        assert_same_bytes(x, y.detach())
    triangle = RowIntervals(torch.arange(length).int(), everything.ends)
    for x, y in zip(run(tensors, dout, triangle)[:2], plain):
        assert_same_bytes(x, y.detach())
    documents = RowIntervals(everything.starts, ends_of_documents(600, 900))
    first = attention(*(x[:, :600] for x in tensors), causal=True, backend="sm90", return_lse=True)
    found = run(tensors, dout, documents, causal=True)
    assert_same_bytes(found[0][:, :600], first[0].detach())
    assert_same_bytes(found[1][:, :, :600], first[1].detach())
    # Negative control: the second document stands elsewhere in its tiles when it is alone.
    second = attention(*(x[:, 600:] for x in tensors), causal=True, backend="sm90")
    assert not same_bytes(found[0][:, 600:], second.detach())


@pytest.mark.parametrize(("head_dim", "heads"), [(64, (8, 8)), (96, (8, 2)), (128, (8, 2))])
@pytest.mark.parametrize("policy", ["auto", "spt", "shift(ring=16)", "symmetric_shift"])
def test_replays(head_dim: int, heads: tuple[int, int], policy: str, replays: int) -> None:
    """The same bytes under load."""
    length, full = 2048, policy.startswith("shift")
    tensors, dout = drawn(length, head_dim, heads)
    rows = RowIntervals(torch.zeros(length).int(), ends_of_documents(300, 1100, 48, 600))
    how: dict[str, Any] = {"causal": not full, "policy": policy}
    wanted = run(tensors, dout, rows, **how)
    beside = torch.cuda.Stream()
    for replay in range(max(2, replays // 4)):
        if replay % 2:
            with torch.cuda.stream(beside):
                torch.randn(2000, 2000, device="cuda") @ torch.randn(2000, 2000, device="cuda")
        for name, x, y in zip(NAMES, run(tensors, dout, rows, **how), wanted):
            assert_same_bytes(x, y, name)
    torch.cuda.synchronize()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_without_order_the_bytes_differ(head_dim: int) -> None:
    """Negative control of the replays."""
    tensors, dout = drawn(4096, head_dim, (32, 32))
    rows = random_intervals(4096, 4096, 1)
    wanted = run(tensors, dout, rows)
    plan = plan_for(*tensors, backend="sm90")
    given = Tensors(dout, *(x.detach() for x in tensors), *wanted[:2])
    there = RowIntervals(*(x[None].cuda() for x in rows))
    found = [
        run_backward(plan, given, head_dim**-0.5, rows=there, ordered=ordered).dq
        for ordered in (True, *[False] * 4)
    ]
    assert_same_bytes(found[0], wanted[2])
    assert any(not same_bytes(x, wanted[2]) for x in found[1:])
    for x in found:
        assert relative_error(x.double(), wanted[2].double()) <= 0.01


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_sink(head_dim: int) -> None:
    """A row that sees nothing has the sink alone."""
    tensors, dout = drawn(500, head_dim)
    sink = torch.linspace(-1, 2, 4, device="cuda").requires_grad_()
    ends = torch.full((500,), 300, dtype=torch.int32)
    found, theirs = [], []
    for backend, results in (("sm90", found), ("triton", theirs)):
        out, lse = attention(
            *tensors, causal=True, row_ends=ends[None].cuda(), learnable_sink=sink, backend=backend,
            return_lse=True,
        )  # fmt: skip
        results += [out.detach(), lse, *torch.autograd.grad(out, [*tensors, sink], dout)]
    assert not found[0][:, 300:].any()
    assert_same_bytes(found[1][0, :, 300:], sink.detach()[:, None].expand(4, 200).contiguous())
    for x, y in zip(found, theirs):
        assert relative_error(x.double(), y.double()) <= 0.01


def test_packed_sequences() -> None:
    """Of any lengths: each has what it has alone."""
    lengths, rng = (300, 1, 700, 129), random.Random(1)
    tensors, dout = drawn(sum(lengths), 128)
    each = [
        any_intervals(n, rng) if n > 1 else RowIntervals(*torch.tensor([[0], [1]]).int()) for n in lengths
    ]
    starts, ends = (torch.cat(side).cuda() for side in zip(*each))
    flat, bounds = [x[0] for x in tensors], torch.tensor([0, *lengths]).cumsum(0).int()
    out, lse = flash_attn_varlen_func(
        *flat, bounds, bounds, max(lengths), max(lengths), causal=True, row_starts=starts, row_ends=ends,
        backend="sm90", return_lse=True,
    )  # fmt: skip
    packed = [out.detach(), *torch.autograd.grad(out, tensors, dout[0])]
    for index, length in enumerate(lengths):
        at = slice(int(bounds[index]), int(bounds[index]) + length)
        one = [x.detach()[:, at].contiguous().requires_grad_() for x in tensors]
        alone = run(one, dout[:, at].contiguous(), each[index], causal=True)
        assert_same_bytes(packed[0][at], alone[0][0])
        assert_same_bytes(lse[:, at].contiguous(), alone[1][0])
        for x, y in zip(packed[1:], alone[2:]):
            assert relative_error(x[:, at].double(), y.double()) <= 0.006


@pytest.mark.parametrize("head_dim", [64, 72, 80, 88, 96, 128])
def test_long_sequences(head_dim: int) -> None:
    """Several segments of keys: a prefix that continuations share, with holes of more than a segment. As by
    Triton, and as a continuation alone behind the prefix."""
    length, prefix, parts = 24_000, 4_000, 4
    tensors, dout = drawn(length, head_dim, (2, 1))
    ends = ends_of_documents(prefix, *[(length - prefix) // parts] * parts)
    ends[:prefix] = length
    rows = RowIntervals(torch.zeros(length).int(), ends)
    found = run(tensors, dout, rows, causal=True)
    for name, x, y in zip(NAMES, found, run(tensors, dout, rows, causal=True, backend="triton")):
        assert relative_error(x.double(), y.double()) <= 0.01, name
    last = slice(length - (length - prefix) // parts, length)
    k, v = (torch.cat([x[:, :prefix], x[:, last]], 1).detach() for x in tensors[1:])
    alone = attention(tensors[0][:, last].detach(), k, v, causal=True, backend="sm90")
    assert relative_error(found[0][:, last].double(), alone.double()) <= 0.01


def test_keys_that_intervals_hide_may_be_anything() -> None:
    """NaN in k of another document, and in q of its rows."""
    tensors, dout = drawn(1000, 128)
    rows = RowIntervals(torch.zeros(1000).int(), ends_of_documents(450, 550))
    wanted = run(tensors, dout, rows, causal=True)
    with torch.no_grad():
        for x in tensors[:2]:
            x[:, 450:] = torch.nan
    out, lse = attention(
        *(x.detach() for x in tensors), causal=True, row_ends=rows.ends[None].cuda(), backend="sm90",
        return_lse=True,
    )  # fmt: skip
    assert_same_bytes(out[:, :450], wanted[0][:, :450])
    assert_same_bytes(lse[:, :, :450], wanted[1][:, :, :450])


def test_a_captured_graph_reads_new_intervals() -> None:
    tensors, dout = drawn(1024, 64)
    ends = ends_of_documents(500, 524)[None].cuda()
    others = ends_of_documents(100, 24, 900)[None].cuda()

    def step() -> list[Tensor]:
        out, lse = attention(*tensors, causal=True, row_ends=ends, backend="sm90", return_lse=True)
        return [out.detach(), lse, *torch.autograd.grad(out, tensors, dout)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    ends.copy_(others)
    graph.replay()
    for x, y in zip(found, step()):
        assert_same_bytes(x, y)

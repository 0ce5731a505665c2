"""What ranks do in tests of ``dash_attn.distributed``: compare what they share with one process's bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dash_attn
from dash_attn.distributed import attention, attention_varlen, shard
from dash_attn.distributed.exchange import team_of
from dash_attn.distributed.notes import Notes
from dash_attn.errors import InputError
from dash_attn.testing import assert_same_bytes

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (300, 0)},
    "both sides": {"window": (100, 60)},
}
MODES = ("ulysses", "gather", "ring", "ulysses+gather", "ulysses+ring", "auto")
LAYOUTS = ("zigzag", "contiguous")


def notes() -> Notes:
    """Of the group of all processes."""
    return team_of(None).notes


@contextmanager
def refused(match: str) -> Iterator[None]:
    """An error of arguments, which this rank has told the others once, or they it."""
    before = notes().calls
    with pytest.raises(InputError, match=match):
        yield
    assert notes().calls == before + 1


class Case(NamedTuple):
    """One comparison. ``lengths``: of packed sequences; else ``rows`` of two dense ones."""

    heads: tuple[int, int]
    mask: str
    mode: str
    layout: str
    rows: int = 0
    lengths: tuple[int, ...] = ()
    q_segment: int | None = 128
    head_dim: int = 32
    sink: bool = False
    extra: str = ""
    dtype: torch.dtype = torch.bfloat16


def drawn(case: Case, device: str) -> list[Tensor]:
    """q, k, v and dout of the whole sequences, the same on every rank."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (sum(case.lengths),) if case.lengths else (2, case.rows)
    heads = case.heads[0], case.heads[1], case.heads[1], case.heads[0]
    sizes = [(*shape, n, case.head_dim) for n in heads]
    return [torch.randn(size, generator=generator, device=device).to(case.dtype) for size in sizes]


def compared(case: Case, device: str = "cpu") -> None:
    """Out, lse, dq, dk and dv of this rank's rows are the bytes of one process."""
    *qkv, dout = drawn(case, device)
    dim = 0 if case.lengths else 1
    bounds = None
    if case.lengths:
        bounds = torch.tensor([0, *torch.tensor(case.lengths).cumsum(0).tolist()], dtype=torch.int32)

    def mine(x: Tensor, at: int = dim) -> Tensor:
        return shard(x, dim=at, layout=case.layout, cu_seqlens=bounds)

    options: dict[str, Any] = MASKS[case.mask] | {"q_segment": case.q_segment, "return_lse": True}
    sinks: list[Tensor] = []
    if case.sink:
        generator = torch.Generator(device).manual_seed(1)
        sink = torch.randn(case.heads[0], generator=generator, device=device)
        sinks = [sink.clone().requires_grad_() for _ in range(2)]
    if case.extra == "dropout":
        options |= {"dropout_p": 0.3, "dropout_seed": 2**40 + 7}
    beside: dict[str, Tensor] = {}
    if case.extra == "alibi":
        options["alibi_slopes"] = torch.linspace(0.01, 0.3, case.heads[0], device=device)
    if case.extra == "intervals":  # documents of 100 rows
        lengths = case.lengths or (case.rows,)
        ends = torch.cat([(torch.arange(n, device=device) // 100 + 1) * 100 for n in lengths]).int()
        beside["row_ends"] = ends if case.lengths else ends.expand(2, -1).contiguous()
    how = {"mode": case.mode, "layout": case.layout}
    whole = [x.clone().requires_grad_() for x in qkv]
    parts = [mine(x).requires_grad_() for x in qkv]
    if case.extra == "one tensor":
        whole, parts = whole[:1] * 3, parts[:1] * 3
    of_parts = {name: mine(x) for name, x in beside.items()}
    of_whole = dict(beside)
    if sinks:
        of_whole["learnable_sink"], of_parts["learnable_sink"] = sinks
    if bounds is None:
        out, lse = dash_attn.attention(*whole, **options, **of_whole)
        there, of_rows = attention(*parts, **options, **of_parts, **how)
    else:
        packed = {**options, "window_size": options.get("window", (-1, -1))}
        packed.pop("window", None)
        out, lse = dash_attn.flash_attn_varlen_func(*whole, bounds, bounds, **packed, **of_whole)
        there, of_rows = attention_varlen(*parts, bounds, **options, **of_parts, **how)
    out.backward(dout)
    there.backward(mine(dout))
    assert_same_bytes(there, mine(out))
    assert_same_bytes(of_rows, mine(lse, lse.ndim - 1))
    for part, x in zip(parts, whole):
        assert part.grad is not None
        assert x.grad is not None
        assert_same_bytes(part.grad, mine(x.grad))
    if sinks:
        wanted, total = (x.grad for x in sinks)
        assert wanted is not None
        assert total is not None
        dist.all_reduce(total)  # of each head one rank has it all, or each rank that of its rows
        if case.mode == "ulysses":
            assert_same_bytes(total, wanted)
        torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-4)

"""What ranks do in tests of ``dash_attn.distributed``: compare what they share with one process's bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dash_attn
from dash_attn.distributed import attention, attention_varlen, shard
from dash_attn.distributed.notes import Notes
from dash_attn.distributed.team import team_of
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


def bounds_of(case: Case) -> Tensor | None:
    if not case.lengths:
        return None
    return torch.tensor([0, *torch.tensor(case.lengths).cumsum(0).tolist()], dtype=torch.int32)


def asked(case: Case, device: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Keywords of a call, and tensors of the whole sequences beside q, k and v."""
    options: dict[str, Any] = MASKS[case.mask] | {"q_segment": case.q_segment, "return_lse": True}
    if case.sink:
        generator = torch.Generator(device).manual_seed(1)
        sink = torch.randn(case.heads[0], generator=generator, device=device)
        options["learnable_sink"] = sink.requires_grad_()
    if case.extra == "dropout":
        options |= {"dropout_p": 0.3, "dropout_seed": 2**40 + 7}
    beside: dict[str, Tensor] = {}
    if case.extra == "alibi":
        options["alibi_slopes"] = torch.linspace(0.01, 0.3, case.heads[0], device=device)
    if case.extra == "intervals":  # documents of 100 rows
        lengths = case.lengths or (case.rows,)
        ends = torch.cat([(torch.arange(n, device=device) // 100 + 1) * 100 for n in lengths]).int()
        beside["row_ends"] = ends if case.lengths else ends.expand(2, -1).contiguous()
    return options, beside


@lru_cache(2)
def of_one_process(case: Case, device: str) -> list[Tensor]:
    """out, lse and the gradients of q, k, v and the sink, if there is one; case: without mode and layout."""
    *qkv, dout = drawn(case, device)
    options, beside = asked(case, device)
    leaves = [x.requires_grad_() for x in (qkv[:1] * 3 if case.extra == "one tensor" else qkv)]
    if (bounds := bounds_of(case)) is None:
        out, lse = dash_attn.attention(*leaves, **options, **beside)
    else:
        packed = {**options, "window_size": options.get("window", (-1, -1))}
        packed.pop("window", None)
        out, lse = dash_attn.flash_attn_varlen_func(*leaves, bounds, bounds, **packed, **beside)
    out.backward(dout)
    leaves += [options["learnable_sink"]] if case.sink else []
    return [out.detach(), lse, *_gradients(leaves)]


def _of_rank_0(case: Case, device: str) -> list[Tensor]:
    """The same on every rank; on a CPU only one of the processes has computed it."""
    if device != "cpu":
        return of_one_process(case, device)
    found = [of_one_process(case, device) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    (made,) = found
    assert made is not None
    return made


def _gradients(leaves: list[Tensor]) -> list[Tensor]:
    found = [x.grad for x in leaves if x.grad is not None]
    assert len(found) == len(leaves)
    return found


def compared(case: Case, device: str = "cpu") -> None:
    """Out, lse, dq, dk and dv of this rank's rows are the bytes of one process."""
    out, lse, *wanted = _of_rank_0(case._replace(mode="", layout=""), device)
    *qkv, dout = drawn(case, device)
    dim, bounds = 0 if case.lengths else 1, bounds_of(case)

    def mine(x: Tensor, at: int = dim) -> Tensor:
        return shard(x, dim=at, layout=case.layout, cu_seqlens=bounds)

    options, beside = asked(case, device)
    options |= {"mode": case.mode, "layout": case.layout} | {name: mine(x) for name, x in beside.items()}
    leaves = [mine(x).requires_grad_() for x in qkv]
    if case.extra == "one tensor":
        leaves = leaves[:1] * 3
    if bounds is None:
        there, of_rows = attention(*leaves, **options)
    else:
        there, of_rows = attention_varlen(*leaves, bounds, **options)
    there.backward(mine(dout))
    assert_same_bytes(there, mine(out))
    assert_same_bytes(of_rows, mine(lse, lse.ndim - 1))
    for got, x in zip(_gradients(leaves), wanted):
        assert_same_bytes(got, mine(x))
    if case.sink:
        (total,) = _gradients([options["learnable_sink"]])
        dist.all_reduce(total)  # of each head one rank has it all, or each rank that of its rows
        if case.mode == "ulysses":
            assert_same_bytes(total, wanted[3])
        torch.testing.assert_close(total, wanted[3], rtol=1e-4, atol=1e-4)

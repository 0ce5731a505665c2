"""Random packed tensors for a problem, and its results by executor and oracle; for tests only."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from dash_attn.backends.base import RowIntervals, Tensors, tensor_shapes
from dash_attn.backends.cpu import backward, forward, plain_attention
from dash_attn.backends.cpu.oracle import Inputs
from dash_attn.problem import Problem
from dash_attn.schedule import Plan

SCALE = 0.3

torch.set_num_threads(1)  # tests run in parallel processes, and threads of many would wait for one another


def packed_tensors(problem: Problem, seed: int = 0) -> list[Tensor]:
    """dout, q, k, v in the problem's dtype, packed."""
    generator = torch.Generator().manual_seed(seed)
    sizes = tensor_shapes(problem)[3].of_tensors[:4]
    dtype = getattr(torch, problem.dtype)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def executed(plan: Plan, tensors: list[Tensor], **how: Any) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv by the executor."""
    dout, q, k, v = tensors
    out, lse = forward(plan, q, k, v, SCALE)
    dq, dk, dv = backward(plan, Tensors(dout, q, k, v, out, lse), SCALE, **how)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def expected(
    problem: Problem, tensors: list[Tensor], rows: RowIntervals | None = None, **how: Any
) -> dict[str, Tensor]:
    """The same by the oracle, sequence by sequence, float64."""
    each: list[RowIntervals | None] = [None] * len(problem.sequences)
    if rows is not None:
        lengths = [seqlen_k for _, seqlen_k in problem.sequences]
        each = [RowIntervals(*own) for own in zip(*(x.split(lengths) for x in rows))]
    parts = [
        oracle_of_one(problem, sequence, rows=own, **how)
        for sequence, own in zip(split(problem, tensors), each)
    ]
    if not parts:
        return {}
    joined = {name: torch.cat([part[name] for part in parts]) for name in ("out", "dq", "dk", "dv")}
    return joined | {"lse": torch.cat([part["lse"] for part in parts], 1)}


def split(problem: Problem, tensors: list[Tensor]) -> list[list[Tensor]]:
    """dout, q, k, v of every sequence."""
    lengths = [[pair[side] for pair in problem.sequences] for side in (0, 0, 1, 1)]
    return [list(part) for part in zip(*(x.split(n) for x, n in zip(tensors, lengths)))]


def oracle_of_one(problem: Problem, tensors: list[Tensor], **how: Any) -> dict[str, Tensor]:
    return plain_attention(Inputs(*tensors), problem.mask, SCALE, **how)._asdict()


def shuffled_placement(plan: Plan, seed: int) -> Plan:
    """The same numerics with the items in random order; not verified yet."""
    order = list(range(len(plan.items)))
    random.Random(seed).shuffle(order)
    return plan.with_items(plan.items[order])

"""Random packed tensors for a problem, and its results by executor and oracle; for tests only."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from dash_attn.backends.base import NO_AUX, AuxTensors, Tensors
from dash_attn.backends.cpu import backward, forward, plain_attention
from dash_attn.backends.cpu.oracle import Inputs, Results, sink_gradient
from dash_attn.backends.shapes import tensor_shapes
from dash_attn.problem import Problem
from dash_attn.schedule import Plan
from dash_attn.scores import Scores

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
    dq, dk, dv, _ = backward(plan, Tensors(dout, q, k, v, out, lse), SCALE, **how)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def expected(
    problem: Problem, tensors: list[Tensor], aux: AuxTensors = NO_AUX, **how: Any
) -> dict[str, Tensor]:
    """The same by the oracle, sequence by sequence, float64; with a sink also dsink."""
    sequences, sink = split(problem, tensors), aux.learnable_sink
    parts = [
        oracle_of_one(problem, *one, sequence=at, **how)
        for at, one in enumerate(zip(sequences, aux_of_each(problem, aux)))
    ]
    if not parts:
        return {}
    joined = {name: torch.cat([part[name] for part in parts]) for name in ("out", "dq", "dk", "dv")}
    joined["lse"] = torch.cat([part["lse"] for part in parts], 1)
    if sink is not None:
        joined["dsink"] = sum(
            (sink_gradient(one[0], Results(**part), sink) for one, part in zip(sequences, parts)),
            torch.zeros(problem.heads, dtype=torch.float64),
        )
    return joined


def aux_of_each(problem: Problem, aux: AuxTensors) -> list[AuxTensors]:
    """What belongs to each sequence of what stands beside packed tensors."""
    each = [aux] * len(problem.sequences)
    if aux.alibi_slopes is not None and aux.alibi_slopes.ndim == 2:
        each = [one._replace(alibi_slopes=own) for one, own in zip(each, aux.alibi_slopes)]
    if aux.rows is not None:
        starts, ends = (x.split([keys for _, keys in problem.sequences]) for x in aux.rows)
        each = [one._replace(row_starts=a, row_ends=b) for one, a, b in zip(each, starts, ends)]
    return each


def split(problem: Problem, tensors: list[Tensor]) -> list[list[Tensor]]:
    """dout, q, k, v of every sequence."""
    lengths = [[pair[side] for pair in problem.sequences] for side in (0, 0, 1, 1)]
    return [list(part) for part in zip(*(x.split(n) for x, n in zip(tensors, lengths)))]


def oracle_of_one(
    problem: Problem,
    tensors: list[Tensor],
    aux: AuxTensors = NO_AUX,
    scores: Scores | float = SCALE,
    **how: Any,
) -> dict[str, Tensor]:
    return plain_attention(Inputs(*tensors), problem.mask, scores, aux=aux, **how)._asdict()


def shuffled_placement(plan: Plan, seed: int) -> Plan:
    """The same numerics with the items in random order; not verified yet."""
    order = list(range(len(plan.items)))
    random.Random(seed).shuffle(order)
    return plan.with_items(plan.items[order])

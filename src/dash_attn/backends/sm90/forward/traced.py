"""A forward that keeps when each of its items ran, and on which SM."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ....errors import InputError
from ....problem import Problem
from ....schedule import ForwardPlan
from ..launch import DTYPES
from .arguments import TRACE_WORDS
from .config import forward_config
from .launch import Forward

__all__ = ["Traced", "empty_trace", "traced_forward"]


class Traced(NamedTuple):
    """A forward with its trace.

    Attributes:
        out, lse: as without a trace.
        plan: what ran.
        trace: (items, 3) int64, items in the order of claims: nanoseconds at which an item began and was
            done, and the SM, as its first warpgroup saw it. An item begins when its Q has arrived and the one
            before it is done. It is done when O has left the registers; the copy engine stores it beside the
            next item. The fold of split tiles comes after all items, and is not in it.
    """

    out: Tensor
    lse: Tensor
    plan: ForwardPlan
    trace: Tensor


def empty_trace(plan: ForwardPlan, device: torch.device) -> Tensor:
    """Where the kernel writes a trace; 0 where no item has been."""
    return torch.zeros(plan.items, TRACE_WORDS, dtype=torch.int64, device=device)


def traced_forward(
    problem: Problem, tensors: tuple[Tensor, Tensor, Tensor], *, blocks: int | None = None, runs: int = 1
) -> Traced:
    """The forward of q, k and v, with the problem's default scale.

    Args:
        problem: what to compute.
        tensors: q, k, v of its shapes on a Hopper GPU.
        blocks: thread blocks to launch, at most one per SM; default: all.
        runs: how often; the trace is of the last one. The first finds cold caches.

    Raises:
        InputError: there is no q or no k.
    """
    q, k, _ = tensors
    if not q.numel() or not k.numel():
        raise InputError(f"nothing to trace: q has shape {tuple(q.shape)}, k has shape {tuple(k.shape)}")
    config = replace(forward_config(problem.head_dim, DTYPES[problem.dtype]), trace=True)
    forward = Forward(problem, q.device, blocks=blocks, config=config)
    plan = forward.plan()
    for _ in range(runs):
        trace = empty_trace(plan, q.device)
        out, lse = forward(*tensors, problem.head_dim**-0.5, trace=trace)
    return Traced(out, lse, plan, trace)

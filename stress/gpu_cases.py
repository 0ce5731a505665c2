"""Problems, random inputs with what is exact, the peer, and comparison of bytes without leaving the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dash_attn.backends.base import Prepared, backend_for
from dash_attn.backends.base import Tensors as Inputs
from dash_attn.backends.cpu import plain_attention
from dash_attn.backends.cpu.oracle import Inputs as Sequence
from dash_attn.backends.cpu.oracle import Results
from dash_attn.backends.shapes import tensor_shapes
from dash_attn.backends.sm90.launch import Result, run_backward
from dash_attn.peers import fa4
from dash_attn.peers.base import Inputs as PeerInputs
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import (
    FA3,
    SPT,
    Descending,
    Plan,
    Policy,
    Shift,
    SymmetricShift,
    build_plan,
    choose_policy,
)
from dash_attn.scores import Scores
from dash_attn.testing import same_bytes
from fuzz_case import GRADS

FULL, CAUSAL, WINDOW = Mask.full(), Mask.causal(), Mask.window(300, 0)

BY_HEAD = Descending(by_head_from=0)
POLICIES: list[tuple[Mask, Policy]] = [
    *((FULL, policy) for policy in (FA3(), Descending(), SPT(), Shift(), Shift(ring=3))),
    *((CAUSAL, policy) for policy in (FA3(), Descending(), BY_HEAD, SPT(), SymmetricShift())),
    *((WINDOW, policy) for policy in (FA3(), Descending(), BY_HEAD, SPT())),
]
"""Every policy under every mask it covers."""


@dataclass(frozen=True)
class Case:
    """A problem, its inputs and what the gradients should be (float64)."""

    problem: Problem
    inputs: Inputs
    scale: float
    exact: dict[str, Tensor]


def dense(mask: Mask = CAUSAL, **shape: Any) -> Problem:
    """A small dense problem: 2 sequences of 700 tokens, 4 heads on 2, head dim 128."""
    return Problem.dense(
        **{"batch": 2, "heads": 4, "kv_heads": 2, "seqlen": 700, "head_dim": 128, "mask": mask} | shape
    )


def packed(
    *lengths: int | tuple[int, int], mask: Mask = CAUSAL, heads: int = 4, kv_heads: int = 2, **how: Any
) -> Problem:
    """A small packed problem: 4 heads on 2, head dim 128."""
    return Problem.varlen(lengths, mask=mask, heads=heads, kv_heads=kv_heads, **how)


def auto_plan(problem: Problem, **how: Any) -> Plan:
    return build_plan(problem, *choose_policy(problem), **how)


def random_tensors(problem: Problem, seed: int = 0, outliers: bool = False) -> list[Tensor]:
    """dout, q, k, v of a dense batch: normal; with outliers, one element in 2,000 is 30 times larger."""
    return _random(problem, 4, seed, outliers)


def _random(problem: Problem, rank: int, seed: int, outliers: bool) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    tensors = []
    for size in tensor_shapes(problem)[rank].of_tensors[:4]:
        x = torch.randn(size, generator=generator, device="cuda")
        if outliers:
            rare = torch.rand(size, generator=generator, device="cuda") < 5e-4
            x = torch.where(rare, x * 30, x)
        tensors.append(x.to(getattr(torch, problem.dtype)))
    return tensors


def make_case(problem: Problem, seed: int = 0, outliers: bool = False) -> Case:
    """Random dense inputs; out and lse are the oracle's, rounded, so that no forward kernel is involved."""
    dout, q, k, v = random_tensors(problem, seed, outliers)
    found = [_exact(problem, index, *one) for index, one in enumerate(zip(dout, q, k, v))]
    exact = {name: torch.stack([one[name] for one in found]) for name in Results._fields}
    return _case(problem, (dout, q, k, v), exact)


def make_packed_case(problem: Problem, seed: int = 0, outliers: bool = False) -> Case:
    """The same with packed tensors: all rows of all sequences one after the other, lse (heads, total_q)."""
    dout, q, k, v = _random(problem, 3, seed, outliers)
    found = [
        _exact(problem, index, dout[rows.q], q[rows.q], k[rows.k], v[rows.k])
        for index, rows in enumerate(sequence_rows(problem))
    ]
    exact = {
        name: torch.cat([one[name] for one in found], 1 if name == "lse" else 0) for name in Results._fields
    }
    return _case(problem, (dout, q, k, v), exact)


def any_case(problem: Problem, seed: int = 0) -> Case:
    """Dense where all sequences have the same lengths, packed otherwise."""
    return (make_case if len(problem.grids) == 1 else make_packed_case)(problem, seed)


def _exact(problem: Problem, index: int, *sequence: Tensor) -> dict[str, Tensor]:
    """What the oracle says of dout, q, k, v of one sequence."""
    start, scale = problem.grid(index).diagonal, problem.head_dim**-0.5
    return plain_attention(Sequence(*sequence), problem.mask, scale, q_start=start)._asdict()


def _case(problem: Problem, tensors: tuple[Tensor, ...], exact: dict[str, Tensor]) -> Case:
    inputs = Inputs(*tensors, exact["out"].to(tensors[1].dtype), exact["lse"].float())
    return Case(problem, inputs, problem.head_dim**-0.5, exact)


class Rows(NamedTuple):
    """Rows of one sequence in packed tensors."""

    q: slice
    k: slice


def sequence_rows(problem: Problem) -> list[Rows]:
    ends = [list(accumulate((pair[side] for pair in problem.sequences), initial=0)) for side in (0, 1)]
    return [Rows(slice(*q), slice(*k)) for q, k in zip(pairwise(ends[0]), pairwise(ends[1]))]


def take_sequence(case: Case, index: int) -> Inputs:
    """One sequence of a packed case, as a dense batch of one."""
    dout, q, k, v, out, lse = case.inputs
    rows = sequence_rows(case.problem)[index]
    tensors = (dout[rows.q], q[rows.q], k[rows.k], v[rows.k], out[rows.q], lse[:, rows.q])
    return Inputs(*(x[None].contiguous() for x in tensors))


def launch(plan: Plan, case: Case, **how: Any) -> Result:
    """One backward of a case."""
    return run_backward(plan, case.inputs, case.scale, **how)


@cache
def prepared(problem: Problem, device: torch.device, packed: bool) -> Prepared:
    """A problem on its backend."""
    return backend_for(device).prepare(problem, device, packed)


def forward(plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) of dense or packed tensors of a plan's problem."""
    return prepared(plan.problem, q.device, q.ndim == 3).forward(q, k, v, Scores(scale))


def grads(result: Result) -> dict[str, Tensor]:
    return {name: getattr(result, name) for name in GRADS}


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Norm of the error over the norm of what is exact (over 1 where that is zero)."""
    norm = float(exact.norm())
    return float((found.double() - exact).norm()) / (norm or 1.0)


def has_fa4() -> bool:
    return not fa4.why_not()


def fa4_backward(case: Case) -> dict[str, Tensor]:
    """FlashAttention-4's deterministic gradients of the same inputs."""
    dout, q, k, v, out, lse = case.inputs
    bounds: tuple[Tensor, ...] = ()
    if q.dim() == 3:
        starts = torch.tensor([[0, 0], *case.problem.sequences]).cumsum(0).int().to(q.device)
        bounds = starts[:, 0].contiguous(), starts[:, 1].contiguous()
    peer = PeerInputs(case.problem, dout, q, k, v, out, lse, bounds, case.scale)
    return dict(zip(GRADS, fa4.backward(peer, deterministic=True)()))


def differing(first: Result, other: Result) -> list[str]:
    """Names of the gradients whose bytes differ."""
    return [name for name in GRADS if not same_bytes(getattr(first, name), getattr(other, name))]

"""Inputs, an fp64 oracle on the GPU, the peer, and comparison of bytes without leaving the GPU."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from fuzz_case import GRADS
from fuzz_case import Tensors as Inputs
from torch import Tensor

from dash_attn.backends.sm90.launch import Result, run_backward
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
from dash_attn.testing import same_bytes

FULL, CAUSAL, WINDOW = Mask.full(), Mask.causal(), Mask.window(300, 0)

POLICIES: list[tuple[Mask, Policy]] = [
    *((FULL, policy) for policy in (FA3(), Descending(), SPT(), Shift(), Shift(ring=3))),
    *((CAUSAL, policy) for policy in (FA3(), Descending(), SPT(), SymmetricShift())),
    *((WINDOW, policy) for policy in (FA3(), Descending(), SPT())),
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
    (seqlen_q, seqlen_k), batch = problem.sequences[0], len(problem.sequences)
    return _random(problem, (batch, seqlen_q), (batch, seqlen_k), seed, outliers)


def _random(
    problem: Problem, q_rows: tuple[int, ...], k_rows: tuple[int, ...], seed: int, outliers: bool
) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    q = (*q_rows, problem.heads, problem.head_dim)
    k = (*k_rows, problem.kv_heads, problem.head_dim)
    tensors = []
    for size in (q, q, k, k):
        x = torch.randn(size, generator=generator, device="cuda")
        if outliers:
            rare = torch.rand(size, generator=generator, device="cuda") < 5e-4
            x = torch.where(rare, x * 30, x)
        tensors.append(x.to(getattr(torch, problem.dtype)))
    return tensors


def make_case(problem: Problem, seed: int = 0, outliers: bool = False) -> Case:
    """Random dense inputs; out and lse are the oracle's, rounded, so that no forward kernel is involved."""
    dout, q, k, v = random_tensors(problem, seed, outliers)
    scale = problem.head_dim**-0.5
    exact = oracle(problem.mask, dout, q, k, v, scale)
    out, lse = exact["out"].to(q.dtype), exact["lse"].float()
    return Case(problem, Inputs(dout, q, k, v, out, lse), scale, exact)


def make_packed_case(problem: Problem, seed: int = 0, outliers: bool = False) -> Case:
    """The same with packed tensors: all rows of all sequences one after the other, lse (heads, total_q)."""
    total_q, total_k = (sum(pair[side] for pair in problem.sequences) for side in (0, 1))
    dout, q, k, v = _random(problem, (total_q,), (total_k,), seed, outliers)
    scale = problem.head_dim**-0.5
    found = [
        oracle(problem.mask, *(x[None] for x in (dout[rows.q], q[rows.q], k[rows.k], v[rows.k])), scale)
        for rows in sequence_rows(problem)
    ]
    exact = {
        name: torch.cat([one[name][0] for one in found], 1 if name == "lse" else 0)
        for name in ("out", "lse", *GRADS)
    }
    return Case(problem, Inputs(dout, q, k, v, exact["out"].to(q.dtype), exact["lse"].float()), scale, exact)


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


def oracle(mask: Mask, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv in float64 on the GPU, one head of one sequence at a time."""
    group = q.shape[2] // k.shape[2]
    hidden = _hidden(q.shape[1], k.shape[1], mask, q.device)
    wide = {"dtype": torch.float64, "device": q.device}
    if not q.shape[1] or not k.shape[1]:
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, **wide)
        zeros = {n: torch.zeros(x.shape, **wide) for n, x in zip(("out", *GRADS), (q, q, k, v))}
        return zeros | {"lse": lse}
    found = {
        name: torch.zeros(x.shape, **wide) for name, x in zip(("out", "dq", "dk", "dv"), (q, q, k, v))
    } | {"lse": torch.zeros(q.shape[0], q.shape[2], q.shape[1], **wide)}
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            at, kv = (b, slice(None), h), (b, slice(None), h // group)
            qh, kh, vh, doh = q[at].double(), k[kv].double(), v[kv].double(), dout[at].double()
            scores = (qh @ kh.T * scale).masked_fill_(hidden, -torch.inf)
            lse = torch.logsumexp(scores, -1)
            p = scores.sub_(lse[:, None]).exp_().masked_fill_(hidden, 0.0)
            out = p @ vh
            ds = (doh @ vh.T).sub_((doh * out).sum(-1, keepdim=True)).mul_(p).mul_(scale)
            found["out"][at], found["lse"][b, h] = out, lse
            found["dq"][at] = ds @ kh
            found["dk"][kv] += ds.T @ qh
            found["dv"][kv] += p.T @ doh
    return found


def _hidden(seqlen_q: int, seqlen_k: int, mask: Mask, device: torch.device) -> Tensor:
    """(seqlen_q, seqlen_k) bool, True where the mask hides the element."""
    row = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
    column = torch.arange(seqlen_k, device=device)[None, :]
    hidden = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if mask.left is not None:
        hidden |= column < row - mask.left
    if mask.right is not None:
        hidden |= column > row + mask.right
    return hidden


def launch(plan: Plan, case: Case, **how: Any) -> Result:
    """One backward of a case."""
    return run_backward(plan, *case.inputs, case.scale, **how)


def grads(result: Result) -> dict[str, Tensor]:
    return {name: getattr(result, name) for name in GRADS}


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Norm of the error over the norm of what is exact (over 1 where that is zero)."""
    norm = float(exact.norm())
    return float((found.double() - exact).norm()) / (norm or 1.0)


def has_fa4() -> bool:
    return find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None


def fa4_backward(case: Case) -> dict[str, Tensor]:
    """FlashAttention-4's deterministic gradients of the same inputs."""
    mask, (dout, q, k, v, out, lse) = case.problem.mask, case.inputs
    options: dict[str, Any] = {}
    if mask.name not in ("full", "causal"):
        options = {"window_size_left": mask.left, "window_size_right": mask.right}
    if q.dim() == 3:
        starts = torch.tensor([[0, 0], *case.problem.sequences], device="cuda").cumsum(0, dtype=torch.int32)
        longest = [max(pair[side] for pair in case.problem.sequences) for side in (0, 1)]
        options |= {"cu_seqlens_q": starts[:, 0].contiguous(), "cu_seqlens_k": starts[:, 1].contiguous()}
        options |= {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        interface = import_module("flash_attn.cute.interface")
        dq, dk, dv, *_ = interface._flash_attn_bwd(
            q, k, v, out, dout, lse, case.scale, mask.name == "causal", deterministic=True, **options
        )
    return {"dq": dq, "dk": dk, "dv": dv}


def differing(first: Result, other: Result) -> list[str]:
    """Names of the gradients whose bytes differ."""
    return [name for name in GRADS if not same_bytes(getattr(first, name), getattr(other, name))]

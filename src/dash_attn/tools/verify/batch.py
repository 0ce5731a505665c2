"""Sequences as one call of the public functions, and its results as sequences again."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...api import apply_plan, fingerprints, flash_attn_func, flash_attn_varlen_func, plan_for
from ...backends.cpu.oracle import Inputs, Results
from ...schedule import Plan
from ...schedule.segments import WHOLE
from ..shapes import Shape

__all__ = ["NAMES", "Batch", "Inputs", "Results", "digest", "empty_inputs", "random_inputs"]

NAMES = Results._fields


def random_inputs(shape: Shape, device: torch.device) -> list[Inputs]:
    """Normal tensors of every sequence. They are drawn on the CPU: the same in every process."""
    generator, dtype = torch.Generator().manual_seed(shape.seed), getattr(torch, shape.dtype)
    return _inputs(shape, lambda *size: torch.randn(size, generator=generator).to(device, dtype))


def empty_inputs(shape: Shape, device: torch.device) -> list[Inputs]:
    """Tensors of every sequence that hold anything."""
    how: dict[str, Any] = {"dtype": getattr(torch, shape.dtype), "device": device}
    return _inputs(shape, lambda *size: torch.empty(size, **how))


def _inputs(shape: Shape, draw: Callable[..., Tensor]) -> list[Inputs]:
    problem = shape.problem
    heads, kv_heads, of_qk, of_v = problem.heads, problem.kv_heads, problem.head_dim, problem.head_dim_v
    return [
        Inputs(draw(m, heads, of_v), draw(m, heads, of_qk), draw(n, kv_heads, of_qk), draw(n, kv_heads, of_v))
        for m, n in shape.sequences
    ]


class Batch:
    """A call with some sequences, in some order."""

    def __init__(self, shape: Shape, inputs: Sequence[Inputs]) -> None:
        self.shape = shape
        self.lengths = [(len(x.q), len(x.k)) for x in inputs]
        join = torch.cat if shape.packed else torch.stack
        self.dout, *leaves = (join(list(tensors)) for tensors in zip(*inputs))
        self.q, self.k, self.v = (x.requires_grad_() for x in leaves)
        self.bounds = tuple(self._bounds(side) for side in (0, 1)) if shape.packed else ()

    def _bounds(self, side: int) -> Tensor:
        lengths = torch.tensor([0, *(pair[side] for pair in self.lengths)])
        return lengths.cumsum(0).int().to(self.q.device)

    def run(self) -> Results:
        """Forward and backward through the public functions."""
        tensors = (self.q, self.k, self.v)
        call = flash_attn_varlen_func if self.shape.packed else flash_attn_func
        out, lse = call(*tensors, *self.bounds, **self.shape.options, return_lse=True)
        return Results(out.detach(), lse, *torch.autograd.grad(out, tensors, self.dout))

    def planned_dq(self, seed: int | None) -> Tensor:
        """dQ by :meth:`plan`. With a seed there is no fixed order; on the CPU there is that of the seed."""
        scale = float(self.shape.head_dim) ** -0.5
        disorder = None if seed is None else random.Random(seed)
        how: dict[str, Any] = {"disorder": disorder, "backend": self.shape.backend}
        out, _ = apply_plan(self.plan(), self.q, self.k, self.v, scale, **how)
        return torch.autograd.grad(out, self.q, self.dout)[0]

    def fingerprint(self) -> str:
        """Of the backward that :meth:`run` has."""
        return fingerprints(self.q, self.k, self.v, *self.bounds, **self.shape.options).backward

    def plan(self) -> Plan:
        """The plan of whole sequences. :meth:`run` follows it if none is cut into segments."""
        options = self.shape.options | {"q_segment": WHOLE}
        return plan_for(self.q, self.k, self.v, *self.bounds, **options)

    def split(self, results: Results) -> list[Results]:
        """Results of every sequence; lse (heads, seqlen_q)."""
        out, lse, dq, dk, dv = results
        if not self.shape.packed:
            return [Results(*one) for one in zip(*(x.unbind(0) for x in results))]
        rows_q, rows_k = ([pair[side] for pair in self.lengths] for side in (0, 1))
        cuts = ((out, rows_q, 0), (lse, rows_q, 1), (dq, rows_q, 0), (dk, rows_k, 0), (dv, rows_k, 0))
        return [Results(*one) for one in zip(*(torch.split(x, rows, dim) for x, rows, dim in cuts))]


def digest(results: Results) -> dict[str, str]:
    """SHA-256 of the bytes of every tensor."""
    hashes = {}
    for name, x in zip(NAMES, results):
        data = x.detach().cpu().contiguous().view(torch.uint8).numpy()
        hashes[name] = hashlib.sha256(data.tobytes()).hexdigest()
    return hashes

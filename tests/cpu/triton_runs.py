"""How tests run the Triton kernels without a GPU; see ``triton_interpreted.py``."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from attention_cases import SCALE, expected
from torch import Tensor

from dash_attn.backends.base import NO_AUX, AuxTensors, Tensors
from dash_attn.backends.triton import launch
from dash_attn.backends.triton.backend import BACKEND
from dash_attn.backends.triton.tiles import forward_numerics
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import Plan
from dash_attn.scores import Scores
from triton_cases import triton_problem

CPU = torch.device("cpu")
SCORES = Scores(SCALE)
BOUND = {"float32": 2e-6, "float16": 2e-3}

problem_of = partial(triton_problem, head_dim=16, mask=None, dtype="float32", heads=2, kv_heads=1)

MASKS = [Mask.full(), Mask.causal(), Mask.window(40, 0), Mask.window(9, 30)]
LENGTHS = ((70, 70), (0, 30), (40, 0), (33, 150), (150, 33))
SHORT = ((33, 150), (40, 0), (0, 10), (50, 30))


def run(
    plan: Plan, tensors: list[Tensor], scores: Scores = SCORES, aux: AuxTensors = NO_AUX, **how: Any
) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv, and dsink if there is a sink."""
    dout, q, k, v = tensors
    prepared = BACKEND.prepare(plan.problem, CPU, packed=q.ndim == 3)
    out, lse = prepared.forward(q, k, v, scores, aux)
    grads = prepared.backward(plan, Tensors(dout, q, k, v, out, lse), scores, aux, **how)
    found = {"out": out, "lse": lse, **grads._asdict()}
    return {name: x for name, x in found.items() if x is not None}


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """Of one packed sequence."""
    dtype = str(q.dtype).removeprefix("torch.")
    problem = problem_of(
        (len(q), len(k)), mask=mask, head_dim=q.shape[2], dtype=dtype, heads=q.shape[1], kv_heads=k.shape[1]
    )
    return BACKEND.prepare(problem, CPU, packed=True).forward(q, k, v, SCORES)


def assert_accurate(
    problem: Problem, tensors: list[Tensor], found: dict[str, Tensor], slack: int = 1, **how: Any
) -> None:
    for name, exact in expected(problem, tensors, **how).items():
        got = found[name].double()
        assert got.shape == exact.shape
        nothing = exact == -torch.inf
        assert torch.equal(got == -torch.inf, nothing)
        error, size = (got - exact)[~nothing].abs(), exact[~nothing].abs()
        if error.numel():
            bound = BOUND[problem.dtype] * (2 if name == "dsink" else slack)
            assert error.max() <= bound * max(size.max(), 1.0), name


def few_keys(monkeypatch: pytest.MonkeyPatch, segment: int) -> None:
    """Short segments, so that short sequences have several."""
    monkeypatch.setattr(
        launch, "forward_numerics", lambda *of: replace(forward_numerics(*of), segment=segment)
    )

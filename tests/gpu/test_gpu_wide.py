"""The kernels of head dims above 128: of 192 with 128 of V, and of 256."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dash_attn import attention
from dash_attn.backends.base import Tensors
from dash_attn.backends.cpu import fold_partials
from dash_attn.backends.sm90.forward.launch import Forward
from dash_attn.backends.sm90.launch import Debug
from dash_attn.problem import Problem
from dash_attn.schedule import Shift, build_plan
from dash_attn.schedule.constants import FORWARD_SEGMENT
from dash_attn.testing import assert_same_bytes, same_bytes
from gpu_cases import (
    CAUSAL,
    FULL,
    GRADS,
    POLICIES,
    WINDOW,
    any_case,
    auto_plan,
    dense,
    differing,
    launch,
    make_case,
    packed,
    relative_error,
)

WIDE = {"head_dim": 192, "head_dim_v": 128}
LARGE = {"head_dim": 256, "head_dim_v": 256, "tile_m": 64, "tile_n": 64}
KERNELS = pytest.mark.parametrize("of", [WIDE, LARGE], ids=["192", "256"])
DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
MASKS = pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOW], ids=["full", "causal", "window"])
EVERY_POLICY = pytest.mark.parametrize(("mask", "policy"), POLICIES, ids=lambda x: getattr(x, "name", str(x)))
BOUNDED = Debug(bounded=True)
"""Run first, so that a kernel that would hang is a failure with a message."""

PROBLEMS = {
    "square": lambda mask, **how: dense(mask, seqlen=1100, heads=4, kv_heads=4, **how),
    "grouped": lambda mask, **how: dense(mask, seqlen=700, heads=4, kv_heads=2, **how),
    "head groups": lambda mask, **how: dense(mask, seqlen=900, heads=16, kv_heads=1, **how),
    "more keys": lambda mask, **how: dense(mask, seqlen=None, seqlen_q=300, seqlen_k=1300, **how),
    "more rows": lambda mask, **how: dense(mask, seqlen=None, seqlen_q=1300, seqlen_k=300, **how),
    "packed": lambda mask, **how: packed((130, 260), (0, 100), (100, 0), (1, 999), 640, mask=mask, **how),
}


def forward(
    problem: Problem, tensors: Tensors, blocks: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse."""
    q, k, v = tensors.q, tensors.k, tensors.v
    return Forward(problem, q.device, blocks=blocks)(q, k, v, problem.head_dim**-0.5)


@DTYPES
@MASKS
@pytest.mark.parametrize("name", PROBLEMS)
@KERNELS
def test_values_and_replays(of, name, mask, dtype):
    problem = PROBLEMS[name](mask, dtype=dtype, **of)
    case, plan = any_case(problem), auto_plan(problem)
    found = forward(problem, case.inputs)
    assert relative_error(found[0], case.exact["out"]) <= 4e-3
    seen = case.exact["lse"].isfinite()
    assert (found[1].double() - case.exact["lse"])[seen].abs().max() < 1e-4
    launch(plan, case, debug=BOUNDED)
    first = launch(plan, case)
    for grad in GRADS:
        assert relative_error(getattr(first, grad), case.exact[grad]) <= 8e-3, grad
        loose = getattr(launch(plan, case, ordered=False), grad)
        assert relative_error(loose, case.exact[grad]) <= 8e-3, f"{grad}, without order"
    for _ in range(20):
        assert not differing(first, launch(plan, case))
        for x, again in zip(found, forward(problem, case.inputs)):
            assert_same_bytes(x, again)
    for blocks in (1, 7):
        for x, again in zip(found, forward(problem, case.inputs, blocks)):
            assert_same_bytes(x, again, f"{blocks} blocks")


@EVERY_POLICY
@KERNELS
def test_every_policy_and_few_workers(of, mask, policy):
    problem = dense(mask, seqlen=1100, heads=8, kv_heads=4, **of)
    plan, case = build_plan(problem, policy), make_case(problem)
    launch(plan, case, debug=BOUNDED)
    first = launch(plan, case)
    for workers in (plan.min_workers, plan.min_workers + 1, 131):
        launch(plan, case, workers=workers, debug=BOUNDED)
        assert not differing(first, launch(plan, case, workers=workers)), f"{workers} workers"


@KERNELS
def test_dq_is_what_the_plan_says(of):
    problem = dense(FULL, batch=1, heads=2, kv_heads=2, seqlen=1000, **of)
    plan, case = build_plan(problem, Shift(ring=3)), make_case(problem)
    result = launch(plan, case, debug=Debug(contributions=True))
    for tile, by_ticket in enumerate(result.dq_contributions.cpu()):
        folded = fold_partials(list(by_ticket), 1.0, torch.float32)
        assert_same_bytes(folded, result.dq_tiles[tile].cpu(), f"dQ tile {tile}")
    assert not differing(result, launch(plan, case))


@pytest.mark.parametrize(
    ("of", "head_dim", "head_dim_v"),
    [(WIDE, 136, 128), (WIDE, 160, 96), (WIDE, 192, 8), (LARGE, 200, 200), (LARGE, 256, 208)],
)
@MASKS
def test_fewer_columns_have_the_bytes_of_padded_tensors(mask, of, head_dim, head_dim_v):
    few = dense(mask, seqlen=700, **of | {"head_dim": head_dim, "head_dim_v": head_dim_v})
    whole, case = dense(mask, seqlen=700, **of), make_case(few)
    of_qk, of_v = of["head_dim"], of["head_dim_v"]

    def pad(x: torch.Tensor, columns: int) -> torch.Tensor:
        return F.pad(x, (0, columns - x.shape[-1]))

    dout, q, k, v, out, lse = case.inputs
    padded = Tensors(pad(dout, of_v), pad(q, of_qk), pad(k, of_qk), pad(v, of_v), pad(out, of_v), lse)
    found = forward(few, case.inputs)
    wanted = Forward(whole, q.device)(*padded[1:4], few.head_dim**-0.5)
    assert_same_bytes(found[0], wanted[0][..., :head_dim_v].contiguous())
    assert_same_bytes(found[1], wanted[1])
    grads = launch(auto_plan(few), case)
    of_padded = launch(auto_plan(whole), case.__class__(whole, padded, case.scale, {}))
    for name, columns in zip(GRADS, (head_dim, head_dim, head_dim_v)):
        assert_same_bytes(getattr(grads, name), getattr(of_padded, name)[..., :columns].contiguous(), name)


@KERNELS
def test_several_segments_of_keys(of):
    keys = 2 * FORWARD_SEGMENT + 300
    problem = dense(CAUSAL, batch=1, seqlen=None, seqlen_q=1000, seqlen_k=keys, **of)
    case = make_case(problem)
    out, lse = forward(problem, case.inputs)
    assert relative_error(out, case.exact["out"]) <= 4e-3
    last = dense(CAUSAL, batch=1, seqlen=None, seqlen_q=3, seqlen_k=keys, **of)
    few = case.inputs._replace(q=case.inputs.q[:, -3:])
    of_few = forward(last, few)  # split among blocks, and folded
    assert_same_bytes(of_few[0], out[:, -3:].contiguous())
    assert_same_bytes(of_few[1], lse[..., -3:].contiguous())


@DTYPES
@pytest.mark.parametrize("window", [None, (300, 0)], ids=["causal", "window"])
@KERNELS
def test_sequences_are_cut_into_segments_of_rows(of, window, dtype):
    """Errors are those of whole sequences, and the same bytes come again."""
    generator = torch.Generator("cuda").manual_seed(7)
    of_qk, of_v = of["head_dim"], of["head_dim_v"]
    shapes = [(2, 900, 4, of_qk), (2, 900, 2, of_qk), (2, 900, 2, of_v), (2, 900, 4, of_v)]
    drawn = (torch.randn(shape, generator=generator, device="cuda") for shape in shapes)
    q, k, v, dout = (x.to(getattr(torch, dtype)) for x in drawn)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    how = {"causal": True, "window": window, "backend": "sm90"}

    def gradients(**more):
        out = attention(*leaves, **how, **more)
        return torch.autograd.grad(out, leaves, dout)

    cut, again, whole = gradients(q_segment=256), gradients(q_segment=256), gradients(q_segment=2**30)
    for a, b, c in zip(cut, again, whole):
        assert_same_bytes(a, b)
        assert relative_error(a, c.double()) < 0.02
    assert not same_bytes(cut[1], whole[1])

"""Contributions to dQ that are kept apart: the bytes of those that wait for their tickets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dash_attn
from dash_attn.backends.sm90.launch import Result, run_backward
from dash_attn.backends.sm90.resident import on_device
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import Plan, Shift, build_plan
from dash_attn.testing import assert_same_bytes, same_bytes
from fuzz_case import poisoned_memory
from gpu_cases import CAUSAL, FULL, GRADS, WINDOW, any_case, auto_plan, dense, launch, packed

MASKS = pytest.mark.parametrize("mask", [CAUSAL, FULL, WINDOW], ids=["causal", "full", "window"])
LENGTHS = (300, 0, (0, 100), (100, 0), 1, (129, 700), 577)


def assert_equal(found: Result, expected: Result) -> None:
    for name in GRADS:
        assert_same_bytes(getattr(found, name), getattr(expected, name), name)


def problems(mask: Mask) -> list[Problem]:
    """More items than SMs, several heads per kv head and in groups, and columns that tensors do not have."""
    return [
        dense(mask, seqlen=1000, batch=2, heads=4, head_dim=64),
        dense(mask, seqlen=640, batch=8, heads=16, kv_heads=4, head_dim=128, dtype="float16"),
        packed(*LENGTHS, mask=mask, heads=8, kv_heads=1, head_dim=48, head_dim_v=40),
        packed(*LENGTHS, mask=mask, heads=4, kv_heads=2, head_dim=112, dtype="float16"),
        packed(*LENGTHS, mask=mask, heads=3, kv_heads=3, head_dim=64, dtype="float16"),
    ]


@MASKS
@pytest.mark.parametrize("number", range(5))
def test_bytes_are_those_of_tickets(mask: Mask, number: int) -> None:
    problem = problems(mask)[number]
    plans = [auto_plan(problem)]
    if problem.group > 1:
        plans.append(auto_plan(problem, head_groups=2))
    if mask.is_full:
        plans.append(build_plan(problem, Shift(ring=3)))
    case = any_case(problem)
    for plan in plans:
        with poisoned_memory():
            expected = launch(plan, case)
            for workers in (None, 1, 7, 131):
                assert_equal(launch(plan, case, apart=True, workers=workers), expected)


@pytest.mark.parametrize("exponent", [-100, -112, -120, -126])
def test_small_numbers(exponent: int) -> None:
    """The copy engine keeps subnormal numbers where it adds to memory, and so does what adds here."""
    problem = dense(FULL, seqlen=500, head_dim=64)
    case, plan = any_case(problem), auto_plan(problem)
    inputs = case.inputs._replace(dout=(case.inputs.dout * 2.0**exponent).bfloat16())
    expected = run_backward(plan, inputs, case.scale)
    if exponent == -112:
        assert ((expected.dq.abs() < 2.0**-126) & (expected.dq != 0)).any()
    assert_equal(run_backward(plan, inputs, case.scale, apart=True), expected)


def test_inputs_that_were_just_written() -> None:
    """Kernels begin before those in front of them have ended. What they read by then must be there."""
    problem = dense(CAUSAL, seqlen=384, batch=2, heads=6, head_dim=64)
    plan, cases = auto_plan(problem), [any_case(problem, seed) for seed in range(4)]
    expected = [launch(plan, case) for case in cases]
    inputs = type(cases[0].inputs)(*[torch.empty_like(x) for x in cases[0].inputs])
    found = []
    for turn in range(200):
        for here, given in zip(inputs, cases[turn % 4].inputs):
            here.copy_(given)
        found.append(run_backward(plan, inputs, cases[0].scale, apart=True))
    for turn, each in enumerate(found):
        assert_equal(each, expected[turn % 4])
    assert not same_bytes(expected[0].dq, expected[1].dq)


def asked_of(plan: Plan) -> set[bool]:
    """Whether contributions were apart in the launches of a plan."""
    return {asked.apart for asked in on_device(plan, torch.device("cuda", 0)).variants}


@pytest.mark.parametrize("how", [{}, {"learnable_sink": True}, {"deterministic": False}, {"softcap": 20.0}])
def test_who_calls_with_few_items_gets_it(how: dict[str, object]) -> None:
    """By the public functions; not where a softcap has no such kernels, nor without order."""
    q, k, v = (torch.randn(1, 390, 5, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    if "learnable_sink" in how:
        how = {"learnable_sink": torch.linspace(-1, 1, 5, device="cuda").requires_grad_()}
    deterministic = bool(how.get("deterministic", True))

    def run() -> list[Tensor]:
        out = dash_attn.flash_attn_func(q, k, v, **how)
        leaves = [q, k, v, *(x for x in how.values() if isinstance(x, Tensor))]
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    options = {name: x for name, x in how.items() if name in ("softcap", "learnable_sink")}
    plan = dash_attn.plan_for(q, k, v, **options)
    first = run()
    assert asked_of(plan) == {deterministic and "softcap" not in how}
    for _ in range(20):
        for a, b in zip(run(), first):
            assert not deterministic or same_bytes(a, b)


def test_many_items_wait() -> None:
    problem = dense(FULL, seqlen=2000, heads=8, batch=2, head_dim=64)
    plan, case = auto_plan(problem), any_case(problem)
    launch(plan, case, apart=None)
    assert asked_of(plan) == {False}

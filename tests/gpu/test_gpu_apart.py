"""Contributions to dQ that are kept apart: the bytes of those that wait for their tickets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dash_attn
from dash_attn.backends.sm90.launch import Debug, run_backward
from dash_attn.backends.sm90.resident import on_device
from dash_attn.machine import APART_ITEMS
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import Plan, Shift, build_plan
from dash_attn.scores import Scores
from dash_attn.testing import same_bytes
from dash_attn.tools.verify.checks import contention
from fuzz_case import poisoned_memory
from gpu_cases import CAUSAL, FULL, WINDOW, any_case, auto_plan, dense, differing, launch, packed

MASKS = pytest.mark.parametrize("mask", [CAUSAL, FULL, WINDOW], ids=["causal", "full", "window"])
HEAD_DIMS = [64, 80, 128, 256]
LENGTHS = (300, 0, (0, 100), (100, 0), 1, (129, 700), 577)


def asked_of(plan: Plan) -> set[bool]:
    """Whether contributions were apart in the launches of a plan."""
    variants = on_device(plan, torch.device("cuda", 0)).variants.values()
    return {variant.config.apart for variant in variants}


def problems(mask: Mask) -> list[Problem]:
    """Few items and more than SMs, several heads per kv head and in groups, columns that tensors lack; few
    rows behind many keys."""
    return [
        dense(mask, seqlen=1000, batch=2, heads=4, head_dim=64),
        dense(mask, seqlen=640, batch=8, heads=16, kv_heads=4, head_dim=128, dtype="float16"),
        packed(*LENGTHS, mask=mask, heads=8, kv_heads=1, head_dim=48, head_dim_v=40),
        packed(*LENGTHS, mask=mask, heads=4, kv_heads=2, head_dim=112, dtype="float16"),
        packed(*LENGTHS, mask=mask, heads=3, kv_heads=3, head_dim=64, dtype="float16"),
        dense(mask, seqlen_q=100, seqlen_k=3300, heads=12, kv_heads=6),
        dense(mask, seqlen_q=200, seqlen_k=2100, head_dim=64, dtype="float16"),
        dense(mask, seqlen_q=100, seqlen_k=2100, head_dim=48, head_dim_v=40),
        packed(*LENGTHS, mask=mask, heads=4, kv_heads=2, head_dim=80),
        packed(*LENGTHS, mask=mask, heads=4, kv_heads=4, head_dim=96, dtype="float16"),
        packed(*LENGTHS, mask=mask, heads=4, kv_heads=2, head_dim=192, head_dim_v=128, dtype="float16"),
        packed(*LENGTHS, mask=mask, heads=4, kv_heads=2, head_dim=256),
        dense(mask, seqlen_q=100, seqlen_k=2100, head_dim=72, dtype="float16"),
        dense(mask, seqlen_q=200, seqlen_k=2100, head_dim=88, head_dim_v=96),
        dense(mask, seqlen_q=100, seqlen_k=2100, heads=3, kv_heads=3, head_dim=192, head_dim_v=128),
        dense(mask, seqlen_q=100, seqlen_k=2100, heads=2, head_dim=256, dtype="float16"),
        dense(mask, seqlen_q=200, seqlen_k=700, heads=4, kv_heads=1, head_dim=160, head_dim_v=120),
        dense(mask, seqlen_q=200, seqlen_k=700, heads=4, kv_heads=1, head_dim=160),
    ]


@MASKS
@pytest.mark.parametrize("number", range(18))
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
                assert not differing(launch(plan, case, apart=True, workers=workers), expected)
        assert asked_of(plan) == {False, True}


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@MASKS
def test_bytes_beside_a_softcap(mask: Mask, head_dim: int) -> None:
    problem = packed(*LENGTHS, mask=mask, head_dim=head_dim)
    plan, inputs = auto_plan(problem), any_case(problem).inputs
    scores = Scores(head_dim**-0.5, softcap=1.5)
    expected = run_backward(plan, inputs, scores)
    with poisoned_memory():
        assert not differing(run_backward(plan, inputs, scores, apart=True), expected)
    assert differing(run_backward(plan, inputs, head_dim**-0.5, apart=True), expected)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("exponent", [-114, -120, -126])
def test_small_numbers(exponent: int, head_dim: int) -> None:
    """The copy engine keeps subnormal numbers where it adds to memory, and so does what adds here."""
    problem = dense(FULL, seqlen=500, head_dim=head_dim)
    case, plan = any_case(problem), auto_plan(problem)
    inputs = case.inputs._replace(dout=(case.inputs.dout * 2.0**exponent).bfloat16())
    expected = run_backward(plan, inputs, case.scale, debug=Debug(contributions=True))
    for small in (expected.dq_contributions, expected.dq_tiles):
        assert small is not None
        assert ((small.abs() < 2.0**-126) & (small != 0)).any()
    assert not differing(run_backward(plan, inputs, case.scale, apart=True), expected)


@pytest.mark.parametrize("last", ["dout", "q", "k", "v", "out", "lse"])
def test_inputs_that_were_just_written(last: str) -> None:
    """Kernels begin before those in front of them have ended. What they read by then must be there: each of
    the inputs in turn is written right before the launch, with all launches queued behind a sleep."""
    problem = dense(CAUSAL, seqlen=384, batch=2, heads=6, head_dim=64)
    plan, cases = auto_plan(problem), [any_case(problem, seed) for seed in range(4)]
    expected = [launch(plan, case) for case in cases]
    inputs = type(cases[0].inputs)(*[torch.empty_like(x) for x in cases[0].inputs])
    names, found = [*(name for name in inputs._fields if name != last), last], []
    run_backward(plan, cases[0].inputs, cases[0].scale, apart=True)
    for _ in range(8):
        torch.cuda._sleep(10**7)  # some milliseconds
        for case in cases:
            for name in names:
                getattr(inputs, name).copy_(getattr(case.inputs, name))
            found.append(run_backward(plan, inputs, case.scale, apart=True))
        torch.cuda.synchronize()
    for turn, each in enumerate(found):
        assert not differing(each, expected[turn % 4])
    assert not same_bytes(expected[0].dq, expected[1].dq)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@MASKS
def test_replays_beside_a_busy_stream(mask: Mask, head_dim: int, replays: int) -> None:
    """And beside others of their kind, on two streams."""
    plans = [auto_plan(dense(mask, seqlen=length, heads=8, head_dim=head_dim)) for length in (500, 700)]
    cases = [any_case(plan.problem) for plan in plans]
    expected = [launch(plan, case) for plan, case in zip(plans, cases)]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in plans], []
    with contention("cuda") as product:
        for replay in range(replays):
            product()
            for which, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    found.append((which, launch(plans[which], cases[which], apart=True)))
            if replay % 20 == 19 or replay == replays - 1:
                torch.cuda.synchronize()
                for which, each in found:
                    assert not differing(each, expected[which])
                found.clear()


# Lengths differ, for a plan remembers what all calls with it asked for.
@pytest.mark.parametrize(
    ("seqlen", "head_dim", "how", "apart"),
    [
        (390, 64, {}, True),
        (391, 64, {"learnable_sink": True}, True),
        (392, 64, {"deterministic": False}, False),
        (393, 64, {"softcap": 20.0}, True),
        (194, 256, {}, True),
        (195, 256, {"softcap": 20.0}, False),
    ],
)
def test_who_calls_with_few_items_gets_it(
    seqlen: int, head_dim: int, how: dict[str, object], apart: bool
) -> None:
    """By the public functions; not where a softcap has no such kernels, nor without order."""
    rows = (torch.randn(1, seqlen, 5, head_dim, device="cuda") for _ in range(3))
    q, k, v = (x.bfloat16().requires_grad_() for x in rows)
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
    assert asked_of(plan) == {apart}
    for _ in range(20):
        for a, b in zip(run(), first):
            assert not deterministic or same_bytes(a, b)


@pytest.mark.parametrize(("seqlen_q", "apart"), [(2000, False), (60, True)])
def test_many_items_wait_but_for_few_rows(seqlen_q: int, apart: bool) -> None:
    problem = dense(FULL, seqlen_q=seqlen_q, seqlen_k=2050, heads=8, kv_heads=8, head_dim=64)
    plan, case = auto_plan(problem), any_case(problem)
    assert len(plan.items) > APART_ITEMS
    launch(plan, case, apart=None)
    assert asked_of(plan) == {apart}


@pytest.mark.parametrize("mebibytes", [160, 270])
def test_without_memory_for_it_they_wait(mebibytes: int) -> None:
    """200 MiB of contributions and 100 of gradients, where so many are left."""
    problem = dense(FULL, batch=1, seqlen_q=250, seqlen_k=51_200, heads=8, kv_heads=8, head_dim=64)
    plan, case = auto_plan(problem), any_case(problem)
    expected = launch(plan, case)
    torch.cuda.empty_cache()
    left = torch.cuda.memory_reserved() + mebibytes * 2**20
    torch.cuda.set_per_process_memory_fraction(left / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            launch(plan, case, apart=True)
        for _ in range(2):
            assert not differing(launch(plan, case, apart=None), expected)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert not on_device(plan, torch.device("cuda", 0)).apart

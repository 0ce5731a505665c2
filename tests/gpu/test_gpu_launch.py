"""What a launch accepts and refuses, its edges, its debugging modes, and every kernel variant."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

import dash_attn
from broken_plans import broken_plan, released
from dash_attn.api import apply_plan
from dash_attn.backends.sm90.backward.config import BackwardConfig
from dash_attn.backends.sm90.compile import backward_variants
from dash_attn.backends.sm90.launch import Debug
from dash_attn.errors import HandOverError, InputError, PlanMismatchError, TooFewWorkersError
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import Plan, Shift, build_plan
from dash_attn.testing import assert_same_bytes, same_bytes
from fuzz_case import LAYOUTS
from gpu_cases import (
    CAUSAL,
    FULL,
    GRADS,
    WINDOW,
    Case,
    Inputs,
    auto_plan,
    dense,
    differing,
    grads,
    launch,
    make_case,
    make_packed_case,
    packed,
    relative_error,
)

BOTH_DIMS = pytest.mark.parametrize("head_dim", [64, 128])

# No hang


def test_a_ticket_that_never_comes_is_an_error_and_not_a_hang():
    plan = broken_plan()
    case = make_case(plan.problem)
    launch(auto_plan(plan.problem), case, debug=Debug(bounded=True))  # compiled, and works
    torch.cuda.synchronize()
    start = time.monotonic()
    with pytest.raises(
        HandOverError,
        match=r"sequence [01], q head [0-3], kv tile 1, q tile 2: "
        r"waited for ticket 3, the counter stayed at 1",
    ):
        launch(plan, case, debug=Debug(bounded=True))
    assert time.monotonic() - start < 20  # a hang has no end; this is not a measurement
    good = auto_plan(plan.problem)
    after = grads(launch(good, case))
    for name in GRADS:
        assert relative_error(after[name], case.exact[name]) <= 4e-3, name


def test_a_ticket_that_never_comes_leaves_a_trace():
    plan = broken_plan()
    case = make_case(plan.problem)
    with pytest.raises(
        HandOverError, match=r"waited for ticket .*; \d+ contributions were made until"
    ) as error:
        launch(plan, case, debug=Debug(bounded=True, trace=True))
    path = Path(str(error.value).rpartition(" is in ")[2])
    trace = np.load(path)
    path.unlink()
    assert 0 < int((trace[..., 2] > 0).sum()) < plan.problem.tasks


def test_a_ring_on_too_few_workers_is_an_error_and_not_a_hang():
    problem = dense(FULL, batch=1, heads=1, kv_heads=1, seqlen=256)
    plan, case = build_plan(problem, Shift(ring=2)), make_case(problem)
    assert plan.min_workers == 2
    with pytest.raises(
        HandOverError, match="q head 0, kv tile 0, q tile 2: waited for ticket 1, the counter stayed at 0"
    ):
        launch(released(plan), case, workers=1, debug=Debug(bounded=True))


@BOTH_DIMS
def test_bounded_waits_give_the_same_bytes(head_dim):
    problem = dense(head_dim=head_dim)
    plan, case = auto_plan(problem), make_case(problem)
    assert not differing(launch(plan, case), launch(plan, case, debug=Debug(bounded=True)))


def test_too_few_workers_are_refused_before_the_launch(monkeypatch):
    problem = dense(FULL, seqlen=1024)
    plan, case = build_plan(problem, Shift()), make_case(problem)
    assert plan.min_workers == 8
    launched = lambda *_: pytest.fail("launched")  # noqa: E731
    monkeypatch.setattr("dash_attn.backends.sm90.launch.program", lambda config: launched)
    with pytest.raises(
        TooFewWorkersError, match="needs 8 resident workers .*, got 7; policy='descending' runs"
    ):
        launch(plan, case, workers=7)


# Plans that are not for these tensors


def by_the_plan(plan: Plan, case: Case) -> None:
    """Forward and backward as a user runs a plan of their own."""
    leaves = [x.clone().requires_grad_() for x in case.inputs[1:4]]
    out, _ = apply_plan(plan, *leaves, case.scale)
    out.backward(case.inputs.dout)


BY_THE_PLAN = pytest.mark.parametrize("run", [launch, by_the_plan], ids=["run_backward", "apply_plan"])


def without_order(plan: Plan, case: Case) -> None:
    launch(plan, case, ordered=False)


@pytest.mark.parametrize("run", [launch, without_order, by_the_plan])
def test_a_plan_with_other_tiles_is_refused(run):
    """Its table counts other tiles than the kernel has."""
    how = {"batch": 1, "heads": 4, "kv_heads": 2, "seqlen": 500, "head_dim": 128}
    plan = auto_plan(Problem.dense(**how, tile_m=128, tile_n=128))
    case = make_case(Problem.dense(**how))
    with pytest.raises(PlanMismatchError, match="128"):
        run(plan, case)
    run(auto_plan(case.problem), case)


DENSE = {"batch": 2, "heads": 4, "kv_heads": 2, "seqlen_q": 300, "seqlen_k": 300, "seqlen": None}


@BY_THE_PLAN
@pytest.mark.parametrize(
    "other",
    [
        {"batch": 1},
        {"batch": 3},
        {"seqlen_q": 301},
        {"seqlen_k": 200},
        {"heads": 8},
        {"heads": 2},
        {"kv_heads": 4},
        {"kv_heads": 1},
        {"head_dim": 64},
        {"dtype": "float16"},
    ],
    ids=str,
)
def test_a_plan_for_other_dense_tensors_is_refused(run, other):
    case = make_case(dense(FULL, **DENSE))
    with pytest.raises(PlanMismatchError):
        run(auto_plan(dense(FULL, **DENSE | other)), case)
    run(auto_plan(case.problem), case)


@BY_THE_PLAN
def test_a_plan_for_other_packed_tensors_is_refused(run):
    """The tensors have more rows than the plan, so that no forward reads what is not there."""
    case = make_packed_case(packed(300, 200))
    for lengths in ((300, 100), ((300, 300), (200, 150)), (400,)):
        with pytest.raises(PlanMismatchError):
            run(auto_plan(packed(*lengths)), case)
    run(auto_plan(case.problem), case)


def test_a_plan_for_a_ragged_batch_takes_no_dense_tensors():
    case = make_case(dense(FULL, batch=2, seqlen=300))
    with pytest.raises(PlanMismatchError):
        launch(auto_plan(packed(400, 200, mask=FULL)), case)


@pytest.mark.parametrize("which", ["dout", "out", "lse"])
def test_each_tensor_of_the_backward_is_checked(which):
    case = make_case(dense(seqlen=300))
    wrong = getattr(case.inputs, which)[:, :-1]
    with pytest.raises(PlanMismatchError, match=f"{which} has shape"):
        launch(auto_plan(case.problem), Case(case.problem, case.inputs._replace(**{which: wrong}), 1.0, {}))


# Inputs


@BOTH_DIMS
@pytest.mark.parametrize("layout", ["transposed", "sliced", "misaligned", "scattered"])
def test_layout_of_the_inputs_leaves_every_byte_alone(layout, head_dim):
    problem = dense(seqlen=300, head_dim=head_dim)
    plan, case = auto_plan(problem), make_case(problem)
    dout, q, k, v, out, lse = case.inputs
    views = Inputs(*(LAYOUTS[layout](x) for x in (dout, q, k, v, out)), lse.mT.contiguous().mT)
    assert any(x.stride() != y.stride() or x.data_ptr() % 16 for x, y in zip(views, case.inputs))
    result = launch(plan, Case(problem, views, case.scale, {}))
    assert not differing(launch(plan, case), result)
    for name, x in zip(GRADS, (q, k, v)):
        assert getattr(result, name).shape == x.shape


def test_one_row_broadcast_to_a_batch():
    problem = dense(seqlen=200, batch=3)
    plan, case = auto_plan(problem), make_case(problem)
    row = Inputs(*(x[:1] for x in case.inputs))
    spread = Inputs(*(x.expand(3, *x.shape[1:]) for x in row))
    copied = Inputs(*(x.contiguous() for x in spread))
    first, other = (launch(plan, Case(problem, x, case.scale, {})) for x in (spread, copied))
    assert not differing(first, other)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 100), (100, 0), (0, 0)])
def test_empty_sequences_have_zero_gradients(seqlen_q, seqlen_k):
    shape = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    q = torch.ones(2, seqlen_q, 4, 64, **shape)
    k, v = (torch.ones(2, seqlen_k, 2, 64, **shape) for _ in range(2))
    out = dash_attn.attention(q, k, v)
    assert out.shape == q.shape
    assert not out.any()
    out.sum().backward()
    for leaf in (q, k, v):
        assert leaf.grad.shape == leaf.shape
        assert not leaf.grad.any()


@BOTH_DIMS
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "mask"), [(1, 1, FULL), (1, 1, CAUSAL), (1, 999, CAUSAL), (999, 1, FULL)]
)
def test_single_rows(seqlen_q, seqlen_k, mask, head_dim):
    problem = dense(mask, seqlen_q=seqlen_q, seqlen_k=seqlen_k, seqlen=None, head_dim=head_dim)
    case = make_case(problem)
    ours = grads(launch(auto_plan(problem), case))
    for name in GRADS:
        error = float((ours[name].double() - case.exact[name]).abs().max())
        assert error <= 1e-2 * (1 + float(case.exact[name].abs().max())), name


@BOTH_DIMS
def test_rows_that_see_nothing_have_zero_dq(head_dim):
    problem = dense(CAUSAL, seqlen_q=900, seqlen_k=500, seqlen=None, head_dim=head_dim)
    case = make_case(problem)
    result = launch(auto_plan(problem), case)
    assert not result.dq[:, :400].any()
    assert result.dq[:, 401:].any(-1).all()
    assert relative_error(result.dq, case.exact["dq"]) <= 4e-3


@BOTH_DIMS
def test_keys_that_nobody_sees_have_zero_gradients(head_dim):
    problem = dense(Mask.window(50, 0), seqlen_q=200, seqlen_k=900, seqlen=None, head_dim=head_dim)
    case = make_case(problem)
    result = launch(auto_plan(problem), case)
    unseen = 900 - 200 - 50
    for grad in (result.dk, result.dv):
        assert not grad[:, :unseen].any()
        assert grad[:, unseen:].any(-1).all()
    assert relative_error(result.dk, case.exact["dk"]) <= 4e-3


@BOTH_DIMS
@pytest.mark.parametrize("which", ["dout", "q", "k", "v"])
def test_nan_in_an_input_reaches_the_gradients(which, head_dim):
    problem = dense(FULL, batch=2, seqlen=300, head_dim=head_dim)
    case = make_case(problem)
    bad = {which: getattr(case.inputs, which).clone()}
    bad[which][0, 137, 0, 5] = float("nan")
    inputs = case.inputs._replace(**bad)
    clean, result = (
        launch(auto_plan(problem), Case(problem, x, case.scale, {})) for x in (case.inputs, inputs)
    )
    assert result.dq[0, 137 if which in ("dout", "q") else 0, 0].isnan().any()
    assert result.dk[0, :, 0].isnan().any()
    for name in GRADS:
        assert_same_bytes(getattr(result, name)[1], getattr(clean, name)[1], f"{name} of the other sequence")


def test_two_streams_at_once():
    problems = [dense(seqlen=1500, head_dim=head_dim) for head_dim in (64, 128)]
    plans, cases = [auto_plan(p) for p in problems], [make_case(p) for p in problems]
    expected = [launch(plan, case) for plan, case in zip(plans, cases)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in plans]
    results = [[], []]
    for _ in range(20):
        for stream, plan, case, kept in zip(streams, plans, cases, results):
            with torch.cuda.stream(stream):
                kept.append(launch(plan, case))
    torch.cuda.synchronize()
    for first, others in zip(expected, results):
        assert not any(differing(first, other) for other in others)


def test_support_names_the_reason():
    q = torch.zeros(1, 8, 4, 64, device="cuda")
    assert "dtype float32 is not supported by sm90" in dash_attn.is_supported(q, q, q, backend="sm90").reason
    assert dash_attn.is_supported(q, q, q).backend == "triton"
    with pytest.raises(InputError, match="dtype float32 is not supported by sm90"):
        dash_attn.attention(q, q, q, backend="sm90")
    with pytest.raises(InputError, match=r"sm90: dtype float64 .*; triton: dtype float64 is not supported"):
        dash_attn.attention(*3 * [q.double()])
    with pytest.raises(InputError, match="the cpu backend does not run on cuda:0"):
        dash_attn.attention(q, q, q, backend="cpu")
    q = torch.zeros(1, 8, 4, 264, device="cuda", dtype=torch.bfloat16)
    assert "head_dim 264 is not supported by sm90" in dash_attn.is_supported(q, q, q, backend="sm90").reason
    q = torch.zeros(1, 8, 4, 64, device="cuda", dtype=torch.bfloat16)
    assert dash_attn.is_supported(q, q, q).backend == "sm90"


def test_attention_repeats_its_bytes():
    case = make_case(dense(seqlen=1000))

    def run() -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (case.inputs.q, case.inputs.k, case.inputs.v)]
        out = dash_attn.attention(*leaves, causal=True)
        out.backward(case.inputs.dout)
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    first = run()
    for _ in range(20):
        assert all(same_bytes(a, b) for a, b in zip(first, run()))


# Kernel variants

_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


PLAIN = {
    name: config
    for name, config in backward_variants().items()
    if not (config.softcap or config.key_sums or config.intervals)
}


@pytest.mark.parametrize("config", PLAIN.values(), ids=PLAIN)
def test_variants_launch(config: BackwardConfig):
    """Those of a softcap, of segments and of intervals have tests of their own."""
    fewer = 8 * config.padded
    head_dims = {"head_dim": config.head_dim - fewer, "head_dim_v": config.head_dim_v - fewer}
    problem = dense(WINDOW, seqlen=500, dtype=_DTYPES[config.dtype], **head_dims)
    case = make_case(problem)
    debug = Debug(config.spin_limit > 0, config.dump_contributions, config.trace)
    result = launch(auto_plan(problem), case, ordered=config.ordered, apart=config.apart, debug=debug)
    for grad_name in GRADS:
        error = relative_error(getattr(result, grad_name), case.exact[grad_name])
        assert error <= (4e-3 if config.dtype == "bf16" else 8e-4), f"{grad_name}: {error}"
    if config.trace:
        _check_trace(result.trace.cpu(), problem.grid(0).contributions.tolist())


def _check_trace(trace: torch.Tensor, contributions: list[int]) -> None:
    """Every task left a record, granted before performed, on an SM."""
    for tile, records in enumerate(trace):
        count = contributions[tile % len(contributions)]
        granted, ready, performed, sm = records[:count].T
        assert (granted > 0).all()
        assert (granted <= performed).all()
        assert (ready <= performed).all()
        assert ((sm >= 0) & (sm < torch.cuda.get_device_properties(0).multi_processor_count)).all()
        assert not records[count:].any()

"""The Triton kernels where rows that see a key are an interval of its own.

``test_triton.py`` starts this file in processes, see ``triton_interpreted.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import SCALE, packed_tensors
from triton_runs import BOUND, CPU, LENGTHS, MASKS, SCORES, assert_accurate, few_keys, problem_of, run

import dash_attn
from dash_attn.backends.base import AuxTensors, RowIntervals
from dash_attn.backends.cpu import forward as reference
from dash_attn.backends.triton import backward_kernels, forward_kernel
from dash_attn.backends.triton.backend import BACKEND
from dash_attn.backends.triton.tiles import forward_numerics
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import FA3, SPT, Descending, Shift, build_plan
from dash_attn.scores import Scores
from dash_attn.testing import assert_same_bytes
from interval_cases import beside, ends_of_documents, random_intervals, random_tree, starts_of_prefix

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in rows that see nothing


def intervals(problem: Problem, seed: int) -> AuxTensors:
    """Random ones of all sequences, packed."""
    parts = [random_intervals(n, m, seed + at) for at, (m, n) in enumerate(problem.sequences)]
    return beside(RowIntervals(*(torch.cat(side) for side in zip(*parts))))


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
@pytest.mark.parametrize("dtype", BOUND)
def test_intervals_beside_masks(mask: Mask, dtype: str) -> None:
    problem = problem_of(*LENGTHS, (200, 200), mask=mask, dtype=dtype, heads=2, kv_heads=1)
    tensors, aux = packed_tensors(problem), intervals(problem, 1)
    found = run(build_plan(problem, Descending()), tensors, SCORES, aux)
    assert_accurate(problem, tensors, found, aux=aux)
    blind = found["lse"][0] == -torch.inf
    assert blind.any()
    for name in ("out", "dq"):
        assert not found[name][blind].any()


def test_maxima_with_intervals_are_those_of_the_reference() -> None:
    """A row's first one looks at how many keys it sees. P of float16 is rounded elsewhere with others."""
    problem = problem_of((60, 300), dtype="float16", heads=1)
    _, q, k, v = packed_tensors(problem)
    k = (k * torch.linspace(3.0, 0.5, 300)[:, None, None]).to(k.dtype)  # scores rise along the tiles' order
    ends = torch.where(torch.arange(300) % 16 == 0, 60, 0).int()
    aux = beside(RowIntervals(torch.zeros_like(ends), ends))

    numerics = forward_numerics(problem)
    found, _ = BACKEND.prepare(problem, CPU, packed=True).forward(q, k, v, SCORES, aux)

    def differing(**numbers: Any) -> float:
        other = replace(numerics, **numbers)
        wanted, _ = reference(problem, q, k, v, SCALE, aux, numerics=other)
        return float((found != wanted).float().mean())

    assert differing() < 0.002
    assert differing(room=0) > 0.01  # as if rows saw whole tiles


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [40, 72, 200])
def test_intervals_and_head_dims(head_dim: int) -> None:
    """Tiles of every size; with a softcap, head groups and a head dim of its own for V."""
    problem = problem_of((170, 170), mask=Mask.causal(), head_dim=head_dim, head_dim_v=24)
    tensors, aux = packed_tensors(problem), intervals(problem, 2)
    tensors[1] = tensors[1] / head_dim**0.5
    plan = build_plan(problem, SPT(), head_groups=2)
    scores = Scores(SCALE, 5.0)
    assert_accurate(problem, tensors, run(plan, tensors, scores, aux), scores=scores, aux=aux)


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
@pytest.mark.parametrize(
    ("dtype", "dropout_p"), [pytest.param("float32", 0.3, marks=pytest.mark.slow), ("float16", 0.0)]
)
def test_intervals_with_all_that_scores_take(mask: Mask, dtype: str, dropout_p: float) -> None:
    """A sink, ALiBi, dropout, a softcap, head groups and a head dim of its own for V. Rows that see nothing
    have the sink for their log-sum-exp."""
    problem = problem_of((70, 90), (0, 30), (40, 0), (33, 150), mask=mask, head_dim_v=24, dtype=dtype)
    tensors, scores = packed_tensors(problem), Scores(SCALE, 5.0, True, True, dropout_p, row_intervals=True)
    slopes = torch.tensor([[0.02, 0.3], [0.1, 0.0]]).repeat(2, 1)
    aux = AuxTensors(torch.tensor([0.5, 3.0]), slopes, torch.tensor(11), *intervals(problem, 5).rows or ())
    assert aux.row_starts is not None
    aux.row_starts[:90].clamp_(min=5)  # the first rows see nothing
    found = run(build_plan(problem, Descending(), head_groups=2), tensors, scores, aux)
    assert_accurate(problem, tensors, found, 2, scores=scores, aux=aux)
    blind = found["out"].flatten(1).eq(0).all(1)
    assert blind[:5].all()
    assert blind[70:110].all()
    assert not found["dq"][blind].any()
    unseen = found["lse"][1, :5], found["lse"][1, 70:110]
    torch.testing.assert_close(torch.cat(unseen), torch.full((45,), 3.0))


@pytest.mark.slow
def test_intervals_of_documents_prefixes_and_trees() -> None:
    """Long enough that tiles of rows and of keys are left out."""
    nothing = torch.zeros(400, dtype=torch.int32)
    for mask, rows in (
        (Mask.causal(), RowIntervals(nothing, ends_of_documents(30, 250, 1, 119))),
        (Mask.full(), RowIntervals(starts_of_prefix(150, 400), nothing + 400)),
        (Mask.causal(), RowIntervals(nothing, random_tree(400, 1)[0])),
    ):
        problem = problem_of(400, mask=mask, head_dim=72, heads=1)
        tensors = packed_tensors(problem)
        tensors[1] = tensors[1] / 4
        found = run(build_plan(problem, FA3()), tensors, SCORES, beside(rows))
        assert_accurate(problem, tensors, found, aux=beside(rows))


def test_intervals_of_dense_batches() -> None:
    problem = problem_of((60, 60), (60, 60), mask=Mask.causal())
    plan, packed, aux = build_plan(problem, SPT()), packed_tensors(problem), intervals(problem, 3)
    assert aux.rows is not None
    wanted = run(plan, packed, SCORES, aux)
    whole = beside(RowIntervals(*(x.view(2, 60) for x in aux.rows)))
    found = run(plan, [x.unflatten(0, (2, -1)) for x in packed], SCORES, whole)
    for name in ("out", "dq", "dk", "dv"):
        assert_same_bytes(found[name].flatten(0, 1), wanted[name], name)


@pytest.mark.parametrize("policy", [Shift(2), FA3()], ids=str)
@pytest.mark.slow
def test_tiles_that_intervals_empty_may_be_left_out(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving them out changes no byte. What is hidden in them may be anything, as it is not read."""
    few_keys(monkeypatch, 128)
    problem = problem_of(500, mask=Mask.full(), head_dim=72, heads=1, dtype="float16")
    last = ends_of_documents(130, 190, 180)
    lengths = torch.tensor((130, 190, 180))
    aux = beside(RowIntervals(last - lengths.repeat_interleave(lengths).int(), last))
    tensors, plan = packed_tensors(problem), build_plan(problem, policy)
    first = run(plan, tensors, SCORES, aux)
    spoilt = [x.clone() for x in tensors]
    for x in spoilt:
        x[320:] = torch.nan  # another document, which begins where a tile does
    clean = run(plan, spoilt, SCORES, aux)
    for name in ("out", "dq", "dk", "dv"):
        assert_same_bytes(clean[name][:320], first[name][:320], name)
    for module in (backward_kernels, forward_kernel):
        monkeypatch.setattr(module, "keys_within", lambda starts, ends, low, high, *_: (low, high))
    monkeypatch.setattr(backward_kernels, "visible_part", lambda first, step, count, *_: (count * 0, count))
    for name, got in run(plan, tensors, SCORES, aux).items():
        assert_same_bytes(got, first[name], name)
    for name, got in run(plan, spoilt, SCORES, aux).items():
        assert name == "lse" or not got[:320].isfinite().all(), "the example shows nothing"


def test_keys_that_intervals_hide_may_be_anything() -> None:
    """Within tiles that rows see: q and k of another document."""
    problem = problem_of(150, mask=Mask.causal(), heads=1)
    _, q, k, v = packed_tensors(problem)
    aux = beside(RowIntervals(torch.zeros(150, dtype=torch.int32), ends_of_documents(40, 110)))
    prepared = BACKEND.prepare(problem, CPU, packed=True)
    out, lse = prepared.forward(q, k, v, SCORES, aux)
    q[:40], k[:40] = torch.nan, torch.inf
    found, other = prepared.forward(q, k, v, SCORES, aux)
    assert_same_bytes(found[40:], out[40:], "out")
    assert_same_bytes(other[:, 40:].contiguous(), lse[:, 40:].contiguous(), "lse")


def test_intervals_that_hide_nothing_change_no_byte() -> None:
    problem = problem_of(200, (30, 90), mask=Mask.causal(), dtype="float16")
    tensors, plan = packed_tensors(problem), build_plan(problem, SPT())
    nothing = torch.zeros(290, dtype=torch.int32)
    found = run(plan, tensors, SCORES, beside(RowIntervals(nothing, nothing + 200)))
    for name, wanted in run(plan, tensors).items():
        assert_same_bytes(found[name], wanted, name)


def test_public_functions_with_intervals() -> None:
    problem = problem_of((90, 90), (20, 130), mask=Mask.causal(), head_dim=40)
    dout, q, k, v = packed_tensors(problem)
    aux = intervals(problem, 4)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ends = [torch.tensor([0, *side]).cumsum(0).int() for side in zip(*problem.sequences)]
    how = {"causal": True, "backend": "triton", "row_starts": aux.row_starts, "row_ends": aux.row_ends}
    out = dash_attn.flash_attn_varlen_func(*leaves, *ends, softmax_scale=SCALE, **how)
    plan = dash_attn.plan_for(*leaves, *ends, **how)
    found = run(plan, [x.detach() for x in (dout, q, k, v)], SCORES, aux)
    for name, got in zip(("out", "dq", "dk", "dv"), (out, *torch.autograd.grad(out, leaves, dout))):
        assert_same_bytes(got, found[name], name)

"""The fuzzer: its checks on the CPU executor, for cases that hypothesis draws; and that they can fail.

``stress/fuzz.py`` runs the same checks on a Hopper GPU, for cases drawn from a seed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import masks, tiles

from dash_attn.backends.base import Tensors
from dash_attn.backends.cpu.executor import backward
from dash_attn.problem import DTYPES
from dash_attn.schedule import COMMON_PLACEMENTS, Plan
from dash_attn.scores import Scores
from fuzz import Summary, mask_kind, run
from fuzz_case import LAYOUTS, Backend, FuzzCase, Grads, How, check, make_tensors
from fuzz_draw import CHOICES, HEAD_DIMS, MOST_ATTEMPTS, draw, script_of, shrink, size

torch.set_num_threads(1)


def execute(plan: Plan, tensors: Tensors, scores: Scores, how: How) -> Grads:
    """One backward by the executor; every variant is another interleaving."""
    rng = random.Random(how.variant)
    packed = tensors.q.ndim == 3
    if not packed:
        *rows, lse = tensors
        batch, heads, seqlen = lse.shape
        flat = lse.transpose(0, 1).reshape(heads, batch * seqlen)
        tensors = Tensors(*(x.flatten(0, 1) for x in rows), flat)
    workers = how.workers if how.ordered else None
    grads = backward(plan, tensors, scores, workers=workers, rng=rng, ordered=how.ordered)[:3]
    if packed:
        return grads
    return tuple(x.unflatten(0, (batch, -1)) if x.numel() else x.view(batch, -1, *x.shape[1:]) for x in grads)


def executor(launch: Callable[[Plan, Tensors, Scores, How], Grads] = execute) -> Backend:
    """The executor as a machine of 132 workers."""
    return Backend("cpu", 132, launch, lambda calls: [call() for call in calls])


@st.composite
def cases(draw: st.DrawFn) -> FuzzCase:
    """Small cases with many tiles; policies that do not cover the mask are drawn again."""
    packed, mask = draw(st.booleans()), draw(masks)
    length = st.integers(0 if packed else 1, 70)
    pair = st.tuples(length, length) | length.map(lambda n: (n, n))
    lengths = (
        draw(st.lists(pair, min_size=1, max_size=3)) if packed else [draw(pair)] * draw(st.integers(1, 3))
    )
    group = draw(st.integers(1, 5))
    tile_m, tile_n = draw(tiles)
    policy = draw(st.sampled_from(CHOICES))
    layouts = [draw(st.sampled_from(list(LAYOUTS))) for _ in range(4)]
    layouts.append(draw(st.sampled_from([name for name in LAYOUTS if name != "one_head"])))
    return FuzzCase(
        lengths=tuple(lengths),
        group=group,
        kv_heads=draw(st.integers(1, 2)),
        head_dim=draw(st.sampled_from((5, 8, 16))),
        dtype=draw(st.sampled_from(DTYPES)),
        left=mask.left,
        right=mask.right,
        tile_m=tile_m,
        tile_n=tile_n,
        packed=packed,
        policy=policy,
        ring=draw(st.none() | st.integers(1, 5)) if policy == "shift" else None,
        placement=draw(st.sampled_from((*COMMON_PLACEMENTS, "shuffled"))),
        head_groups=draw(st.none() | st.integers(1, group)),
        layouts=tuple(layouts),
        scale=draw(st.sampled_from((1.0, 0.1, 4.0))),
        softcap=draw(st.sampled_from((0.0, 0.0, 2.0))),
        head_dim_v=draw(st.sampled_from((0, 0, 12))),
        outliers=draw(st.booleans()),
        streams=draw(st.integers(1, 2)),
        extra_workers=draw(st.none() | st.integers(0, 3)),
        seed=draw(st.integers(0, 2**20)),
    )


def covered(case: FuzzCase) -> bool:
    try:
        case.plan("policy", 132)
    except ValueError:
        return False
    return True


def test_random_cases() -> None:
    """Gradients near float64, the same bytes however they are computed, and others without order."""
    outcomes = []

    @settings(max_examples=70)
    @given(cases())
    def hold(case: FuzzCase) -> None:
        assume(covered(case))
        outcome = check(case, executor())
        assert not outcome.failures, case
        outcomes.append(outcome)

    hold()
    assert len(outcomes) >= 70
    assert sum(outcome.unordered_differs for outcome in outcomes) > 10, "without order nothing differs"


# The checks can fail

CASE = FuzzCase(
    lengths=((60, 60), (40, 50), (60, 60)), group=2, kv_heads=2, head_dim=8, dtype="float32", right=0,
    tile_m=8, tile_n=8, packed=True, placement="shuffled", streams=2, extra_workers=2,
    layouts=("transposed", "plain", "sliced", "plain", "plain"),
)  # fmt: skip


def spoiled(when: Callable[[Plan, Tensors, How], bool], spoil: Callable[[Grads], None]) -> Backend:
    """The executor with some results spoiled in place."""

    def launch(plan: Plan, tensors: Tensors, scores: Scores, how: How) -> Grads:
        grads = execute(plan, tensors, scores, how)
        if when(plan, tensors, how):
            spoil(grads)
        return grads

    return executor(launch)


def last_bit(grads: Grads) -> None:
    """One bit of one element of dv."""
    grads[2].view(torch.int32 if grads[2].element_size() == 4 else torch.int16).flatten()[0] ^= 1


@pytest.mark.parametrize(
    ("when", "spoil", "message"),
    [
        (lambda plan, x, how: how.bounded, last_bit, "workers and all: dv differ"),
        (lambda plan, x, how: how.variant == 3, last_bit, "replays, 2 streams: dv differ"),
        (lambda plan, x, how: how.apart, last_bit, "waiting and apart: dv differ"),
        (lambda plan, x, how: x.dout.is_contiguous(), last_bit, "strides and contiguous inputs: dv differ"),
        (lambda plan, x, how: x.q.ndim == 4, lambda g: g[2].mul_(-1), "in the batch and alone: dv differ"),
        (lambda plan, x, how: not how.ordered, last_bit, "with and without order: dv differ"),
        (lambda plan, x, how: True, lambda g: g[0].mul_(1.0001), "dq, dk, dv: dq of sequence 0 is"),
        (lambda plan, x, how: True, lambda g: g[1][-1].mul_(0.98), "dq, dk, dv: dk of sequence 2 is"),
        (lambda plan, x, how: True, lambda g: g[2][0, 0, 0].fill_(torch.nan), "dv of sequence 0 is inf"),
        (lambda plan, x, how: not how.ordered, lambda g: g[0].mul_(1.001), "without order: dq of sequence 0"),
    ],
)  # fmt: skip
def test_what_is_spoiled_is_found(when, spoil, message) -> None:
    found = check(CASE, spoiled(when, spoil)).failures
    assert any(message in failure for failure in found), found


def test_nothing_is_found_where_nothing_is_spoiled() -> None:
    outcome = check(CASE, executor())
    assert outcome.failures == []
    assert outcome.unordered_differs
    assert outcome.launches == 2 + 2 + 4 + 1 + 1 + 2


def test_sums_in_an_order_of_chance_are_found() -> None:
    """The negative control of the whole: an executor that ignores tickets does not pass."""

    def launch(plan: Plan, tensors: Tensors, scores: Scores, how: How) -> Grads:
        return execute(plan, tensors, scores, how._replace(ordered=False))

    assert any("dq differ" in failure for failure in check(CASE, executor(launch)).failures)


@pytest.mark.parametrize(
    ("dtype", "units"), [("bfloat16", 1.0), ("float16", 1.0), ("float32", 300), ("float64", 5000)]
)
def test_the_allowed_error_is_near_the_error_of_its_dtype(dtype, units) -> None:
    """Not a bound that anything would pass: so many times the dtype's epsilon, of the gradient's norm."""
    case = FuzzCase(((200, 200),), 2, 1, 32, dtype, None, 0, 16, 16)
    (expected,) = make_tensors(case, "cpu")[1]
    for exact, allowed in zip(expected.grads, expected.allowed):
        assert 0 < allowed <= units * torch.finfo(getattr(torch, dtype)).eps * float(exact.norm())


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "plain"])
def test_layouts_are_views_of_the_same_values(layout) -> None:
    for shape in ((2, 5, 3, 8), (7, 3, 8)):
        x = torch.randn(shape)
        view = LAYOUTS[layout](x)
        assert view.shape == x.shape
        assert view.stride() != x.stride() or view.data_ptr() % 16
        assert torch.equal(view, x[..., :1, :].expand(shape) if layout == "one_head" else x)


# Drawing, shrinking, writing down


def test_what_is_drawn_covers_every_choice() -> None:
    drawn = [draw(seed) for seed in range(400)]
    assert drawn[:5] == [draw(seed) for seed in range(5)]
    for name, values in {
        "policy": set(CHOICES), "placement": {"policy", "lpt", "shuffled"}, "streams": {1, 2, 3},
        "dtype": {"bfloat16", "float16"}, "softcap": {0.0, 2.0, 30.0}, "packed": {True, False},
    }.items():  # fmt: skip
        assert {getattr(case, name) for case in drawn} == values
    assert {(case.head_dim, case.head_dim_v) for case in drawn} == set(HEAD_DIMS)
    assert {layout for case in drawn for layout in case.layouts} == set(LAYOUTS)
    assert {mask_kind(case.problem.mask) for case in drawn} == {"full", "causal", "window"}
    assert max(n for case in drawn for pair in case.lengths for n in pair) > 4000
    assert all(case.packed or len(set(case.lengths)) == 1 for case in drawn)
    assert any(0 in pair for case in drawn for pair in case.lengths)


def test_shrinking_keeps_what_the_failure_needs_and_nothing_else() -> None:
    """Made up: fails from 130 keys on, with two q heads per kv head, on transposed k."""

    def fails(case: FuzzCase) -> bool:
        return any(n >= 130 for _, n in case.lengths) and case.group >= 2 and case.layouts[2] == "transposed"

    layouts = ("sliced", "misaligned", "transposed", "plain", "scattered")
    found = [replace(draw(seed), layouts=layouts) for seed in range(300)]
    found = [case for case in found if fails(case)]
    assert len(found) > 20
    for case in found[:20]:
        small = shrink(case, fails)
        ((_, seqlen_k),) = small.lengths
        assert (seqlen_k, small.group, small.kv_heads, small.streams) == (130, 2, 1, 1), small
        assert small.layouts == ("plain", "plain", "transposed", "plain", "plain")
        assert (small.policy, small.dtype, small.left, small.right) == ("fa3", "bfloat16", None, None)
        assert sum(small.lengths[0]) == 131
        assert small.seed == case.seed


def test_shrinking_ends_when_everything_fails_or_nothing_smaller_does() -> None:
    calls = []
    case = draw(3)
    smallest = shrink(case, lambda smaller: bool(calls.append(smaller)) or True)
    assert smallest.lengths in (((1, 1),), ((0, 0),))
    assert len(calls) < MOST_ATTEMPTS
    assert all(size(a) > size(b) for a, b in zip([case, *calls], calls))
    assert shrink(case, lambda smaller: False) == case


def test_a_failure_of_one_bit_is_shrunk_and_written_down(tmp_path) -> None:
    """From the executor with a fault to a script that finds it alone."""
    backend = spoiled(lambda plan, x, how: how.variant == 1 and x.k.shape[0] > 30, last_bit)

    def fails(case: FuzzCase) -> bool:
        return bool(check(case, backend).failures)

    start = FuzzCase(((20, 25), (0, 8)), 2, 1, 8, left=9, tile_m=8, tile_n=8, packed=True, extra_workers=0)
    assert fails(start)
    small = shrink(start, fails)
    assert fails(small)
    assert sum(n for _, n in small.lengths) == 31
    script = tmp_path / "reproduce.py"
    script.write_text(script_of(small))
    spec = spec_from_file_location("reproduce", script)
    sys.modules["reproduce"] = module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["reproduce"]
    assert repr(module.CASE) == repr(small)
    assert any("replays" in failure for failure in module.check(module.CASE, backend).failures)


def small_seeds(count: int) -> list[int]:
    """Seeds of small cases, which the executor runs quickly."""
    sizes = ((seed, draw(seed)) for seed in range(400))
    small = [s for s, c in sizes if sum(m * n for m, n in c.lengths) * c.group * c.kv_heads < 2e4]
    assert len(small) >= count
    return small[:count]


def test_a_run_reports_failures_and_goes_on(tmp_path) -> None:
    said: list[str] = []
    seeds = small_seeds(6)
    packed = [seed for seed in seeds if draw(seed).packed]
    assert 0 < len(packed) < 6
    backend = spoiled(lambda plan, x, how: x.q.ndim == 3 and how.variant == 1 and x.v.numel() > 0, last_bit)
    summary = run(iter(seeds), backend, tmp_path, said.append)
    assert summary.seeds == seeds
    assert not summary.passed
    failed = [seed for seed, _, _ in summary.failures]
    assert set(failed) <= set(packed)
    assert failed
    for seed, what, script in summary.failures:
        assert "dv differ" in what[0]
        assert f"seed={seed}" in Path(script).read_text()
    facts = summary.as_json()
    assert facts["problems"] == 6
    assert [failure["seed"] for failure in facts["failures"]] == failed
    assert sum(facts["by"]["policy"].values()) == 6
    assert f"seed {failed[0]}: replays" in str(summary)


def test_a_run_is_limited_in_time_and_an_exception_is_a_failure(tmp_path) -> None:
    assert run(iter(range(10)), executor(), tmp_path, print, seconds=-1).seeds == []

    def launch(plan: Plan, tensors: Tensors, scores: Scores, how: How) -> Grads:
        raise RuntimeError("made up")

    summary = run(iter(small_seeds(1)), executor(launch), tmp_path, lambda line: None)
    assert summary.failures[0][1] == ["RuntimeError: made up"]


def test_a_run_in_which_no_control_differs_does_not_pass() -> None:
    summary = Summary(seeds=list(range(100)))
    assert not summary.passed
    summary.unordered_differs = 1
    assert summary.passed

"""Timelines from recorded traces: a simulated run, recorded and read back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import plans

from dash_attn.backends.base import Tensors
from dash_attn.backends.cuda.upload import Upload
from dash_attn.backends.sm90.arguments import Given
from dash_attn.backends.sm90.forward import launch
from dash_attn.backends.sm90.forward.arguments import named
from dash_attn.backends.sm90.forward.config import ForwardConfig
from dash_attn.backends.sm90.forward.traced import traced_forward
from dash_attn.backends.sm90.launch import Debug
from dash_attn.errors import InputError, PlanMismatchError
from dash_attn.model import Costs, ForwardCosts, ForwardTimeline, Timeline, simulate, simulate_forward
from dash_attn.model.forward import save_forward
from dash_attn.model.output import PictureError
from dash_attn.model.trace import measured_forward, measured_timeline
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import ForwardNumerics, ForwardPlan, Plan, build_forward_plan, build_plan
from dash_attn.schedule.interleave import item_tasks
from dash_attn.tools import measure


def recorded(timeline: Timeline, first_sm: int) -> np.ndarray:
    """The trace a GPU would have written, one nanosecond a cycle."""
    plan, problem = timeline.plan, timeline.plan.problem
    tiles = [problem.grid(s).q_tiles * problem.heads for s in range(len(problem.sequences))]
    widest = max(max(g.kv_tiles for g in problem.grids.values()), 1)
    trace = np.zeros((sum(tiles), widest, 4), dtype=np.int64)
    for item in range(len(plan.items)):
        for k, task in enumerate(item_tasks(plan, item), start=int(timeline.first_task[item])):
            row = (
                sum(tiles[: task.sequence]) + task.q_head * problem.grid(task.sequence).q_tiles + task.q_tile
            )
            worker = timeline.item_worker[item] + first_sm
            times = timeline.reduce_start[k], timeline.compute_end[k], timeline.reduce_end[k]
            trace[row, task.ticket] = (*(int(t) + 1000 for t in times), worker)
    return trace


@given(plans())
def test_a_recorded_simulation(plan: Plan) -> None:
    timeline = simulate(plan, Costs(compute=3, reduce=2, dq_buffers=2), plan.min_workers + 1)
    measured = measured_timeline(plan, recorded(timeline, first_sm=7), clock_ghz=2.0)
    if not plan.problem.tasks:
        assert measured.makespan == 0
        return
    shift = timeline.reduce_start.min()
    assert measured.makespan == 2 * (timeline.makespan - shift)
    for name in ("compute_end", "reduce_start", "reduce_end"):
        assert np.array_equal(getattr(measured, name), 2 * (getattr(timeline, name) - shift))
    used = [
        w
        for w in range(timeline.workers)
        if any(
            timeline.first_task[i] < timeline.first_task[i + 1]
            for i in np.flatnonzero(timeline.item_worker == w)
        )
    ]
    assert measured.workers == len(used)
    assert (measured.compute_start <= measured.compute_end).all()


# Of a forward


def forward_plan(workers: int, heads: int = 2, **shape: int) -> ForwardPlan:
    problem = Problem.dense(head_dim=64, heads=heads, mask=Mask.causal(), **shape)
    return build_forward_plan(problem, 192, workers, ForwardNumerics(64, "bfloat16", segment=256))


def recorded_forward(timeline: ForwardTimeline) -> np.ndarray:
    """The trace a GPU would have written, one nanosecond per cycle, on SMs 7, 10, 13, ..."""
    columns = timeline.start + 1000, timeline.end + 1000, 3 * timeline.worker + 7
    return np.stack(columns, axis=1).astype(np.int64)


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 900), st.integers(0, 2000))
def test_a_recorded_simulation_of_a_forward(workers: int, heads: int, seqlen: int, more: int) -> None:
    plan = forward_plan(workers, heads, seqlen_q=seqlen, seqlen_k=seqlen + more)
    timeline = simulate_forward(plan, ForwardCosts(tile=3, item=2), workers)
    measured = measured_forward(plan, recorded_forward(timeline), clock_ghz=2.0)
    assert measured.workers == len(np.unique(timeline.worker)) == min(workers, plan.items)
    assert np.array_equal(measured.worker, timeline.worker)
    for name in ("start", "end"):
        assert np.array_equal(getattr(measured, name), 2 * getattr(timeline, name))
    assert measured.makespan == 2 * timeline.makespan
    busy = 2 * float((timeline.end - timeline.start).sum())
    assert measured.utilization == pytest.approx(busy / (measured.makespan * measured.workers))
    longest = 2 * float((timeline.end - timeline.start).max())
    assert measured.lower_bound == pytest.approx(max(busy / measured.workers, longest))
    tiles = plan.tiles_of_items()
    assert tiles.tolist() == [plan.kv_tiles[plan.claimed(item)[0]] for item in range(plan.items)]
    if tiles.min() < tiles.max():
        assert (measured.costs.tile, measured.costs.item) == (pytest.approx(6), pytest.approx(4))
    else:
        assert measured.costs == ForwardCosts((2 * 2 + 6 * float(tiles[0])) / float(tiles[0]))


def test_segments_of_a_split_tile_are_items_of_their_own() -> None:
    plan = forward_plan(132, heads=3, seqlen_q=1, seqlen_k=600)
    assert len(plan.folds) == 1
    trace = np.array([[100 + 10 * item, 150 + 10 * item, 131 - item] for item in range(9)])
    measured = measured_forward(plan, trace, clock_ghz=1.0)
    assert (measured.workers, measured.makespan) == (9, 130)
    assert measured.worker.tolist() == list(range(8, -1, -1))
    assert measured.start.tolist() == list(range(0, 90, 10))


def test_lengths_that_do_not_grow_with_kv_tiles_have_no_negative_cost() -> None:
    plan = forward_plan(1, heads=1, seqlen=400)
    assert plan.kv_tiles.tolist() == [4, 3, 2]
    trace = np.array([[1, 3, 0], [3, 13, 0], [13, 28, 0]])
    assert measured_forward(plan, trace, clock_ghz=1.0).costs == ForwardCosts(27 / 9, 0.0)


def test_a_forward_without_keys_and_one_without_rows() -> None:
    plan = forward_plan(1, seqlen_q=9, seqlen_k=0)
    assert measured_forward(plan, np.array([[5, 9, 0], [9, 15, 0]]), 1.0).costs == ForwardCosts(0.0, 5.0)
    nothing = measured_forward(forward_plan(1, seqlen_q=0, seqlen_k=9), np.zeros((0, 3), np.int64), 1.0)
    assert (nothing.workers, nothing.makespan, nothing.utilization) == (1, 0, 1)


def test_traces_of_other_plans_are_named() -> None:
    plan = forward_plan(1, seqlen=200)
    trace = recorded_forward(simulate_forward(plan, ForwardCosts(), 1))
    with pytest.raises(PlanMismatchError, match=r"the trace has shape \(3, 3\), the plan has 4 items"):
        measured_forward(plan, trace[1:], 1.0)
    trace[2, 1] = 0
    with pytest.raises(PlanMismatchError, match="item 2 of 4 left no record"):
        measured_forward(plan, trace, 1.0)


def test_two_timelines_of_a_forward_in_one_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan = forward_plan(3, seqlen=900)
    fast, slow = (simulate_forward(plan, ForwardCosts(tile), 3) for tile in (10, 20))
    pictures = [tmp_path / name for name in ("one.svg", "both.svg")]
    save_forward(fast, pictures[0])
    save_forward([("simulated", fast), ("measured", slow)], pictures[1])
    one, both = (path.read_text() for path in pictures)
    assert f"forward, causal: makespan {fast.makespan:g}," in one
    assert f"forward, causal, simulated: makespan {fast.makespan:g}," in both
    assert f"forward, causal, measured: makespan {slow.makespan:g}," in both
    assert both.count(">cycles<") == one.count(">cycles<") == 1
    with pytest.raises(PictureError, match="save_forward needs at least one timeline"):
        save_forward([], tmp_path / "none.svg")


@pytest.mark.parametrize("q_rows", [300, 0])
def test_the_traced_variant_is_given_a_trace(monkeypatch: pytest.MonkeyPatch, q_rows: int) -> None:
    """A program that records in place of the kernel: there is no GPU."""
    problem = Problem.dense(seqlen_q=q_rows, seqlen_k=300, heads=3, head_dim=64, mask=Mask.causal())
    q, k, v = (torch.randn(1, rows, 3, 64).bfloat16() for rows in (q_rows, 300, 300))
    calls: list[Given] = []

    def program(config: ForwardConfig) -> Callable[..., None]:
        assert config.trace

        def run(*arguments: Any) -> None:
            calls.append(named(config, arguments))
            trace = calls[-1].tensors["trace"]
            assert not trace.any()
            trace.copy_(torch.arange(len(trace)) + len(calls))

        return run

    class Uploaded(Upload):
        def __init__(self, what: object, arrays: Any, device: torch.device) -> None:
            self.arrays = [torch.from_numpy(array) for array in arrays]

        def use(self) -> list[torch.Tensor]:
            return self.arrays

    monkeypatch.setattr(launch, "program", program)
    monkeypatch.setattr(launch, "Upload", Uploaded)
    if not q_rows:
        with pytest.raises(InputError, match=r"nothing to trace: q has shape \(1, 0, 3, 64\), k has"):
            traced_forward(problem, (q, k, v), blocks=2)
        return
    found = traced_forward(problem, (q, k, v), blocks=2, runs=2)
    assert [call.places["q"].address for call in calls] == 2 * [q.data_ptr()]
    assert [(call.launch.grid, tuple(call.cap)) for call in calls] == 2 * [(2, ())]
    assert found.plan.items == 6
    assert found.trace.tolist() == [[3 * item + 2, 3 * item + 3, 3 * item + 4] for item in range(6)]
    assert (found.out.shape, found.lse.shape) == (q.shape, (1, 3, 300))


def test_v_of_a_trace_may_have_another_head_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so does dout."""
    problem = Problem.dense(
        batch=2, seqlen_q=3, seqlen_k=5, heads=4, kv_heads=2, head_dim=192, head_dim_v=128
    )
    q, k, v = inputs = measure.random_inputs(problem, "cpu")
    assert [x.shape for x in inputs] == [(2, 3, 4, 192), (2, 5, 2, 192), (2, 5, 2, 128)]
    assert {x.dtype for x in inputs} == {torch.bfloat16}
    given = []

    class Done(Exception):
        """Here the GPU would write a trace."""

    def run_backward(plan: Plan, tensors: Tensors, scale: float, *, debug: Debug) -> None:
        given.append(tensors)
        raise Done

    monkeypatch.setattr(measure, "_check_traced", lambda problem: None)
    monkeypatch.setattr(measure, "random_inputs", lambda problem: inputs)
    monkeypatch.setattr(measure.launch, "run_backward", run_backward)
    with pytest.raises(Done):
        measure.simulated_and_measured(build_plan(problem, "fa3"))
    assert given[0][1:4] == (q, k, v)
    assert given[0].dout.shape == given[0].out.shape == (2, 3, 4, 128)

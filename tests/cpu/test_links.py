"""What the model says of several GPUs: beside what two measured, and what must hold anyway."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dash_attn.errors import CostError, InputError, ProblemError
from dash_attn.model.links import Links, memory_gb, predict
from dash_attn.problem import Mask, Problem

FILE = Path(__file__).parents[2] / "benchmarks/results/h200x2-context-parallel.json"
ROWS = [row for row in json.loads(FILE.read_text())["rows"] if "predicted_ms" in row]


def problem_of(case: str) -> Problem:
    tokens, heads, head_dim, mask = case.split(", ")
    q_heads, kv_heads = map(int, heads.split(":"))
    assert mask == "causal"
    return Problem.dense(
        heads=q_heads, kv_heads=kv_heads, seqlen=int(tokens), head_dim=int(head_dim), mask=Mask.causal()
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['case']}, {row['impl']}")
def test_predictions_are_within_a_tenth_of_what_two_gpus_measured(row: dict[str, float | str]) -> None:
    mode = str(row["impl"]).partition(", ")[2]
    ranks = 1 if mode == "one GPU" else 2
    problem = problem_of(str(row["case"]))
    found = predict(problem, ranks, mode)
    assert found.ms == pytest.approx(float(row["ms"]), rel=0.1)
    assert found.ms >= found.forward_ms + found.backward_ms
    assert memory_gb(problem, ranks, mode) == pytest.approx(float(row["peak_gb"]), rel=0.2)


def test_more_gpus_are_faster_and_slower_links_are_not() -> None:
    problem = problem_of("1048576, 32:8, 128, causal")
    times = [predict(problem, ranks, "ulysses+ring").ms for ranks in (1, 2, 8, 32)]
    assert times == sorted(times, reverse=True)
    slow = predict(problem, 8, "ulysses", Links(gb_per_s=20.0))
    assert slow.moving_ms > predict(problem, 8, "ulysses").moving_ms


def test_heads_in_turns_take_less_memory() -> None:
    problem = problem_of("131072, 32:8, 128, causal")
    assert memory_gb(problem, 2, "ring") < memory_gb(problem, 2, "gather") / 3
    assert memory_gb(problem, 2, "ulysses") < memory_gb(problem, 1, "ulysses")


def test_what_cannot_be_shared_is_an_error() -> None:
    with pytest.raises(ProblemError, match="self-attention of equal sequences"):
        predict(Problem.dense(seqlen_q=128, seqlen_k=256), 2, "gather")
    with pytest.raises(InputError, match="no multiple of 4"):
        predict(Problem.dense(seqlen=1026), 2, "gather")
    with pytest.raises(InputError, match="4 kv heads are no multiple of 8"):
        predict(Problem.dense(heads=4, seqlen=4096), 8, "ulysses")
    with pytest.raises(InputError, match="mode must be one of auto, ulysses, .*, got 'one'"):
        memory_gb(Problem.dense(seqlen=4096), 2, "one")


def test_a_mode_means_what_it_means_where_it_runs() -> None:
    problem = Problem.dense(heads=4, seqlen=65536, mask=Mask.causal())
    assert predict(problem, 4, "auto") == predict(problem, 4, "ulysses")
    assert predict(problem, 8, "auto") == predict(problem, 8, "ulysses+ring") != predict(problem, 8, "ring")


def test_windows_and_full_masks_have_the_work_that_they_leave() -> None:
    window, causal, full = (
        predict(Problem.dense(heads=8, seqlen=65536, mask=mask), 2, "ulysses").backward_ms
        for mask in (Mask.of_sides(4096, 0), Mask.causal(), Mask.full())
    )
    assert full == pytest.approx(2 * causal, rel=1e-3)
    assert window == pytest.approx(full * 4096 / 65536, rel=0.05)


def test_windows_stay_whole_unless_somebody_cuts_them() -> None:
    """As in the calls themselves: without segments one rank has all of a sequence."""
    windowed = Problem.dense(heads=16, kv_heads=4, seqlen=131_072, mask=Mask.window(4095, 0))
    assert predict(windowed, 8, "gather").ms == predict(windowed, 8, "gather", q_segment=0).ms
    assert predict(windowed, 8, "gather").ms > 4 * predict(windowed, 8, "gather", q_segment=16384).ms
    causal = Problem.dense(heads=16, kv_heads=4, seqlen=131_072, mask=Mask.causal())
    assert predict(causal, 8, "gather").ms == predict(causal, 8, "gather", q_segment=16384).ms


@pytest.mark.parametrize("ranks", [0, -1, 2.0, "2", None, True])
def test_ranks_that_there_cannot_be(ranks: Any) -> None:
    for function in (predict, memory_gb):
        with pytest.raises(ProblemError, match=f"ranks must be an integer >= 1, got {ranks!r}"):
            function(Problem.dense(seqlen=4096), ranks, "gather")


@pytest.mark.parametrize("q_segment", [-128, 100, True, 128.0])
def test_segments_that_there_cannot_be(q_segment: Any) -> None:
    with pytest.raises(ProblemError, match=rf"q_segment must be None, 0 .*, got {q_segment!r}"):
        predict(Problem.dense(seqlen=4096), 2, "gather", q_segment=q_segment)


@pytest.mark.parametrize(
    "wrong",
    [{"gb_per_s": 0.0}, {"gb_per_s": float("nan")}, {"forward_tflops": (1.0, -1.0)}, {"exchange_us": -1.0}],
)
def test_links_that_there_cannot_be(wrong: Any) -> None:
    with pytest.raises(CostError, match=f"^{next(iter(wrong))}"):
        Links(**wrong)

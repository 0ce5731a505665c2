"""What benchmarks/ makes of its rows: figures over runs, ratios, targets; and which points there are."""

from __future__ import annotations

import json
import math
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
MODES = {  # ms of every implementation of a made-up point
    ("dash_attn", "shift(ring=16)", True): 2.0,
    ("dash_attn", "shift", True): 1.8,
    ("dash_attn", "unordered (shift(ring=16))", False): 1.9,
    ("fa4", "spt", True): 2.2,
    ("fa4", "none", False): 1.6,
    ("fa2", "split", True): 5.0,
}


def load(name: str) -> ModuleType:
    spec = spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


summary = load("summary")


def rows_of(times: dict[Any, float | None] = MODES, **fields: Any) -> list[dict[str, Any]]:
    """Rows of one point, the first of them auto's; a time of None is an error."""
    point = {"set": "grid", "mask": "full", "head_dim": 64, "seqlen": 512, "batch": 32} | fields
    point = {"heads": 32, "kv_heads": 32, "placement": "policy"} | point
    rows = []
    for (impl, policy, deterministic), ms in times.items():
        row = point | {"impl": impl, "policy": policy, "deterministic": deterministic, "auto": not rows}
        run = {"error": "made up"} if ms is None else {"ms": ms, "spread": 0.01, "repeatable": deterministic}
        rows.append(summary.over_runs(row, [run]))
    return rows


def test_figures_over_runs() -> None:
    row = rows_of()[0]
    runs = [{"ms": ms, "spread": spread, "repeatable": True} for ms, spread in ((3, 0.1), (1, 0.3), (2, 0.2))]
    found = summary.over_runs(row, runs)
    assert (found["ms"], found["runs_ms"], found["spread"], found["repeatable"]) == (2, [3, 1, 2], 0.3, True)
    assert found["tflops"] == round(10 * 512**2 * 64 * 32 * 32 / 2e-3 / 1e12, 1)
    assert (summary.run_spread(found), summary.first_ms(found)) == (1.0, 3)
    assert math.isnan(summary.run_spread(row))  # one run has no spread
    assert summary.over_runs(row, [runs[0], runs[1] | {"repeatable": False}])["repeatable"] is False
    failed = summary.over_runs({"impl": "fa4"}, [runs[0], {"error": "out of memory"}])
    assert failed == {"impl": "fa4", "error": "out of memory"}


def test_ratios_are_those_of_the_fastest() -> None:
    found = summary.ratios_of(rows_of())
    assert found == pytest.approx(
        {
            summary.PEER: 2.2 / 2.0,
            summary.ANY_PEER: 1.6 / 2.0,
            summary.OTHER_BUILDS: 2.2 * 320 / 337 / 2.0,
            summary.ORDER: 1.9 / 2.0,
        }
    )
    assert list(found) == list(summary.RATIOS)
    slow = summary.ratios_of(rows_of(MODES | {("fa2", "split", True): 1.0}))
    assert slow[summary.PEER] == slow[summary.ANY_PEER] == slow[summary.OTHER_BUILDS] == 0.5
    cudnn = summary.ratios_of(rows_of(head_dim=128, mask="causal"))  # by its ratio the fastest there
    assert cudnn[summary.OTHER_BUILDS] == pytest.approx(2.2 / 1.179 / 2.0)
    outside = summary.ratios_of(rows_of(set="lengths", seqlen=1500))
    assert math.isnan(outside[summary.OTHER_BUILDS])
    without = summary.ratios_of(rows_of({**MODES, next(iter(MODES)): None}))
    assert all(map(math.isnan, without.values()))


def test_what_targets_look_at() -> None:
    rows = rows_of() + rows_of(seqlen=4096, batch=4) + rows_of(set="lengths", seqlen=1500)
    rows += rows_of(MODES | {("fa4", "spt", True): 1.0}, mask="causal", seqlen=1024)
    points = summary.by_point(rows)
    assert len(points) == 4

    def target(how: str, set_: str = "grid", seqlens: tuple[int, ...] = ()) -> Any:
        return summary.reached(summary.Target("", summary.PEER, set_, how, 1.0, 3, seqlens), points)

    assert target("least") == (0.5, 3)
    assert target("geometric mean") == (pytest.approx((1.1 * 1.1 * 0.5) ** (1 / 3)), 3)
    assert target("least", seqlens=(512, 4096)) == (pytest.approx(1.1), 2)
    assert target("least", "lengths") == (pytest.approx(1.1), 1)
    value, count = target("least", "grouped")
    assert (math.isnan(value), count) == (True, 0)
    points |= summary.by_point(rows_of({**MODES, next(iter(MODES)): None}, seqlen=8192))
    value, count = target("least")  # a point that failed is not left out
    assert (math.isnan(value), count) == (True, 4)


def test_targets_name_ratios_and_ways() -> None:
    assert {target.ratio for target in summary.TARGETS} <= set(summary.RATIOS)
    assert {target.how for target in summary.TARGETS} == {"least", "geometric mean"}
    assert {target.set for target in summary.TARGETS} == {"grid", "grouped", "lengths"}
    for by_kernel in summary.OTHER_BUILDS_TFLOPS.values():
        assert {len(x) for x in by_kernel.values()} == {len(summary.OTHER_BUILDS_SEQLENS)}


def test_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "summary", summary)
    report = load("report")
    few = [summary.TARGETS[0]._replace(points=1, at_least=figure) for figure in (1.09, 1.11)]
    monkeypatch.setattr(report, "TARGETS", (*few, *summary.TARGETS))
    rows = rows_of() + rows_of({**MODES, next(iter(MODES)): None}, set="grouped", kv_heads=8, mask="causal")
    text = report.report(rows)
    assert "shift policy 1.111 x auto" in text
    assert "no figures: dash_attn shift(ring=16), 1 rows: made up" in text
    outcomes = [line.split()[0] for line in text.split("targets\n")[1].splitlines()]
    assert outcomes == ["met", "missed", *7 * ["incomplete"], "not"]
    assert "did not repeat" not in text
    rows[3] = rows[3] | {"repeatable": False}
    assert "did not repeat: D64 full 512 fa4 spt" in report.report(rows)
    slower = rows_of(MODES | {next(iter(MODES)): 2.0585})  # 83.46 TFLOP/s, 83.5 in the row: rounded once
    assert slower[0]["tflops"] == 83.5
    assert re.search(r"D64 full 512 +83  ", report.report(slower))


def test_rows_of_auto_are_named_as_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    backward, points = load("backward"), load("points")
    rows = json.loads((FOLDER / "results" / "h200-backward.json").read_text())["rows"]
    named = {
        (row["head_dim"], row["mask"], row["seqlen"]): (row["policy"], row["placement"])
        for row in rows
        if row["set"] == "grid" and row["auto"] and row["deterministic"]
    }
    for point in points.grid((64, 128), ("full", "causal"), points.SEQLENS):
        shape = point.shape
        name = (shape.head_dim, "causal" if shape.causal else "full", shape.seqlen)
        assert backward._chosen(point) == named.pop(name)
    (grouped, *_) = points.beyond_the_grid((128,), ("causal",))
    assert backward._chosen(grouped) == ("by_length(long_from=0, shift_from=8192)", "policy")
    assert not named


def test_ratios_of_cudnn_are_those_of_its_run() -> None:
    rows = json.loads((FOLDER / "results" / "h200-cudnn.json").read_text())["rows"]
    ms: dict[str, dict[tuple[int, str], list[float]]] = {"fa4": {}, "cudnn": {}}
    for row in rows:
        if row["deterministic"]:
            ms[row["impl"]].setdefault((row["head_dim"], row["mask"]), []).append(row["ms"])
    for panel, ratios in summary.CUDNN_TO_FA4.items():
        measured = [a / b for a, b in zip(ms["fa4"][panel], ms["cudnn"][panel], strict=True)]
        assert list(ratios) == [round(x, 3) for x in measured]


def test_points() -> None:
    points = load("points")
    grid = list(points.grid((64, 128), ("full", "causal"), points.SEQLENS))
    others = list(points.beyond_the_grid((64, 128), ("full", "causal")))
    assert [len([p for p in others if p.set == kind]) for kind in ("grouped", "lengths")] == [4, 28]
    assert len(grid) == 24
    assert len(set(grid + others)) == 56
    for point in grid + others:
        tokens, hidden = point.shape.batch * point.shape.seqlen, point.shape.heads * point.shape.head_dim
        assert hidden == points.HIDDEN
        assert tokens <= points.TOKENS < tokens + point.shape.seqlen or point.shape.batch == 1
    assert all(p.shape.batch * p.shape.seqlen == points.TOKENS for p in grid)
    assert {p.shape.problem.group for p in others if p.set == "grouped"} == {4, 8}
    for target in summary.TARGETS:
        of_target = [p for p in grid + others if p.set == target.set]
        assert target.points == len(
            [p for p in of_target if p.shape.seqlen in (target.seqlens or (p.shape.seqlen,))]
        )

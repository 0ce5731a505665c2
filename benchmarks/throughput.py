"""What the docs quote from the throughput benchmark, h200-backward.json."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from documents import STATISTICS, Value, read, table_of
from ranking import plan_of, sums_as
from summary import (
    ANY_PEER,
    ORDER,
    OTHER_BUILDS,
    PEER,
    POINT,
    TARGETS,
    Points,
    Row,
    by_point,
    fastest,
    first_ms,
    ours,
    ratios_of,
    reached,
    run_spread,
    tflops,
)

from dash_attn.model.roofline import measured_cycles, roofline
from dash_attn.schedule import build_plan, choose_policy

MAIN, CUDNN = "h200-backward.json", "h200-cudnn.json"
"""All but cuDNN's deterministic mode; and that one, beside FlashAttention-4, from an earlier run."""

OTHER_KERNELS_MS = 0.039
"""Preprocessing at 16,384 tokens and hidden size 2,048 (docs/performance.md)."""


def _is_long_128(mask: str, point: Row) -> bool:
    here: bool = (point["set"], point["mask"], point["head_dim"]) == ("lengths", mask, 128)
    return here and point["seqlen"] >= 32_768


RATIO_NAMES = {"det": PEER, "any": ANY_PEER, "builds": OTHER_BUILDS, "order": ORDER}
SELECTIONS: Mapping[str, Callable[[Row], bool]] = {
    "grid": lambda point: point["set"] == "grid",
    "grid-short": lambda point: point["set"] == "grid" and point["seqlen"] <= 1024,
    "grouped": lambda point: point["set"] == "grouped",
    "lengths": lambda point: point["set"] == "lengths",
    "long-causal-128": partial(_is_long_128, "causal"),
    "long-full-128": partial(_is_long_128, "full"),
}
"""Points of the throughput benchmark, chosen by the fields of POINT."""


def grid_rows(file: str = MAIN) -> list[Row]:
    """The throughput rows at the paper's 24 points."""
    return [row for row in read(file) if row["set"] == "grid"]


def throughput_values() -> Iterator[tuple[str, Value]]:
    """``SELECTION-RATIO-STATISTIC`` for all of them, then tables and counts."""
    for selection in SELECTIONS:
        for ratio in RATIO_NAMES:
            if selection.startswith("grid") or ratio in ("det", "any"):
                for statistic in STATISTICS:
                    yield f"{selection}-{ratio}-{statistic}", partial(_ratio, selection, ratio, statistic)
    yield "grid-table", grid_table
    yield "targets", target_table
    yield "distance", distance_table
    yield "points", lambda: str(len(_points()))
    for name, field in (("mhz", "sm_mhz"), ("watts", "watts")):
        for of, pick in (("least", min), ("most", max)):
            yield f"grid-{name}-{of}", partial(_of_auto, field, pick)
    yield "spread-median", lambda: f"{statistics.median(_spreads()):.1%}"
    yield "spread-most", lambda: f"{max(_spreads()):.1%}"
    yield "spread-rows", lambda: str(len(_spreads()))
    yield "unordered-points", lambda: str(len(_unordered()))
    yield "unordered-repeated", lambda: str(sum(row["repeatable"] for row in _unordered()))
    yield "auto-rows", lambda: str(len(_auto_rows()))
    yield "auto-today", lambda: str(sum(map(_is_auto_today, _auto_rows())))


def _points() -> Points:
    return by_point(read(MAIN))


def _ratio(selection: str, ratio: str, statistic: str) -> str:
    wanted, what = SELECTIONS[selection], RATIO_NAMES[ratio]
    points = _points().items()
    values = [ratios_of(rows)[what] for point, rows in points if wanted(dict(zip(POINT, point)))]
    return STATISTICS[statistic](values)


def _auto_rows() -> list[Row]:
    return [row for row in read(MAIN) if row["auto"] and row["deterministic"]]


def _of_auto(field: str, pick: Callable[[Sequence[float]], float]) -> str:
    return f"{pick([row[field] for row in _auto_rows() if row['set'] == 'grid']):,.0f}"


def _is_auto_today(row: Row) -> bool:
    """Whether ``policy="auto"`` still sums in the order that this row was measured with."""
    problem = plan_of(row).problem
    return sums_as(build_plan(problem, *choose_policy(problem)), row["fingerprint"])


def _spreads() -> list[float]:
    return [x for x in map(run_spread, read(MAIN)) if math.isfinite(x)]


def _unordered() -> list[Row]:
    return [row for row in grid_rows() if row["impl"] == "dash_attn" and not row["deterministic"]]


def grid_table() -> str:
    """TFLOP/s and ratios at the points of the grid."""
    lines = []
    for point, rows in _points().items():
        facts = dict(zip(POINT, point))
        if facts["set"] != "grid":
            continue
        peers = [row for row in rows if row["impl"] != "dash_attn"]
        auto, any_peer = ours(rows, lambda row: row["auto"]), fastest(peers)
        exact = fastest([row for row in peers if row["deterministic"] and row["impl"] == "fa4"])
        if auto is None or any_peer is None or exact is None:
            raise ValueError(f"a side of {point} has no figures")
        speeds = [f"{tflops(row, row['ms']):.0f}" for row in (auto, exact, any_peer)]
        line = [facts["head_dim"], facts["mask"], f"{facts['seqlen']:,}", *speeds]
        ratios = ratios_of(rows)
        lines.append([*line, *(f"{ratios[ratio]:.2f}" for ratio in (PEER, OTHER_BUILDS, ANY_PEER, ORDER))])
    head = ["head dim", "mask", "tokens", "`auto`", "FA4 det", "any", "`auto` / FA4 det"]
    return table_of([*head, "`auto` / det", "`auto` / any", "ordered / unordered"], lines)


def target_table() -> str:
    """Each target, what was reached and what was wanted."""
    lines = []
    for target in TARGETS:
        value, count = reached(target, _points())
        if count != target.points:
            raise ValueError(f"{target.what}: {count} of {target.points} points were measured")
        outcome = "met" if value >= target.at_least else "**missed**"
        lines.append([target.what, target.how, f"{value:.3f}", f"{target.at_least:.2f}", outcome])
    return table_of(["target", "figure", "reached", "wanted", ""], lines)


def distance_table() -> str:
    """Of what auto runs, how many cycles a task takes, by length, and the share of the bound."""
    rows = [row for row in grid_rows() if row["auto"] and row["deterministic"]]
    lengths = sorted({row["seqlen"] for row in rows})
    lines = []
    for head_dim in (64, 128):
        for mask in ("full", "causal"):
            line: list[object] = [head_dim, mask]
            for seqlen in lengths:
                wanted = (head_dim, mask, seqlen)
                (row,) = (row for row in rows if (row["head_dim"], row["mask"], row["seqlen"]) == wanted)
                clock = row["sm_mhz"] / 1000  # in the first run
                cycles = measured_cycles(plan_of(row).problem, first_ms(row), OTHER_KERNELS_MS, clock)
                line.append(f"{cycles:,.0f} ({roofline(head_dim).bound / cycles:.0%})")
            lines.append(line)
    return table_of(["head dim", "mask", *(f"{seqlen:,}" for seqlen in lengths)], lines)

"""What the rows of ``backward.py`` say: figures over the runs, ratios of speeds, and targets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Row = dict[str, Any]
Points = Mapping[tuple[Any, ...], Sequence[Row]]

POINT = ("set", "head_dim", "mask", "seqlen", "heads", "kv_heads")
"""The fields of a row that say which point it belongs to."""

PEER, ANY_PEER, OTHER_BUILDS, ORDER = RATIOS = (
    "auto / fastest deterministic peer",
    "auto / fastest peer of any kind",
    "auto / fastest deterministic kernel, other builds included",
    "ordered / unordered",
)
"""Ratios of speeds at a point. Peers are those of the run."""

OTHER_BUILDS_SEQLENS = (512, 1024, 2048, 4096, 8192, 16_384)
OTHER_BUILDS_TFLOPS: Mapping[tuple[int, str], Mapping[str, Sequence[float]]] = {
    (64, "full"): {
        "fa4": (320, 429, 505, 555, 527, 536),
        "fa3": (275, 328, 368, 406, 448, 509),
        "DASH shift": (324, 411, 481, 495, 494, 503),
        "DASH descending": (337, 329, 335, 364, 417, 499),
    },
    (64, "causal"): {
        "fa4": (197, 309, 423, 503, 523, 522),
        "fa3": (190, 294, 399, 488, 520, 529),
        "DASH symmetric shift": (205, 303, 387, 449, 473, 468),
    },
    (128, "full"): {
        "fa4": (299, 432, 533, 581, 615, 602),
        "fa3": (299, 399, 460, 512, 535, 576),
        "DASH shift": (333, 447, 528, 551, 559, 568),
    },
    (128, "causal"): {
        "fa4": (206, 314, 427, 515, 564, 574),
        "fa3": (199, 300, 403, 477, 511, 508),
        "DASH symmetric shift": (206, 302, 394, 460, 496, 498),
        "DASH descending": (204, 308, 379, 422, 473, 486),
    },
}
"""TFLOP/s of deterministic kernels that are built from source, FlashAttention-3 in C++ and the DASH authors'
fork of it, at ``OTHER_BUILDS_SEQLENS``, by head dim and mask: one run on an H200 (November 2026) beside
FlashAttention-4 4.0.0b36. Only their ratios to it, and to one another, are used."""

FREE_FA3_TFLOPS: Mapping[tuple[int, str], Sequence[float]] = {
    (64, "full"): (325, 431, 507, 525, 517, 528),
    (64, "causal"): (189, 300, 419, 510, 550, 547),
    (128, "full"): (344, 490, 575, 596, 597, 597),
    (128, "causal"): (221, 346, 485, 576, 635, 591),
}
"""Of FlashAttention-3 without order, in the run of ``OTHER_BUILDS_TFLOPS``."""

CUDNN_TO_FA4: Mapping[tuple[int, str], Sequence[float]] = {
    (64, "full"): (0.669, 0.585, 0.530, 0.497, 0.474, 0.471),
    (64, "causal"): (0.882, 0.747, 0.644, 0.607, 0.602, 0.596),
    (128, "full"): (1.141, 0.966, 0.894, 0.856, 0.820, 0.796),
    (128, "causal"): (1.179, 1.048, 0.919, 0.853, 0.832, 0.840),
}
"""Speed of cuDNN's deterministic backward as a multiple of FlashAttention-4's, at the same lengths: cuDNN
9.19 in the run of ``h200-cudnn.json``."""


class Target(NamedTuple):
    """What a ratio is to reach.

    Attributes:
        what: in words.
        ratio: one of RATIOS.
        set: of points.
        how: "least" or "geometric mean" of the points.
        at_least: the figure.
        points: how many points there are.
        seqlens: only these lengths; empty: all.
    """

    what: str
    ratio: str
    set: str
    how: str
    at_least: float
    points: int
    seqlens: tuple[int, ...] = ()


TARGETS = (
    Target("grid: no deterministic peer is faster at any point", PEER, "grid", "least", 1.00, 24),
    Target("grid: the same, with cuDNN and kernels of other builds", OTHER_BUILDS, "grid", "least", 1.00, 24),
    Target("grid: as fast as the fastest peer of the run", ANY_PEER, "grid", "geometric mean", 1.00, 24),
    Target(
        "grid, 512 and 1,024 tokens: faster than it", ANY_PEER, "grid", "geometric mean", 1.15, 8, (512, 1024)
    ),
    Target("grid, stretch: 10 % faster than it", ANY_PEER, "grid", "geometric mean", 1.10, 24),
    Target("grid: order costs at most 1 %", ORDER, "grid", "geometric mean", 0.99, 24),
    Target(
        "grouped heads: faster than deterministic peers at every point", PEER, "grouped", "least", 1.05, 4
    ),
    Target("other lengths: no cliff at any point", PEER, "lengths", "least", 0.97, 28),
)


def over_runs(row: Row, runs: Sequence[Row]) -> Row:
    """The row with what its runs found.

    Args:
        row: what was measured.
        runs: of each run either its ``ms`` (median of the rounds), ``spread`` (distance of their quartiles,
            as a share of it) and ``repeatable``, or an ``error``.

    ``ms`` becomes the median over runs, of which ``runs_ms`` has all; ``spread`` is the largest of a run,
    and ``repeatable`` says that all of them were. An error in any run leaves no figures.
    """
    for run in runs:
        if "error" in run:
            return row | {"error": run["error"]}
    times = [run["ms"] for run in runs]
    ms = statistics.median(times)
    return row | {
        "repeatable": all(run["repeatable"] for run in runs),
        "ms": round(ms, 5),
        "runs_ms": [round(x, 5) for x in times],
        "spread": round(max(run["spread"] for run in runs), 4),
        "tflops": round(tflops(row, ms), 1),
    }


def flops(row: Row) -> float:
    """Of one backward: 2.5 * 4 S^2 D H B, half of that under a causal mask."""
    found: float = 10.0 * row["seqlen"] ** 2 * row["head_dim"] * row["heads"] * row["batch"]
    return found / (2 if row["mask"] == "causal" else 1)


def tflops(row: Row, ms: float) -> float:
    """TFLOP/s of a backward that takes so long."""
    return flops(row) / ms / 1e9


def by_point(rows: Iterable[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """The rows of each point, in the order of the rows."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[field] for field in POINT), []).append(row)
    return found


def ratios_of(rows: Sequence[Row]) -> dict[str, float]:
    """RATIOS of one point, greater than 1 where ours is faster; not a number where a side has no figures."""
    auto = _ms(ours(rows, lambda row: row["auto"]))
    unordered = _ms(ours(rows, lambda row: not row["deterministic"]))
    peers = [row for row in rows if row["impl"] != "dash_attn"]
    deterministic = [row for row in peers if row["deterministic"]]
    exact, loose = _ms(fastest(deterministic)), _ms(fastest(peers))
    others = _other_builds_ms(deterministic)
    others = min(exact, others) if math.isfinite(others) else math.nan
    return dict(zip(RATIOS, (x / auto for x in (exact, loose, others, unordered)), strict=True))


def _other_builds_ms(deterministic: Sequence[Row]) -> float:
    """Time of the fastest kernel of OTHER_BUILDS_TFLOPS, or of cuDNN, by its ratio to FlashAttention-4's."""
    fa4 = next((row for row in deterministic if row["impl"] == "fa4" and "ms" in row), None)
    if fa4 is None or fa4["set"] != "grid" or fa4["seqlen"] not in OTHER_BUILDS_SEQLENS:
        return math.nan
    at = OTHER_BUILDS_SEQLENS.index(fa4["seqlen"])
    panel = fa4["head_dim"], fa4["mask"]
    speeds = {name: x[at] for name, x in OTHER_BUILDS_TFLOPS[panel].items()}
    of_fa4 = speeds.pop("fa4")
    return float(fa4["ms"]) / max(CUDNN_TO_FA4[panel][at], *(x / of_fa4 for x in speeds.values()))


def ours(rows: Sequence[Row], wanted: Callable[[Row], bool]) -> Row | None:
    """The first row of dash_attn that is wanted."""
    return next((row for row in rows if row["impl"] == "dash_attn" and wanted(row)), None)


def fastest(rows: Iterable[Row]) -> Row | None:
    """The row with the least time, None if no row has one."""
    return min((row for row in rows if "ms" in row), key=lambda row: row["ms"], default=None)


def _ms(row: Row | None) -> float:
    return math.nan if row is None else float(row.get("ms", math.nan))


def values_of(points: Points, ratio: str, set_: str, seqlens: Sequence[int] = ()) -> list[float]:
    """The ratio at every point of a set (and of some lengths), in their order."""
    found = []
    for point, rows in points.items():
        facts = dict(zip(POINT, point))
        if facts["set"] == set_ and (not seqlens or facts["seqlen"] in seqlens):
            found.append(ratios_of(rows)[ratio])
    return found


def least(values: Sequence[float]) -> float:
    """The least, not a number where one of the values is none or there are no values."""
    return min(values) if values and all(map(math.isfinite, values)) else math.nan


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean, not a number where one of the values is none or there are no values."""
    return statistics.geometric_mean(values) if math.isfinite(least(values)) else math.nan


def reached(target: Target, points: Points) -> tuple[float, int]:
    """What the target's ratio is and how many points it is of; not a number if one of them lacks figures."""
    values = values_of(points, target.ratio, target.set, target.seqlens)
    return (least if target.how == "least" else geometric_mean)(values), len(values)


def run_spread(row: Row) -> float:
    """Slowest run less fastest run, as a share of the median; not a number of less than two runs."""
    times = row.get("runs_ms", ())
    return float((max(times) - min(times)) / row["ms"]) if len(times) > 1 else math.nan


def first_ms(row: Row) -> float:
    """Median of the first run, the one in which all policies were measured."""
    return float(row.get("runs_ms", [row["ms"]])[0])

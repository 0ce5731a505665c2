"""What the docs quote of forward and backward together, beside the fastest of any peers.

Nobody has to take both from one library. So a point's mark is the fastest forward of any peer and the fastest
backward of any peer, each timed by itself. Beside it the fastest of what users can call: "functions".
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from documents import STATISTICS, Value, table_of
from forward_values import FA3_TO_FA4, Point, by_point
from points import SEQLENS
from summary import CUDNN_TO_FA4, OTHER_BUILDS_TFLOPS

__all__ = ["total_values"]

FA3_BACKWARD_TO_FA4: Mapping[tuple[int, str], Sequence[float]] = {
    (64, "full"): (0.98, 0.98, 0.99, 0.95, 0.99, 0.99),
    (64, "causal"): (0.90, 0.96, 0.99, 1.02, 1.04, 1.04),
    (128, "full"): (0.99, 0.98, 0.98, 0.93, 1.00, 0.97),
    (128, "causal"): (0.92, 0.95, 1.01, 1.02, 1.02, 0.97),
}
"""Speed of FlashAttention-3's backward / FlashAttention-4's, both without order, at SEQLENS: a run of single
calls on an H200 (November 2026). It must be built from source, so it enters by these, in "builds" only."""

POINTS = 24
DETERMINISTIC = ("fa4_det", "cudnn_det")
BACKWARDS = {"det": DETERMINISTIC, "any": (*DETERMINISTIC, "fa4", "cudnn")}
BACKWARDS["builds"] = (*BACKWARDS["any"], "fa3", "builds_det")
"""Which backwards count. "builds": also FlashAttention-3's and the DASH authors' fork of it, by ratio."""
NAMES = {"fa4": "FA4", "fa4_det": "FA4", "cudnn": "cuDNN", "cudnn_det": "cuDNN", "fa3": "FA3"}
TARGETS = (("geometric mean", 1.05), ("least", 1.00), ("geometric mean, stretch", 1.08))
"""Of the ratios to peers of any kind."""


def total_values(file: str) -> Iterator[tuple[str, Value]]:
    """``total-WHICH-STATISTIC``, ``total-single-WHICH-STATISTIC`` of single calls, a table, and targets;
    ``total-functions-STATISTIC`` where public functions of peers were timed, too."""
    if not _points(file, "sustained"):
        return  # not measured yet
    for timing, prefix in (("sustained", "total"), ("single", "total-single")):
        for which in BACKWARDS:
            for statistic in STATISTICS:
                yield f"{prefix}-{which}-{statistic}", partial(_statistic, file, timing, which, statistic)
    if any("fa4 function" in ms for ms in _points(file, "sustained").values()):
        for statistic in STATISTICS:
            yield (
                f"total-functions-{statistic}",
                partial(_statistic, file, "sustained", "functions", statistic),
            )
    yield "total-table", partial(total_table, file)
    yield "total-targets", partial(target_table, file)


def _points(file: str, timing: str) -> dict[Point, dict[str, float]]:
    """Milliseconds by point and by what was timed, with what enters by ratio."""
    found = by_point("total", timing, "ms", file)
    for (head_dim, mask, seqlen), ms in found.items():
        at = SEQLENS.index(seqlen)
        if "fa4 forward" in ms:
            ms["fa3 forward"] = ms["fa4 forward"] / FA3_TO_FA4[head_dim, mask][at]
        if "fa4 backward" in ms:
            ms["fa3 backward"] = ms["fa4 backward"] / FA3_BACKWARD_TO_FA4[head_dim, mask][at]
        if "fa4_det backward" in ms:
            by_ratio = ms["fa4_det backward"] / CUDNN_TO_FA4[head_dim, mask][at]
            ms.setdefault("cudnn_det backward", by_ratio)  # it is timed where cuDNN's package is installed
            speeds = {name: x[at] for name, x in OTHER_BUILDS_TFLOPS[head_dim, mask].items()}
            ms["builds_det backward"] = ms["fa4_det backward"] * speeds.pop("fa4") / max(speeds.values())
    return found


def _fastest(ms: Mapping[str, float], direction: str, names: Sequence[str]) -> tuple[float, str]:
    """Milliseconds and name of the fastest of these forwards or backwards."""
    found = [(ms[f"{name} {direction}"], name) for name in names if f"{name} {direction}" in ms]
    if not found:
        raise ValueError(f"no {direction} of {', '.join(names)} was measured")
    return min(found)


def _peers(ms: Mapping[str, float], which: str) -> float:
    """Milliseconds of the fastest forward and the fastest backward that count, or of the fastest function."""
    if which == "functions":
        return _fastest(ms, "function", ("fa4_det", "fa4", "cudnn"))[0]
    forward, _ = _fastest(ms, "forward", ("fa4", "cudnn", "fa3"))
    return forward + _fastest(ms, "backward", BACKWARDS[which])[0]


def _ratios(file: str, timing: str, which: str) -> list[float]:
    """Our speed / that of the peers, greater than 1 where ours is faster."""
    points = _points(file, timing)
    if len(points) != POINTS:
        raise ValueError(f"{len(points)} of {POINTS} points of forward and backward were measured")
    return [_peers(ms, which) / ms["dash_attn"] for ms in points.values()]


def _statistic(file: str, timing: str, which: str, statistic: str) -> str:
    return STATISTICS[statistic](_ratios(file, timing, which))


def total_table(file: str) -> str:
    """Milliseconds of ours and of the fastest peers, and ratios."""
    lines = []
    for (head_dim, mask, seqlen), ms in _points(file, "sustained").items():
        best = [_fastest(ms, "forward", ("fa4", "cudnn", "fa3"))]
        best += [_fastest(ms, "backward", BACKWARDS[which]) for which in ("det", "any")]
        shown = [f"{x:.3f} {NAMES[name]}" for x, name in best]
        ratios = [f"{_peers(ms, which) / ms['dash_attn']:.2f}" for which in ("det", "any")]
        lines.append([head_dim, mask, f"{seqlen:,}", f"{ms['dash_attn']:.3f}", *shown, *ratios])
    head = ["head dim", "mask", "tokens", "ours, ms", "forward", "backward, det", "backward, any"]
    return table_of([*head, "ours / det", "ours / any"], lines)


def target_table(file: str) -> str:
    """What was reached and what was wanted, of peers of any kind."""
    ratios, lines = _ratios(file, "sustained", "any"), []
    for figure, wanted in TARGETS:
        value = min(ratios) if figure == "least" else statistics.geometric_mean(ratios)
        outcome = "met" if value >= wanted else "**missed**"
        lines.append([figure, f"{value:.3f}", f"{wanted:.2f}", outcome])
    return table_of(["forward and backward / fastest of any peers", "reached", "wanted", ""], lines)

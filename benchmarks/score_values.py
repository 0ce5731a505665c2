"""What the docs quote from the benchmark of softcaps and sinks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from documents import STATISTICS, Value, read, table_of

__all__ = ["score_values"]

FILE = "h200-scores.json"
PASSES = ("forward", "backward")
RATIOS = {
    "sink": ("sink", "plain"),
    "softcap": ("softcap", "plain"),
    "wide": ("softcap, wide", "plain"),
    "wider": ("softcap, wider", "plain"),
    "triton": ("softcap, triton", "softcap"),
}
"""Whose time is divided by whose."""

Point = tuple[int, str, int]


def score_values() -> Iterator[tuple[str, Value]]:
    """``RATIO-PASS-STATISTIC`` over all points, the same of one head dim, and a table."""
    for name in RATIOS:
        for which in PASSES:
            for statistic in STATISTICS:
                for head_dim in (0, 64, 128, 256):
                    of = f"-{head_dim}" if head_dim else ""
                    value = partial(_statistic, name, which, statistic, head_dim)
                    yield f"{name}-{which}{of}-{statistic}", value
    yield "table", score_table


def _times() -> dict[Point, dict[tuple[str, str], float]]:
    found: dict[Point, dict[tuple[str, str], float]] = {}
    for row in read(FILE):
        point = (row["head_dim"], row["mask"], row["seqlen"])
        found.setdefault(point, {})[row["pass"], row["impl"]] = row["ms"]
    return found


def _ratio(ms: dict[tuple[str, str], float], name: str, which: str) -> float:
    above, below = RATIOS[name]
    return ms[which, above] / ms[which, below]


def _statistic(name: str, which: str, statistic: str, head_dim: int) -> str:
    points = [ms for point, ms in _times().items() if head_dim in (0, point[0])]
    return STATISTICS[statistic]([_ratio(ms, name, which) for ms in points])


def score_table() -> str:
    """Ratios of times, forward / backward."""
    lines: list[Sequence[object]] = []
    for (head_dim, mask, seqlen), ms in _times().items():
        cells = (" / ".join(f"{_ratio(ms, name, which):.2f}" for which in PASSES) for name in RATIOS)
        lines.append([head_dim, mask, f"{seqlen:,}", *cells])
    head = [
        "head dim",
        "mask",
        "tokens",
        "sink",
        "softcap",
        "softcap, wide scores",
        "wider scores",
        "Triton with softcap / ours",
    ]
    return table_of(head, lines)

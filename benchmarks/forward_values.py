"""What the docs quote of the forward's benchmark: a table of the grid and ratios to the fastest peer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from documents import STATISTICS, Value, document, read, table_of
from points import SEQLENS

from dash_attn.schedule import ForwardNumerics

__all__ = ["forward_values"]

FA3_TO_FA4: Mapping[tuple[int, str], Sequence[float]] = {
    (64, "full"): (1.03, 0.96, 1.00, 1.00, 1.01, 0.99),
    (64, "causal"): (1.24, 1.15, 1.09, 1.04, 1.03, 0.99),
    (128, "full"): (1.18, 1.13, 1.05, 1.02, 1.01, 1.01),
    (128, "causal"): (1.21, 1.22, 1.16, 1.11, 1.09, 1.08),
}
"""Speed of FlashAttention-3's forward (C++, its main branch of August 2026) / FlashAttention-4's, at SEQLENS:
one run on an H200 in sustained mode (November 2026). It must be built from source, so it enters by these."""

Point = tuple[int, str, int]


FASTEST: Mapping[str, tuple[str, Sequence[str]]] = {
    "any": ("sustained", ("fa4", "cudnn", "fa3")),
    "fa4": ("sustained", ("fa4",)),
    "single": ("single", ("fa4", "cudnn")),
}
"""Ratios of the grid by name: timing, and the peers of which the fastest counts."""


def forward_values() -> Iterator[tuple[str, Value]]:
    yield "grid-table", grid_table
    yield "sets-of-today", _sets_of_today
    for name in FASTEST:
        for statistic in STATISTICS:
            yield f"{name}-{statistic}", partial(_statistic, name, statistic)
    for of, pick in (("least", min), ("most", max)):
        yield f"grouped-{of}", partial(_grouped, pick)


def by_point(
    set_: str, timing: str, figure: str, file: str = "h200-forward.json"
) -> dict[Point, dict[str, float]]:
    """A figure of every contender, at the points of a set that has the grid's."""
    found: dict[Point, dict[str, float]] = {}
    for row in read(file):
        if (row["set"], row["timing"]) == (set_, timing):
            found.setdefault((row["head_dim"], row["mask"], row["seqlen"]), {})[row["impl"]] = row[figure]
    return found


def _grid(timing: str = "sustained") -> dict[Point, dict[str, float]]:
    """TFLOP/s by point and contender, with what enters by ratio."""
    found = by_point("grid", timing, "tflops")
    for (head_dim, mask, seqlen), speeds in found.items():
        speeds["fa3"] = speeds["fa4"] * FA3_TO_FA4[head_dim, mask][SEQLENS.index(seqlen)]
    return found


def _sets_of_today() -> str:
    """How many sets were measured with today's numerics of the forward."""
    today = ForwardNumerics(128, "bfloat16").fingerprint
    headers = document("h200-forward.json")["headers"]
    return str(sum(header["numerics"] == today for header in headers.values()))


def _ratio(speeds: Mapping[str, float], peers: Sequence[str]) -> float:
    """Our speed / that of the fastest of these."""
    return speeds["dash_attn"] / max(speeds[peer] for peer in peers)


def _statistic(name: str, statistic: str) -> str:
    timing, peers = FASTEST[name]
    return STATISTICS[statistic]([_ratio(speeds, peers) for speeds in _grid(timing).values()])


def grid_table() -> str:
    lines = [
        [head_dim, mask, f"{seqlen:,}", *(f"{x[name]:.0f}" for name in ("dash_attn", "fa4", "cudnn", "fa3")),
         *(f"{_ratio(x, FASTEST[name][1]):.2f}" for name in ("fa4", "any"))]
        for (head_dim, mask, seqlen), x in _grid().items()
    ]  # fmt: skip
    head = [
        "head dim",
        "mask",
        "tokens",
        "ours",
        "FA4",
        "cuDNN",
        "FA3, by ratio",
        "ours / FA4",
        "ours / fastest",
    ]
    return table_of(head, lines)


def _grouped(pick) -> str:
    ours, peer = ([row["tflops"] for row in read("h200-forward.json")
                   if (row["set"], row["timing"], row["impl"]) == ("grouped", "sustained", impl)]
                  for impl in ("dash_attn", "fa4"))  # fmt: skip
    return f"{pick(a / b for a, b in zip(ours, peer)):.2f}"

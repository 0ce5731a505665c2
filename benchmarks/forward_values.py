"""What the docs quote of the forward's benchmark: a table of the grid and ratios to the fastest peer."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from documents import Value, document, read, table_of
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


def forward_values() -> Iterator[tuple[str, Value]]:
    yield "grid-table", grid_table
    yield "sets-of-today", _sets_of_today
    yield "single-behind", lambda: str(sum(x < 1 for x in _single()))
    yield "single-least", lambda: f"{min(_single()):.2f}"
    yield "single-mean", lambda: f"{statistics.geometric_mean(_single()):.2f}"
    for name, peers in (("any", ("fa4", "cudnn", "fa3")), ("fa4", ("fa4",))):
        yield f"{name}-mean", lambda peers=peers: f"{statistics.geometric_mean(_ratios(peers).values()):.2f}"
        yield f"{name}-least", lambda peers=peers: f"{min(_ratios(peers).values()):.2f}"
        yield f"{name}-behind", lambda peers=peers: str(sum(x < 1 for x in _ratios(peers).values()))
    for of, pick in (("least", min), ("most", max)):
        yield f"grouped-{of}", partial(_grouped, pick)


def _grid() -> dict[Point, dict[str, float]]:
    """TFLOP/s in sustained mode by point and contender."""
    found: dict[Point, dict[str, float]] = {}
    for row in read("h200-forward.json"):
        if (row["set"], row["timing"]) == ("grid", "sustained"):
            found.setdefault((row["head_dim"], row["mask"], row["seqlen"]), {})[row["impl"]] = row["tflops"]
    for (head_dim, mask, seqlen), speeds in found.items():
        speeds["fa3"] = speeds["fa4"] * FA3_TO_FA4[head_dim, mask][SEQLENS.index(seqlen)]
    return found


def _sets_of_today() -> str:
    """How many sets were measured with today's numerics of the forward."""
    today = ForwardNumerics(128, "bfloat16").fingerprint
    headers = document("h200-forward.json")["headers"]
    return str(sum(header["numerics"] == today for header in headers.values()))


def _single() -> list[float]:
    """Of the grid in single calls: our speed / that of the faster of FlashAttention-4 and cuDNN."""
    found: dict[Point, dict[str, float]] = {}
    for row in read("h200-forward.json"):
        if (row["set"], row["timing"]) == ("grid", "single"):
            found.setdefault((row["head_dim"], row["mask"], row["seqlen"]), {})[row["impl"]] = row["tflops"]
    return [x["dash_attn"] / max(x["fa4"], x["cudnn"]) for x in found.values()]


def _ratios(peers: Sequence[str]) -> dict[Point, float]:
    """Our speed / that of the fastest of these."""
    return {point: x["dash_attn"] / max(x[peer] for peer in peers) for point, x in _grid().items()}


def grid_table() -> str:
    lines = [
        [head_dim, mask, f"{seqlen:,}", *(f"{x[name]:.0f}" for name in ("dash_attn", "fa4", "cudnn", "fa3")),
         f"{_ratios(('fa4',))[head_dim, mask, seqlen]:.2f}",
         f"{_ratios(('fa4', 'cudnn', 'fa3'))[head_dim, mask, seqlen]:.2f}"]
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

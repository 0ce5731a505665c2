"""What the docs quote of attention on several GPUs: what was measured on two, and what the model predicts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from documents import STATISTICS, Value, read, table_of
from summary import Row

from dash_attn.model.links import memory_gb, predict
from dash_attn.problem import Mask, Problem

FILE = "h200x2-context-parallel.json"
ONE, MODES = "dash_attn, one GPU", ("ulysses", "gather", "ring")
PEERS = ("all-gather, fa4 det", "all-gather, fa4", "torch ring")
K = 1024
MOST_GB, LEAST_SHARE = 100, 0.2
"""What is not worth a line: what no GPU has memory for, and what mostly waits."""


def sharing_values() -> Iterator[tuple[str, Value]]:
    """The measured table; by mode how many times faster than one GPU; how far predictions are off."""
    yield "table", measured_table
    for mode in MODES:
        for statistic in ("least", "most"):
            yield f"{mode}-{statistic}", partial(_speedup, f"dash_attn, {mode}", statistic)
    for peer in PEERS:
        for statistic in ("least", "most"):
            yield f"{peer}-{statistic}", partial(_beside, peer, statistic)
    yield "predicted", _off


def _cases() -> dict[str, dict[str, Row]]:
    found: dict[str, dict[str, Row]] = {}
    for row in read(FILE):
        found.setdefault(row["case"], {})[row["impl"]] = row
    return found


def measured_table() -> str:
    """Milliseconds on one GPU, and how many times faster two are."""
    names = [f"dash_attn, {mode}" for mode in MODES]
    names += [peer for peer in PEERS if any(peer in rows for rows in _cases().values())]
    head = ["case", "one GPU, ms", *(name.removeprefix("dash_attn, ") for name in names)]
    lines = []
    for case, rows in _cases().items():
        one = rows[ONE]["ms"]
        ratios = [f"{one / rows[name]['ms']:.2f}" if name in rows else "-" for name in names]
        lines.append([case, f"{one:.1f}", *ratios])
    return table_of(head, lines)


def _speedup(name: str, statistic: str) -> str:
    """Over one GPU, from 65,536 tokens on."""
    long = [rows for case, rows in _cases().items() if int(case.split(",")[0]) >= 64 * K]
    return STATISTICS[statistic]([rows[ONE]["ms"] / rows[name]["ms"] for rows in long])


def _beside(peer: str, statistic: str) -> str:
    """Our fastest mode beside a peer."""
    found = []
    for rows in _cases().values():
        if peer in rows:
            ours = min(rows[f"dash_attn, {mode}"]["ms"] for mode in MODES)
            found.append(rows[peer]["ms"] / ours)
    return STATISTICS[statistic](found) if found else "-"


def _off() -> str:
    """By how many percent a predicted time is off at worst."""
    found = [abs(row["predicted_ms"] / row["ms"] - 1) for row in read(FILE) if "predicted_ms" in row]
    return f"{100 * max(found, default=0.0):.0f}%"


def choice_values() -> Iterator[tuple[str, Value]]:
    yield "choice", choice_table


def choice_table() -> str:
    """Predicted milliseconds of a forward and a backward, and GB, by length and number of GPUs."""
    head = ["tokens", "GPUs", "mode of least time", "ms", "GB", "share of ideal"]
    lines = []
    for tokens in (32 * K, 128 * K, 1024 * K, 16 * K * K):
        problem = Problem.dense(heads=32, kv_heads=8, seqlen=tokens, mask=Mask.causal())
        one = predict(problem, 1, "ulysses").ms
        for ranks in (2, 8, 64, 1024):
            if 2 * ranks * 128 > tokens:
                continue
            modes = ["ulysses"] if 8 % ranks == 0 else []
            modes += ["gather", "ring", "ulysses+ring"] if ranks > 2 else ["gather", "ring"]
            best = min(modes, key=lambda mode: predict(problem, ranks, mode).ms)
            ms, gb = predict(problem, ranks, best).ms, memory_gb(problem, ranks, best)
            share = one / ranks / ms
            if gb > MOST_GB or share < LEAST_SHARE:
                continue
            lines.append([f"{tokens:,}", f"{ranks:,}", best, f"{ms:,.1f}", f"{gb:.1f}", f"{share:.2f}"])
    return table_of(head, lines)

"""What the docs quote of ``steps.py``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

from documents import Value, read, table_of

__all__ = ["step_values"]

FILE = "h200-steps.json"
NAMES = {"dash_attn": "ours", "fa4": "FlashAttention-4", "fa2": "PyTorch", "cudnn": "cuDNN"}
ORDERED = {(False, False): "nothing", (True, False): "attention", (True, True): "everything"}
Key = tuple[str, str, str]


def step_values() -> Iterator[tuple[str, Value]]:
    """A table, and what an order of everything costs: ``MODE-IMPL-cost``."""
    yield "table", table
    for mode, impl in product(("eager", "compiled"), ("dash_attn", "fa2")):
        yield f"{mode}-{impl}-cost", partial(_cost, mode, impl)


def _times() -> dict[Key, float]:
    """Milliseconds by mode, library, and what has an order."""
    return {
        (row["mode"], row["impl"], ORDERED[row["deterministic"], row["everything"]]): row["ms"]
        for row in read(FILE)
    }


def _cost(mode: str, impl: str) -> str:
    times = _times()
    return f"{times[mode, impl, 'everything'] / times[mode, impl, 'nothing'] - 1:.1%}"


def table() -> str:
    times, lines = _times(), []
    for mode, impl in dict.fromkeys((mode, impl) for mode, impl, _ in times):
        found = (times.get((mode, impl, what)) for what in ORDERED.values())
        lines.append([NAMES[impl], mode, *("-" if ms is None else f"{ms:.1f}" for ms in found)])
    return table_of(["attention by", "mode", *(f"ordered: {what}, ms" for what in ORDERED.values())], lines)

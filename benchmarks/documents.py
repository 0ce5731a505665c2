"""The JSON of benchmarks/results, and how it becomes Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from summary import Row, geometric_mean, least

RESULTS = Path(__file__).parent / "results"

Value = Callable[[], str]
"""What a page quotes: a table or a single figure, computed when it is asked for."""

STATISTICS: Mapping[str, Callable[[Sequence[float]], str]] = {
    "mean": lambda values: f"{geometric_mean(values):.2f}",
    "least": lambda values: f"{least(values):.2f}",
    "most": lambda values: f"{max(values):.2f}",
    "behind": lambda values: str(sum(x < 1 for x in values)),
    "points": lambda values: str(len(values)),
}
"""Of the ratios of several points, as pages quote them; "behind" counts those at which ours is slower."""


@cache
def document(name: str) -> Any:
    """One JSON file of results, as it is."""
    return json.loads((RESULTS / name).read_text())


def read(name: str) -> list[Row]:
    """The rows of one JSON file of results."""
    rows: list[Row] = document(name)["rows"]
    return rows


def table_of(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table without a line feed at its end."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)

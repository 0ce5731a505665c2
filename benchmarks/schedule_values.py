"""What the docs quote of other schedules than the default one (h100-choices.json)."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence

from documents import Value, read, table_of
from summary import Row, geometric_mean

__all__ = ["schedule_values"]

MATTERS, ALIKE = 1.03, 1.02
"""From which ratio on a schedule is faster than the default one, and up to which two are equally fast."""


def schedule_values() -> Iterator[tuple[str, Value]]:
    """Counts and tables."""
    yield "cases", lambda: str(len(_cases()))
    yield "plans", lambda: str(sum(len(rows) for rows in _cases().values()))
    yield "faster", lambda: str(len(_faster()))
    yield "faster-table", faster_table
    yield "model-table", model_table


def _cases() -> dict[str, list[Row]]:
    """Rows by case; the two of the default plan are one, with their mean."""
    found: dict[str, list[Row]] = {}
    for row in read("h100-choices.json"):
        found.setdefault(row["case"], []).append(row)
    return {name: [_default(rows), *(r for r in rows if not r["auto"])] for name, rows in found.items()}


def _default(rows: Sequence[Row]) -> Row:
    twice = [row for row in rows if row["auto"]]
    return twice[0] | {"ms": statistics.mean(row["ms"] for row in twice)}


def _faster() -> list[tuple[str, Row, Row]]:
    """Cases with the default and the fastest of the others, where that is faster; the largest gain first."""
    found = []
    for name, (default, *others) in _cases().items():
        best = min((r for r in others if r["head_groups"] is None), key=lambda r: r["ms"], default=default)
        if default["ms"] > MATTERS * best["ms"]:
            found.append((name, default, best))
    return sorted(found, key=lambda case: case[2]["ms"] / case[1]["ms"])


def faster_table() -> str:
    """Cases in which another schedule was more than 3 % faster."""
    lines = [
        [name, f"`{default['schedule']}`", f"`{best['schedule']}`", f"{default['ms'] / best['ms']:.2f}",
         best["min_workers"], _modelled(default, best)]
        for name, default, best in _faster()
    ]  # fmt: skip
    head = ["case", "`auto`", "fastest", "`auto` / fastest", "its blocks at least", "by the model"]
    return table_of(head, lines)


def _modelled(default: Row, other: Row) -> str:
    return f"{default['estimated'] / other['estimated']:.2f}" if "estimated" in default else "-"


def model_table() -> str:
    """By kind of case: pairs in the wrong order, and what the model's pick and `auto` give away."""
    kinds: dict[str, list[list[Row]]] = {}
    for name, rows in _cases().items():
        if "estimated" in rows[0]:
            kinds.setdefault(name.partition(":")[0], []).append(rows)
    lines = [[kind, *_ranking(cases)] for kind, cases in kinds.items()]
    lines.append(["**all**", *_ranking([rows for cases in kinds.values() for rows in cases])])
    head = [
        "cases", "how many", "wrong pairs, tasks alone", "wrong pairs", "the model's pick is slower by",
        "`auto` is slower by",
    ]  # fmt: skip
    return table_of(head, lines)


def _ranking(cases: Sequence[Sequence[Row]]) -> list[str]:
    pairs = [
        (a, b)
        for rows in cases
        for a, b in itertools.combinations(rows, 2)
        if max(a["ms"] / b["ms"], b["ms"] / a["ms"]) > ALIKE
    ]
    wrong = [
        sum((a[field] - b[field]) * (a["ms"] - b["ms"]) <= 0 for a, b in pairs)
        for field in ("simulated", "estimated")
    ]
    pick = [min(rows, key=lambda r: r["estimated"])["ms"] / min(r["ms"] for r in rows) for rows in cases]
    auto = [rows[0]["ms"] / min(r["ms"] for r in rows) for rows in cases]
    given = [f"{geometric_mean(x) - 1:.1%}, at most {max(x) - 1:.0%}" for x in (pick, auto)]
    return [str(len(cases)), *(f"{n} of {len(pairs)}" for n in wrong), *given]

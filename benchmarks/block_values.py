"""What the docs quote of ``blocks.py``, and the DASH paper's figure 10 drawn from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from documents import RESULTS, STATISTICS, Value, read, table_of
from summary import Row, fastest

from dash_attn.model.charts import PALETTE, lighter, new_figure, plotting, save_figure

__all__ = ["FILE", "PARTS", "block_figure", "block_values", "measured"]

FILE = "h200-blocks.json"
OURS = ("dash_attn", True)
PARTS = ("attention forward", "attention backward", "matrix products", "the rest")
"""Of a block's time; the first two are names in a profile."""
NAMES = {
    ("dash_attn", False): "ours, no order", ("fa4", True): "FA4 det", ("fa4", False): "FA4",
    ("cudnn", True): "cuDNN det", ("cudnn", False): "cuDNN", ("fa2", True): "PyTorch strict",
    ("fa2", False): "PyTorch",
}  # fmt: skip
COLOURS = dict(zip(("dash_attn", "fa4", "cudnn", "fa2"), (PALETTE[0], PALETTE[1], PALETTE[3], PALETTE[7])))
PART_COLOURS = (PALETTE[0], PALETTE[5], PALETTE[7], "#DDDDDD")


def measured() -> bool:
    """Whether there is a file of results."""
    return (RESULTS / FILE).exists()


def block_values() -> Iterator[tuple[str, Value]]:
    """Tables, and ``WHICH-STATISTIC`` of other blocks' times / ours: greater than 1 where ours is faster."""
    yield "table", table
    yield "parts", parts_table
    for which in ("det", "any", "no-order"):
        for statistic in STATISTICS:
            yield f"{which}-{statistic}", partial(_ratio, which, STATISTICS[statistic])


def by_case() -> dict[str, dict[tuple[str, bool], Row]]:
    """The rows of each case by library and order."""
    found: dict[str, dict[tuple[str, bool], Row]] = {}
    for row in read(FILE):
        found.setdefault(row["case"], {})[row["impl"], row["deterministic"]] = row
    return found


def ratios(rows: dict[tuple[str, bool], Row]) -> dict[str, float]:
    """Times of others / ours: the fastest in a fixed order, the fastest of any kind, ours without order."""
    others = [row for kind, row in rows.items() if kind[0] != "dash_attn"]
    sides = {
        "det": fastest([row for row in others if row["deterministic"]]),
        "any": fastest(others),
        "no-order": rows.get(("dash_attn", False)),
    }
    return {which: row["ms"] / rows[OURS]["ms"] for which, row in sides.items() if row is not None}


def _ratio(which: str, statistic: Callable[[Sequence[float]], str]) -> str:
    return statistic([x[which] for x in map(ratios, by_case().values()) if which in x])


def table() -> str:
    """By case: our time, others' as multiples of it, and memory."""
    cases, lines = by_case(), []
    kinds = [kind for kind in NAMES if any(kind in rows for rows in cases.values())]
    for case, rows in cases.items():
        ours = rows[OURS]
        times = [f"{rows[kind]['ms'] / ours['ms']:.3f}" if kind in rows else "-" for kind in kinds]
        lines.append([case, f"{ours['ms']:.2f}", *times, f"{ours['peak_mib']:,}"])
    return table_of(["block", "ours, ms", *(f"{NAMES[kind]} / ours" for kind in kinds), "MiB"], lines)


def parts_table() -> str:
    """Of our blocks, milliseconds by part."""
    lines = [
        [case, *(f"{rows[OURS]['parts_ms'][part]:.2f}" for part in PARTS)]
        for case, rows in by_case().items()
        if rows[OURS]["central"] and "parts_ms" in rows[OURS]
    ]
    return table_of(["block, ms", *PARTS], lines)


@plotting
def block_figure(path: Path) -> Path:
    """Figure 10: (a) times of all contenders as multiples of ours, (b) time by part."""
    cases = by_case()
    figure = new_figure(7.6, 12.0)
    above, below = figure.subplots(2, 1)
    width = 0.85 / len(NAMES)
    for number, (kind, name) in enumerate(NAMES.items()):
        here = [
            (i, rows[kind]["ms"] / rows[OURS]["ms"]) for i, rows in enumerate(cases.values()) if kind in rows
        ]
        at = [i + (number + 0.5) * width - 0.425 for i, _ in here]
        colour = COLOURS[kind[0]]
        face = colour if kind[1] else lighter(colour)
        above.bar(
            at, [x for _, x in here], width * 0.9, label=name, facecolor=face, edgecolor=colour, linewidth=0.6
        )
    above.axhline(1.0, color="#333333", linewidth=0.8)
    highest = max(
        rows[kind]["ms"] / rows[OURS]["ms"] for rows in cases.values() for kind in NAMES if kind in rows
    )
    above.set_ylim(0.8, max(1.05, highest * 1.02))
    above.set_xticks(range(len(cases)), [case.replace(", ", "\n") for case in cases], fontsize=7, rotation=45)
    above.set_ylabel("time / ours")
    above.set_title(
        "(a) forward and backward of a block; pale: no fixed order; the axis begins at 0.8", loc="left"
    )
    above.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    _draw_parts(below, [(case, rows) for case, rows in cases.items() if rows[OURS]["central"]])
    figure.suptitle("Figure 10: transformer blocks, H200", fontsize=12)
    return save_figure(figure, path)


def _draw_parts(ax: Any, cases: Sequence[tuple[str, dict[tuple[str, bool], Row]]]) -> None:
    """Stacked bars: ours, and beside it the fastest other one in a fixed order."""
    labels: list[str] = []
    bars: list[Row] = []
    for case, rows in cases:
        other = fastest([row for kind, row in rows.items() if kind[0] != "dash_attn" and kind[1]])
        for row, name in ((rows[OURS], "ours"), (other, "" if other is None else NAMES[other["impl"], True])):
            if row is not None and "parts_ms" in row:
                bars.append(row)
                labels.append(f"{case.partition(',')[0]}\n{name}")
    bottom = [0.0] * len(bars)
    for part, colour in zip(PARTS, PART_COLOURS, strict=True):
        heights = [row["parts_ms"][part] for row in bars]
        ax.bar(range(len(bars)), heights, 0.7, bottom=bottom, label=part, color=colour)
        bottom = [a + b for a, b in zip(bottom, heights)]
    ax.set_xticks(range(len(bars)), labels, fontsize=7, rotation=45)
    ax.set_ylabel("ms on the GPU")
    ax.set_title("(b) time by part", loc="left")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)

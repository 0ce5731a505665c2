"""What a benchmark found, as a table and as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...model.charts import PALETTE, lighter, new_figure, plotting, save_figure
from ...model.output import check_path
from .run import Result, Row

__all__ = ["save_chart", "table"]

_OURS, _PEER = PALETTE[6], PALETTE[1]


def table(result: Result) -> str:
    """One line per row, fastest first; rows without figures last, with their reason."""
    first = result.rows[0]
    head = f"{'implementation':<46}{'mode':<8}{'ms':>9}{'spread':>8}{'TFLOP/s':>9}{'ratio':>7}  repeats"
    lines = [f"{result.shape} on {result.gpu}", head]
    for row in _sorted(result.rows):
        start = f"{_name(row):<46}{'det' if row.deterministic else 'nondet':<8}"
        if row.ms is None or row.spread is None:
            lines.append(f"{start}{row.reason}")
            continue
        ratio = f"{first.ms / row.ms:.3f}" if first.ms else "-"
        figures = f"{row.ms:>9.3f}{row.spread:>8.1%}{row.tflops:>9.1f}{ratio:>7}"
        lines.append(f"{start}{figures}  {'yes' if row.repeatable else 'no'}")
    return "\n".join([*lines, f"ratio: speed as a multiple of {_name(first)}; spread: quartiles / median"])


def _sorted(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row.ms is None, row.ms or 0.0))


def _name(row: Row) -> str:
    return f"{row.impl} {row.policy}".strip()


@plotting
def save_chart(results: Sequence[Result], path: str | Path) -> Path:
    """Bars of TFLOP/s, one panel per shape, full colour for deterministic modes, pale for the others.

    Args:
        results: one or more shapes; rows without figures are left out.
        path: ends in .svg or .png.

    Raises:
        PictureError: another suffix.
        PlotsMissingError: Matplotlib is not installed.
    """
    path = check_path(path)
    panels = [(result, [row for row in _sorted(result.rows) if row.tflops]) for result in results]
    heights = [0.27 * len(rows) + 0.8 for _, rows in panels]
    figure = new_figure(sum(heights))
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ax, (result, rows) in zip(axes, panels):
        speeds = [row.tflops or 0.0 for row in rows]
        tones = [_OURS if row.impl == "dash_attn" else _PEER for row in rows]
        colours = [
            tone if row.deterministic else lighter(tone) for tone, row in zip(tones, rows, strict=True)
        ]
        names = [f"{_name(row)}, {'det' if row.deterministic else 'nondet'}" for row in rows]
        bars = ax.barh(range(len(rows)), speeds, color=colours)
        ax.bar_label(bars, fmt="%.0f", padding=2)
        ax.set_yticks(range(len(rows)), names)
        ax.invert_yaxis()
        ax.set_title(f"{result.shape} on {result.gpu}", loc="left")
    axes[-1].set_xlabel("TFLOP/s of the backward; pale: no fixed order")
    return save_figure(figure, path)

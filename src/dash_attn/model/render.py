"""Pictures of plans and timelines: Gantt charts (SVG, PNG), and text for terminals.

Charts need Matplotlib, which is imported when one is drawn; text needs only NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..schedule.plan import Plan
from .charts import new_figure, plotting, save_figure
from .cost import Costs
from .output import PictureError, PlotsMissingError, check_path
from .segments import Segments, describe, segments, task_heads
from .simulate import Timeline, simulate
from .timeline_chart import draw_legend, draw_timeline

__all__ = [
    "PAPER_COSTS",
    "PictureError",
    "PlotsMissingError",
    "plan_workers",
    "save_gantt",
    "save_plan",
    "text_gantt",
    "text_plan",
]

PAPER_COSTS = Costs(compute=2, reduce=1)
"""Costs of the paper's model: c = 2, r = 1, in series, hand-overs free."""

_HEAD_SYMBOLS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@plotting
def save_gantt(
    timelines: Timeline | Sequence[tuple[str, Timeline]], path: str | Path, *, title: str | None = None
) -> Path:
    """Write a Gantt chart.

    Args:
        timelines: one timeline, or (title, timeline) pairs to stack on one time axis.
        path: ends in .svg or .png.
        title: the headline; default for a single timeline: policy, makespan and utilization.

    Returns:
        The path. The bytes are the same whenever the input is.

    Raises:
        PictureError: another suffix, or no timeline.
        PlotsMissingError: Matplotlib is not installed.
    """
    path = check_path(path)
    if isinstance(timelines, Timeline):
        timelines = [(describe(timelines) if title is None else title, timelines)]
        title = None
    panels = list(timelines)
    if not panels:
        raise PictureError("save_gantt needs at least one timeline, got an empty list")
    heights = [min(max(0.27 * t.workers, 0.6), 5.0 + 0.01 * t.workers, 12.0) + 0.55 for _, t in panels]
    figure = new_figure(sum(heights) + (0.9 if title else 0.6))
    if title:
        figure.suptitle(title, fontsize=12)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    draw_legend(figure, [t for _, t in panels])
    figure.get_layout_engine().execute(figure)  # type: ignore[union-attr]  # labels need the final size
    span = max(t.makespan for _, t in panels)
    total = sum(len(t.compute_start) for _, t in panels)
    for number, (ax, (name, timeline)) in enumerate(zip(axes, panels, strict=True)):
        ax.set_title(name, loc="left")
        draw_timeline(ax, timeline, span=span, tag=str(number), total=total)
    for ax in axes[:-1]:
        ax.set_xlabel("")
    return save_figure(figure, path)


def save_plan(plan: Plan, path: str | Path) -> Path:
    """Write the Gantt chart of a plan under the paper's costs, with as many workers as kv tiles.

    More workers are used where the plan cannot run with as few (``min_workers``).
    """
    p = plan.problem
    timeline = simulate(plan, PAPER_COSTS, plan_workers(plan))
    batch = f"{len(p.sequences)} sequences, " if len(p.sequences) > 1 else ""
    shape = f"{p.mask.name} mask, {batch}q heads: {p.heads}, kv heads: {p.kv_heads}, tasks: {p.tasks:,}"
    costs = f"paper's costs c = {PAPER_COSTS.compute:g}, r = {PAPER_COSTS.reduce:g} in series"
    return save_gantt(timeline, path, title=f"{describe(timeline)}\n{shape}; {costs}")


def plan_workers(plan: Plan) -> int:
    """Workers of :func:`save_plan`."""
    return max(1, plan.min_workers, *(grid.kv_tiles for grid in plan.problem.grids.values()))


def text_gantt(timeline: Timeline, width: int = 100, most: int = 64) -> str:
    """A Gantt chart in characters, one line per worker.

    One character is one cycle if that fits and all times are whole; otherwise it shows the middle of
    its stretch of time. Where a reduction overlaps compute, compute is shown.

    Args:
        timeline: what to show.
        width: columns, at most.
        most: workers, at most; a line says how many more there are.

    >>> from dash_attn.problem import Problem
    >>> from dash_attn.schedule import FA3, build_plan
    >>> plan = build_plan(Problem.dense(heads=2, seqlen=2 * 128, head_dim=64), FA3())
    >>> print(text_gantt(simulate(plan, Costs(2, 1), 2)))
    0 |00+00+11+11+ |
    1 |00.+00+11+11+|
    makespan 13, 1 cycle per character; compute: kv head 0-1, reduce +, wait ., idle blank
    """
    digits = len(str(timeline.workers - 1))
    columns = max(width - digits - 3, 1)
    times = (timeline.item_start, timeline.compute_end, timeline.reduce_start, timeline.reduce_end)
    whole = all((array == np.floor(array)).all() for array in times)
    cycle = 1.0 if whole and timeline.makespan <= columns else timeline.makespan / columns
    used = round(timeline.makespan / cycle) if cycle else 0
    shown = min(timeline.workers, most)
    chart = np.full((shown, used), " ")
    heads = np.array(list(_HEAD_SYMBOLS))[task_heads(timeline) % len(_HEAD_SYMBOLS)]
    parts = segments(timeline)
    for kind, symbol in (("launch", "^"), ("held", "."), ("wait", "."), ("reduce", "+"), ("compute", heads)):
        _paint(chart, parts[kind], cycle, symbol)
    lines = [f"{w:>{digits}} |{''.join(row)}|" for w, row in enumerate(chart.tolist())]
    if shown < timeline.workers:
        lines.append(f"… and {timeline.workers - shown:,} more workers")
    return "\n".join([*lines, _text_legend(timeline, cycle, len(parts["launch"].worker) > 0)])


def _paint(chart: NDArray[np.str_], s: Segments, cycle: float, symbol: str | NDArray[np.str_]) -> None:
    """Fill the characters whose middle lies in a segment, with one symbol or with each segment's own."""
    if not cycle:
        return
    first, end = (np.ceil(times / cycle - 0.5).astype(np.int64) for times in (s.start, s.end))
    seen = np.flatnonzero((s.worker < len(chart)) & (first < end))
    counts = (end - first)[seen]
    segment = np.repeat(seen, counts)
    column = first[segment] + np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)
    chart[s.worker[segment], column] = symbol if isinstance(symbol, str) else symbol[segment]


def _text_legend(timeline: Timeline, cycle: float, launches: bool) -> str:
    heads = int(timeline.plan.group_first[-1])
    unit = f"{cycle:,.6g} cycle{'' if cycle == 1 else 's'} per character"
    symbols = _HEAD_SYMBOLS[0] if heads == 1 else f"{_HEAD_SYMBOLS[0]}-{_HEAD_SYMBOLS[min(heads, 36) - 1]}"
    launch = ", launch ^" if launches else ""
    compute = f"compute: kv head {symbols}, reduce +, wait ., idle blank{launch}"
    return f"makespan {timeline.makespan:,.10g}, {unit}; {compute}"


def text_plan(plan: Plan, sequence: int = 0, most: int = 64) -> str:
    """The grid of one head: rows q tiles, columns kv tiles, cells ``step:ticket``, a dot where masked.

    The step counts the tasks of one item from 0; the ticket is the task's place in the sum of its row.

    Args:
        plan: what to show.
        sequence: whose head.
        most: q tiles and kv tiles, at most; a line says how many there are.

    >>> from dash_attn.problem import Mask, Problem
    >>> from dash_attn.schedule import Shift, SymmetricShift, build_plan
    >>> print(text_plan(build_plan(Problem.dense(seqlen=3 * 128, head_dim=64), Shift())))
    q\\kv   0   1   2
       0 0:0 2:2 1:1
       1 1:1 0:0 2:2
       2 2:2 1:1 0:0
    >>> causal = Problem.dense(seqlen=4 * 128, head_dim=64, mask=Mask.causal())
    >>> print(text_plan(build_plan(causal, SymmetricShift())))
    q\\kv   0   1   2   3
       0 2:0   .   .   .
       1 3:1 2:0   .   .
       2 0:0 1:1 1:2   .
       3 1:1 0:0 0:2 0:3
    """
    pattern = plan.pattern(sequence)
    grid = pattern.grid
    rows, columns = min(grid.q_tiles, most), min(grid.kv_tiles, most)
    cells = [["."] * columns for _ in range(rows)]
    for kv in range(columns):
        q_tiles, tickets = pattern.tasks_of(kv)
        for step in np.flatnonzero(q_tiles < rows).tolist():
            cells[int(q_tiles[step])][kv] = f"{step}:{tickets[step]}"
    table = [["q\\kv", *map(str, range(columns))], *([str(q), *row] for q, row in enumerate(cells))]
    width = max((len(cell) for row in table for cell in row[1:]), default=0)
    lines = [" ".join([f"{row[0]:>4}", *(f"{cell:>{width}}" for cell in row[1:])]) for row in table]
    if (rows, columns) != (grid.q_tiles, grid.kv_tiles):
        lines.append(f"the first {rows} of {grid.q_tiles:,} q tiles, {columns} of {grid.kv_tiles:,} kv tiles")
    return "\n".join(lines)

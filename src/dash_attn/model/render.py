"""Pictures of plans and timelines: Gantt charts (SVG, PNG), and text for terminals.

Charts need Matplotlib, which is imported when one is drawn; text needs only NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..schedule.plan import Plan
from .charts import (
    PictureError,
    PlotsMissingError,
    check_path,
    draw_legend,
    draw_timeline,
    new_figure,
    plotting,
    save_figure,
)
from .cost import Costs
from .segments import Segments, describe, segments, task_heads
from .simulate import Timeline, simulate

__all__ = [
    "PAPER_COSTS",
    "PictureError",
    "PlotsMissingError",
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
    workers = max(1, plan.min_workers, *(grid.kv_tiles for grid in p.grids.values()))
    timeline = simulate(plan, PAPER_COSTS, workers)
    batch = f"{len(p.sequences)} sequences, " if len(p.sequences) > 1 else ""
    shape = f"{p.mask.name} mask, {batch}q heads: {p.heads}, kv heads: {p.kv_heads}, tasks: {p.tasks:,}"
    costs = f"paper's costs c = {PAPER_COSTS.compute:g}, r = {PAPER_COSTS.reduce:g} in series"
    return save_gantt(timeline, path, title=f"{describe(timeline)}\n{shape}; {costs}")


def text_gantt(timeline: Timeline, width: int = 100) -> str:
    """A Gantt chart in characters, one line a worker, at most ``width`` columns.

    One character is one cycle if that fits and all times are whole; otherwise it shows the middle of
    its stretch of time. Where a reduction overlaps compute, compute is shown.

    >>> from dash_attn.problem import Problem
    >>> from dash_attn.schedule import FA3, build_plan
    >>> plan = build_plan(Problem.dense(heads=2, seqlen=2 * 128, head_dim=64), FA3())
    >>> print(text_gantt(simulate(plan, Costs(2, 1), 2)))
    0 |00+00+11+11+ |
    1 |00.+00+11+11+|
    makespan 13, 1 cycle a character; compute: kv head 0-1, reduce +, wait ., idle blank
    """
    digits = len(str(timeline.workers - 1))
    columns = max(width - digits - 3, 1)
    times = (timeline.item_start, timeline.compute_end, timeline.reduce_start, timeline.reduce_end)
    whole = all((array == np.floor(array)).all() for array in times)
    cycle = 1.0 if whole and timeline.makespan <= columns else timeline.makespan / columns
    used = round(timeline.makespan / cycle) if cycle else 0
    chart = np.full((timeline.workers, used), " ")
    heads = task_heads(timeline)
    parts = segments(timeline)
    for kind, symbol in (("launch", "^"), ("held", "."), ("wait", "."), ("reduce", "+"), ("compute", "")):
        _paint(chart, parts[kind], cycle, [symbol or _HEAD_SYMBOLS[h % 36] for h in heads.tolist()], symbol)
    lines = [f"{w:>{digits}} |{''.join(row)}|" for w, row in enumerate(chart.tolist())]
    return "\n".join([*lines, _text_legend(timeline, cycle, len(parts["launch"].worker) > 0)])


def _paint(chart: NDArray[np.str_], s: Segments, cycle: float, symbols: list[str], symbol: str) -> None:
    """Fill the characters whose middle lies in a segment."""
    if not cycle:
        return
    first = np.ceil(s.start / cycle - 0.5).astype(np.int64).tolist()
    end = np.ceil(s.end / cycle - 0.5).astype(np.int64).tolist()
    for k, worker in enumerate(s.worker.tolist()):
        chart[worker, first[k] : end[k]] = symbol or symbols[k]


def _text_legend(timeline: Timeline, cycle: float, launches: bool) -> str:
    heads = int(timeline.plan.group_first[-1])
    unit = f"{cycle:,.6g} cycle{'' if cycle == 1 else 's'} a character"
    symbols = _HEAD_SYMBOLS[0] if heads == 1 else f"{_HEAD_SYMBOLS[0]}-{_HEAD_SYMBOLS[min(heads, 36) - 1]}"
    launch = ", launch ^" if launches else ""
    compute = f"compute: kv head {symbols}, reduce +, wait ., idle blank{launch}"
    return f"makespan {timeline.makespan:,.10g}, {unit}; {compute}"


def text_plan(plan: Plan, sequence: int = 0) -> str:
    """The grid of one head: rows q tiles, columns kv tiles, cells ``step:ticket``, a dot where masked.

    The step counts the tasks of one item from 0; the ticket is the task's place in the sum of its row.

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
    cells = [["."] * grid.kv_tiles for _ in range(grid.q_tiles)]
    for kv in range(grid.kv_tiles):
        q_tiles, tickets = (array.tolist() for array in pattern.tasks_of(kv))
        for step, (q, ticket) in enumerate(zip(q_tiles, tickets, strict=True)):
            cells[q][kv] = f"{step}:{ticket}"
    table = [["q\\kv", *map(str, range(grid.kv_tiles))], *([str(q), *row] for q, row in enumerate(cells))]
    width = max((len(cell) for row in table for cell in row[1:]), default=0)
    return "\n".join(" ".join([f"{row[0]:>4}", *(f"{cell:>{width}}" for cell in row[1:])]) for row in table)

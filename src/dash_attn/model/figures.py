"""Figures 2 to 7 of the DASH paper, redrawn from plans: ``dash-attn figures``.

Every timeline, grid and graph here comes from a plan that was built, verified and simulated with c = 2,
r = 1 in series, so a changed plan changes its figure. Titles set the simulated makespan beside the
paper's closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..problem import IntArray, Mask, Problem
from ..schedule.build import build_plan
from ..schedule.graph import dependency_graph
from .bounds import closed_form
from .charts import IDLE, PALETTE, lighter, new_figure, plotting, save_figure
from .graph_chart import RED, Node, draw_arrow, draw_graph, draw_graph_legend
from .output import FORMATS, PictureError, prepare_folder
from .render import PAPER_COSTS
from .segments import task_heads, task_tiles, task_workers
from .simulate import Timeline, simulate
from .timeline_chart import draw_legend, draw_timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_figures"]

FORMULAS = {
    "fa3": "m n (c + r) + (n − 1) r",
    "shift": "m n (c + r)",
    "descending": "m (n + 1)(c + r) / 2 + (n − 1) r",
    "symmetric_shift": "m (n + 1)(c + r) / 2",
}


def _simulated(policy: str, mask: Mask, n: int, m: int) -> Timeline:
    """m heads of n kv tiles by n q tiles on n workers."""
    problem = Problem.dense(heads=m, seqlen=128 * n, head_dim=64, mask=mask)
    return simulate(build_plan(problem, policy), PAPER_COSTS, n)


def _verdict(t: Timeline) -> str:
    """Our makespan beside the paper's, for a timeline of ``_simulated``."""
    p, policy = t.plan.problem, t.plan.policy.partition("(")[0]
    c, r = PAPER_COSTS.compute, PAPER_COSTS.reduce
    paper = closed_form(policy, p.mask, p.grid(0).kv_tiles, p.heads, c, r)
    return f"makespan {t.makespan:g} simulated; paper: {FORMULAS[policy]} = {paper:g}"


def _sizes(t: Timeline) -> str:
    c, r = PAPER_COSTS.compute, PAPER_COSTS.reduce
    return f"n = {t.workers} workers, m = {t.plan.problem.heads}, c = {c:g}, r = {r:g}"


def _settle(figure: Figure, heading: str) -> None:
    """Set the headline and give all axes their final size: labels are drawn where they fit."""
    figure.suptitle(heading, fontsize=12)
    for ax in figure.axes:
        ax.set_title(" ", loc="left")
        ax.set_xlabel("cycles")
    figure.get_layout_engine().execute(figure)  # type: ignore[union-attr]


def _name_tasks(ax: Axes, timeline: Timeline) -> None:
    """Write C(i, j) and R(i, j) into the boxes of a small timeline."""
    kv, q = (array.tolist() for array in task_tiles(timeline))
    worker = task_workers(timeline).tolist()
    spans = (
        ("C", timeline.compute_start, timeline.compute_end),
        ("R", timeline.reduce_start, timeline.reduce_end),
    )
    for letter, start, end in spans:
        for k, x in enumerate(((start + end) / 2).tolist()):
            ax.text(x, worker[k], f"{letter}({kv[k]},{q[k]})", ha="center", va="center_baseline", fontsize=9)


def _mark_hand_overs(ax: Axes, timeline: Timeline) -> None:
    """Red arrows from each reduction to the one that waited for it, and the name of the gap."""
    q = task_tiles(timeline)[1]
    worker = task_workers(timeline)
    for task in np.flatnonzero(timeline.reduce_start > timeline.compute_end).tolist():
        begin, idle_from = timeline.reduce_start[task], timeline.compute_end[task]
        (before,) = np.flatnonzero((q == q[task]) & (timeline.reduce_end == begin))
        draw_arrow(ax, (begin, worker[before] + 0.36), (begin, worker[task] - 0.36), RED)
        middle = (begin + idle_from) / 2
        ax.text(middle, worker[task] - 0.1, "bubble", ha="center", va="bottom", fontsize=9, color=RED)


def figure_2() -> Figure:
    """The naive schedule of a 2 x 2 grid, and its graph."""
    t = _simulated("fa3", Mask.full(), 2, 1)
    figure = new_figure(3.3)
    left, right = figure.subplots(1, 2)
    draw_graph_legend(figure, both=False)
    _settle(figure, "Figure 2: two kv tiles (i), two q tiles (j), naive order")
    draw_timeline(left, t, labels=False)
    left.set_title(_verdict(t), loc="left")
    _name_tasks(left, t)
    _mark_hand_overs(left, t)
    graph = dependency_graph(t.plan, t.items_of_workers(), PAPER_COSTS.compute, PAPER_COSTS.reduce)
    draw_graph(right, graph, _edge_names(t))
    right.set_title(f"dependency graph, critical path {graph.critical_path():g}", loc="left")
    return figure


def _edge_names(timeline: Timeline) -> dict[Node, str]:
    """C(i,j) and R(i,j) for the chain edges, by the node they lead to; one item per worker."""
    kv, q = (array.tolist() for array in task_tiles(timeline))
    names: dict[Node, str] = {}
    for worker, (item,) in enumerate(timeline.items_of_workers()):
        for k, task in enumerate(range(timeline.first_task[item], timeline.first_task[item + 1])):
            names[worker, 2 * k + 1] = f"C({kv[task]},{q[task]}) = {PAPER_COSTS.compute:g}"
            names[worker, 2 * k + 2] = f"R({kv[task]},{q[task]}) = {PAPER_COSTS.reduce:g}"
    return names


def figure_3() -> Figure:
    """FlashAttention-3's order under both masks."""
    timelines = [_simulated("fa3", mask, 4, 2) for mask in (Mask.full(), Mask.causal())]
    figure = new_figure(4.6)
    axes = figure.subplots(2, 1)
    draw_legend(figure, timelines)
    _settle(figure, f"Figure 3: FlashAttention-3's deterministic order ({_sizes(timelines[0])})")
    for tag, (ax, t, letter) in enumerate(zip(axes, timelines, "ab", strict=True)):
        draw_timeline(ax, t, tag=str(tag))
        ax.set_title(f"({letter}) {t.plan.problem.mask.name} mask: {_verdict(t)}", loc="left")
    return figure


def figure_4() -> Figure:
    """Descending q tiles under a causal mask."""
    t = _simulated("descending", Mask.causal(), 4, 2)
    figure = new_figure(2.9)
    ax = figure.subplots()
    draw_legend(figure, [t])
    _settle(figure, f"Figure 4: descending q tiles, causal mask ({_sizes(t)})")
    draw_timeline(ax, t)
    ax.set_title(_verdict(t), loc="left")
    return figure


def figure_5() -> Figure:
    """Lemma 1 on two plans of the same chains: shift adds only allowed edges, FA3 only backward ones."""
    figure = new_figure(3.7)
    axes = figure.subplots(1, 2)
    draw_graph_legend(figure, both=True)
    _settle(figure, "Figure 5: Lemma 1 on isomorphic chains (3 × 3 tiles, full mask, c = 2, r = 1)")
    for ax, policy in zip(axes, ("shift", "fa3"), strict=True):
        t = _simulated(policy, Mask.full(), 3, 1)
        graph = dependency_graph(t.plan, t.items_of_workers(), PAPER_COSTS.compute, PAPER_COSTS.reduce)
        draw_graph(ax, graph, {})
        back, alone = len(graph.backward_edges()), graph.without_edges().critical_path()
        path = f"critical path {graph.critical_path():g}, without them {alone:g}"
        ax.set_title(f"{policy}: {back} of {len(graph.edges)} added edges lead back\n{path}", loc="left")
    return figure


Cells = dict[Node, tuple[str, str]]


def _draw_grid(ax: Axes, cells: Cells, q_tiles: int, kv_tiles: int) -> None:
    """A grid of q tiles by kv tiles; cells without an entry are masked."""
    from matplotlib.patches import Rectangle

    for q in range(q_tiles):
        for kv in range(kv_tiles):
            text, colour = cells.get((q, kv), ("", IDLE))
            ax.add_patch(
                Rectangle((kv - 0.5, q - 0.5), 1, 1, facecolor=colour, edgecolor="white", linewidth=1.2)
            )
            ax.text(kv, q, text, ha="center", va="center_baseline", fontsize=10)
    ax.set_xlim(-0.5, kv_tiles - 0.5)
    ax.set_ylim(q_tiles - 0.5, -0.5)
    ax.set_xticks(range(kv_tiles))
    ax.set_yticks(range(q_tiles))
    ax.set_aspect("equal", anchor="N")
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set_xlabel("kv tile")
    ax.set_ylabel("q tile")


def _steps(timeline: Timeline) -> IntArray:
    """When each task starts: in units of c + r, from the start of its head."""
    heads = task_heads(timeline)
    begin = np.full(timeline.plan.problem.heads, np.inf)
    np.minimum.at(begin, heads, timeline.compute_start)
    steps: IntArray = np.rint((timeline.compute_start - begin[heads]) / PAPER_COSTS.per_task).astype(np.int64)
    return steps


def _grid_and_timeline(
    heading: str, t: Timeline, height: float, groups: IntArray, names: Mapping[int, str] | None = None
) -> Figure:
    """Left the steps of the first head in its grid, right the timeline, in the same colours."""
    figure = new_figure(height, 11.0)
    left, right = figure.subplots(1, 2, width_ratios=[1, 2.6])
    draw_legend(figure, [t], names)
    _settle(figure, heading)
    steps = _steps(t)
    kv, q = task_tiles(t)
    # Where one colour says nothing, shades of it show the diagonals of equal steps.
    shades = np.where(names is None, 1.0 - 0.7 * steps / steps.max(), 1.0)
    cells = {
        (int(q[k]), int(kv[k])): (str(steps[k]), lighter(PALETTE[groups[k]], shades[k]))
        for k in np.flatnonzero(task_heads(t) == 0).tolist()
    }
    grid = t.plan.problem.grid(0)
    _draw_grid(left, cells, grid.q_tiles, grid.kv_tiles)
    left.set_title("step of each task, head 0", loc="left")
    draw_timeline(right, t, groups=groups)
    right.set_title(_verdict(t), loc="left")
    return figure


def figure_6() -> Figure:
    """Shift: visiting order and timeline."""
    t = _simulated("shift", Mask.full(), 4, 2)
    return _grid_and_timeline(f"Figure 6: shift, full mask ({_sizes(t)})", t, 3.1, task_heads(t))


def figure_7() -> Figure:
    """Symmetric shift: the phases and the timeline."""
    t = _simulated("symmetric_shift", Mask.causal(), 8, 2)
    half = t.plan.problem.grid(0).kv_tiles // 2
    phase = np.where(_steps(t) < half, 0, np.where(task_tiles(t)[0] < half, 1, 3))
    names = {0: "phase 1: square", 1: "phase 2: left triangle", 3: "phase 2: right triangle"}
    heading = f"Figure 7: symmetric shift, causal mask ({_sizes(t)})"
    figure = _grid_and_timeline(heading, t, 4.0, phase, names)
    for head in range(t.plan.problem.heads):
        rows = task_workers(t)[task_heads(t) == head]
        figure.axes[1].text(1.01 * t.makespan, rows.mean(), f"kv head {head}", rotation=270, va="center")
    return figure


_FIGURES: dict[str, Callable[[], Figure]] = {
    "fig2": figure_2,
    "fig3": figure_3,
    "fig4": figure_4,
    "fig5": figure_5,
    "fig6": figure_6,
    "fig7": figure_7,
}


@plotting
def draw_figures(folder: str | Path, formats: Sequence[str] = ("svg",)) -> list[Path]:
    """Draw all figures into a folder, which is made if need be.

    Args:
        folder: where ``fig2.svg`` ... ``fig7.svg`` go.
        formats: "svg", "png" or both.

    Returns:
        The paths written, figure by figure.

    Raises:
        PictureError: another format, or a file that cannot be written; found before anything is drawn.
        PlotsMissingError: Matplotlib is not installed.
    """
    for kind in formats:
        if kind not in FORMATS:
            raise PictureError(f"figures are written as svg or png, got {kind!r}")
    folder = prepare_folder(folder, [f"{name}.{kind}" for name in _FIGURES for kind in formats])
    paths = []
    for name, draw in _FIGURES.items():
        figure = draw()
        paths += [save_figure(figure, folder / f"{name}.{kind}") for kind in formats]
    return paths

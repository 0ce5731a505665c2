"""Figures 2 to 7 of the DASH paper, redrawn from plans: ``python -m dash_attn.model.figures docs/figures``.

Every timeline, grid and graph here comes from a plan that was built, verified and simulated with c = 2,
r = 1 in series, so a changed plan changes its figure. Titles set the simulated makespan beside the
paper's closed form.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..problem import IntArray, Mask, Problem
from ..schedule.build import build_plan
from ..schedule.graph import ChainGraph, dependency_graph
from ..schedule.policies import policy_by_name
from .bounds import closed_form
from .charts import (
    IDLE,
    PALETTE,
    PictureError,
    draw_legend,
    draw_timeline,
    new_figure,
    plotting,
    save_figure,
    task_tiles,
)
from .render import PAPER_COSTS
from .simulate import Timeline, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["critical_nodes", "draw_figures"]

RED, GREEN, CRITICAL = PALETTE[5], PALETTE[2], "#F7D774"
FORMULAS = {
    "fa3": "m n (c + r) + (n − 1) r",
    "shift": "m n (c + r)",
    "descending": "m (n + 1)(c + r) / 2 + (n − 1) r",
    "symmetric_shift": "m (n + 1)(c + r) / 2",
}
Node = tuple[int, int]


def _simulated(policy: str, mask: Mask, n: int, m: int) -> Timeline:
    """m heads of n kv tiles by n q tiles on n workers."""
    problem = Problem.dense(heads=m, seqlen=128 * n, head_dim=64, mask=mask)
    return simulate(build_plan(problem, policy_by_name(policy)), PAPER_COSTS, n)


def _verdict(t: Timeline) -> str:
    """Our makespan beside the paper's, for a timeline of :func:`_simulated`."""
    p, policy = t.plan.problem, t.plan.policy.partition("(")[0]
    c, r = PAPER_COSTS.compute, PAPER_COSTS.reduce
    paper = closed_form(policy, p.mask.name, p.grid(0).kv_tiles, p.heads, c, r)
    relation = "=" if paper == t.makespan else "≠"
    return f"simulated {t.makespan:g} {relation} {paper:g} = {FORMULAS[policy]}"


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


def critical_nodes(graph: ChainGraph) -> list[Node]:
    """Nodes (chain, depth) of one longest path, from the source to the end of a chain."""
    reached = graph.distances()
    ends = [(path[-1], -k) for k, path in enumerate(reached)]
    k = -max(ends)[1]
    nodes = [(k, len(reached[k]) - 1)]
    while (d := nodes[-1][1]) > 0:
        k = nodes[-1][0]
        tails = [
            e.tail for e in graph.edges if e.head == (k, d) and reached[e.tail[0]][e.tail[1]] == reached[k][d]
        ]
        along = reached[k][d - 1] + graph.chains[k][d - 1] == reached[k][d]
        nodes.append((k, d - 1) if along or not tails else tails[0])
    return nodes[::-1]


def _draw_graph(ax: Axes, graph: ChainGraph, labels: Mapping[Node, str]) -> None:
    """Chains from left to right by depth, added edges as arrows, one longest path on a yellow ground.

    ``labels`` name the chain edges that lead to a node.
    """
    last = max(len(chain) for chain in graph.chains)
    middle = (len(graph.chains) - 1) / 2
    place = {(k, d): (float(d), float(k)) for k, c in enumerate(graph.chains) for d in range(1, len(c) + 1)}
    place |= {(k, 0): (0.0, middle) for k in range(len(graph.chains))}
    sink = (last + 0.8, middle)
    path = [place[node] for node in critical_nodes(graph)] + [sink]
    ax.plot(*zip(*path, strict=True), color=CRITICAL, linewidth=11, solid_capstyle="round", zorder=0)
    for k, weights in enumerate(graph.chains):
        for d, weight in enumerate(weights):
            style = ("#222222", "-", 1.8) if d % 2 == 0 else (PALETTE[0], "-", 1.8)
            (x0, y0), (x1, y1) = place[k, d], place[k, d + 1]
            ax.plot((x0, x1), (y0, y1), color=style[0], linestyle=style[1], linewidth=style[2], zorder=1)
            name = labels.get((k, d + 1), "")
            up = 0.09 if y1 <= middle else -0.09
            above = "bottom" if y1 <= middle else "top"
            ax.text((x0 + x1) / 2, (y0 + y1) / 2 - up, f"{name}{weight:g}", ha="center", va=above, fontsize=8)
        ax.plot(*zip(place[k, len(weights)], sink, strict=True), color="#999999", linewidth=0.8, zorder=1)
    backward = set(graph.backward_edges())
    for edge in graph.edges:
        _arrow(ax, place[edge.tail], place[edge.head], RED if edge in backward else GREEN)
    for x, y in {*place.values(), sink}:
        ax.plot(x, y, "o", color="white", markeredgecolor="#222222", markersize=7, zorder=4)
    for name, (x, y) in (("s", (0.0, middle)), ("t", sink)):
        ax.text(x, y + 0.17, name, ha="center", va="top", fontsize=10, style="italic")
    ax.set_ylim(len(graph.chains) - 0.5, -0.5)
    ax.set_xlim(-0.4, last + 1.2)
    ax.set_yticks(range(len(graph.chains)))
    ax.set_ylabel("chain (worker)")
    ax.set_xticks(range(last + 1))
    ax.set_xlabel("depth (edges from s)")
    ax.spines["left"].set_visible(False)


def _arrow(ax: Axes, tail: tuple[float, float], head: tuple[float, float], colour: str) -> None:
    look = {
        "arrowstyle": "-|>",
        "color": colour,
        "linewidth": 1.6,
        "shrinkA": 4,
        "shrinkB": 4,
        "linestyle": "--",
    }
    ax.annotate("", xy=head, xytext=tail, arrowprops=look, zorder=3)


def _graph_legend(figure: Figure, *, both: bool) -> None:
    from matplotlib.lines import Line2D

    entries = [
        ("#222222", "-", 1.8, "compute edge, weight c"),
        (PALETTE[0], "-", 1.8, "reduce edge, weight r"),
    ]
    if both:
        entries.append((GREEN, "--", 1.6, "added edge, weight 0, depth does not fall"))
        entries.append((RED, "--", 1.6, "added edge, weight 0, depth falls"))
    else:
        entries.append((RED, "--", 1.6, "order of additions, weight 0"))
    entries.append((CRITICAL, "-", 8, "a critical path"))
    handles = [Line2D([], [], color=c, linestyle=s, linewidth=w, label=name) for c, s, w, name in entries]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8.5)


def _name_tasks(ax: Axes, timeline: Timeline) -> None:
    """Write C(i, j) and R(i, j) into the boxes of a small timeline."""
    kv, q = (array.tolist() for array in task_tiles(timeline))
    worker = np.repeat(timeline.item_worker, np.diff(timeline.first_task)).tolist()
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
    worker = np.repeat(timeline.item_worker, np.diff(timeline.first_task))
    for task in np.flatnonzero(timeline.reduce_start > timeline.compute_end).tolist():
        begin, idle_from = timeline.reduce_start[task], timeline.compute_end[task]
        (before,) = np.flatnonzero((q == q[task]) & (timeline.reduce_end == begin))
        _arrow(ax, (begin, worker[before] + 0.36), (begin, worker[task] - 0.36), RED)
        middle = (begin + idle_from) / 2
        ax.text(middle, worker[task] - 0.1, "bubble", ha="center", va="bottom", fontsize=9, color=RED)


def figure_2() -> Figure:
    """The naive schedule of a 2 x 2 grid, and its graph."""
    t = _simulated("fa3", Mask.full(), 2, 1)
    figure = new_figure(3.3)
    left, right = figure.subplots(1, 2)
    _graph_legend(figure, both=False)
    _settle(figure, "Figure 2: two kv tiles (i), two q tiles (j), naive order")
    draw_timeline(left, t, labels=False)
    left.set_title(_verdict(t), loc="left")
    _name_tasks(left, t)
    _mark_hand_overs(left, t)
    graph = dependency_graph(t.plan, t.items_of_workers(), PAPER_COSTS.compute, PAPER_COSTS.reduce)
    _draw_graph(right, graph, _edge_names(t))
    right.set_title(f"dependency graph, critical path {graph.critical_path():g}", loc="left")
    return figure


def _edge_names(timeline: Timeline) -> dict[Node, str]:
    """C(i,j) and R(i,j) for the chain edges, by the node they lead to; one item a worker."""
    kv, q = (array.tolist() for array in task_tiles(timeline))
    names: dict[Node, str] = {}
    for worker, (item,) in enumerate(timeline.items_of_workers()):
        for k, task in enumerate(range(timeline.first_task[item], timeline.first_task[item + 1])):
            names[worker, 2 * k + 1] = f"C({kv[task]},{q[task]}) "
            names[worker, 2 * k + 2] = f"R({kv[task]},{q[task]}) "
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
    _graph_legend(figure, both=True)
    _settle(figure, "Figure 5: Lemma 1 on isomorphic chains (3 × 3 tiles, full mask, c = 2, r = 1)")
    for ax, policy in zip(axes, ("shift", "fa3"), strict=True):
        t = _simulated(policy, Mask.full(), 3, 1)
        graph = dependency_graph(t.plan, t.items_of_workers(), PAPER_COSTS.compute, PAPER_COSTS.reduce)
        _draw_graph(ax, graph, {})
        back, alone = len(graph.backward_edges()), graph.without_edges().critical_path()
        path = f"critical path {graph.critical_path():g}, chains alone {alone:g}"
        ax.set_title(f"{policy}: {back} of {len(graph.edges)} added edges lead back;\n{path}", loc="left")
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
    """The step at which each task starts, in units of c + r from the start of its worker's head."""
    per_head = timeline.makespan / _rounds(timeline)
    return np.rint(timeline.compute_start % per_head / PAPER_COSTS.per_task).astype(np.int64)


def _rounds(timeline: Timeline) -> int:
    """How many heads one worker works for, one after the other."""
    heads = timeline.plan.items[:, 1]
    return max(len(set(heads[items].tolist())) for items in timeline.items_of_workers())


def _first_head(timeline: Timeline) -> Sequence[int]:
    tasks = np.diff(timeline.first_task)
    return np.flatnonzero(np.repeat(timeline.plan.items[:, 1] == 0, tasks)).tolist()  # type: ignore[no-any-return]


def _grid_and_timeline(
    heading: str, t: Timeline, groups: IntArray, names: Mapping[int, str] | None, height: float
) -> Figure:
    """Left the steps of the first head in its grid, right the timeline, in the same colours."""
    figure = new_figure(height, 11.0)
    left, right = figure.subplots(1, 2, width_ratios=[1, 2.6])
    draw_legend(figure, [t], names)
    _settle(figure, heading)
    steps = _steps(t)
    kv, q = task_tiles(t)
    cells = {(int(q[k]), int(kv[k])): (str(steps[k]), PALETTE[groups[k]]) for k in _first_head(t)}
    grid = t.plan.problem.grid(0)
    _draw_grid(left, cells, grid.q_tiles, grid.kv_tiles)
    left.set_title("step of each task, head 0", loc="left")
    draw_timeline(right, t, groups=groups)
    right.set_title(_verdict(t), loc="left")
    return figure


def figure_6() -> Figure:
    """Shift: visiting order and timeline."""
    t = _simulated("shift", Mask.full(), 4, 2)
    heads = np.repeat(t.plan.items[:, 1].astype(np.int64), np.diff(t.first_task))
    return _grid_and_timeline(f"Figure 6: shift, full mask ({_sizes(t)})", t, heads, None, 3.1)


def figure_7() -> Figure:
    """Symmetric shift: the phases and the timeline."""
    t = _simulated("symmetric_shift", Mask.causal(), 8, 2)
    half = t.plan.problem.grid(0).kv_tiles // 2
    phase = np.where(_steps(t) < half, 0, np.where(task_tiles(t)[0] < half, 1, 3))
    names = {0: "phase 1: square", 1: "phase 2: left triangle", 3: "phase 2: right triangle"}
    heading = f"Figure 7: symmetric shift, causal mask ({_sizes(t)})"
    return _grid_and_timeline(heading, t, phase, names, 4.0)


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
        PictureError: another format.
        PlotsMissingError: Matplotlib is not installed.
    """
    for kind in formats:
        if kind not in ("svg", "png"):
            raise PictureError(f"figures are written as svg or png, got {kind!r}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in _FIGURES.items():
        figure = draw()
        paths += [save_figure(figure, folder / f"{name}.{kind}") for kind in formats]
    return paths


if __name__ == "__main__":
    for written in draw_figures(*(sys.argv[1:2] or ["docs/figures"]), formats=sys.argv[2:] or ("svg",)):
        print(written)

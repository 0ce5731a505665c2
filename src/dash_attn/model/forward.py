"""What a forward's plan would take: workers claim items in order, and none waits for another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from heapq import heapreplace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import CostError
from ..machine import FORWARD_CYCLES
from ..schedule import ForwardPlan
from .charts import IDLE, PALETTE, new_figure, save_figure
from .cost import require_costs, require_workers
from .output import PictureError, check_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "ForwardCosts",
    "ForwardTimeline",
    "least_makespan",
    "require_drawable",
    "save_forward",
    "simulate_forward",
]

MOST_BOXES = 20_000


@dataclass(frozen=True)
class ForwardCosts:
    """Costs of an item, in cycles of one worker.

    Attributes:
        tile: of a kv tile.
        item: of what an item takes beside its kv tiles.

    Raises:
        CostError: a value is negative or not finite.
    """

    tile: float = 1.0
    item: float = 0.0

    def __post_init__(self) -> None:
        require_costs(asdict(self))

    @classmethod
    def h200(cls, head_dim: int) -> ForwardCosts:
        """Those measured on an H200 at this head dim.

        Raises:
            CostError: none were measured: it is not 64 or 128.
        """
        if head_dim not in FORWARD_CYCLES:
            raise CostError(f"no costs of a forward were measured at head dim {head_dim}")
        return cls(*FORWARD_CYCLES[head_dim])


@dataclass(frozen=True, eq=False)
class ForwardTimeline:
    """What happened when; times in cycles from the start.

    Attributes:
        plan, costs, workers: what was simulated.
        makespan: when the last item ended.
        lower_bound: no order of claims takes less: all work over all workers, or the longest item.
        worker, start, end: (items,) of every item in the order of claims.
    """

    plan: ForwardPlan
    costs: ForwardCosts
    workers: int
    makespan: float
    lower_bound: float
    worker: NDArray[np.int64]
    start: NDArray[np.float64]
    end: NDArray[np.float64]

    @property
    def utilization(self) -> float:
        """Share of worker cycles spent on items; 1 for a plan without items."""
        busy = float((self.end - self.start).sum())
        return busy / (self.makespan * self.workers) if self.makespan else 1.0


def simulate_forward(plan: ForwardPlan, costs: ForwardCosts, workers: int) -> ForwardTimeline:
    """Let workers claim the items of a plan, in order, each when it is free.

    Raises:
        CostError: ``workers`` is not a positive integer.

    >>> from dash_attn.problem import Mask, Problem
    >>> from dash_attn.schedule import build_forward_plan
    >>> causal = Problem.dense(seqlen=4 * 128, heads=1, head_dim=128, mask=Mask.causal())
    >>> found = simulate_forward(build_forward_plan(causal, 128, 2), ForwardCosts(tile=2, item=1), 2)
    >>> found.start.tolist(), found.end.tolist(), found.makespan, found.lower_bound
    ([0.0, 0.0, 7.0, 9.0], [9.0, 7.0, 12.0, 12.0], 12.0, 12.0)
    """
    require_workers(workers)
    length = np.asarray(costs.tile * plan.tiles_of_items() + costs.item, dtype=np.float64)
    free = [(0.0, worker) for worker in range(min(workers, max(plan.items, 1)))]
    worker, start = np.zeros(plan.items, dtype=np.int64), np.zeros(plan.items)
    for number, cycles in enumerate(length.tolist()):
        start[number], worker[number] = free[0]
        heapreplace(free, (free[0][0] + cycles, free[0][1]))
    end = start + length
    bound = least_makespan(length, workers)
    return ForwardTimeline(plan, costs, workers, float(end.max(initial=0.0)), bound, worker, start, end)


def least_makespan(cycles: NDArray[np.float64], workers: int) -> float:
    """No order of claims of items of these lengths takes less."""
    return max(float(cycles.sum()) / workers, float(cycles.max(initial=0.0)))


def require_drawable(plan: ForwardPlan) -> None:
    """Raise PictureError where there are too many items for a picture."""
    if plan.items > MOST_BOXES:
        raise PictureError(f"too many items to draw: {plan.items:,}, the limit is {MOST_BOXES:,}")


def save_forward(
    timelines: ForwardTimeline | Sequence[tuple[str, ForwardTimeline]], path: str | Path
) -> Path:
    """Draw one row per worker, a box per item, in the colour of its head.

    Args:
        timelines: one timeline, or (title, timeline) pairs to stack on one time axis.
        path: ends in .svg or .png.

    Raises:
        PictureError: another suffix than .svg or .png, more than 20,000 items, or no timeline.
        PlotsMissingError: Matplotlib is not installed.
    """
    path = check_path(path)
    if isinstance(timelines, ForwardTimeline):
        timelines = [("", timelines)]
    if not timelines:
        raise PictureError("save_forward needs at least one timeline, got an empty list")
    for _, timeline in timelines:
        require_drawable(timeline.plan)
    heights = [min(max(0.27 * timeline.workers, 1.0), 8.0) + 1.0 for _, timeline in timelines]
    figure = new_figure(sum(heights))
    axes = figure.subplots(len(timelines), 1, squeeze=False, height_ratios=heights)[:, 0]
    span = max(timeline.makespan for _, timeline in timelines) * 1.005 or 1.0
    for ax, (title, timeline) in zip(axes, timelines):
        _draw_items(ax, timeline)
        ax.set_xlim(0, span)
        facts = f"makespan {timeline.makespan:,.6g}, bound {timeline.lower_bound:,.6g}"
        what = f"forward, {timeline.plan.problem.mask.name}"
        ax.set_title(f"{what}{title and f', {title}'}: {facts}", loc="left")
    for ax in axes[:-1]:
        ax.set_xlabel("")
    return save_figure(figure, path)


def _draw_items(ax: Axes, timeline: ForwardTimeline) -> None:
    heads = np.array([timeline.plan.claimed(number)[1] for number in range(timeline.plan.items)], dtype=int)
    for colour in range(len(PALETTE)):
        mine = heads % len(PALETTE) == colour
        for worker in np.unique(timeline.worker[mine]).tolist():
            its = mine & (timeline.worker == worker)
            boxes = np.stack([timeline.start[its], (timeline.end - timeline.start)[its]], 1).tolist()
            row, tone = (worker - 0.4, 0.8), PALETTE[colour]
            ax.broken_barh(boxes, row, facecolor=tone, edgecolor="white", linewidth=0.3)
    ax.set_facecolor(IDLE)
    ax.set_ylim(timeline.workers - 0.5, -0.5)
    ax.set_xlabel("cycles")
    ax.set_ylabel("worker")

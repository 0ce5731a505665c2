"""A timeline drawn on axes, and the legend of its colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..problem import IntArray
from ..schedule.plan import Plan
from .charts import IDLE, LAUNCH, PALETTE, WAIT, lighter
from .pixels import pixels
from .segments import Segments, segments, task_heads, task_tiles
from .simulate import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_legend", "draw_timeline", "is_averaged"]

# Tasks of a picture: in SVG a task takes some 130 bytes and a label as many, and a picture should stay
# below 150 KB.
_RASTER_ABOVE = 800
_LABELS_UP_TO = 400
# With more tasks than this, boxes are narrower than a pixel and take many seconds.
_PIXELS_ABOVE = 20_000


def _head_name(plan: Plan, head: int) -> str:
    sequence = int(np.searchsorted(plan.group_first, head, side="right")) - 1
    groups = int(plan.group_first[sequence + 1] - plan.group_first[sequence])
    kind = "kv head" if groups == plan.problem.kv_heads else "head group"
    names = [f"{kind} {head - plan.group_first[sequence]}"]
    if groups == 1 and len(plan.problem.sequences) > 1:
        names = []
    return ", ".join([f"sequence {sequence}", *names] if len(plan.problem.sequences) > 1 else names)


def _group_names(plan: Plan) -> list[str]:
    count = int(plan.group_first[-1])
    if count > len(PALETTE):
        return [f"heads {head}, {head + len(PALETTE)}, …" for head in range(len(PALETTE))]
    return [_head_name(plan, head) for head in range(count)]


def _add_boxes(ax: Axes, s: Segments, rows: tuple[float, float], **style: Any) -> None:
    """All boxes of one look as one path, a closed polygon each: small in SVG, and quick."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    if not len(s.worker):
        return
    low, high = s.worker + rows[0], s.worker + rows[1]
    x = np.stack([s.start, s.end, s.end, s.start, s.start], axis=1)
    y = np.stack([low, low, high, high, low], axis=1)
    moves = [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY]
    codes = np.tile(np.array(moves, dtype=np.uint8), len(s.worker))
    ax.add_patch(PathPatch(Outline(np.stack([x, y], axis=2).reshape(-1, 2), codes), **style))


def draw_timeline(
    ax: Axes,
    timeline: Timeline,
    *,
    span: float | None = None,
    groups: IntArray | None = None,
    tag: str = "0",
    total: int = 0,
    labels: bool = True,
) -> None:
    """Draw a timeline: one row per worker, time to the right, a full box to compute, a pale one to reduce.

    Where reductions overlap compute, a row has two lanes: compute above, reductions below. Above some
    hundred tasks boxes lose labels, outlines and lanes, and become pixels within the SVG. Above some ten
    thousand tasks there are no boxes: each pixel mixes the colours of what happens in it, by shares of time.

    Args:
        ax: where to draw; its size must already be about final.
        span: end of the time axis in cycles, default the makespan.
        groups: (tasks,) index into ``PALETTE``, default the kv head.
        tag: part of the SVG ids ``compute-TAG-COLOUR`` and ``reduce-TAG-COLOUR`` of the paths, each of
            which holds one closed polygon per task; ``pixels-TAG`` where there are no boxes.
        total: tasks of the whole picture, where that has more panels than this one.
        labels: write q tiles into the boxes, if there is room.
    """
    span = span or timeline.makespan or 1.0
    total = max(total, len(timeline.compute_start))
    colour_of = (task_heads(timeline) if groups is None else groups) % len(PALETTE)
    if is_averaged(total):
        _draw_pixels(ax, timeline, colour_of, tag)
    else:
        middle = _draw_boxes(ax, timeline, colour_of, tag, dense=total > _RASTER_ABOVE)
        if labels and 0 < total <= _LABELS_UP_TO:
            _label_boxes(ax, timeline, span, middle)
    _finish_axes(ax, timeline, span)


def is_averaged(total: int) -> bool:
    """A picture of so many tasks has pixels in place of boxes."""
    return total > _PIXELS_ABOVE


def _draw_boxes(ax: Axes, timeline: Timeline, colour_of: IntArray, tag: str, *, dense: bool) -> float:
    """A box for every stretch of time; returns where in a row the middle of compute is."""
    upper = lower = (-0.5, 0.5) if dense else (-0.4, 0.4)
    if timeline.costs.dq_buffers and not dense:
        upper, lower = (-0.4, 0.12), (0.16, 0.4)
    thin = 0.15 if timeline.workers > 48 else 0.035
    middles = [(sum(lane) / 2 - thin, sum(lane) / 2 + thin) for lane in (upper, lower)]
    parts = segments(timeline)
    workers = np.arange(timeline.workers, dtype=np.int64)
    band = Segments(workers, np.zeros(len(workers)), np.full(len(workers), timeline.makespan))
    _add_boxes(ax, band, (min(upper), max(lower)), facecolor=IDLE, linewidth=0)
    # Without blended pixels a picture of thousands of boxes takes a fraction of the bytes.
    raster: dict[str, Any] = {"rasterized": dense, "antialiased": not dense}
    edge: dict[str, Any] = {"linewidth": 0 if dense else 0.5, **raster}
    _add_boxes(ax, parts["launch"], upper, facecolor=LAUNCH, edgecolor="white", **edge)
    for kind, rows in (("wait", middles[0]), ("held", middles[1])):
        _add_boxes(ax, parts[kind], rows, facecolor=WAIT, linewidth=0, snap=False, **raster)
    for colour in np.unique(colour_of).tolist():
        tone = PALETTE[colour]
        for kind, rows, face in (("reduce", lower, lighter(tone)), ("compute", upper, tone)):
            hatch = "/////" if kind == "reduce" and not dense else None
            look = {
                "facecolor": face,
                "edgecolor": "white" if hatch is None else tone,
                "hatch": hatch,
                **edge,
            }
            boxes = _of_colour(parts[kind], colour_of, colour)
            _add_boxes(ax, boxes, rows, gid=f"{kind}-{tag}-{colour}", **look)
    return sum(upper) / 2


def _of_colour(s: Segments, colour_of: IntArray, colour: int) -> Segments:
    mine = colour_of == colour
    return Segments(*(array[mine] for array in s))


def _draw_pixels(ax: Axes, timeline: Timeline, colour_of: IntArray, tag: str) -> None:
    """The timeline as one image."""
    parts, colours = segments(timeline), np.unique(colour_of).tolist()
    layers = [(_of_colour(parts["compute"], colour_of, c), PALETTE[c]) for c in colours]
    layers += [(parts["launch"], LAUNCH), (parts["wait"], WAIT)]
    layers += [(_of_colour(parts["reduce"], colour_of, c), lighter(PALETTE[c])) for c in colours]
    layers += [(parts["held"], WAIT)]
    end = timeline.makespan or 1.0
    image = pixels(layers, timeline.workers, end, IDLE)
    extent = (0.0, end, timeline.workers - 0.5, -0.5)
    ax.imshow(image, extent=extent, aspect="auto", interpolation="nearest", gid=f"pixels-{tag}")


def _label_boxes(ax: Axes, timeline: Timeline, span: float, offset: float) -> None:
    """Write each task's q tile into its compute box, if all of them have room."""
    box = ax.get_window_extent()
    points = 72.0 / ax.figure.dpi
    q = task_tiles(timeline)[1]
    width = timeline.costs.compute / span * box.width * points
    height = 0.5 * box.height * points / timeline.workers
    size = min(9.0, height, width / (0.7 * len(str(q.max(initial=0)))))
    if size < 5:
        return
    part = segments(timeline)["compute"]
    for label, x, y in zip(
        q.tolist(), ((part.start + part.end) / 2).tolist(), part.worker.tolist(), strict=True
    ):
        ax.text(x, y + offset, str(label), ha="center", va="center_baseline", fontsize=round(size, 1))


def _finish_axes(ax: Axes, timeline: Timeline, span: float) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_xlim(0, span * 1.005)
    ax.set_ylim(timeline.workers - 0.5, -0.5)
    ax.xaxis.set_major_locator(MaxNLocator(integer=span >= 2, nbins=12))
    ax.xaxis.set_major_formatter("{x:,.10g}")
    step = next(s for s in (1, 2, 4, 5, 10, 20, 50, 100, 1 << 30) if timeline.workers <= 16 * s)
    ax.set_yticks(range(0, timeline.workers, step))
    if not len(timeline.compute_start):
        ax.text(0.5, 0.5, "no tasks", transform=ax.transAxes, ha="center", va="center")
    ax.tick_params(length=2)
    ax.spines["left"].set_visible(False)
    ax.set_ylabel("worker")
    ax.set_xlabel("cycles")


def draw_legend(
    figure: Figure, timelines: Sequence[Timeline], names: Mapping[int, str] | None = None
) -> None:
    """One legend below all panels; ``names`` of colours, by default the kv heads."""
    from matplotlib.patches import Patch

    averaged = is_averaged(sum(len(t.compute_start) for t in timelines))
    found = {kind for t in timelines for kind, part in segments(t).items() if len(part.worker)}
    if names is None:
        most = max(timelines, key=lambda t: len(_group_names(t.plan)))
        names = dict(enumerate(_group_names(most.plan)))
    handles = [Patch(facecolor=PALETTE[colour], label=name) for colour, name in names.items()]
    if "reduce" in found and any(t.costs.reduce for t in timelines):
        look: dict[str, Any] = {"facecolor": lighter(PALETTE[-1]), "edgecolor": "#888888"}
        handles.append(Patch(**look, hatch="/////", linewidth=0.5, label="reduce (pale)"))
    if found & {"wait", "held"}:
        # The legend's boxes have one height; a line of the same colour stands for the thin bar.
        handles.append(Patch(facecolor=WAIT, label="wait" if averaged else "wait (thin)"))
    if "launch" in found:
        handles.append(Patch(facecolor=LAUNCH, label="item launch"))
    if found & {"wait", "held"} or any(t.stalls["idle"] > 1e-9 * t.makespan for t in timelines):
        handles.append(Patch(facecolor=IDLE, label="idle"))
    lines = -(-len(handles) // 8)
    columns = -(-len(handles) // lines)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5)

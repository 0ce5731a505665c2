"""The parts charts are made of: style, figures without pyplot, and a timeline drawn on axes.

Matplotlib is imported when something is drawn and not before. Charts use ``Figure`` objects without
pyplot, so neither a display nor global state is involved, and the bytes of a picture depend on nothing
but its input and the versions of Matplotlib and its libraries.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from ..errors import DashError
from ..problem import IntArray
from ..schedule.plan import Plan
from .segments import Segments, segments, task_heads, task_tiles
from .simulate import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "IDLE",
    "PALETTE",
    "PictureError",
    "PlotsMissingError",
    "check_path",
    "draw_legend",
    "draw_timeline",
    "lighter",
    "new_figure",
    "plotting",
    "save_figure",
]

P = ParamSpec("P")
R = TypeVar("R")

PALETTE = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00", "#0072B2", "#999999")
"""Okabe and Ito's colours, which people with any common colour blindness can tell apart."""

IDLE, WAIT, LAUNCH = "#ECECEC", "#444444", "#B8B8B8"

# Tasks of a picture: in SVG a task takes some 130 bytes and a label as many, and a picture should stay
# below 150 KB.
_RASTER_ABOVE = 800
_LABELS_UP_TO = 400
_WIDTH = 10.0  # inches
_STYLE: dict[str, Any] = {
    "svg.hashsalt": "dash-attn",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.6,
}


class PictureError(DashError, ValueError):
    """A picture was asked for in a format, or of a timeline, that cannot be drawn."""


class PlotsMissingError(DashError, ImportError):
    """Matplotlib is not installed."""


def plotting(draw: Callable[P, R]) -> Callable[P, R]:
    """Decorator: run a drawing function with Matplotlib's defaults and our style, whatever the user's.

    Raises:
        PlotsMissingError: Matplotlib is not installed.
    """

    @wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            import matplotlib
        except ImportError as error:
            message = "pictures need Matplotlib, which is not installed: pip install 'dash-attn[plots]'"
            raise PlotsMissingError(message) from error
        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            settings: Any = matplotlib.rcParams
            settings.update(_STYLE)
            return draw(*args, **kwargs)

    return styled


def new_figure(height: float, width: float = _WIDTH) -> Figure:
    """An empty white figure (inches)."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def check_path(path: str | Path) -> Path:
    path = Path(path)
    if path.suffix.lower() not in (".svg", ".png"):
        raise PictureError(
            f"a picture is written as .svg or .png, got suffix {path.suffix!r} of {path.name!r}"
        )
    return path


@plotting
def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write a figure without dates or versions, so that the same figure gives the same bytes."""
    path = check_path(path)
    if path.suffix.lower() == ".png":
        figure.savefig(path, format="png", metadata={"Software": None}, dpi=150)
        return path
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, dpi=100)
    path.write_text(_slim(buffer.getvalue()), encoding="utf-8", newline="\n")
    return path


def _slim(svg: str) -> str:
    """The same picture in half the bytes: two decimals, one font for all texts, no empty rotations."""
    font = "font-family: 'DejaVu Sans', sans-serif; "
    svg = svg.replace(font, "").replace("<svg ", "<svg font-family=\"'DejaVu Sans', sans-serif\" ", 1)
    svg = re.sub(r' transform="rotate\(-0 [^"]*"', "", svg)

    def shorter(match: re.Match[str]) -> str:
        return re.sub(r"(\.\d\d)\d+| (?=\n)", r"\1", match.group())

    return re.sub(r' (?:d|x|y)="[^"]*"', shorter, svg)


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


def lighter(colour: str, share: float = 0.35) -> str:
    """A share of a colour, the rest white."""
    parts = (share * int(colour[i : i + 2], 16) + (1 - share) * 255 for i in (1, 3, 5))
    return "#" + "".join(f"{round(part):02X}" for part in parts)


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
    """Draw a timeline: one row a worker, time to the right, a full box to compute, a pale one to reduce.

    Where reductions overlap compute, a row has two lanes: compute above, reductions below. Above some
    hundred tasks boxes lose labels, outlines and lanes, and become pixels within the SVG.

    Args:
        ax: where to draw; its size must already be about final.
        span: end of the time axis in cycles, default the makespan.
        groups: (tasks,) index into ``PALETTE``, default the kv head.
        tag: part of the SVG ids ``compute-TAG-COLOUR`` and ``reduce-TAG-COLOUR`` of the paths, each of
            which holds one closed polygon a task.
        total: tasks of the whole picture, where that has more panels than this one.
        labels: write q tiles into the boxes, if there is room.
    """
    span = span or timeline.makespan or 1.0
    total = max(total, len(timeline.compute_start))
    dense = total > _RASTER_ABOVE
    upper = lower = (-0.5, 0.5) if dense else (-0.4, 0.4)
    if timeline.costs.dq_buffers and not dense:
        upper, lower = (-0.4, 0.12), (0.16, 0.4)
    thin = 0.15 if timeline.workers > 48 else 0.035
    middles = [(sum(lane) / 2 - thin, sum(lane) / 2 + thin) for lane in (upper, lower)]
    parts = segments(timeline)
    colour_of = (task_heads(timeline) if groups is None else groups) % len(PALETTE)
    workers = np.arange(timeline.workers, dtype=np.int64)
    band = Segments(workers, np.zeros(len(workers)), np.full(len(workers), timeline.makespan))
    _add_boxes(ax, band, (min(upper), max(lower)), facecolor=IDLE, linewidth=0)
    # Without blended pixels a picture of thousands of boxes takes a fraction of the bytes.
    pixels: dict[str, Any] = {"rasterized": dense, "antialiased": not dense}
    edge: dict[str, Any] = {"linewidth": 0 if dense else 0.5, **pixels}
    _add_boxes(ax, parts["launch"], upper, facecolor=LAUNCH, edgecolor="white", **edge)
    for kind, rows in (("wait", middles[0]), ("held", middles[1])):
        _add_boxes(ax, parts[kind], rows, facecolor=WAIT, linewidth=0, snap=False, **pixels)
    for colour in np.unique(colour_of).tolist():
        mine, tone = colour_of == colour, PALETTE[colour]
        for kind, rows, face in (("reduce", lower, lighter(tone)), ("compute", upper, tone)):
            boxes = Segments(*(array[mine] for array in parts[kind]))
            hatch = "/////" if kind == "reduce" and not dense else None
            outline = "white" if hatch is None else tone
            _add_boxes(
                ax,
                boxes,
                rows,
                facecolor=face,
                edgecolor=outline,
                hatch=hatch,
                gid=f"{kind}-{tag}-{colour}",
                **edge,
            )
    if labels and 0 < total <= _LABELS_UP_TO:
        _label_boxes(ax, timeline, span, sum(upper) / 2)
    _finish_axes(ax, timeline, span)


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
        handles.append(Patch(facecolor=WAIT, label="wait (thin)"))
    if "launch" in found:
        handles.append(Patch(facecolor=LAUNCH, label="item launch"))
    if found & {"wait", "held"} or any(t.stalls["idle"] > 1e-9 * t.makespan for t in timelines):
        handles.append(Patch(facecolor=IDLE, label="idle"))
    lines = -(-len(handles) // 8)
    columns = -(-len(handles) // lines)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5)

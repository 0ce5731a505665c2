"""The parts charts are made of: style, colours, and figures without pyplot.

Matplotlib is imported when something is drawn and not before. Charts use ``Figure`` objects without
pyplot, so neither a display nor global state is involved, and the bytes of a picture depend on nothing
but its input and the versions of Matplotlib and its libraries.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from .output import check_path, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["IDLE", "LAUNCH", "PALETTE", "WAIT", "lighter", "new_figure", "plotting", "save_figure"]

P = ParamSpec("P")
R = TypeVar("R")

PALETTE = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00", "#0072B2", "#999999")
"""Okabe and Ito's colours, which people with any common colour blindness can tell apart."""

IDLE, WAIT, LAUNCH = "#ECECEC", "#444444", "#B8B8B8"

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


def plotting(draw: Callable[P, R]) -> Callable[P, R]:
    """Decorator: run a drawing function with Matplotlib's defaults and our style, whatever the user's.

    Raises:
        PlotsMissingError: Matplotlib is not installed.
    """

    @wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> R:
        require_matplotlib()
        import matplotlib

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


def lighter(colour: str, share: float = 0.35) -> str:
    """A share of a colour, the rest white."""
    parts = (share * int(colour[i : i + 2], 16) + (1 - share) * 255 for i in (1, 3, 5))
    return "#" + "".join(f"{round(part):02X}" for part in parts)

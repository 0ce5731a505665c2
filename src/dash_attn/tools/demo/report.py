"""What the demo shows: sparklines, a progress bar, and the picture of the drift."""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import TextIO

from ...model.charts import new_figure, plotting, save_figure

__all__ = ["ProgressBar", "draw_drift", "sparkline"]

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 40) -> str:
    """Values as a line of bars, averaged to at most ``width`` of them.

    >>> sparkline([5.5, 4.0, 3.0, 2.6])
    '█▄▂▁'
    """
    width = min(width, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = high - low if high > low else 1.0
    return "".join(_BARS[min(int((m - low) / span * len(_BARS)), len(_BARS) - 1)] for m in means)


class ProgressBar:
    """One line on a terminal, redrawn at every step and cleared at the end."""

    def __init__(self, name: str, steps: int, stream: TextIO | None = None, width: int = 30) -> None:
        self.name, self.steps, self.width = name, steps, width
        self.stream = sys.stderr if stream is None else stream
        self.start = time.perf_counter()

    def show(self, step: int, loss: float) -> None:
        """Step ``step`` of ``steps`` is done."""
        done = self.width * step // self.steps
        left = (time.perf_counter() - self.start) / step * (self.steps - step)
        bar = "█" * done + "░" * (self.width - done)
        line = f"{self.name:<15} {bar} step {step}/{self.steps}  loss {loss:.3f}  {left:.0f} s left"
        # \033[K clears the rest of the line, which may be longer from the step before.
        self.stream.write(f"\r{line}\033[K" if step < self.steps else "\r\033[K")
        self.stream.flush()


@plotting
def draw_drift(
    path: Path, losses: list[float], shuffled_losses: list[float], drift: dict[int, float], caption: str
) -> Path:
    """Write a picture of both losses, and of the weights drifting apart, over the steps.

    Args:
        path: ends in .svg or .png.
        losses, shuffled_losses: nats per byte, one per step.
        drift: step -> largest absolute difference of a weight.
        caption: stands below.

    Raises:
        PlotsMissingError: Matplotlib is not installed.
    """
    figure = new_figure(height=5.6)
    top, bottom = figure.subplots(2, 1, sharex=True)
    steps = range(1, len(losses) + 1)
    top.plot(steps, losses, color="#444444", linewidth=2.2, label="summed in the order of the plan")
    top.plot(steps, shuffled_losses, color="#D55E00", linewidth=1.0, label="summed in no fixed order")
    top.set_ylabel("loss (nats per byte)")
    top.legend(frameon=False)
    shown = {step: value for step, value in drift.items() if value > 0}
    if shown:
        bottom.semilogy(list(shown), list(shown.values()), "o-", color="#D55E00", markersize=3.5)
    bottom.set_ylabel("largest weight difference")
    bottom.set_xlabel(f"step\n\n{caption}")
    figure.suptitle("One thing differs between these runs: the order in which dQ is summed", fontsize=12)
    return save_figure(figure, path)

"""A timeline of many tasks as an image: the share of time of each kind, averaged over a pixel.

The work is a few passes over arrays of all tasks, so tens of millions of tasks take seconds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .segments import Segments

__all__ = ["pixels", "shares"]

MOST_ROWS = 400
"""Rows of an image; with more workers a row is the average over several of them."""

COLUMNS = 900
"""Fewer than the pixels of a chart, so that none is lost where the image is stretched over them."""

Shares = NDArray[np.float64]


def shares(s: Segments, workers: int, span: float, rows: int, columns: int) -> Shares:
    """The share of time that segments cover in each pixel.

    Args:
        s: segments that do not overlap within a worker.
        workers: rows are ceil(workers / rows) neighbouring workers each.
        span: end of the time axis in cycles, > 0.
        rows, columns: of the image.

    Returns:
        (rows, columns) float64, from 0 to 1.

    >>> import numpy as np
    >>> half = Segments(np.array([0]), np.array([1.0]), np.array([2.5]))
    >>> shares(half, 1, 4.0, 1, 4).tolist()
    [[0.0, 1.0, 0.5, 0.0]]
    """
    per_row = -(-workers // rows)
    row = s.worker // per_row * (columns + 2)
    total = np.zeros(rows * (columns + 2))
    steps = np.zeros_like(total)
    # A segment [a, b) covers what lies behind a, less what lies behind b.
    for times, sign in ((s.start, 1.0), (s.end, -1.0)):
        at = np.clip(times * (columns / span), 0, columns)
        pixel = at.astype(np.int64)
        total += sign * np.bincount(row + pixel, weights=pixel + 1 - at, minlength=len(total))
        steps += sign * np.bincount(row + pixel + 1, minlength=len(total))
    covered = total.reshape(rows, -1) + steps.reshape(rows, -1).cumsum(axis=1)
    in_row = np.bincount(np.arange(workers) // per_row, minlength=rows)[:, None]
    found: Shares = np.clip(covered[:, :columns] / np.maximum(in_row, 1), 0.0, 1.0)
    return found


def pixels(
    layers: list[tuple[Segments, str]], workers: int, span: float, background: str
) -> NDArray[np.uint8]:
    """An image whose pixels mix the colours of what their workers do, by the share of time.

    Args:
        layers: segments and their colours; where shares add up to more than 1, the first ones count.
        workers: of the timeline.
        span: end of the time axis in cycles.
        background: colour of the rest.

    Returns:
        (rows, columns, 3) uint8; rows is ``workers``, or fewer above ``MOST_ROWS``.
    """
    per_row = -(-workers // MOST_ROWS)
    rows = -(-workers // per_row)
    left = np.ones((rows, COLUMNS))
    image = np.zeros((rows, COLUMNS, 3))
    for s, colour in layers:
        if len(s.worker):
            taken = np.minimum(shares(s, workers, span, rows, COLUMNS), left)
            left -= taken
            image += taken[:, :, None] * _rgb(colour)
    image += left[:, :, None] * _rgb(background)
    return np.rint(image).astype(np.uint8)


def _rgb(colour: str) -> NDArray[np.float64]:
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)], dtype=np.float64)

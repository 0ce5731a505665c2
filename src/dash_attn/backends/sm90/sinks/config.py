"""Static configuration of the kernels for the gradient of a sink: there is one variant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....schedule.constants import SINK_ROWS


@dataclass(frozen=True)
class SinkConfig:
    """Head dim, dtype and tiles are no matter: the kernels read row statistics.

    Attributes:
        direction: the package of its program.
        kernels: class names, which the compiler puts into the names of the kernels.
        rows: of a tile.
    """

    direction: ClassVar[str] = "sinks"
    kernels: ClassVar[tuple[str, ...]] = ("SinkParts", "SinkTotals")

    rows: int = SINK_ROWS

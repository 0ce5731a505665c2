"""Static configuration of the kernels for the gradient of a sink."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....schedule.constants import SINK_ROWS

__all__ = ["STEPS", "SinkConfig"]

STEPS = {"": ("SinkParts", "SinkTotals"), "add": ("SinkParts",), "finish": ("SinkTotals",)}
"""Kernels by what is done: everything; rows are added to sums of their sequences; these sums are added."""


@dataclass(frozen=True)
class SinkConfig:
    """Head dim, dtype and tiles are no matter: the kernels read row statistics.

    Attributes:
        direction: the package of its program.
        step: one of ``STEPS``.
        rows: of a tile.
    """

    direction: ClassVar[str] = "sinks"

    step: str = ""
    rows: int = SINK_ROWS

    @property
    def kernels(self) -> tuple[str, ...]:
        """Class names, which the compiler puts into the names of the kernels."""
        return STEPS[self.step]

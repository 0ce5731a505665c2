"""What a task costs, in cycles of one worker."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from ..errors import CostError
from ..machine import TASK_CYCLES
from ..machine import WORKERS as H200_WORKERS

__all__ = ["H200", "H200_WORKERS", "MOST_WORKERS", "Costs", "require_costs", "require_workers"]

MOST = 1e15
"""Cycles: six days of a GPU. Sums of these stay finite."""
MOST_BUFFERS = 1024
_REAL = (int, float, np.integer, np.floating)
MOST_WORKERS = 2**20


def require_costs(costs: Mapping[str, float]) -> None:
    """Raise CostError unless all of these, by name, are finite, not negative, and at most ``MOST``."""
    for name, value in costs.items():
        if not isinstance(value, _REAL) or not math.isfinite(value) or value < 0:
            raise CostError(f"{name} must be finite and >= 0, got {value!r}")
        if value > MOST:
            raise CostError(f"{name} must be at most {MOST:g}, got {value!r}")


@dataclass(frozen=True)
class Costs:
    """Costs of one task, in cycles.

    Attributes:
        compute: the five matrix products of a task (the paper's c).
        reduce: adding one dQ tile to global memory, to completion (the paper's r).
        latency: from the end of a reduction until the next worker may start its own (hand-over).
        dq_buffers: dQ tiles a worker can hold for reductions that have not finished. With 0, compute
            and reduce run in series, as in the paper; with b >= 1 a task's compute ends only when the
            reduction b tasks before it has, so reductions overlap compute.
        launch: from claiming an item to its first compute.

    Raises:
        CostError: a value is negative, not finite, or so large that sums would be.
    """

    compute: float = 1.0
    reduce: float = 0.0
    latency: float = 0.0
    dq_buffers: int = 0
    launch: float = 0.0

    def __post_init__(self) -> None:
        require_costs(asdict(self))
        if self.dq_buffers != int(self.dq_buffers):
            raise CostError(f"dq_buffers must be an integer, got {self.dq_buffers!r}")
        if self.dq_buffers > MOST_BUFFERS:
            raise CostError(f"dq_buffers must be at most {MOST_BUFFERS}, got {self.dq_buffers!r}")
        object.__setattr__(self, "dq_buffers", int(self.dq_buffers))

    @property
    def per_task(self) -> float:
        """Cycles a worker needs for each of many tasks when it never waits."""
        return self.compute + self.reduce if self.dq_buffers == 0 else max(self.compute, self.reduce)


H200 = Costs(compute=TASK_CYCLES, reduce=1336, latency=1460, dq_buffers=1, launch=TASK_CYCLES)
"""Measured on one H200 (docs/design.md): a 64 x 128 tile at head dim 128, or 128 x 128 at 64, at three
quarters of the tensor cores' peak; a 32 KB bulk reduction to completion; a hop of 2,800 cycles with
acquire and release, of which the reduction is one part; about one task to start an item."""


def require_workers(workers: int) -> None:
    """Raise CostError unless ``workers`` is a positive integer, and no more than a simulation can hold."""
    whole = isinstance(workers, _REAL) and math.isfinite(workers) and workers == int(workers)
    if not whole or workers < 1:
        raise CostError(f"workers must be an integer >= 1, got {workers!r}")
    if workers > MOST_WORKERS:
        raise CostError(f"too large: {int(workers):,} workers, the limit is {MOST_WORKERS:,}")

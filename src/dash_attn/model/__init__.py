"""Costs, simulation, bounds and pictures of plans. Pure NumPy; pictures need matplotlib."""

from __future__ import annotations

from .bounds import closed_form, lower_bounds
from .cost import H200, H200_WORKERS, Costs
from .estimate import Estimate, estimate
from .forward import ForwardCosts, ForwardTimeline, simulate_forward
from .simulate import Timeline, simulate

__all__ = [
    "H200",
    "H200_WORKERS",
    "Costs",
    "Estimate",
    "ForwardCosts",
    "ForwardTimeline",
    "Timeline",
    "closed_form",
    "estimate",
    "lower_bounds",
    "simulate",
    "simulate_forward",
]

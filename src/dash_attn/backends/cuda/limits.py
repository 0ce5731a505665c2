"""What CUDA allows on every GPU."""

from __future__ import annotations

__all__ = ["MOST_GRID"]

MOST_GRID = 65_535
"""Blocks that a grid may have in its second and in its third dimension."""

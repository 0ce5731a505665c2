"""``dash-attn bench``: the backward on the user's own shapes, beside the peers that are installed."""

from __future__ import annotations

from .report import save_chart, table
from .run import Result, Settings, bench_shape, require_gpu_for, require_hopper

__all__ = ["Result", "Settings", "bench_shape", "require_gpu_for", "require_hopper", "save_chart", "table"]

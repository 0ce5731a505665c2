"""``dash-attn verify``: does this machine keep the promise, on the user's own shapes?"""

from __future__ import annotations

from ..shapes import Shape, chosen_device, chosen_shapes
from .checks import CHECKS, Settings, require_supported, verify_shape
from .report import Check, Report, Status

__all__ = [
    "CHECKS",
    "Check",
    "Report",
    "Settings",
    "Shape",
    "Status",
    "chosen_device",
    "chosen_shapes",
    "require_supported",
    "verify_shape",
]

"""Bitwise-reproducible attention for LLM training: schedules as data, proven before they run.

The functions on tensors need PyTorch and load it when they are first used; problems, plans and the
simulator do not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .problem import Mask, Problem
from .schedule import Plan, build_plan

if TYPE_CHECKING:
    from .api import (
        Fingerprints,
        Support,
        attention,
        fingerprints,
        flash_attn_func,
        flash_attn_varlen_func,
        flash_attn_with_kvcache,
        is_supported,
        plan_for,
    )

__version__ = "0.1.0"

__all__ = [
    "Fingerprints",
    "Mask",
    "Plan",
    "Problem",
    "Support",
    "__version__",
    "attention",
    "build_plan",
    "fingerprints",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "is_supported",
    "plan_for",
]

_NEED_TORCH = (
    "Fingerprints",
    "Support",
    "attention",
    "fingerprints",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "is_supported",
    "plan_for",
)


_MODULES = ("distributed", "errors", "integrations", "testing")
"""What a user may name without having imported it."""


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        found = globals()[name] = getattr(import_module(".api", __name__), name)  # asked for once
        return found
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*__all__, *_MODULES))

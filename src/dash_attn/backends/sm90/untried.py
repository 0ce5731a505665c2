"""Kernels that run in the emulator, and that no GPU has run yet. The environment may ask for them.

``DASH_ATTN_UNTRIED=all``, or some of the names below with commas between them. A name leaves this file when a
GPU has passed the tests of its kernels.
"""

from __future__ import annotations

import os
from functools import cache

from ...errors import InputError

__all__ = ["UNTRIED", "runs"]

UNTRIED: tuple[str, ...] = ("head_dim_256",)
"""What no GPU has run."""


def runs(name: str) -> bool:
    """Whether kernels of this name may run: a GPU has tried them, or the environment asks for them.

    Raises:
        InputError: the environment asks for something else.
    """
    return name not in UNTRIED or name in _asked()


@cache
def _asked() -> frozenset[str]:
    asked = os.environ.get("DASH_ATTN_UNTRIED", "")
    if asked == "all":
        return frozenset(UNTRIED)
    names = frozenset(name for name in asked.split(",") if name)
    if unknown := sorted(names.difference(UNTRIED)):
        known = ", ".join(("all", *UNTRIED))
        raise InputError(f"DASH_ATTN_UNTRIED must be of {known}; got {', '.join(unknown)}")
    return names

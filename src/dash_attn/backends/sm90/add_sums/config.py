"""Static configuration of the kernel that adds sums: there is one variant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class AddSumsConfig:
    """Head dim and dtype are no matter: sums are fp32 in any order.

    Attributes:
        direction: the package of its program.
        kernels: class names, which the compiler puts into the names of the kernels.
    """

    direction: ClassVar[str] = "add_sums"
    kernels: ClassVar[tuple[str, ...]] = ("Add",)

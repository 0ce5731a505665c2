"""What the numbers must be (the fp64 oracle) and what the bytes must be (the forward and the executor)."""

from __future__ import annotations

from .executor import backward, dq_partials, fold_partials
from .forward import forward
from .oracle import oracle_backward, oracle_forward, plain_attention

__all__ = [
    "backward",
    "dq_partials",
    "fold_partials",
    "forward",
    "oracle_backward",
    "oracle_forward",
    "plain_attention",
]

"""What the numbers must be (the fp64 oracle) and what the bytes must be (the executor of a plan)."""

from __future__ import annotations

from .executor import backward, dq_partials, fold_partials, forward
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

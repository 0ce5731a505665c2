"""What heads keep in the L2 cache while their items run."""

from __future__ import annotations

from ...machine import L2_BYTES
from ...problem import IntArray, Problem
from ..batch import Batch

__all__ = ["all_fit", "head_bytes", "l2_limit"]

_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def head_bytes(batch: Batch) -> IntArray:
    """Of a head group of each sequence: Q, dO and fp32 dQ of its q heads, K and V; shape (sequences,)."""
    problem = batch.problem
    element = _ELEMENT_BYTES[problem.dtype]
    lengths = problem.lengths
    rows_q = problem.group * lengths[:, 0] // batch.head_groups
    both = (problem.head_dim + problem.head_dim_v) * element  # of a row of Q and dO, or of K and V
    size: IntArray = rows_q * (both + 4 * problem.head_dim) + lengths[:, 1] * both
    return size


def l2_limit(problem: Problem) -> int:
    """Bytes of the heads whose items may run together.

    The cache for sequences up to 1,024 tokens, rising to four times as much at 4,096: the longer a head, the
    less of it is in use at a time (measured, docs/experiments/placement.md).
    """
    longest = int(problem.lengths[:, 1].max())
    return L2_BYTES * min(max(longest, 1024), 4096) // 1024


def all_fit(batch: Batch, limit: int) -> bool:
    """Whether all heads have ``limit`` bytes at most, so that their items may run together."""
    return bool((head_bytes(batch) * batch.groups).sum() <= limit)

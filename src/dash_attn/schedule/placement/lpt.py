"""Longest-processing-time-first placement with L2-aware head groups (FA4 section 3.3)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...problem import Problem
from ..plan import HeadPattern, Plan

__all__ = ["L2_BYTES", "lpt_placement"]

L2_BYTES = 50 * 2**20
"""L2 cache of an H100 or H200. It moves items in time and never changes a bit."""

_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def lpt_placement(plan: Plan, *, l2_bytes: int | None = None) -> NDArray[np.int32]:
    """Reorder items: within a section of heads that fit L2 together, the longest first.

    Sections keep the order in which heads first appear; items of equal length keep their order, so a
    placement whose items are all equal comes back unchanged.

    Args:
        plan: a plan, verified or not, in a policy's own order of items.
        l2_bytes: bytes of the cache that a section of heads may fill. By default L2_BYTES for sequences
            up to 1,024 tokens, rising to four times as much at 4,096: the longer a head, the less of it
            is in use at a time (measured, docs/perf-log.md).

    Returns:
        (items, 3) int32, rows as in ``plan.items``.

    Source: FlashAttention-4 section 3.3. It is a placement: combine it with any policy's numerics, and
    let the verifier say how many workers the pair needs.

    >>> from dash_attn.problem import Mask, Problem
    >>> from dash_attn.schedule import Descending, build_plan
    >>> causal = Problem.dense(heads=2, seqlen=256, head_dim=64, mask=Mask.causal())
    >>> lpt_placement(build_plan(causal, Descending()))[:, 1:].tolist()                  # (head, kv tile)
    [[0, 0], [1, 0], [0, 1], [1, 1]]
    """
    problem, items = plan.problem, plan.items
    if not len(items):
        return items
    if l2_bytes is None:
        longest = max(seqlen_k for _, seqlen_k in problem.sequences)
        l2_bytes = L2_BYTES * min(max(longest, 1024), 4096) // 1024
    tasks = plan.by_item(lambda pattern: pattern.task_counts * problem.group // pattern.head_groups)
    size = plan.by_item(lambda pattern: np.full(pattern.grid.kv_tiles, _head_bytes(problem, pattern)))
    head = plan.group_first[items[:, 0]] + items[:, 1]
    _, first_seen, inverse = np.unique(head, return_index=True, return_inverse=True)
    by_appearance = np.sort(first_seen)
    place = np.asarray(np.searchsorted(by_appearance, first_seen), dtype=np.int64)[inverse]
    section = _sections(size[by_appearance], l2_bytes)[place]
    return items[np.lexsort((np.arange(len(items)), -tasks, section))]


def _head_bytes(problem: Problem, pattern: HeadPattern) -> int:
    """Bytes a head group keeps in L2 while its items run: Q, dO and fp32 dQ of its q heads, K and V."""
    element, grid = _ELEMENT_BYTES[problem.dtype], pattern.grid
    rows_q = problem.group * grid.seqlen_q // pattern.head_groups
    return problem.head_dim * (rows_q * (2 * element + 4) + grid.seqlen_k * 2 * element)


def _sections(sizes: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """Section of each head: as many neighbours as fit, at least one."""
    section = np.zeros(len(sizes), dtype=np.int64)
    current, used = 0, 0
    for i, size in enumerate(sizes.tolist()):
        if used and used + size > limit:
            current, used = current + 1, 0
        section[i], used = current, used + size
    return section

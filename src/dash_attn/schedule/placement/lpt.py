"""Longest-processing-time-first placement with L2-aware sections of heads (FA4 section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...machine import L2_BYTES
from ...problem import IntArray, Problem
from ..batch import Batch, Items
from ..plan import Plan
from ..policy import Numerics
from .base import Placement, sorted_by

__all__ = ["Longest", "lpt_placement"]

_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Longest(Placement):
    """The default placement of the numerics, and in it the longest items first: see :func:`lpt_placement`."""

    name: ClassVar[str] = "lpt"

    def place(self, batch: Batch, numerics: Numerics) -> Items:
        from . import default_placement

        return _longest_first(batch, default_placement(numerics).place(batch, numerics), None)


def lpt_placement(plan: Plan, *, l2_bytes: int | None = None) -> Items:
    """Reorder items: within a section of heads that fit L2 together, the longest first.

    Sections keep the order in which heads first appear. Items of equal length keep their order, so a
    placement whose items are all equal comes back unchanged.

    Args:
        plan: a plan, proven or not, in a default order of items.
        l2_bytes: bytes of the cache that a section of heads may fill. By default L2_BYTES for sequences
            up to 1,024 tokens, rising to four times as much at 4,096: the longer a head, the less of it
            is in use at a time (measured, docs/performance.md).

    Returns:
        (items, 3) int32, rows as in ``plan.items``.

    Source: FlashAttention-4 section 3.3. It is a placement: combine it with any policy's numerics, and
    let the proof say how many workers the pair needs.

    >>> from dash_attn.problem import Mask, Problem
    >>> from dash_attn.schedule import Descending, build_plan
    >>> causal = Problem.dense(heads=2, seqlen=256, head_dim=64, mask=Mask.causal())
    >>> lpt_placement(build_plan(causal, Descending()))[:, 1:].tolist()                  # (head, kv tile)
    [[0, 0], [1, 0], [0, 1], [1, 1]]
    """
    return _longest_first(plan.batch, plan.items, l2_bytes)


def _longest_first(batch: Batch, items: Items, l2_bytes: int | None) -> Items:
    if not len(items):
        return items
    problem = batch.problem
    if l2_bytes is None:
        longest = max(seqlen_k for _, seqlen_k in problem.sequences)
        l2_bytes = L2_BYTES * min(max(longest, 1024), 4096) // 1024
    tasks = batch.by_item(items, lambda p: p.task_counts * problem.group // p.head_groups)
    head = batch.group_of_item(items)
    first_seen = np.full(int(batch.group_first[-1]), len(items))
    first_seen[head[::-1]] = np.arange(len(items))[::-1]  # of several, the last one written stays
    by_appearance = np.argsort(first_seen, kind="stable")
    sizes = _head_bytes(problem, batch)[batch.sequence_of_group]
    section = np.empty(len(sizes), dtype=np.int64)
    section[by_appearance] = _sections(sizes[by_appearance], l2_bytes)
    return sorted_by(items, section[head], -tasks)


def _head_bytes(problem: Problem, batch: Batch) -> IntArray:
    """Bytes that a head group of each sequence keeps in L2: Q, dO and fp32 dQ of its q heads, K and V."""
    element = _ELEMENT_BYTES[problem.dtype]
    lengths = np.array(problem.sequences, dtype=np.int64)
    rows_q = problem.group * lengths[:, 0] // batch.head_groups
    size: IntArray = problem.head_dim * (rows_q * (2 * element + 4) + lengths[:, 1] * 2 * element)
    return size


def _sections(sizes: IntArray, limit: int) -> IntArray:
    """Section of each head: as many neighbours as fit, at least one.

    >>> _sections(np.array([40, 40, 40, 90, 10]), 100).tolist()
    [0, 0, 1, 2, 2]
    """
    starts = np.flatnonzero(np.diff(sizes, prepend=sizes[0] - 1))
    section = np.empty(len(sizes), dtype=np.int64)
    current, used = 0, 0
    for at, end in zip(starts.tolist(), [*starts[1:].tolist(), len(sizes)]):
        size = int(sizes[at])
        while at < end:
            if used and used + size > limit:
                current, used = current + 1, 0
            room = (limit - used) // size if size else end - at
            taken = min(max(room, 1), end - at)
            section[at : at + taken] = current
            at, used = at + taken, used + taken * size
    return section

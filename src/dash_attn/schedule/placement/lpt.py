"""Longest-processing-time-first placement with L2-aware sections of heads (FA4 section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...problem import IntArray
from ..batch import Batch, Items
from ..plan import Plan
from ..policy import Numerics
from .base import Placement, sorted_by
from .in_order import InOrder, LastFirst, queueing
from .l2 import head_bytes, l2_limit

__all__ = ["Longest", "lpt_placement"]


@dataclass(frozen=True)
class Longest(Placement):
    """The default placement of the numerics, and in it the longest items first: see :func:`lpt_placement`.

    Items of one length keep the order of the default placement. Where they queue
    (:func:`.in_order.queueing`), heads take turns.
    """

    name: ClassVar[str] = "lpt"

    def place(self, batch: Batch, numerics: Numerics) -> IntArray:
        from . import default_placement

        usual = default_placement(numerics)
        in_order = isinstance(usual, (InOrder, LastFirst))
        codes = usual.place(batch, numerics)
        if not in_order or not queueing(batch).any():
            return _longest_first(batch, codes, None, in_order)
        place = batch.columns.kv + (batch.columns.turned if isinstance(usual, LastFirst) else 0)
        return _longest_first(batch, codes, None, in_order, place)


def lpt_placement(plan: Plan, *, l2_bytes: int | None = None) -> Items:
    """Reorder items: within a section of heads that fit L2 together, the longest first.

    Sections keep the order in which heads first appear. Items of equal length keep their order, so a
    placement whose items are all equal comes back unchanged.

    Args:
        plan: a plan in a default order of items.
        l2_bytes: bytes that a section of heads may have, by default :func:`~.l2.l2_limit`.

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
    in_order = _heads_in_order(plan.batch, plan.codes)
    return plan.batch.items[_longest_first(plan.batch, plan.codes, l2_bytes, in_order)]


def _longest_first(
    batch: Batch, codes: IntArray, l2_bytes: int | None, heads_in_order: bool, place: IntArray | None = None
) -> IntArray:
    """``place``: by code, an item's place among those of its length, if it is not that in ``codes``."""
    if not len(codes):
        return codes
    if l2_bytes is None:
        l2_bytes = l2_limit(batch.problem)
    tasks, sizes = batch.columns.tasks, np.repeat(head_bytes(batch), batch.groups)
    section = _sections(sizes, l2_bytes) if heads_in_order else _by_appearance(batch, codes, sizes, l2_bytes)
    keys = [batch.per_item(section)[codes], -tasks[codes]]
    return sorted_by(codes, *keys, *(() if place is None else (place[codes],)))


def _heads_in_order(batch: Batch, codes: IntArray) -> bool:
    """Whether the heads come one after the other, as in most placements."""
    head = batch.per_item(np.arange(len(batch.items_of_group)))[codes]
    return bool((head[1:] >= head[:-1]).all())


def _by_appearance(batch: Batch, codes: IntArray, sizes: IntArray, limit: int) -> IntArray:
    """Section of each head group, where sections take heads in the order of their first items."""
    head = batch.per_item(np.arange(len(sizes)))[codes]
    first_seen = np.full(len(sizes), len(codes))
    first_seen[head[::-1]] = np.arange(len(codes))[::-1]  # of several, the last one written stays
    order = np.argsort(first_seen, kind="stable")
    section = np.empty(len(sizes), dtype=np.int64)
    section[order] = _sections(sizes[order], limit)
    return section


def _sections(sizes: IntArray, limit: int) -> IntArray:
    """Section of each head: neighbours, in about as few sections as fit, and these about alike. In a last
    section of few heads, workers would wait for one another. Numbers ascend; where heads are unequal, some
    may be left out, and a section may have up to twice the limit.

    >>> [_sections(np.array(sizes), 100).tolist() for sizes in ([30, 30, 30, 30], [40, 40, 40, 90, 10])]
    [[0, 0, 1, 1], [0, 0, 1, 2, 2]]
    """
    share = 1 / np.maximum(limit // np.maximum(sizes, 1), 1)  # of a section
    total = max(float(share.sum()), 1e-9)
    number = np.ceil(total - 1e-6)
    found: IntArray = ((np.cumsum(share) - share / 2) * (number / total)).astype(np.int64)
    return found

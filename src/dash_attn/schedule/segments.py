"""Segments of q rows: how the backward of a long sequence is cut, so that any number of GPUs cuts it alike.

dK and dV are sums over q rows. Where these rows are on several GPUs, somebody adds partial sums. How many
there are must not depend on the number of GPUs. So rows are cut at fixed places, every ``q_segment`` rows
from the first one. A segment has a plan of its own, over all keys that its rows see. It leaves partial sums
of dK and dV in fp32. They are added in ascending order of the segments. dQ of its rows is complete.

A sequence of at most ``q_segment`` rows is one segment: nothing is cut.
"""

from __future__ import annotations

from typing import NamedTuple

from ..problem import Mask, Problem, TileGrid
from .constants import Q_SEGMENT
from .head_groups import default_head_groups

__all__ = ["WHOLE", "Segment", "can_be_cut", "head_groups_of_segments", "segments_of"]

WHOLE = 2**30
"""Rows per segment that leave every sequence whole."""


class Segment(NamedTuple):
    """rows: first q row, and the row behind the last one; keys: likewise, all that these rows see."""

    rows: tuple[int, int]
    keys: tuple[int, int]


def can_be_cut(mask: Mask) -> bool:
    """Whether the rows of a segment, and the keys that they see, are a problem under the same mask: full and
    causal masks, and windows that end at the diagonal.

    >>> can_be_cut(Mask.full()), can_be_cut(Mask.of_sides(512, 0)), can_be_cut(Mask.of_sides(512, 512))
    (True, True, False)
    """
    return mask.is_full or mask.sides[1] == 0


def segments_of(
    seqlen_q: int, seqlen_k: int, mask: Mask, tile_n: int, q_segment: int = Q_SEGMENT
) -> tuple[Segment, ...]:
    """The segments of a sequence, ascending.

    Args:
        seqlen_q, seqlen_k: its lengths.
        mask: one that can be cut; others leave the sequence whole.
        tile_n: rows of a kv tile. Keys begin at a multiple of it.
        q_segment: rows per segment.

    >>> segments_of(300, 300, Mask.causal(), 128, q_segment=128)[1:]
    (Segment(rows=(128, 256), keys=(0, 256)), Segment(rows=(256, 300), keys=(0, 300)))
    >>> segments_of(512, 512, Mask.of_sides(100, 0), 128, q_segment=256)
    (Segment(rows=(0, 256), keys=(0, 256)), Segment(rows=(256, 512), keys=(128, 512)))
    """
    if seqlen_q <= q_segment or not can_be_cut(mask):
        return (Segment((0, seqlen_q), (0, seqlen_k)),)
    left, right = mask.sides
    found = []
    for first in range(0, seqlen_q, q_segment):
        last = min(first + q_segment, seqlen_q)
        begin, end = 0, seqlen_k
        if right == 0:
            end = max(last + seqlen_k - seqlen_q, 0)
        if left >= 0:
            begin = max(first + seqlen_k - seqlen_q - left, 0) // tile_n * tile_n
        found.append(Segment((first, last), (begin, end) if begin < end else (0, 0)))
    return tuple(found)


def head_groups_of_segments(problem: Problem, q_segment: int = Q_SEGMENT) -> int:
    """Head groups of a kv head, the same for all segments: those of a sequence of one segment."""
    (grid,) = TileGrid.of([(q_segment, q_segment)], problem.tile_m, problem.tile_n, problem.mask)
    return default_head_groups(problem.group, grid)

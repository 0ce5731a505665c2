"""What the kernels are given, by name; tensors and places are those of cached/arguments.py."""

from __future__ import annotations

from typing import Any, NamedTuple


class Workspace(NamedTuple):
    """fp32. A tile is a kv tile of a kv head of a sequence.

    Attributes:
        scores: (tile, rows, 128), as `place_in_scores` says.
        largest: (tile, 64), of each row before it is scaled.
        partial: (sequence, segment, kv head), as `Fold` reads it; nothing if there is one segment.
    """

    scores: Any
    largest: Any
    partial: Any


class Launch(NamedTuple):
    """Scalars.

    Attributes:
        scale: softmax scale, fp32.
        batch: sequences.
        most_pages: per sequence.
        tiles: kv tiles per sequence that there may be.
        segments: per sequence that there may be.
        left, right: mask sides, -1 unbounded.
    """

    scale: Any
    batch: Any
    most_pages: Any
    tiles: Any
    segments: Any
    left: Any
    right: Any


class Memory(NamedTuple):
    """q, out, lse, sink: with the q heads of a kv head among the rows (cached/kernel.py)."""

    q: Any
    out: Any
    lse: Any
    sink: Any
    lengths: Any
    pages: Any
    scores: Any
    largest: Any
    partial: Any


class Numbers(NamedTuple):
    """Scalars of every kernel.

    Attributes:
        left, right: mask sides.
        group: q heads of a kv head.
        kv_heads: of the cache.
        tiles, segments: of a sequence that there may be.
        pages, page_size, most_pages: as the load warp has them (cached/load.py).
        k_rows, v_rows: rows from page to page.
    """

    left: Any
    right: Any
    group: Any
    kv_heads: Any
    tiles: Any
    segments: Any
    pages: Any
    page_size: Any
    most_pages: Any
    k_rows: Any
    v_rows: Any

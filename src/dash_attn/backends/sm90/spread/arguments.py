"""What the kernels are given, by name; tensors and places are those of cached/arguments.py."""

from __future__ import annotations

from typing import Any, NamedTuple


class Workspace(NamedTuple):
    """fp32. A tile is a kv tile of a kv head of a sequence, and only warps count that have rows.

    Attributes:
        scores: of every tile and warp, `SpreadConfig.scores_words`, as threads have them.
        weighed: of every tile, `SpreadConfig.weighed_words` per warp: P of the first half of the keys, of all
            warps, and of the second half, as `Spread` has it in shared memory; then per thread what its two
            rows are multiplied by before the tile, and their sums of the tile.
        rises: (tile, 4): whether any row of a warp is multiplied by something else than 1; 0 if none is.
        largest: (tile, 64), of each row before it is scaled.
        maxima: (tile, 128, 2), of each thread's two rows, from the tile on.
        partial: (sequence, segment, kv head), as `Fold` reads it; nothing if there is one segment.
    """

    scores: Any
    weighed: Any
    rises: Any
    largest: Any
    maxima: Any
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
    weighed: Any
    rises: Any
    largest: Any
    maxima: Any
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

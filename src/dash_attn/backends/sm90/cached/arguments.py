"""What the kernels over a cache of keys are given, by name; see backward/arguments.py."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..arguments import Copy

HEADER_WORDS = 32
"""Of the table, before its records, see deal.py."""

RECORD_WORDS = 8


class Tensors(NamedTuple):
    """q, out: (B, Sq, H, D), batch extent 1 where they are packed; k, v: (pages, page_size, Hkv, D), bf16 or
    fp16; lse: (B, H, Sq) fp32, natural logarithm."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any


class Places(NamedTuple):
    """lengths: (batch,), used keys; pages: (batch * most_pages,); bounds: (batch + 1,), cu_seqlens_q, of
    dense q unread; all int32. sink: (H,) fp32."""

    lengths: Any
    pages: Any
    bounds: Any
    sink: Any


class Workspace(NamedTuple):
    """As forward/arguments.py says. ``Deal`` writes the table, see deal.py."""

    table: Any
    claimed: Any
    state: Any
    partial: Any


class Launch(NamedTuple):
    """Scalars.

    Attributes:
        scale: softmax scale, fp32.
        batch: sequences.
        tiles: q tiles that there may be.
        seqlen_q: rows of a dense sequence, -1: q is packed.
        most_pages: per sequence.
        share: blocks, times how eagerly tiles are split.
        places: of single segments that there may be.
        folds: of split tiles that there may be.
        grid: blocks.
        left, right: mask sides, -1 unbounded.
    """

    scale: Any
    batch: Any
    tiles: Any
    seqlen_q: Any
    most_pages: Any
    share: Any
    places: Any
    folds: Any
    grid: Any
    left: Any
    right: Any


class Copies(NamedTuple):
    k: Copy
    v: Copy


class Memory(NamedTuple):
    """q, out, lse, sink: with the q heads of a kv head among the rows (kernel.py)."""

    q: Any
    out: Any
    lse: Any
    sink: Any
    pages: Any
    table: Any
    claimed: Any
    state: Any
    partial: Any

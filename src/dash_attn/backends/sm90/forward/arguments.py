"""What the forward kernel is given, by name; see backward/arguments.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..arguments import Copy, Given
from .config import ForwardConfig

MATRICES = ("q", "k", "v", "out")
"""Of :class:`Tensors`, those that a launch is given as places."""

PARTS = ("claimed", "state", "partial")
"""Parts of the buffer of a call, each a multiple of 128 bytes. See :class:`Workspace`."""

TRACE_WORDS = 3
"""Of an item in a trace: nanoseconds at which it began and was done, and the SM."""


BOUNDS_WORDS = 4


class Tensors(NamedTuple):
    """q, out: (B, Sq, H, D); k, v: (Bk, Sk, Hkv, D), bf16 or fp16; lse: (B, H, Sq) fp32, natural logarithm.

    With batch extent 1, sequences begin at the rows that the table says. Otherwise a batch is a sequence, and
    of its Sk keys the first seqlen_k of the table are used. B and Bk need not be equal.
    """

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any


class Workspace(NamedTuple):
    """table: int32, see table.py; claimed: one int32, how many items beyond the blocks' first have been
    claimed; state: fp32, `ForwardConfig.state_words` per block; partial: fp32, what is left of segments,
    `ForwardConfig.partial_words` per place, q head and warpgroup."""

    table: Any
    claimed: Any
    state: Any
    partial: Any


class Launch(NamedTuple):
    """scale: softmax scale, fp32; entries of the table; heads: q heads per section; grid: blocks;
    left, right: mask sides, -1 unbounded."""

    scale: Any
    entries: Any
    heads: Any
    grid: Any
    left: Any
    right: Any


class Intervals(NamedTuple):
    """Which rows see a key. starts, ends: int32, one per key, sequences one after the other; bounds: int32,
    `BOUNDS_WORDS` per kv tile: the first row and the one behind the last that see any of its keys, then of
    those that see all. See bounds.py."""

    starts: Any
    ends: Any
    bounds: Any


class Extra(NamedTuple):
    """What only some variants have.

    sink: (H,) fp32, natural logarithms; trace: int64, `TRACE_WORDS` per item, see trace.py; inner, outer: of
    a softcap, fp32, see `Cap`."""

    sink: Any = None
    trace: Any = None
    inner: Any = None
    outer: Any = None
    intervals: Any = None


def tensors_of(config: ForwardConfig) -> list[str]:
    """What a launch is given as a tensor: the table, the buffer of the call, and of `Extra` what there is."""
    intervals = Intervals._fields if config.intervals else ()
    return ["table", "work", *["sink"] * config.sink, *["trace"] * config.trace, *intervals]


def named(config: ForwardConfig, arguments: Sequence[Any]) -> Given:
    """The arguments of a compiled function by name."""
    return Given.of(arguments, tensors_of(config), MATRICES, len(PARTS), Launch)


class Copies(NamedTuple):
    """k_rest, v_rest: where a variant has them, see `ForwardConfig.rest`."""

    q: Copy
    k: Copy
    v: Copy
    out: Copy
    k_rest: Copy | None = None
    v_rest: Copy | None = None


class Layouts(NamedTuple):
    """Layouts of tiles in shared memory, (rows, columns, stages). O has one, in the place of a tile of Q."""

    q: Any
    k: Any
    v: Any
    out: Any
    k_rest: Any = None
    v_rest: Any = None


class Products(NamedTuple):
    """Tiled MMAs of one warpgroup: S, O; of O's columns without the rest, and of the rest."""

    scores: Any
    out: Any
    first: Any = None
    rest: Any = None


class Memory(NamedTuple):
    lse: Any
    table: Any
    claimed: Any
    state: Any
    partial: Any
    sink: Any
    trace: Any
    intervals: Any = None


class Shared(NamedTuple):
    """q: a tile per warpgroup and stage, also for O on its way out; k, v: tiles; item: words of a Q stage
    each; k_rest, v_rest: tiles of the columns that k and v leave out."""

    q: Any
    k: Any
    v: Any
    item: Any
    k_rest: Any = None
    v_rest: Any = None

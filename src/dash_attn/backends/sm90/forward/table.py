"""What the forward kernel reads of a batch, as int32 words, and in which order blocks go through it.

Entries, longest first: sequence, q tile, segment, place, then seqlen_q, seqlen_k, first q row and first k
row of the sequence. Segment -1: all that the tile sees. Otherwise what is left of that one segment goes
to a place, and behind the entries stand the folds: sequence, q tile, first place, segments, then the same
four words.

An item is an entry for one q head. Items are numbered section of heads by section, in it entry by entry,
in it head by head. The first item of a block is the one of its own number; where there are more items
than blocks, it claims the others, in their order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....machine import L2_BYTES
from ....problem import Problem
from ....schedule.batch import first_of_each

ENTRY_WORDS = 8  # of a fold, too
MOST_PARTS = 4096  # segments of heads: 270 MB at head dim 128


class ForwardTable(NamedTuple):
    """words: the table; entries, folds, places: how many there are; heads: q heads per section."""

    words: NDArray[np.int32]
    entries: int
    folds: int
    places: int
    heads: int


def forward_table(problem: Problem, tile_m: int, segment: int, blocks: int) -> ForwardTable:
    """``blocks``: where there are fewer items, tiles of several segments are split."""
    lengths = problem.lengths
    tiles = -(-lengths[:, 0] // tile_m)
    sequence = np.repeat(np.arange(len(lengths)), tiles)
    tile = np.arange(len(sequence)) - first_of_each(tiles)[:-1][sequence]
    seqlen_q, seqlen_k = lengths[sequence].T
    position = tile * tile_m + seqlen_k - seqlen_q
    last_row = np.minimum((tile + 1) * tile_m, seqlen_q) - 1 + seqlen_k - seqlen_q
    first, last = problem.mask.interval(position)[0], problem.mask.interval(last_row)[1]
    first = np.zeros_like(position) if first is None else np.maximum(first, 0)
    last = seqlen_k - 1 if last is None else np.minimum(last, seqlen_k - 1)
    entries = np.stack([sequence, tile, np.full_like(tile, -1), np.zeros_like(tile)], 1)
    begin, segments = first // segment, last // segment - first // segment + 1
    # Half as many items as blocks: splitting fewer gains a round at most, and every part costs memory.
    few = 2 * len(tile) * problem.heads <= blocks and segments.sum() * problem.heads <= MOST_PARTS
    split = (last >= first) & (segments > 1) & few
    folds, places = np.zeros((0, 4), dtype=np.int64), 0
    if split.any():
        counts = np.where(split, segments, 1)
        whole = np.repeat(np.arange(len(tile)), counts)
        part = np.arange(len(whole)) - first_of_each(counts)[:-1][whole]
        entries, parted = entries[whole], split[whole]
        entries[parted, 2] = (begin[whole] + part)[parted]
        places = int(parted.sum())
        entries[parted, 3] = np.arange(places)
        first_place = first_of_each(segments[split])[:-1]
        folds = np.stack([sequence[split], tile[split], first_place, segments[split]], 1)
        bounds = entries[:, 2] * segment
        first = np.where(parted, np.maximum(first[whole], bounds), first[whole])
        last = np.where(parted, np.minimum(last[whole], bounds + segment - 1), last[whole])
    order = np.argsort(first - last, kind="stable")
    starts = np.zeros_like(lengths)
    np.cumsum(lengths[:-1], axis=0, out=starts[1:])
    records = np.concatenate([entries[order], folds])
    of_sequence = np.concatenate([lengths, starts], 1)[records[:, 0]]
    words = np.zeros(max(records.size * 2, ENTRY_WORDS), dtype=np.int32)  # who reads ahead finds something
    words[: records.size * 2] = np.concatenate([records, of_sequence], 1).ravel()
    return ForwardTable(words, len(order), len(folds), places, _heads_per_section(problem))


def _heads_per_section(problem: Problem) -> int:
    """As many kv heads as keep K and V in half of L2, a divisor of all; times q heads per kv head."""
    size = 2 * 2 * problem.head_dim * int(problem.lengths[:, 1].sum())
    fit = max(1, (L2_BYTES // 2) // max(size, 1))
    return problem.group * max(
        n for n in range(1, problem.kv_heads + 1) if problem.kv_heads % n == 0 and n <= fit
    )

"""The items of a forward as int32 words: (sequence, q head, q tile, 0) each, then a record per sequence."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ....machine import L2_BYTES
from ....problem import Problem

ITEM_WORDS = SEQUENCE_WORDS = 4


def forward_table(problem: Problem, tile_m: int, blocks: int = 1) -> NDArray[np.int32]:
    """In sections of kv heads that fit half of L2, the longest items first.

    Block b takes items b, b + blocks, ...: every second round of items is turned around, so that the block with the
    longest item of one round has the shortest of the next.
    """
    items, keys = [], []
    section = used = 0
    for sequence, (seqlen_q, seqlen_k) in enumerate(problem.sequences):
        tiles = np.arange(-(-seqlen_q // tile_m))
        grid = problem.grid(sequence)
        top, bottom = tiles * tile_m, np.minimum((tiles + 1) * tile_m, seqlen_q) - 1
        first, last = grid.columns(top)[0], grid.columns(bottom)[1]
        length = np.maximum(last - first + 1, 0)
        size = 2 * 2 * problem.head_dim * seqlen_k
        for head in range(problem.heads):
            if head % problem.group == 0:
                if used and used + size > L2_BYTES // 2:
                    section, used = section + 1, 0
                used += size
            items += [(sequence, head, tile, 0) for tile in tiles.tolist()]
            keys.append(np.stack([np.full(len(tiles), section), -length], 1))
    order = np.lexsort(np.concatenate(keys)[:, ::-1].T) if items else np.zeros(0, dtype=np.int64)
    for start in range(blocks, len(order) - blocks + 1, 2 * blocks):
        order[start : start + blocks] = order[start : start + blocks][::-1]
    lengths = problem.lengths
    starts = np.zeros_like(lengths)
    starts[1:] = np.cumsum(lengths[:-1], axis=0)
    sequences = np.concatenate([lengths, starts], axis=1)
    listed = np.array(items, dtype=np.int32).reshape(-1, ITEM_WORDS)[order]
    return np.concatenate([listed.ravel(), sequences.astype(np.int32).ravel()])

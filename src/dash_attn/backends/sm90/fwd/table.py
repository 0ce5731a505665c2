"""The items of a forward as int32 words: (sequence, q head, q tile, 0) each, then a record per sequence."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ....problem import Problem

ITEM_WORDS = SEQUENCE_WORDS = 4


class SequenceRecord(NamedTuple):
    seqlen_q: int
    seqlen_k: int
    q_row_first: int
    k_row_first: int


def forward_table(problem: Problem, tile_m: int) -> np.ndarray:
    """Longest items first; of equal ones, heads that share K and V next to each other."""
    items, weights = [], []
    for sequence in range(len(problem.sequences)):
        seqlen_q, seqlen_k = problem.sequences[sequence]
        diagonal = problem.grid(sequence).diagonal
        for tile in range(-(-seqlen_q // tile_m)):
            bottom = min((tile + 1) * tile_m, seqlen_q) - 1
            first, last = problem.mask.interval(bottom + diagonal)
            top_first = problem.mask.interval(tile * tile_m + diagonal)[0]
            last = seqlen_k - 1 if last is None else min(last, seqlen_k - 1)
            first = 0 if top_first is None else max(top_first, 0)
            for head in range(problem.heads):
                items.append((sequence, head, tile, 0))
                weights.append(max(last - first + 1, 0))
    order = np.argsort(-np.array(weights), kind="stable")
    lengths = problem.lengths
    starts = np.zeros_like(lengths)
    starts[1:] = np.cumsum(lengths[:-1], axis=0)
    sequences = np.concatenate([lengths, starts], axis=1)
    return np.concatenate([np.array(items, dtype=np.int32)[order].ravel(), sequences.astype(np.int32).ravel()])

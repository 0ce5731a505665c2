"""From a plan to what the kernels read: int32 records per program, and the order of what each program adds.

A record has WORDS words: batch and first row of q, batch and first row of k, both lengths, the column aligned
with row 0; then the tile, where its stretches begin in their table and how many there are, the first q head
(or the kv head) and how many (or how many head groups), its place among the sums of dK and dV (-1: none) and
the distance to that of the next head group; then the number of the sequence and, in the backward, where the
statistics of its rows begin. An item has, in place of that distance, for how many q heads at a time it goes
through its visits.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...problem import IntArray, Mask, Problem
from ...schedule import Plan
from ...schedule.batch import first_of_each
from ...schedule.plan import HeadPattern
from ..shapes import Keys

__all__ = [
    "WORDS",
    "BackwardTables",
    "Stretches",
    "backward_tables",
    "forward_table",
    "most_segments",
    "stretches_of",
    "visits_of",
]

WORDS = 16
_Q_BATCH, _Q_ROW, _K_BATCH, _K_ROW, _SEQLEN_Q, _SEQLEN_K, _DIAGONAL = range(7)
_TILE, _FIRST, _COUNT, _HEAD, _HEADS, _SLOT, _STEP, _SEQUENCE, _STATS = range(7, WORDS)
_PASS = _STEP

Words = NDArray[np.int32]


class Stretches(NamedTuple):
    """Affine stretches of tiles, tile by tile.

    Attributes:
        table: (stretches, 3), rows (first, step, count).
        first: stretches before those of each tile, and of all; shape (tiles + 1,).
    """

    table: Words
    first: IntArray


class BackwardTables(NamedTuple):
    """Of a plan.

    Attributes:
        items: records of the items, in the order of the plan.
        visits: the stretches of q tiles that items visit.
        q_tiles: records of the q tiles, those with most contributions first.
        stretches: the stretches of kv tiles that are added to dQ.
        folds: records of the kv tiles whose q heads are dealt to several head groups.
        sums: places of sums of dK and dV.
        sequences: the first words of a record, per sequence.
    """

    items: Words
    visits: Words
    q_tiles: Words
    stretches: Words
    folds: Words
    sums: int
    sequences: Words


def forward_table(problem: Problem, packed: bool, keys: Keys | None, rows: int) -> Words:
    """A record per q tile of ``rows`` rows, those that see most keys first."""
    tiles = -(-problem.lengths[:, 0] // rows)
    records, _ = _of_tiles(_sequences(problem, packed, keys), tiles)
    grids, top = problem.grids, records[:, _TILE].astype(np.int64) * rows
    seen = np.zeros(len(records), dtype=np.int64)
    at = first_of_each(tiles)
    for index, shape in enumerate(problem.shapes):
        mine = slice(at[index], at[index + 1])
        first, _ = grids[shape].columns(top[mine])
        _, last = grids[shape].columns(np.minimum(top[mine] + rows, shape[0]) - 1)
        seen[mine] = last - first
    return records[np.argsort(-seen, kind="stable")]


def most_segments(records: Words, mask: Mask, rows: int, segment: int) -> int:
    """No tile of ``forward_table`` sees keys of more segments, as its program counts them.

    >>> problem = Problem.dense(seqlen_q=100, seqlen_k=300, head_dim=64, mask=Mask.window(120, 0))
    >>> [most_segments(forward_table(problem, True, None, n), problem.mask, n, 128) for n in (16, 64)]
    [2, 3]
    """
    top = records[:, _TILE].astype(np.int64) * rows
    keys, diagonal = records[:, _SEQLEN_K], records[:, _DIAGONAL]
    left, right = mask.sides
    first = np.zeros_like(top) if left < 0 else np.maximum(top + diagonal - left, 0)
    bottom = np.minimum(top + rows, records[:, _SEQLEN_Q]) - 1
    last = keys - 1 if right < 0 else np.minimum(bottom + diagonal + right, keys - 1)
    counts = (np.maximum(last, -1) + segment) // segment - first // segment
    return int(counts.max(initial=0))


def backward_tables(plan: Plan, packed: bool, disorder: random.Random | None = None) -> BackwardTables:
    """The tables of a plan. With ``disorder`` it draws in which order contributions to dQ are added."""
    batch, problem = plan.batch, plan.problem
    sequences = _sequences(problem, packed, None)
    sequences[:, _STATS] = first_of_each(batch.q_tiles)[:-1] * problem.tile_m
    visits = _joined([visits_of(p) for p in batch.distinct], batch.pattern_of)
    stretches = _joined([stretches_of(p, disorder) for p in batch.distinct], batch.pattern_of)
    records, sequence = _of_tiles(sequences, batch.q_tiles)
    _point(records, stretches, sequence, records[:, _TILE])
    order = np.argsort(-records[:, _COUNT], kind="stable")
    return BackwardTables(
        _items(plan, sequences, visits),
        visits.table,
        records[order],
        stretches.table,
        _folds(plan, sequences),
        int(plan.group_sum_first[-1]),
        sequences,
    )


def visits_of(pattern: HeadPattern) -> Stretches:
    """The q tiles of each kv tile, in the order of its item: its runs without their tickets.

    >>> from dash_attn.problem import Mask, Problem
    >>> from dash_attn.schedule import SPT, build_plan
    >>> plan = build_plan(Problem.dense(seqlen=512, head_dim=64, mask=Mask.causal()), SPT())
    >>> visits_of(plan.pattern(0)).table.tolist()
    [[0, 1, 4], [1, 1, 3], [2, 1, 2], [3, 1, 1]]
    """
    runs = pattern.runs
    first, step, count = runs[:, 0], runs[:, 1], runs[:, 2]
    begins = np.ones(len(runs), dtype=bool)
    begins[1:] = (step[1:] != step[:-1]) | (first[1:] != first[:-1] + step[:-1] * count[:-1])
    begins[pattern.offsets[:-1][pattern.run_counts > 0]] = True
    at = np.flatnonzero(begins)
    counts = np.add.reduceat(count, at) if len(at) else count
    table = np.stack([first[at], step[at], counts], 1)
    return Stretches(table.astype(np.int32), np.searchsorted(at, pattern.offsets))


def stretches_of(pattern: HeadPattern, disorder: random.Random | None = None) -> Stretches:
    """The kv tiles of each q tile, in the order of their tickets.

    >>> from dash_attn.problem import Mask, Problem
    >>> from dash_attn.schedule import SPT, build_plan
    >>> plan = build_plan(Problem.dense(seqlen=512, head_dim=64, mask=Mask.causal()), SPT())
    >>> stretches_of(plan.pattern(0)).table.tolist()
    [[0, 0, 1], [1, -1, 2], [2, -1, 3], [3, -1, 4]]
    """
    first = first_of_each(pattern.grid.contributions)
    order = np.empty(first[-1], dtype=np.int32)
    for kv in range(pattern.grid.kv_tiles):
        q, ticket = pattern.tasks_of(kv)
        order[first[q] + ticket] = kv
    if disorder is not None:
        for begin, end in zip(first[:-1].tolist(), first[1:].tolist()):
            tiles = order[begin:end].tolist()
            disorder.shuffle(tiles)
            order[begin:end] = tiles
    # No kv tile stands twice in an order: after a step of 1 there is none of -1.
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = np.abs(np.diff(order)) != 1
    begins[first[:-1][pattern.grid.contributions > 0]] = True
    at = np.flatnonzero(begins)
    counts = np.diff(at, append=len(order))
    steps = np.where(counts > 1, order[np.minimum(at + 1, len(order) - 1)] - order[at], 0)
    return Stretches(np.stack([order[at], steps, counts], 1).astype(np.int32), np.searchsorted(at, first))


class _Joined(NamedTuple):
    """Stretches of all patterns behind one another; ``places`` is where those of each sequence begin."""

    table: Words
    first: IntArray
    counts: IntArray
    places: IntArray


def _joined(each: list[Stretches], pattern_of: IntArray) -> _Joined:
    begin = first_of_each(np.array([len(one.table) for one in each], dtype=np.int64))
    places = first_of_each(np.array([len(one.first) - 1 for one in each], dtype=np.int64))
    first = np.concatenate([one.first[:-1] + at for one, at in zip(each, begin)])
    count = np.concatenate([np.diff(one.first) for one in each])
    return _Joined(np.concatenate([one.table for one in each]), first, count, places[pattern_of])


def _point(records: Words, stretches: _Joined, sequence: IntArray, tile: NDArray[np.integer]) -> None:
    """Write where the stretches of each record's tile are."""
    at = stretches.places[sequence] + tile
    records[:, _FIRST], records[:, _COUNT] = stretches.first[at], stretches.counts[at]


def _sequences(problem: Problem, packed: bool, keys: Keys | None) -> Words:
    """The first words of the records of each sequence."""
    lengths = problem.lengths
    records = np.zeros((len(lengths), WORDS), dtype=np.int32)
    index = np.arange(len(lengths))
    if packed:
        records[:, _Q_ROW] = first_of_each(lengths[:, 0])[:-1]
    else:
        records[:, _Q_BATCH] = index
    if keys is not None and keys.starts is not None:
        records[:, _K_ROW] = keys.starts
    elif keys is not None or not packed:
        records[:, _K_BATCH] = index
    else:
        records[:, _K_ROW] = first_of_each(lengths[:, 1])[:-1]
    records[:, [_SEQLEN_Q, _SEQLEN_K]] = lengths
    records[:, _SEQUENCE] = index
    records[:, _DIAGONAL] = lengths[:, 1] - lengths[:, 0] if problem.q_starts is None else problem.q_starts
    return records


def _of_tiles(sequences: Words, tiles: IntArray) -> tuple[Words, IntArray]:
    """A record per tile of each sequence, and its sequence."""
    sequence = np.repeat(np.arange(len(tiles)), tiles)
    records: Words = sequences[sequence]
    records[:, _TILE] = np.arange(len(sequence)) - first_of_each(tiles)[sequence]
    return records, sequence


def _items(plan: Plan, sequences: Words, visits: _Joined) -> Words:
    """A record per item, in the order of the plan."""
    batch, group = plan.batch, plan.problem.group
    sequence, head_group, kv = plan.items.astype(np.int64).T
    records: Words = sequences[sequence]
    records[:, _TILE] = kv
    _point(records, visits, sequence, kv)
    groups = batch.head_groups[sequence]
    kv_head, part = head_group // groups, head_group % groups
    first, end = group * part // groups, group * (part + 1) // groups
    records[:, _HEAD], records[:, _HEADS] = kv_head * group + first, end - first
    by_head = batch.per_sequence(lambda p: p.passes)[sequence] > 1
    records[:, _PASS] = np.where(by_head, 1, end - first)
    slot = plan.group_sum_first[sequence] + head_group * batch.kv_tiles[sequence] + kv
    records[:, _SLOT] = np.where(groups > 1, slot, -1)
    return records


def _folds(plan: Plan, sequences: Words) -> Words:
    """A record per kv tile and kv head of the sequences with several head groups."""
    batch, heads = plan.batch, plan.problem.kv_heads
    tiles = np.where(batch.head_groups > 1, batch.kv_tiles, 0)
    records, sequence = _of_tiles(sequences, heads * tiles)
    at = records[:, _TILE].astype(np.int64)
    kv_head, kv = at // np.maximum(tiles[sequence], 1), at % np.maximum(tiles[sequence], 1)
    groups = batch.head_groups[sequence]
    records[:, _TILE], records[:, _HEAD], records[:, _HEADS] = kv, kv_head, groups
    records[:, _SLOT] = plan.group_sum_first[sequence] + kv_head * groups * tiles[sequence] + kv
    records[:, _STEP] = tiles[sequence]
    return records

"""The plan table: the int32 layout in which a kernel reads a plan (the device ABI, version 3).

One contiguous int32 array. Every section starts at a multiple of four words, so that records are read
with 16-byte loads. Offsets are in words from the start of the table.

Header, 20 words
    0 magic 0x44534148      5 item_offset       10 tile_n           15 window_right, -1 unbounded
    1 ABI version           6 run_offset        11 heads            16 q_map_offset
    2 item_count            7 sequence_offset   12 kv_heads         17 q_tile_total
    3 run_count             8 total_offset      13 min_workers      18 kv_map_offset
    4 sequence_count        9 tile_m            14 window_left, -1  19 partial_count

Item, 12 words, in the order in which workers claim them
    sequence, kv_head, kv_tile, q_head_first, q_head_count, run_first, run_count, task_count, partial, needs,
    two words of 0. It goes through runs run_first .. run_first + run_count - 1, task_count tasks in
    all, and does each task for q heads q_head_first, q_head_first + 1, ... (q_head_count of them) before
    the next. partial: where it leaves its sums of dK and dV, of partial_count places; -1 if it owns all
    q heads of its kv head, and finishes dK and dV alone. needs: the last item of the list that it depends on,
    or its own place: a block may claim ahead of it what is behind that one.

Run, 4 words
    q_first, count, t_first, steps
    steps = (q_step & 0xff) | (t_step & 0xff) << 8 | t_hold << 16, both steps signed 8 bit.
    Task k: q tile q_first + k * q_step, ticket t_first + t_step * (k // t_hold).

Sequence, 12 words
    seqlen_q, seqlen_k, q_tile_count, kv_tile_count, q_row_first, k_row_first, q_tile_first, total_first,
    kv_tile_first, head_groups, partial_first, 0
    q_row_first and k_row_first are its rows in the packed layout, q_tile_first and kv_tile_first count
    the tiles of the sequences before it, total_first is the offset of its totals. With head_groups > 1,
    the partial sums of head group g of a kv head lie at
    ``partial_first + (kv_head * kv_tile_count + kv_tile) * head_groups + g``; they are added in ascending
    order of g.

Totals, one word for each q tile of every distinct (seqlen_q, seqlen_k), padded to four
    How many contributions the dQ tile gets; 0: nobody contributes and the tile is zero.

Maps, one word for each q tile (q_map_offset, q_tile_total words) and each kv tile (kv_map_offset) of all
sequences, each padded to four words
    The sequence the tile belongs to.

The ticket counter of (sequence, q head, q tile) has index
``q_tile_first * heads + q_head * q_tile_count + q_tile``.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ..errors import TableError
from ..problem import Mask, Problem
from .head_groups import group_heads
from .plan import HeadPattern, Plan
from .proof import prove
from .tickets import MAX_HOLD, MAX_STEP

__all__ = [
    "ABI_VERSION",
    "HEADER_WORDS",
    "ITEM_WORDS",
    "RUN_WORDS",
    "SEQUENCE_WORDS",
    "from_table",
    "to_table",
]

MAGIC = 0x44534148
ABI_VERSION = 3
HEADER_WORDS, ITEM_WORDS, RUN_WORDS, SEQUENCE_WORDS = 20, 12, 4, 12

Words = NDArray[np.int32]


def to_table(plan: Plan) -> Words:
    """The int32 table of a verified plan, shape (words,).

    Raises:
        TableError: a step, hold, row or tile count does not fit its field.

    >>> from dash_attn.schedule import FA3, build_plan
    >>> table = to_table(build_plan(Problem.dense(seqlen=256, head_dim=64), FA3()))
    >>> table[[2, 3, 4]].tolist(), table[20:44].reshape(2, 12)[:, :10].tolist()
    ([2, 2, 1], [[0, 0, 0, 0, 1, 0, 1, 2, -1, 0], [0, 0, 1, 0, 1, 1, 1, 2, -1, 1]])
    """
    p, batch = plan.problem, plan.batch
    runs, run_first = batch.concatenated(_packed_runs)
    totals, total_first = batch.concatenated(_totals)
    item_offset = HEADER_WORDS
    run_offset = item_offset + ITEM_WORDS * len(plan.items)
    sequence_offset = run_offset + RUN_WORDS * len(runs)
    total_offset = sequence_offset + SEQUENCE_WORDS * len(p.sequences)
    q_map_offset = total_offset + len(totals)
    sequences = _sequence_records(plan, total_offset + total_first)
    maps = [_padded(np.repeat(np.arange(len(sequences)), tiles)) for tiles in (batch.q_tiles, batch.kv_tiles)]
    bounds = (-1 if side is None else side for side in (p.mask.left, p.mask.right))
    header = np.array([
        MAGIC, ABI_VERSION, len(plan.items), len(runs), len(p.sequences), item_offset, run_offset,
        sequence_offset, total_offset, p.tile_m, p.tile_n, p.heads, p.kv_heads, plan.min_workers, *bounds,
        q_map_offset, batch.q_tiles.sum(), q_map_offset + len(maps[0]), plan.group_sum_first[-1],
    ])  # fmt: skip
    for words in (header, sequences):  # all other words are at most one of these
        if words.max() > 2**31 - 1:
            raise TableError(f"a word of the table does not fit int32: {words.max()}")
    table = np.empty(q_map_offset + sum(map(len, maps)), dtype=np.int32)
    table[:item_offset] = header
    _put_items(plan, run_first, table[item_offset:run_offset].reshape(-1, ITEM_WORDS))
    table[run_offset:sequence_offset] = runs.ravel()
    table[sequence_offset:total_offset] = sequences.ravel()
    table[total_offset:q_map_offset] = totals
    table[q_map_offset:] = np.concatenate(maps)
    return table


def _padded(words: NDArray[np.int64]) -> NDArray[np.int64]:
    """Zeros behind, to a multiple of four words."""
    return np.concatenate([words, np.zeros(-len(words) % 4, dtype=np.int64)])


_PACKED: WeakKeyDictionary[HeadPattern, Words] = WeakKeyDictionary()


def _packed_runs(pattern: HeadPattern) -> Words:
    if (found := _PACKED.get(pattern)) is None:
        found = _PACKED[pattern] = _pack_runs(pattern.runs).astype(np.int32)
    return found


def _totals(pattern: HeadPattern) -> NDArray[np.int64]:
    return _padded(pattern.grid.contributions)


def _pack_runs(runs: NDArray[np.int64]) -> NDArray[np.int64]:
    q_first, q_step, count, t_first, t_step, t_hold = runs.T
    for name, values, limit in (
        ("q_step", q_step, MAX_STEP),
        ("t_step", t_step, MAX_STEP),
        ("t_hold", t_hold, MAX_HOLD),
    ):
        for value in values[np.abs(values) > limit][:1]:
            raise TableError(f"{name} {value} of a run is beyond {limit}")
    steps = (q_step & 0xFF) | (t_step & 0xFF) << 8 | t_hold << 16
    return np.stack([q_first, count, t_first, steps], axis=1)


def _put_items(plan: Plan, run_first: NDArray[np.int64], records: Words) -> None:
    """Write the record of every item; ``run_first``: of the pattern of each sequence."""
    batch, group, items = plan.batch, plan.problem.group, plan.items
    sequence, head_group, kv = items[:, 0], items[:, 1], items[:, 2]
    table, first = batch.concatenated(
        lambda p: np.stack([p.offsets[:-1], p.run_counts, p.task_counts], axis=1)
    )
    runs = table[first[sequence] + kv]
    groups = batch.head_groups[sequence]
    records[:, 0], records[:, 2] = sequence, kv
    if batch.head_groups.max() == 1:
        records[:, 1], records[:, 3], records[:, 4] = head_group, head_group * group, group
        records[:, 8] = -1
    else:
        kv_head, part = np.divmod(head_group, groups)
        begin, end = group * part // groups, group * (part + 1) // groups  # as group_heads deals them
        records[:, 1], records[:, 3], records[:, 4] = kv_head, kv_head * group + begin, end - begin
        place = plan.group_sum_first[sequence] + (kv_head * batch.kv_tiles[sequence] + kv) * groups + part
        records[:, 8] = np.where(groups > 1, place, -1)
    records[:, 5], records[:, 6], records[:, 7] = runs[:, 0] + run_first[sequence], runs[:, 1], runs[:, 2]
    assert plan.verdict is not None
    records[:, 9] = plan.verdict.needs
    records[:, 10:] = 0


def _sequence_records(plan: Plan, total_first: NDArray[np.int64]) -> NDArray[np.int64]:
    batch = plan.batch
    records = np.zeros((len(batch.patterns), SEQUENCE_WORDS), dtype=np.int64)
    records[:, :2] = plan.problem.sequences
    records[:, 2], records[:, 3], records[:, 7] = batch.q_tiles, batch.kv_tiles, total_first
    records[:, 9], records[:, 10] = batch.head_groups, plan.group_sum_first[:-1]
    for column, counted in ((4, 0), (5, 1), (6, 2), (8, 3)):
        records[1:, column] = np.cumsum(records[:-1, counted])
    return records


def from_table(table: Words, *, head_dim: int, dtype: str, fingerprint: str | None = None) -> Plan:
    """The verified plan that a table holds; with ``fingerprint``, only if its numerics are those.

    Raises:
        TableError: not a plan table, or one that contradicts itself.
        FingerprintError: other numerics than the given fingerprint's.
        PlanError: the verifier refuses the plan.
    """
    words = np.asarray(table)
    if words.dtype != np.int32 or words.ndim != 1 or len(words) < HEADER_WORDS:
        raise TableError(
            f"a plan table is a 1-D int32 array of at least {HEADER_WORDS} words, "
            f"got {words.dtype} {words.shape}"
        )
    if words[0] != MAGIC or words[1] != ABI_VERSION:
        raise TableError(
            f"not a plan table of ABI {ABI_VERSION}: magic {int(words[0]):#x}, version {words[1]}"
        )
    counts, offsets = words[2:5].tolist(), words[5:8].tolist()
    sizes = (ITEM_WORDS, RUN_WORDS, SEQUENCE_WORDS)
    sections = []
    for name, count, offset, size in zip(("items", "runs", "sequences"), counts, offsets, sizes, strict=True):
        if count < 0 or offset < 0 or offset % 4 or offset + count * size > len(words):
            raise TableError(f"{count} {name} at word {offset} do not fit a table of {len(words)} words")
        sections.append(words[offset : offset + count * size].astype(np.int64).reshape(count, size))
    items, packed, sequences = sections
    sides = [None if side < 0 else side for side in words[14:16].tolist()]
    pairs = tuple((q, k) for q, k in sequences[:, :2].tolist())
    tile_m, tile_n, heads, kv_heads = words[9:13].tolist()
    problem = Problem(pairs, heads, kv_heads, head_dim, Mask(*sides), dtype, tile_m, tile_n)
    patterns = _patterns(problem, items, _unpack_runs(packed), sequences[:, 9])
    plan = Plan(problem, "table", patterns, _items(problem, items, patterns))
    if fingerprint is not None:
        plan.check_fingerprint(fingerprint)
    plan = prove(plan)
    if not np.array_equal(to_table(plan), words):
        raise TableError("the table contradicts itself: it is not the table of the plan it holds")
    return plan


def _unpack_runs(packed: NDArray[np.int64]) -> NDArray[np.int64]:
    q_first, count, t_first, steps = packed.T
    signed = [((steps >> shift & 0xFF) ^ 0x80) - 0x80 for shift in (0, 8)]
    return np.stack([q_first, signed[0], count, t_first, signed[1], steps >> 16 & 0xFFFF], axis=1)


def _items(
    problem: Problem, records: NDArray[np.int64], patterns: dict[tuple[int, ...], HeadPattern]
) -> NDArray[np.int32]:
    """The items of the records: (sequence, head group, kv tile)."""
    items = records[:, :3].copy()
    for at in np.flatnonzero((records[:, 0] < 0) | (records[:, 0] >= len(problem.sequences)))[:1]:
        raise TableError(f"item {at}: sequence {records[at, 0]}, there are {len(problem.sequences)}")
    part = records[:, 3] - records[:, 1] * problem.group
    for pair, pattern in patterns.items():
        mine = np.array([p == pair for p in problem.sequences])[records[:, 0]]
        starts = [heads.start for heads in group_heads(problem.group, pattern.head_groups)]
        dealt = np.searchsorted(starts, part[mine], side="right") - 1
        items[mine, 1] = records[mine, 1] * pattern.head_groups + dealt
    return items.astype(np.int32)


def _patterns(
    problem: Problem, items: NDArray[np.int64], runs: NDArray[np.int64], head_groups: NDArray[np.int64]
) -> dict[tuple[int, ...], HeadPattern]:
    """The pattern of each distinct shape, from the items of the first head group that has the shape."""
    patterns, alike = {}, dict[object, HeadPattern]()
    for pair, grid in problem.tile_grids.items():
        sequence = problem.sequences.index(pair)
        groups = int(head_groups[sequence])
        if not 1 <= groups <= problem.group:
            raise TableError(
                f"sequence {sequence}: {groups} head groups of {problem.group} q heads per kv head"
            )
        mine = items[(items[:, 0] == sequence) & (items[:, 1] == 0) & (items[:, 3] == 0)]
        mine = mine[np.argsort(mine[:, 2])]
        if not np.array_equal(mine[:, 2], np.arange(grid.kv_tiles)):
            raise TableError(
                f"sequence {sequence}, kv head 0: kv tiles {mine[:, 2].tolist()}, "
                f"the grid has {grid.kv_tiles}"
            )
        ends = mine[:, 5] + mine[:, 6]
        if len(mine) and (mine[:, 5:7].min() < 0 or ends.max() > len(runs)):
            raise TableError(f"sequence {sequence}: an item's runs lie outside the table's {len(runs)}")
        offsets = np.concatenate(([0], np.cumsum(mine[:, 6])))
        rows = [runs[first:end] for first, end in zip(mine[:, 5], ends, strict=True)]
        table = np.concatenate([np.zeros((0, 6), np.int64), *rows])
        # Sequences with the same tiles and the same runs share a pattern, as in the plan.
        key = (grid, groups, offsets.tobytes(), table.tobytes())
        patterns[pair] = alike.setdefault(key, HeadPattern(grid, offsets, table, groups))
    return patterns

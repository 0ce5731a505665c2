"""Writing a plan as the int32 table that a kernel reads, and reading back. The layout is :mod:`.layout`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import TableError
from ..problem import Mask, Problem
from .head_groups import group_heads, most_heads
from .layout import (
    ABI_VERSION,
    HEADER_WORDS,
    ITEM,
    ITEM_WORDS,
    MAGIC,
    RUN_WORDS,
    SEQUENCE,
    SEQUENCE_WORDS,
    HeaderRecord,
    RunRecord,
)
from .plan import HeadPattern, Plan
from .proof import prove
from .tickets import MAX_HOLD, MAX_STEP

__all__ = ["from_table", "shared_sums", "to_table"]

Words = NDArray[np.int32]


def to_table(plan: Plan) -> Words:
    """The int32 table of a verified plan, shape (words,).

    Raises:
        TableError: a step, hold, row or tile count does not fit its field, or rows are not aligned
            bottom-right: the table has no field for that.

    >>> from dash_attn.schedule import FA3, build_plan
    >>> table = to_table(build_plan(Problem.dense(seqlen=256, head_dim=64), FA3()))
    >>> table[[2, 3, 4]].tolist(), table[20:44].reshape(2, 12)[:, :10].tolist()
    ([2, 2, 1], [[0, 0, 0, 0, 1, 0, 1, 2, -1, 0], [0, 0, 1, 0, 1, 1, 1, 2, -1, 1]])
    """
    p, batch = plan.problem, plan.batch
    if p.q_starts is not None:
        raise TableError(f"a plan table has rows aligned bottom-right, not with columns {p.q_starts!r:.80}")
    runs, run_first = batch.concatenated(_packed_runs)
    totals, total_first = batch.concatenated(_totals)
    item_offset = HEADER_WORDS
    run_offset = item_offset + ITEM_WORDS * len(plan.items)
    sequence_offset = run_offset + RUN_WORDS * len(runs)
    total_offset = sequence_offset + SEQUENCE_WORDS * len(p.sequences)
    q_map_offset = total_offset + len(totals)
    sequences = _sequence_records(plan, total_offset + total_first)
    q_map, kv_map = (np.repeat(np.arange(len(sequences)), tiles) for tiles in (batch.q_tiles, batch.kv_tiles))
    kv_map_offset = q_map_offset + len(q_map) + -len(q_map) % 4
    header = np.array(HeaderRecord(
        MAGIC, ABI_VERSION, len(plan.items), len(runs), len(p.sequences), item_offset, run_offset,
        sequence_offset, total_offset, p.tile_m, p.tile_n, p.heads, p.kv_heads, plan.min_workers,
        *p.mask.sides, q_map_offset, len(q_map), kv_map_offset,
        plan.group_sum_first[-1],
    ))  # fmt: skip
    for words in (header, sequences):  # all other words are at most one of these
        if words.max() > 2**31 - 1:
            raise TableError(f"a word of the table does not fit int32: {words.max()}")
    table = np.empty(kv_map_offset + len(kv_map) + -len(kv_map) % 4, dtype=np.int32)
    table[:item_offset] = header
    _put_items(plan, run_first, table[item_offset:run_offset].reshape(-1, ITEM_WORDS))
    table[run_offset:sequence_offset] = runs.ravel()
    table[sequence_offset:total_offset] = sequences.ravel()
    table[total_offset:q_map_offset] = totals
    table[q_map_offset:] = 0
    for first, words in ((q_map_offset, q_map), (kv_map_offset, kv_map)):
        table[first : first + len(words)] = words
    return table


def shared_sums(table: Words, plan: Plan) -> Words:
    """The table of a plan whose items all leave their sums of dK and dV among those of other plans.

    The sums of head group g of (kv tile, sequence, kv head) lie at
    ``((kv_tile * sequences + sequence) * kv_heads + kv_head) * head_groups + g``.

    Args:
        table: of the plan, as :func:`to_table` makes it.
        plan: one whose sequences have equally many head groups.

    Raises:
        TableError: sequences have different numbers of head groups, or there are too many sums.
    """
    p, batch = plan.problem, plan.batch
    groups = int(batch.head_groups[0])
    if (batch.head_groups != groups).any():
        raise TableError(
            f"sequences have {sorted(set(batch.head_groups.tolist()))} head groups, not one number"
        )
    made = table.copy()
    items = made[HEADER_WORDS : HEADER_WORDS + ITEM_WORDS * len(plan.items)].reshape(-1, ITEM_WORDS)
    firsts = [heads.start for heads in group_heads(p.group, groups)]
    part = np.searchsorted(firsts, items[:, ITEM.q_head_first] % p.group)
    row = items[:, ITEM.kv_tile].astype(np.int64) * len(p.sequences) + items[:, ITEM.sequence]
    slots = (row * p.kv_heads + items[:, ITEM.kv_head]) * groups + part
    if slots.size and slots.max() > 2**31 - 1:
        raise TableError(f"a word of the table does not fit int32: {slots.max()}")
    items[:, ITEM.group_sum] = slots
    return made


def _padded(words: NDArray[np.int64]) -> NDArray[np.int64]:
    """Zeros behind, to a multiple of four words."""
    return np.concatenate([words, np.zeros(-len(words) % 4, dtype=np.int64)])


def _packed_runs(pattern: HeadPattern) -> Words:
    words: Words = pattern.tiled("runs", lambda p: _pack_runs(p.runs).astype(np.int32), 1)
    return words


def _totals(pattern: HeadPattern) -> NDArray[np.int64]:
    totals: NDArray[np.int64] = pattern.tiled("totals", lambda p: _padded(p.grid.contributions), 1)
    return totals


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
    return np.stack(RunRecord(q_first, count, t_first, steps), axis=1)


def _put_items(plan: Plan, run_first: NDArray[np.int64], records: Words) -> None:
    """Write the record of every item; ``run_first``: of the pattern of each sequence."""
    (batch, codes), heads, group = plan.listed, plan.problem.kv_heads, plan.problem.group
    made = [
        p.tiled(("records", heads, group), lambda p: _records(p, heads, group), 1) for p in batch.distinct
    ]
    # Any mode but "raise": numpy would keep a copy of `out` for that.
    np.take(np.concatenate(made), batch.gather[codes], axis=0, out=records, mode="clip")
    sequence = plan.items[:, 0]
    records[:, ITEM.sequence] = sequence
    records[:, ITEM.run_first] += run_first[sequence]
    if batch.head_groups.max() > 1:
        first = plan.group_sum_first[:-1][sequence]
        records[:, ITEM.group_sum] += np.where(records[:, ITEM.group_sum] < 0, 0, first)
    assert plan.verdict is not None
    records[:, ITEM.needs] = plan.verdict.needs


def _records(pattern: HeadPattern, kv_heads: int, group: int) -> Words:
    """The records of one sequence, by code, as if it were the only one."""
    groups, kv_tiles = pattern.head_groups, pattern.grid.kv_tiles
    kv_head, part, kv = (x.ravel() for x in np.indices((kv_heads, groups, kv_tiles)))
    begin, end = group * part // groups, group * (part + 1) // groups  # as group_heads deals them
    records = np.zeros((len(kv), ITEM_WORDS), dtype=np.int32)
    records[:, ITEM.kv_head], records[:, ITEM.kv_tile] = kv_head, kv
    records[:, ITEM.q_head_first], records[:, ITEM.q_head_count] = kv_head * group + begin, end - begin
    records[:, ITEM.run_first], records[:, ITEM.run_count] = pattern.offsets[kv], pattern.run_counts[kv]
    records[:, ITEM.task_count] = pattern.task_counts[kv]
    records[:, ITEM.heads_per_pass] = end - begin if pattern.passes == 1 else 1
    records[:, ITEM.group_sum] = (kv_head * kv_tiles + kv) * groups + part if groups > 1 else -1
    return records


def _sequence_records(plan: Plan, total_first: NDArray[np.int64]) -> NDArray[np.int64]:
    batch, at = plan.batch, SEQUENCE
    records = np.zeros((len(batch.patterns), SEQUENCE_WORDS), dtype=np.int64)
    records[:, at.seqlen_q : at.seqlen_k + 1] = plan.problem.lengths
    records[:, at.q_tile_count], records[:, at.kv_tile_count] = batch.q_tiles, batch.kv_tiles
    records[:, at.total_first], records[:, at.head_groups] = total_first, batch.head_groups
    records[:, at.group_sum_first] = plan.group_sum_first[:-1]
    for first, counted in (
        (at.q_row_first, at.seqlen_q),
        (at.k_row_first, at.seqlen_k),
        (at.q_tile_first, at.q_tile_count),
        (at.kv_tile_first, at.kv_tile_count),
    ):
        records[1:, first] = np.cumsum(records[:-1, counted])
    return records


def from_table(
    table: Words, *, head_dim: int, dtype: str, head_dim_v: int | None = None, fingerprint: str | None = None
) -> Plan:
    """The verified plan that a table holds; with ``fingerprint``, only if its numerics are those.

    Args:
        table: of :func:`to_table`.
        head_dim, head_dim_v, dtype: of the problem; a table has neither. By default both head dims are one.
        fingerprint: ``plan.fingerprint``.

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
    head = HeaderRecord(*words[:HEADER_WORDS].tolist())
    if head.magic != MAGIC or head.abi_version != ABI_VERSION:
        raise TableError(
            f"not a plan table of ABI {ABI_VERSION}: magic {head.magic:#x}, version {head.abi_version}"
        )
    sections = []
    for name, count, offset, size in (
        ("items", head.item_count, head.item_offset, ITEM_WORDS),
        ("runs", head.run_count, head.run_offset, RUN_WORDS),
        ("sequences", head.sequence_count, head.sequence_offset, SEQUENCE_WORDS),
    ):
        if count < 0 or offset < 0 or offset % 4 or offset + count * size > len(words):
            raise TableError(f"{count} {name} at word {offset} do not fit a table of {len(words)} words")
        sections.append(words[offset : offset + count * size].astype(np.int64).reshape(count, size))
    items, packed, sequences = sections
    mask = Mask.of_sides(head.window_left, head.window_right)
    pairs = tuple((q, k) for q, k in sequences[:, [SEQUENCE.seqlen_q, SEQUENCE.seqlen_k]].tolist())
    sizes = head.heads, head.kv_heads, head_dim, mask, dtype, head.tile_m, head.tile_n
    _check_sizes(head, items, sequences)
    problem = Problem(pairs, *sizes, head_dim_v=head_dim if head_dim_v is None else head_dim_v)
    patterns = _patterns(problem, items, _unpack_runs(packed), sequences)
    plan = Plan(problem, "table", patterns, _items(problem, items, patterns))
    if fingerprint is not None:
        plan.check_fingerprint(fingerprint)
    plan = prove(plan)
    if not np.array_equal(to_table(plan), words):
        raise TableError("the table contradicts itself: it is not the table of the plan it holds")
    return plan


def _check_sizes(head: HeaderRecord, items: NDArray[np.int64], sequences: NDArray[np.int64]) -> None:
    """Lengths, tiles and heads must be those of the items and of the maps, so that a damaged word makes no
    array of another size."""
    if min(head.tile_m, head.tile_n, head.heads, head.kv_heads) < 1:
        return  # the problem says which one
    q_tiles, kv_tiles = (
        int(np.sum(-(-sequences[:, length] // tile)))
        for length, tile in ((SEQUENCE.seqlen_q, head.tile_m), (SEQUENCE.seqlen_k, head.tile_n))
    )
    if q_tiles != head.q_tile_total:
        raise TableError(f"the table has {head.q_tile_total} q tiles, its sequences have {q_tiles}")
    heads = int(items[:, ITEM.q_head_count].sum())
    if heads != kv_tiles * head.heads:
        raise TableError(
            f"items have {heads} q heads in all, {kv_tiles} kv tiles with {head.heads} q heads have "
            f"{kv_tiles * head.heads}"
        )


def _unpack_runs(packed: NDArray[np.int64]) -> NDArray[np.int64]:
    q_first, count, t_first, steps = RunRecord(*packed.T)
    signed = [((steps >> shift & 0xFF) ^ 0x80) - 0x80 for shift in (0, 8)]
    return np.stack([q_first, signed[0], count, t_first, signed[1], steps >> 16 & 0xFFFF], axis=1)


def _items(
    problem: Problem, records: NDArray[np.int64], patterns: dict[tuple[int, ...], HeadPattern]
) -> NDArray[np.int32]:
    """The items of the records: (sequence, head group, kv tile)."""
    sequence, kv_head = records[:, ITEM.sequence], records[:, ITEM.kv_head]
    items = np.stack([sequence, kv_head, records[:, ITEM.kv_tile]], axis=1)
    for at in np.flatnonzero((sequence < 0) | (sequence >= len(problem.sequences)))[:1]:
        raise TableError(f"item {at}: sequence {sequence[at]}, there are {len(problem.sequences)}")
    part = records[:, ITEM.q_head_first] - kv_head * problem.group
    for pair, pattern in patterns.items():
        mine = np.array([p == pair for p in problem.sequences])[sequence]
        starts = [heads.start for heads in group_heads(problem.group, pattern.head_groups)]
        dealt = np.searchsorted(starts, part[mine], side="right") - 1
        items[mine, 1] = kv_head[mine] * pattern.head_groups + dealt
    return items.astype(np.int32)


def _patterns(
    problem: Problem, items: NDArray[np.int64], runs: NDArray[np.int64], sequences: NDArray[np.int64]
) -> dict[tuple[int, ...], HeadPattern]:
    """The pattern of each distinct shape, from the items of the first head group that has the shape."""
    patterns, alike = {}, dict[object, HeadPattern]()
    for pair, grid in problem.tile_grids.items():
        sequence = problem.sequences.index(pair)
        groups, total_first = sequences[sequence, [SEQUENCE.head_groups, SEQUENCE.total_first]].tolist()
        if not 1 <= groups <= problem.group:
            raise TableError(
                f"sequence {sequence}: {groups} head groups of {problem.group} q heads per kv head"
            )
        all_mine = items[items[:, ITEM.sequence] == sequence]
        mine = all_mine[(all_mine[:, ITEM.kv_head] == 0) & (all_mine[:, ITEM.q_head_first] == 0)]
        mine = mine[np.argsort(mine[:, ITEM.kv_tile])]
        if not np.array_equal(mine[:, ITEM.kv_tile], np.arange(grid.kv_tiles)):
            raise TableError(
                f"sequence {sequence}, kv head 0: kv tiles {mine[:, ITEM.kv_tile].tolist()}, "
                f"the grid has {grid.kv_tiles}"
            )
        firsts, counts = mine[:, ITEM.run_first], mine[:, ITEM.run_count]
        ends = firsts + counts
        if len(mine) and (min(firsts.min(), counts.min()) < 0 or ends.max() > len(runs)):
            raise TableError(f"sequence {sequence}: an item's runs lie outside the table's {len(runs)}")
        offsets = np.concatenate(([0], np.cumsum(counts)))
        rows = [runs[first:end] for first, end in zip(firsts, ends, strict=True)]
        table = np.concatenate([np.zeros((0, 6), np.int64), *rows])
        # Sequences whose runs and totals are in one place of the table share a pattern, as in the plan.
        by_head = (all_mine[:, ITEM.heads_per_pass] < all_mine[:, ITEM.q_head_count]).any()
        passes = most_heads(problem.group, groups) if by_head else 1
        key = (grid, groups, passes, offsets.tobytes(), table.tobytes(), total_first)
        patterns[pair] = alike.setdefault(key, HeadPattern(grid, offsets, table, groups, passes))
    return patterns

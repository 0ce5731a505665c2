"""The plan of a forward: which items there are, who may split a tile, and in which order items are claimed.

An *item* is what a worker does at a time: the rows of one q tile of one q head, with all segments of keys
that they see, or with one of them. What is left of single segments goes to places, and a *fold* takes the
places of a q tile in ascending order. All of this is placement: it decides no bit (:mod:`.forward`).
Nobody waits for anybody, so a forward cannot deadlock; what has to be proven is that every row meets
every segment that it sees exactly once, and that folds find all places, in order.

Items are claimed longest first, in sections of heads whose K and V fit L2: section by section, in it entry by
entry, in it head by head. An *entry* is what the items of all heads have in common.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import CoverageError, PlacementError, ProblemError
from ..machine import L2_BYTES
from ..problem import IntArray, Problem
from .batch import first_of_each
from .forward import ForwardNumerics

__all__ = ["ForwardPlan", "build_forward_plan", "prove_forward"]

MOST_PARTS = 4096
"""Single segments of all heads at most. What is left of them takes memory: 285 MB at head dim 128."""


@dataclass(frozen=True, eq=False)
class ForwardPlan:
    """Items and folds of a forward.

    Attributes:
        problem: what to compute.
        numerics: which segments there are.
        tile_m: rows of a q tile.
        entries: (n, 4): sequence, q tile, segment (-1: all that the tile sees), place (of a single segment).
        kv_tiles: (n,) kv tiles that an entry goes through; 0 where no row sees a key.
        folds: (m, 4): sequence, q tile, first place, number of places.
        section: q heads of a section.
    """

    problem: Problem
    numerics: ForwardNumerics
    tile_m: int
    entries: IntArray
    kv_tiles: IntArray
    folds: IntArray
    section: int

    @property
    def items(self) -> int:
        return len(self.entries) * self.problem.heads

    @property
    def places(self) -> int:
        return int(self.folds[:, 3].sum())

    def tiles_of_items(self) -> IntArray:
        """(items,) kv tiles of every item, by the order of claims."""
        within = np.arange(self.items) % max(len(self.entries) * self.section, 1)
        return self.kv_tiles[within // self.section]

    def claimed(self, item: int) -> tuple[int, int]:
        """The entry and the q head of an item, by the order of claims.

        Raises:
            IndexError: there is no such item.
        """
        if not 0 <= item < self.items:
            raise IndexError(f"item {item} of {self.items}")
        first, within = divmod(item, len(self.entries) * self.section)
        entry, head = divmod(within, self.section)
        return entry, first * self.section + head


def build_forward_plan(
    problem: Problem, tile_m: int, workers: int, numerics: ForwardNumerics | None = None
) -> ForwardPlan:
    """Plan a forward.

    Args:
        problem: what to compute.
        tile_m: rows of a q tile.
        workers: where there are at most half as many items, tiles of several segments are split, into at most
            MOST_PARTS segments of all heads.
        numerics: others than the problem's own.

    Raises:
        ProblemError: ``tile_m`` or ``workers`` is not positive, or the problem has ``q_starts``.

    >>> from dash_attn.problem import Mask
    >>> one_row = Problem.dense(seqlen_q=1, seqlen_k=20_000, heads=2, head_dim=128, mask=Mask.causal())
    >>> plan = build_forward_plan(one_row, 128, 132)
    >>> plan.entries.tolist(), plan.kv_tiles.tolist(), plan.folds.tolist()
    ([[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 2, 2]], [64, 64, 29], [[0, 0, 0, 3]])
    """
    for name, value in (("tile_m", tile_m), ("workers", workers)):
        if value < 1:
            raise ProblemError(f"{name} must be >= 1, got {value}")
    if problem.q_starts is not None:
        raise ProblemError(
            f"a forward's plan aligns rows bottom-right, got q_starts {problem.q_starts!r:.80}"
        )
    numerics = ForwardNumerics.of(problem) if numerics is None else numerics
    segment = numerics.segment
    sequence, tile, first, last = _q_tiles(problem, tile_m)
    entries = np.zeros((len(tile), 4), dtype=np.int64)
    entries[:, 0], entries[:, 1], entries[:, 2] = sequence, tile, -1
    folds = np.zeros((0, 4), dtype=np.int64)
    if 2 * len(tile) * problem.heads <= workers:  # with more items, splitting gains a round at most
        entries, first, last, folds = _split(problem, entries, first, last, segment)
    kv_tiles = np.where(last < first, 0, last // numerics.tile - first // numerics.tile + 1)
    order = np.argsort(-kv_tiles, kind="stable")
    entries, kv_tiles = entries.take(order, axis=0), kv_tiles[order]
    return ForwardPlan(problem, numerics, tile_m, entries, kv_tiles, folds, _section(problem))


def _split(
    problem: Problem, entries: IntArray, first: IntArray, last: IntArray, segment: int
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Entries with their first and last key, those of several segments split, and the folds of these."""
    sequence, tile = entries[:, 0], entries[:, 1]
    begin, segments = first // segment, last // segment - first // segment + 1
    split = (last >= first) & (segments > 1)
    if not split.any() or segments.sum() * problem.heads > MOST_PARTS:  # every part costs memory
        return entries, first, last, np.zeros((0, 4), dtype=np.int64)
    counts = np.where(split, segments, 1)
    whole = np.repeat(np.arange(len(tile)), counts)
    part = np.arange(len(whole)) - first_of_each(counts)[:-1][whole]
    found, parted = entries[whole], split[whole]
    found[parted, 2] = (begin[whole] + part)[parted]
    found[parted, 3] = np.arange(parted.sum())
    first_place = first_of_each(segments[split])[:-1]
    folds = np.stack([sequence[split], tile[split], first_place, segments[split]], 1)
    bounds = found[:, 2] * segment
    first = np.where(parted, np.maximum(first[whole], bounds), first[whole])
    last = np.where(parted, np.minimum(last[whole], bounds + segment - 1), last[whole])
    return found, first, last, folds


def prove_forward(plan: ForwardPlan) -> None:
    """Show that every row meets every segment that it sees exactly once, and that folds are complete.

    Raises:
        CoverageError: a q tile, or a segment of one, has no item or several.
        PlacementError: a place is taken twice or by nobody, folds miss one or take it in another order, heads
            are no whole number of sections, or an entry has another number of kv tiles than it sees.
    """
    if plan.section < 1 or plan.problem.heads % plan.section:
        raise PlacementError(f"{plan.problem.heads} heads are no whole number of sections of {plan.section}")
    whole = plan.entries[:, 2] == -1
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for s, t, part, place in plan.entries[~whole].tolist():
        found.setdefault((s, t), []).append((part, place))
    tiles = np.concatenate([plan.entries[whole, :2], np.array(list(found), dtype=np.int64).reshape(-1, 2)])
    lengths = plan.problem.lengths[:, 0]
    counts = -(-lengths // plan.tile_m)
    wanted = np.repeat(np.arange(len(counts)), counts)
    wanted = np.stack([wanted, np.arange(len(wanted)) - first_of_each(counts)[:-1][wanted]], 1)
    tiles = tiles[np.lexsort((tiles[:, 1], tiles[:, 0]))]
    if len(tiles) != len(wanted) or (tiles != wanted).any():
        odd = _pairs(tiles) ^ _pairs(wanted)
        if not odd:
            raise CoverageError("a q tile has several items")
        s, t = min(odd)
        raise CoverageError(f"q tile {t} of sequence {s} has no item, or is none")
    folds = {(s, t): (place, count) for s, t, place, count in plan.folds.tolist()}
    if len(folds) != len(plan.folds):
        raise PlacementError("a q tile is folded twice")
    if extra := sorted(folds.keys() - found.keys()):
        raise PlacementError(f"q tile {extra[0][1]} of sequence {extra[0][0]} is folded and was not split")
    taken: list[int] = []
    for (s, t), parts in found.items():
        which = f"q tile {t} of sequence {s}"
        parts.sort()
        if [part for part, _ in parts] != (there := _segments_seen(plan, s, t)):
            raise CoverageError(f"{which} has items of segments {[p for p, _ in parts]}, it sees {there}")
        places, (place, count) = [place for _, place in parts], folds.get((s, t), (0, 0))
        if places != list(range(place, place + count)):
            raise PlacementError(f"{which} leaves its segments at {places}, folded are {count} from {place}")
        taken += places
    if sorted(taken) != list(range(plan.places)):
        raise PlacementError(f"{len(taken)} segments are left at {plan.places} places")
    if len(plan.kv_tiles) != len(plan.entries):
        raise PlacementError(f"{len(plan.entries)} entries, and kv tiles of {len(plan.kv_tiles)}")
    for at, (entry, said) in enumerate(zip(plan.entries.tolist(), plan.kv_tiles.tolist())):
        if said != (seen := _kv_tiles_seen(plan, *entry[:3])):
            raise PlacementError(f"entry {at} goes through {said} kv tiles, it sees {seen}")


def _pairs(array: IntArray) -> set[tuple[int, int]]:
    return {(int(a), int(b)) for a, b in zip(array[:, 0], array[:, 1])}


def _segments_seen(plan: ForwardPlan, sequence: int, tile: int) -> list[int]:
    """The segments that any row of a q tile of a sequence sees."""
    seen, segment = _columns_seen(plan, sequence, tile), plan.numerics.segment
    return list(range(seen.start // segment, -(-seen.stop // segment))) if seen else []


def _kv_tiles_seen(plan: ForwardPlan, sequence: int, tile: int, part: int) -> int:
    """How many kv tiles any row of a q tile of a sequence sees, in one segment (-1: in all)."""
    seen, size, segment = _columns_seen(plan, sequence, tile), plan.numerics.tile, plan.numerics.segment
    if part >= 0:
        seen = range(max(seen.start, part * segment), min(seen.stop, (part + 1) * segment))
    return -(-seen.stop // size) - seen.start // size if seen else 0


def _columns_seen(plan: ForwardPlan, sequence: int, tile: int) -> range:
    """From the first column that any row of a q tile sees to the last one, from the columns of each row."""
    grid = plan.problem.grid(sequence)
    rows = np.arange(tile * plan.tile_m, min((tile + 1) * plan.tile_m, grid.seqlen_q))
    first, last = grid.columns(rows)
    some = first <= last
    return range(int(first[some].min()), int(last[some].max()) + 1) if some.any() else range(0)


def _q_tiles(problem: Problem, tile_m: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Of every q tile: sequence, number, and the first and last key that any of its rows sees."""
    lengths = problem.lengths
    tiles = -(-lengths[:, 0] // tile_m)
    sequence = np.repeat(np.arange(len(lengths)), tiles)
    tile = np.arange(len(sequence)) - first_of_each(tiles)[:-1][sequence]
    seqlen_q, seqlen_k = lengths[sequence].T
    position = tile * tile_m + seqlen_k - seqlen_q
    last_row = np.minimum((tile + 1) * tile_m, seqlen_q) - 1 + seqlen_k - seqlen_q
    first, last = problem.mask.interval(position)[0], problem.mask.interval(last_row)[1]
    first = np.zeros_like(position) if first is None else np.maximum(first, 0)
    return sequence, tile, first, seqlen_k - 1 if last is None else np.minimum(last, seqlen_k - 1)


def _section(problem: Problem) -> int:
    """As many kv heads as keep K and V in half of L2, a divisor of all; times q heads per kv head."""
    size = 2 * (problem.head_dim + problem.head_dim_v) * int(problem.lengths[:, 1].sum())
    fit = max(1, (L2_BYTES // 2) // max(size, 1))
    return problem.group * max(
        n for n in range(1, problem.kv_heads + 1) if problem.kv_heads % n == 0 and n <= fit
    )

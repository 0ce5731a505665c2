"""Tickets: the one place where a summation order becomes the numbers a kernel waits for.

A policy states, for every q tile, in which order kv tiles are added to its dQ. It does so with a few
:class:`SummationGroup` objects for all q tiles at once, so that a million tokens cost as little as a
thousand. The ticket of a task is the place of its kv tile in that order, counting only the kv tiles
the mask leaves. :func:`derive_runs` turns each item's visits into runs whose tickets are affine.

>>> from dash_attn.problem import Mask, SequenceGrid
>>> grid = SequenceGrid(512, 512, 128, 128, Mask.full()).tiles
>>> ring = SummationGroup(0, 3, step=-1, lead=np.arange(4))      # q tile i: i, i-1, ..., i+1
>>> [tickets_of(grid, (ring,), kv, np.arange(4)).tolist() for kv in (0, 1)]
[[0, 1, 2, 3], [3, 0, 1, 2]]
>>> derive_runs(grid, [[(0, 1, 4)], [(1, 1, 3), (0, 1, 1)], [], []], (ring,))[:2]
[[(0, 1, 4, 0, 1, 1)], [(1, 1, 3, 0, 1, 1), (0, 1, 1, 3, 0, 1)]]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..problem import IntArray, TileGrid

__all__ = ["MAX_HOLD", "MAX_STEP", "RunTuple", "SummationGroup", "Visit", "derive_runs", "tickets_of"]

Visit = tuple[int, int, int]
"""(q_first, q_step, count): the q tiles ``q_first, q_first + q_step, ...`` of one item."""

RunTuple = tuple[int, int, int, int, int, int]
"""(q_first, q_step, count, t_first, t_step, t_hold); see :class:`dash_attn.schedule.plan.Run`."""

MAX_STEP = 127
MAX_HOLD = 32767


@dataclass(frozen=True)
class SummationGroup:
    """A stretch ``kv_first..kv_last`` of kv tiles that stand together in every summation order.

    Within the stretch the order of q tile ``q`` starts at ``lead[q]`` and goes round by ``step``:
    with step -1 it is ``lead, lead-1, ..., kv_first, kv_last, ..., lead+1``. Without a lead it starts
    at the end from which ``step`` covers the stretch without going round. The groups of a plan
    partition its kv tiles and are summed one after the other.
    """

    kv_first: int
    kv_last: int
    step: int = 1
    lead: IntArray | None = None


class _GroupTickets:
    """Tickets of the kv tiles of one group, and where along the q tiles they can change."""

    def __init__(self, grid: TileGrid, group: SummationGroup, before: IntArray) -> None:
        self.group = group
        self.before = before
        self.low, self.high = grid.kv_first, grid.kv_last
        # Without a lead, the tiles before kv lie on one side of it, and the mask's other bound cannot
        # remove any of them from a q tile that kv itself contributes to.
        bounds = [self.low, self.high]
        relevant = bounds if group.lead is not None else bounds[:1] if group.step > 0 else bounds[1:]
        changed = np.zeros(max(grid.q_tiles - 1, 0), dtype=bool)
        for array in (before, *relevant, *(() if group.lead is None else (group.lead,))):
            changed |= array[1:] != array[:-1]
        self.breaks = np.flatnonzero(changed) + 1

    def at(self, kv: int, q: IntArray) -> IntArray:
        """Tickets of kv tile ``kv`` at q tiles ``q``."""
        group, low, high = self.group, self.low[q], self.high[q]
        if group.step > 0:
            earlier = _count(group.kv_first, kv - 1, low, high)
        else:
            earlier = _count(kv + 1, group.kv_last, low, high)
        if group.lead is not None:
            # Going round: from the lead to the end of the stretch, then from its other end to kv.
            lead = group.lead[q]
            if group.step > 0:
                reached, straight = kv >= lead, _count(lead, kv - 1, low, high)
                round_first = _count(lead, group.kv_last, low, high)
            else:
                reached, straight = kv <= lead, _count(kv + 1, lead, low, high)
                round_first = _count(group.kv_first, lead, low, high)
            earlier = np.where(reached, straight, round_first + earlier)
        return self.before[q] + earlier


def _count(first: int | IntArray, last: int | IntArray, low: IntArray, high: IntArray) -> IntArray:
    """Size of [first, last] intersected with [low, high]."""
    size: IntArray = np.maximum(np.minimum(last, high) - np.maximum(first, low) + 1, 0)
    return size


def _prepare(grid: TileGrid, groups: Sequence[SummationGroup]) -> list[_GroupTickets]:
    prepared = []
    before = np.zeros(grid.q_tiles, dtype=np.int64)
    for group in groups:
        prepared.append(_GroupTickets(grid, group, before))
        before = before + _count(group.kv_first, group.kv_last, grid.kv_first, grid.kv_last)
    return prepared


def tickets_of(grid: TileGrid, groups: Sequence[SummationGroup], kv: int, q: IntArray) -> IntArray:
    """Tickets of kv tile ``kv`` at q tiles ``q`` (each of which must be a task), shape of ``q``."""
    for prepared in _prepare(grid, groups):
        if prepared.group.kv_first <= kv <= prepared.group.kv_last:
            return prepared.at(kv, q)
    raise ValueError(f"no summation group holds kv tile {kv}")


def derive_runs(
    grid: TileGrid, visits: Sequence[Sequence[Visit]], groups: Sequence[SummationGroup]
) -> list[list[RunTuple]]:
    """Runs of every kv tile: its visits, split wherever the ticket stops being affine."""
    runs: list[list[RunTuple]] = [[] for _ in visits]
    alike: dict[object, list[list[RunTuple]]] = {}
    for prepared in _prepare(grid, groups):
        group = prepared.group
        members = range(group.kv_first, group.kv_last + 1)
        if not grid.is_full or not grid.tasks:
            for kv in members:
                runs[kv] = _runs_of_item(prepared, kv, visits[kv])
            continue
        # Where the mask cuts nothing, stretches that look alike differ only in what was summed before them.
        lead = b"" if group.lead is None else (group.lead - group.kv_first).tobytes()
        key = (group.step, lead, tuple(tuple(visits[kv]) for kv in members))
        before = int(prepared.before[0])
        if key not in alike:
            found = [_runs_of_item(prepared, kv, visits[kv]) for kv in members]
            alike[key] = [_later(item, -before) for item in found]
        for kv, item in zip(members, alike[key], strict=True):
            runs[kv] = _later(item, before)
    return runs


def _later(runs: list[RunTuple], tickets: int) -> list[RunTuple]:
    """The same runs with every ticket moved."""
    return [(q, step, count, t + tickets, t_step, hold) for q, step, count, t, t_step, hold in runs]


def _runs_of_item(prepared: _GroupTickets, kv: int, visits: Sequence[Visit]) -> list[RunTuple]:
    return [run for visit in visits for run in _runs_of_visit(prepared, kv, visit)]


def _runs_of_visit(prepared: _GroupTickets, kv: int, visit: Visit) -> list[RunTuple]:
    q_first, q_step, count = visit
    if abs(q_step) == 1:
        bottom, top = sorted((q_first, q_first + q_step * (count - 1)))
        inner = slice(
            np.searchsorted(prepared.breaks, bottom, side="right"),
            np.searchsorted(prepared.breaks, top, side="right"),
        )
        starts = np.concatenate(([bottom], prepared.breaks[inner]))
        lengths = np.diff(np.concatenate((starts, [top + 1])))
        if q_step < 0:
            starts, lengths = starts[::-1], lengths[::-1]
    else:
        starts = q_first + q_step * np.arange(count)
        lengths = np.ones(count, dtype=np.int64)
    return _compress(q_first, q_step, lengths, prepared.at(kv, starts))


def _compress(q_first: int, q_step: int, lengths: IntArray, tickets: IntArray) -> list[RunTuple]:
    """Runs, greedily as long as possible, of consecutive pieces that each hold one ticket."""
    if len(tickets) == 1:
        return [(q_first, q_step, int(lengths[0]), int(tickets[0]), 0, 1)]
    new = np.concatenate(([True], tickets[1:] != tickets[:-1]))
    if not new.all():
        heads = np.flatnonzero(new)
        tickets, lengths = tickets[heads], np.add.reduceat(lengths, heads)
    steps = np.diff(tickets)
    fits = (lengths[1:] <= lengths[:-1]) & (np.abs(steps) <= MAX_STEP) & (lengths[:-1] <= MAX_HOLD)
    # Piece i+1 may be followed by a further piece of the run only if it is as long as piece i.
    goes_on = fits[1:] & (lengths[1:-1] == lengths[:-2]) & (steps[1:] == steps[:-1])
    stops = np.flatnonzero(~goes_on) if goes_on.size else np.zeros(0, dtype=np.int64)
    runs: list[RunTuple] = []
    piece, q = 0, q_first
    while piece < len(lengths):
        first, hold = int(tickets[piece]), int(lengths[piece])
        if piece + 1 == len(lengths) or not fits[piece]:
            end, t_step, count = piece + 1, 0, hold
            hold = 1
        else:
            at = np.searchsorted(stops, piece)
            end = int(stops[at]) + 2 if at < len(stops) else len(lengths)
            t_step, count = int(steps[piece]), int(lengths[piece:end].sum())
        runs.append((q, q_step, count, first, t_step, hold))
        q += q_step * count
        piece = end
    return runs

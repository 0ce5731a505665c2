"""What an H200 takes for a backward beyond the simulated tasks: conversion, sums of head groups, and memory.

The simulator knows tasks, tickets and workers. This adds what it lacks, each part by a formula with constants
of the machine (:mod:`dash_attn.machine`). How well plans are ranked by it: docs/experiments/choices.md.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..machine import CACHED_BYTES, CONVERSION_CYCLES, DRAM_BYTES_PER_CYCLE, DRAM_SHARE, LAUNCH_CYCLES
from ..problem import IntArray
from ..schedule.plan import Plan
from .simulate import Timeline

__all__ = ["Estimate", "estimate"]

_WINDOWS = 8
"""Of each length, in which distinct q tiles are counted."""


class Estimate(NamedTuple):
    """Cycles of a backward.

    Attributes:
        tasks: the makespan of the simulation.
        conversion: of complete dQ tiles, as far as idle workers do not do it meanwhile.
        sums: storing and adding the sums of dK and dV of head groups.
        memory: the exposed part of what Q, dO and dQ take from and to DRAM.
    """

    tasks: float
    conversion: float
    sums: float
    memory: float

    @property
    def cycles(self) -> float:
        """All parts."""
        return sum(self)


def estimate(timeline: Timeline) -> Estimate:
    """The parts of a backward's time.

    Args:
        timeline: a simulation with the costs of an H200.

    >>> from dash_attn.model import H200, H200_WORKERS, simulate
    >>> from dash_attn.problem import Mask, Problem
    >>> from dash_attn.schedule import build_plan, choose_policy
    >>> few = Problem.dense(heads=8, kv_heads=1, seqlen=4096, mask=Mask.causal())
    >>> for groups in (2, 8):
    ...     plan = build_plan(few, choose_policy(few), head_groups=groups)
    ...     print([round(cycles) for cycles in estimate(simulate(plan, H200, H200_WORKERS))])
    [875136, 0, 11214, 1657]
    [270472, 0, 29855, 1657]
    """
    plan, batch = timeline.plan, timeline.plan.batch
    problem = plan.problem
    complete = int((batch.sizes.complete_q_tiles * problem.heads).sum())
    exposed = max(0.0, CONVERSION_CYCLES * complete - timeline.stalls["idle"])
    columns = problem.head_dim + problem.head_dim_v
    sums = 2 * 4 * int(plan.group_sum_first[-1]) * problem.tile_n * columns  # written and read, fp32
    tile = problem.tile_m * (2 * columns + 4 * problem.head_dim)
    first, again = _from_dram(_q_tiles_by_time(timeline), tile)
    # Q and dO are read, dQ is read and written, but not read the first time. The weights were fitted.
    moved = (0.5 * first + again) * tile * 4 / 3
    return Estimate(
        timeline.makespan,
        exposed / timeline.workers,
        sums / DRAM_BYTES_PER_CYCLE + LAUNCH_CYCLES if sums else 0.0,
        DRAM_SHARE * moved / DRAM_BYTES_PER_CYCLE,
    )


def _q_tiles_by_time(timeline: Timeline) -> IntArray:
    """The q tile of each task, counted over heads and sequences, in the order in which tasks begin."""
    found = [_q_tiles_of(timeline.plan, *item) for item in timeline.plan.items.tolist()]
    tiles: IntArray = np.concatenate([np.zeros(0, dtype=np.int64), *found])
    return tiles[np.argsort(timeline.compute_start, kind="stable")]


def _q_tiles_of(plan: Plan, sequence: int, head_group: int, kv: int) -> IntArray:
    batch, heads = plan.batch, plan.q_heads(sequence, head_group)
    first = plan.problem.heads * int(batch.q_tiles[:sequence].sum())
    of_heads, q, _ = plan.pattern(sequence).tasks_of_heads(kv, len(heads))
    tiles: IntArray = first + (heads.start + of_heads) * int(batch.q_tiles[sequence]) + q
    return tiles


def _from_dram(tiles: IntArray, tile_bytes: int) -> tuple[int, int]:
    """How many of the accesses are the first ones of a tile, and how many come after it has left L2.

    A tile has left if what was used since its last access does not fit: as many distinct tiles as windows of
    that many accesses have, on average.
    """
    count = len(tiles)
    if not count:
        return 0, 0
    by_tile = np.lexsort((np.arange(count), tiles))
    same = np.diff(tiles[by_tile]) == 0
    since = np.diff(by_tile)[same]
    lengths = [n for n in (1 << power for power in range(6, 18)) if n < count] or [count]
    used = [_distinct(tiles, length) for length in lengths]
    left = np.interp(since, lengths, used) * tile_bytes > CACHED_BYTES
    return count - int(same.sum()), int(left.sum())


def _distinct(tiles: IntArray, length: int) -> float:
    """Different tiles in a window of so many accesses, on average."""
    starts = np.linspace(0, len(tiles) - length, _WINDOWS).astype(int).tolist()
    return float(np.mean([len(np.unique(tiles[at : at + length])) for at in starts]))

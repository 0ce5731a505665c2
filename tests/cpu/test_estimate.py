"""What a backward takes beyond its simulated tasks."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from dash_attn.machine import CACHED_BYTES, CONVERSION_CYCLES
from dash_attn.model import H200, H200_WORKERS, Costs, Estimate, estimate, simulate
from dash_attn.model.estimate import _from_dram, _q_tiles_by_time
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import build_plan, choose_policy


def of(problem: Problem, policy: str | None = None, **options: int) -> Estimate:
    plan = build_plan(problem, policy or choose_policy(problem), **options)
    return estimate(simulate(plan, H200, H200_WORKERS))


def test_sums_cost_as_much_as_there_are() -> None:
    """None where an item owns a whole group; twice as much for twice as many head groups."""
    problem = Problem.dense(heads=8, kv_heads=1, seqlen=4096, mask=Mask.causal())
    whole, two, four = (of(problem, head_groups=groups).sums for groups in (1, 2, 4))
    assert whole == 0 < two < four < 2 * two


def test_idle_workers_convert() -> None:
    """Conversion counts where all are busy: one worker, which is idle never."""
    problem = Problem.dense(heads=2, seqlen=1024, head_dim=64)
    alone = estimate(simulate(build_plan(problem, "fa3"), Costs(compute=3400), 1))
    assert alone.conversion == CONVERSION_CYCLES * 2 * problem.grid(0).q_tiles
    assert of(problem, "fa3").conversion == 0


@pytest.mark.parametrize("mask", [Mask.full(), Mask.causal()], ids=str)
def test_every_task_has_its_q_tile(mask: Mask) -> None:
    problem = Problem.varlen([700, 300, 1], heads=4, kv_heads=2, head_dim=64, mask=mask)
    plan = build_plan(problem, choose_policy(problem))
    tiles = _q_tiles_by_time(simulate(plan, H200, H200_WORKERS))
    contributions = [problem.tile_grids[shape].contributions for shape in problem.shapes]
    wanted = np.concatenate([np.tile(counts, problem.heads) for counts in contributions])
    assert np.array_equal(np.bincount(tiles, minlength=len(wanted)), wanted)


@pytest.mark.parametrize("tiles", [300, 3000])
def test_misses_are_about_those_of_a_cache(tiles: int) -> None:
    """Beside a cache that drops what was not used for longest: rings of accesses, and random ones."""
    rng, tile_bytes, room = np.random.default_rng(0), CACHED_BYTES // 1000, 1000
    for accesses in (np.tile(np.arange(tiles), 8), rng.integers(0, tiles, 8 * tiles)):
        first, again = _from_dram(accesses, tile_bytes)
        cache: OrderedDict[int, None] = OrderedDict()
        misses = 0
        for tile in accesses.tolist():
            misses += tile not in cache
            cache[tile] = None
            cache.move_to_end(tile)
            if len(cache) > room:
                cache.popitem(last=False)
        assert first == len(np.unique(accesses))
        assert first + again == pytest.approx(misses, rel=0.15)


def test_many_heads_side_by_side_cost_memory() -> None:
    """Longest items first over all heads read more from DRAM than head after head."""
    problem = Problem.dense(batch=4, heads=32, seqlen=2048, head_dim=64, mask=Mask.causal())
    turns, together = of(problem, "spt"), of(problem, "descending + lpt")
    assert turns.memory < together.memory
    assert turns.cycles == sum(turns)


def test_nothing_costs_nothing() -> None:
    empty = Problem.dense(seqlen_q=0, seqlen_k=0, head_dim=64)
    assert of(empty).cycles == of(empty).tasks

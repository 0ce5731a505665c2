"""Plans of forwards: every row meets every segment that it sees once, and what is broken is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dash_attn.errors import CostError, CoverageError, PlacementError, ProblemError
from dash_attn.model import ForwardCosts, simulate_forward
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import ForwardNumerics, ForwardPlan, build_forward_plan, prove_forward

MASKS = [Mask.full(), Mask.causal(), Mask.window(300, 0), Mask.window(50, 20)]
SHORT = ForwardNumerics(64, "bfloat16", segment=256)


def plan(*lengths: tuple[int, int], workers: int = 132, mask: Mask = MASKS[1], heads: int = 2) -> ForwardPlan:
    problem = Problem.varlen(lengths, heads=heads, kv_heads=1, head_dim=64, mask=mask)
    return build_forward_plan(problem, 192, workers, SHORT)


lengths = st.lists(st.tuples(st.integers(0, 900), st.integers(0, 3000)), min_size=1, max_size=5)


@given(lengths, st.sampled_from(MASKS), st.sampled_from([1, 40, 10_000]))
def test_plans_are_whole_and_longest_first(lengths: list[tuple[int, int]], mask: Mask, workers: int) -> None:
    found = plan(*lengths, workers=workers, mask=mask)
    prove_forward(found)
    assert (np.diff(found.kv_tiles) <= 0).all()
    items = [found.claimed(number) for number in range(found.items)]
    assert len(set(items)) == len(items)
    work = 0
    for (seqlen_q, _), grid in zip(found.problem.sequences, map(found.problem.grid, range(99))):
        for top in range(0, seqlen_q, 192):
            first, last = grid.columns(np.arange(top, min(top + 192, seqlen_q)))
            seen = [
                kv for a, b in zip(first, last) for kv in range(int(a) // 128, int(b) // 128 + 1) if b >= a
            ]
            work += len(set(seen)) and max(seen) - min(seen) + 1
    assert found.kv_tiles.sum() == work


def test_few_items_are_split_and_many_are_not() -> None:
    assert len(plan((1, 1000)).entries) == 4
    assert plan((1, 1000)).places == 4
    assert len(plan((1, 1000), workers=3).entries) == 1
    assert plan((1, 1000), workers=3).places == 0


def test_items_have_an_end() -> None:
    with pytest.raises(IndexError, match="item 2 of 2"):
        plan((1, 10)).claimed(2)


def changed(original: ForwardPlan, name: str, at: tuple[int, int], value: int) -> ForwardPlan:
    array = getattr(original, name).copy()
    array[at] = value
    return replace(original, **{name: array})


@pytest.mark.parametrize(
    ("name", "at", "value", "error", "message"),
    [
        ("entries", (0, 2), 1, CoverageError, r"items of segments \[1, 1, 2, 3\], it sees \[0, 1, 2, 3\]"),
        ("entries", (0, 1), 7, CoverageError, "q tile 7 of sequence 0 has no item, or is none"),
        ("entries", (0, 3), 1, PlacementError, r"leaves its segments at \[1, 1, 2, 3\], folded are 4 from 0"),
        ("folds", (0, 3), 3, PlacementError, "folded are 3 from 0"),
        ("folds", (0, 2), 1, PlacementError, "folded are 4 from 1"),
    ],
)
def test_broken_plans_are_named(
    name: str, at: tuple[int, int], value: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        prove_forward(changed(plan((1, 1000)), name, at, value))


def test_more_broken_plans() -> None:
    whole = plan((1, 1000), (5, 30))
    with pytest.raises(PlacementError, match="entry 1 goes through 9 kv tiles, it sees "):
        prove_forward(
            replace(whole, kv_tiles=np.where(np.arange(len(whole.entries)) == 1, 9, whole.kv_tiles))
        )
    with pytest.raises(PlacementError, match="entries, and kv tiles of "):
        prove_forward(replace(whole, kv_tiles=whole.kv_tiles[:-1]))
    with pytest.raises(PlacementError, match="3 heads are no whole number of sections of 2"):
        prove_forward(replace(plan((1, 10), heads=3), section=2))
    with pytest.raises(CoverageError, match="q tile 0 of sequence 1 has no item"):
        prove_forward(replace(whole, entries=whole.entries[whole.entries[:, 0] == 0]))
    several = plan((300, 300), workers=1)
    with pytest.raises(CoverageError, match="a q tile has several items"):
        prove_forward(replace(several, entries=np.concatenate([several.entries, several.entries])))
    with pytest.raises(PlacementError, match="a q tile is folded twice"):
        prove_forward(replace(whole, folds=np.concatenate([whole.folds, whole.folds])))
    with pytest.raises(PlacementError, match="2 heads are no whole number of sections of 0"):
        prove_forward(replace(plan((1, 10)), section=0))
    extra = np.array([[1, 0, 4, 1]])
    with pytest.raises(PlacementError, match="q tile 0 of sequence 1 is folded and was not split"):
        prove_forward(replace(whole, folds=np.concatenate([whole.folds, extra])))


def test_two_tiles_at_the_same_places_are_named() -> None:
    """Each by itself is whole: its folds take what its segments have left."""
    two = plan((1, 1000), (1, 1000))
    entries, folds = two.entries.copy(), two.folds.copy()
    assert sorted(folds[:, 2].tolist()) == [0, 4]
    (moved,) = folds[folds[:, 2] == 4, 0]
    entries[entries[:, 0] == moved, 3] -= 4
    folds[folds[:, 0] == moved, 2] = 0
    with pytest.raises(PlacementError, match="8 segments are left at 8 places"):
        prove_forward(replace(two, entries=entries, folds=folds))


def test_items_are_split_up_to_half_as_many_as_workers() -> None:
    assert plan((1, 1000), workers=4).places == 4  # two items
    assert plan((1, 1000), workers=3).places == 0
    many = Problem.dense(seqlen_q=1, seqlen_k=300_000, heads=4, head_dim=64)
    assert build_forward_plan(many, 192, 132, SHORT).places == 0, "4,688 segments of all heads"


def test_sections_of_heads_come_one_after_the_other() -> None:
    long = Problem.dense(seqlen=20_000, heads=8, kv_heads=4, head_dim=128, mask=Mask.causal())
    found = build_forward_plan(long, 128, 132)
    assert found.section == 4
    heads = [found.claimed(number)[1] for number in range(found.items)]
    tiles = [found.kv_tiles[found.claimed(number)[0]] for number in range(found.items)]
    assert found.tiles_of_items().tolist() == tiles
    half = len(found.entries) * 4
    assert set(heads[:half]) == set(range(4))
    assert set(heads[half:]) == set(range(4, 8))


@pytest.mark.parametrize(
    ("problem", "tile_m", "workers", "message"),
    [
        (Problem.dense(seqlen=9), 0, 1, "tile_m must be >= 1, got 0"),
        (Problem.dense(seqlen=9), 64, 0, "workers must be >= 1, got 0"),
        (Problem(((9, 9),), 1, 1, 64, Mask.causal(), q_starts=(0,)), 64, 1, "got q_starts"),
    ],
)
def test_what_has_no_plan_is_named(problem: Problem, tile_m: int, workers: int, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        build_forward_plan(problem, tile_m, workers)


@given(lengths, st.sampled_from(MASKS), st.integers(1, 40))
def test_simulations_are_no_shorter_than_their_bound(
    lengths: list[tuple[int, int]], mask: Mask, workers: int
) -> None:
    found = simulate_forward(plan(*lengths, mask=mask, workers=workers), ForwardCosts(2, 3), workers)
    assert found.makespan >= found.lower_bound - 1e-9
    assert 0 <= found.utilization <= 1
    for worker in range(workers):
        mine = found.worker == worker
        assert (found.start[mine][1:] >= found.end[mine][:-1]).all()


def test_costs_that_nobody_measured_are_named() -> None:
    with pytest.raises(CostError, match="no costs of a forward were measured at head dim 96"):
        ForwardCosts.h200(96)

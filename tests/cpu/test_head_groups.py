"""Head groups: who owns which q heads, that the deal decides dK and dV and nothing else, and the default."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import executed, packed_tensors, shuffled_placement
from hypothesis import given
from hypothesis import strategies as st

from dash_attn.errors import CoverageError, InputError
from dash_attn.problem import Mask, Problem, SequenceGrid
from dash_attn.schedule import Descending, HeadPattern, Plan, build_plan, choose_policy, prove
from dash_attn.schedule.constants import FULL_MOST_ITEMS, MOST_ITEMS
from dash_attn.schedule.head_groups import default_head_groups, group_heads
from dash_attn.testing import assert_same_bytes, same_bytes

SIX_ON_ONE = Problem.dense(
    batch=2,
    heads=6,
    kv_heads=1,
    seqlen=64,
    head_dim=8,
    mask=Mask.causal(),
    dtype="float32",
    tile_m=8,
    tile_n=8,
)


@given(st.integers(1, 40), st.data())
def test_every_head_is_dealt_once(group: int, data: st.DataObject) -> None:
    groups = data.draw(st.integers(1, group))
    dealt = group_heads(group, groups)
    assert [head for heads in dealt for head in heads] == list(range(group))
    sizes = [len(heads) for heads in dealt]
    assert len(sizes) == groups
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


def test_the_deal_decides_dk_and_dv_and_leaves_dq_alone() -> None:
    tensors = packed_tensors(SIX_ON_ONE)
    results = {
        n: executed(build_plan(SIX_ON_ONE, Descending(), head_groups=n), tensors) for n in (1, 2, 4, 6)
    }
    for n in (2, 4, 6):
        assert_same_bytes(results[n]["dq"], results[1]["dq"], "dq")
        assert not same_bytes(results[n]["dk"], results[1]["dk"])
        assert not same_bytes(results[n]["dv"], results[1]["dv"])
    prints = {build_plan(SIX_ON_ONE, Descending(), head_groups=n).fingerprint for n in (1, 2, 4, 6)}
    assert len(prints) == 4


@pytest.mark.parametrize("seed", range(3))
def test_placement_of_the_groups_leaves_every_byte_alone(seed: int) -> None:
    tensors = packed_tensors(SIX_ON_ONE)
    plan = build_plan(SIX_ON_ONE, Descending(), head_groups=4)
    shuffled = prove(shuffled_placement(plan, seed))
    for name, value in executed(plan, tensors).items():
        assert_same_bytes(executed(shuffled, tensors, workers=shuffled.min_workers + seed)[name], value, name)


def test_default_looks_at_the_sequence_and_the_group_alone() -> None:
    grid = SequenceGrid(4096, 4096, 64, 128, Mask.causal())
    several = Problem.varlen([300, 4096, 4096], heads=64, kv_heads=8, mask=Mask.causal())
    plan = build_plan(several, Descending())
    assert plan.pattern(1).head_groups == default_head_groups(8, grid) == 4
    assert plan.group_first.tolist() == [0, 32, 64, 96]
    assert plan.q_heads(1, 5) == range(10, 12)


@pytest.mark.parametrize("mask", [Mask.full(), Mask.causal(), Mask.window(100, 0)])
@pytest.mark.parametrize("seqlen", [0, 1, 1000, 16384, 1 << 20])
def test_default_bounds(mask: Mask, seqlen: int) -> None:
    grid = SequenceGrid(seqlen, seqlen, 64, 128, mask)
    assert default_head_groups(1, grid) == 1
    for group in (2, 3, 7, 8, 64):
        groups = default_head_groups(group, grid)
        assert 1 <= groups <= group
        most = FULL_MOST_ITEMS if mask.is_full else MOST_ITEMS
        assert groups == 1 or groups * grid.kv_tiles <= most + grid.kv_tiles


def test_numbers_that_cannot_be() -> None:
    for value in (0, 7, 2.0, True):
        with pytest.raises(InputError, match=f"head_groups must be in 1..6, got {value}"):
            build_plan(SIX_ON_ONE, Descending(), head_groups=value)
    plan = build_plan(SIX_ON_ONE, Descending())
    pattern = plan.pattern(0)
    broken = HeadPattern(pattern.grid, pattern.offsets, pattern.runs, head_groups=7)
    with pytest.raises(CoverageError, match="7 head groups of 6 q heads"):
        prove(Plan(plan.problem, "broken", {(64, 64): broken}, plan.items))
    broken = replace(pattern, passes=5)
    with pytest.raises(CoverageError, match="5 passes of an item of 2 q heads"):
        prove(Plan(plan.problem, "broken", {(64, 64): broken}, plan.items))


WINDOW = Problem(((300, 300),) * 2, 6, 2, 16, Mask.window(60, 0), "float32", tile_m=16, tile_n=32)


def test_one_head_after_the_other() -> None:
    """An item goes through its q tiles once per q head. dQ keeps its bytes, dK and dV are summed in another
    order."""
    names = "descending", "descending(by_head_from=300)"
    together, by_head = plans = [build_plan(WINDOW, name, head_groups=1) for name in names]
    heads, q_tiles, _ = by_head.pattern(0).tasks_of_heads(2, 3)
    count = len(by_head.pattern(0).tasks_of(2)[0])
    assert heads.tolist() == [0] * count + [1] * count + [2] * count
    assert q_tiles.tolist() == 3 * by_head.pattern(0).tasks_of(2)[0].tolist()
    assert together.fingerprint != by_head.fingerprint
    first, second = (executed(plan, packed_tensors(WINDOW)) for plan in plans)
    assert_same_bytes(first["dq"], second["dq"])
    for name in ("dk", "dv"):
        assert not same_bytes(first[name], second[name]), name
        torch.testing.assert_close(first[name], second[name])
    for workers in range(by_head.min_workers, 5):
        assert_same_bytes(executed(by_head, packed_tensors(WINDOW), workers=workers)["dk"], second["dk"])


def test_shorter_sequences_and_single_heads_stay_as_they_are() -> None:
    shorter = build_plan(WINDOW, "descending(by_head_from=301)")
    assert shorter.fingerprint == build_plan(WINDOW, "descending").fingerprint
    single = replace(WINDOW, heads=2)
    plans = [build_plan(single, name) for name in ("descending", "descending(by_head_from=0)")]
    assert plans[0].fingerprint == plans[1].fingerprint


@pytest.mark.parametrize(
    ("left", "group", "seqlen", "groups"),
    [(128, 8, 8192, 1), (512, 4, 4096, 1), (1024, 4, 4096, 2), (1024, 8, 8192, 2), (4096, 4, 16384, 1)],
)
def test_items_of_a_window_own_more_q_heads(left: int, group: int, seqlen: int, groups: int) -> None:
    problem = Problem.dense(heads=2 * group, kv_heads=2, seqlen=seqlen, mask=Mask.window(left, 0))
    pattern = build_plan(problem, choose_policy(problem)).pattern(0)
    assert (pattern.head_groups, pattern.passes) == (groups, group // groups)

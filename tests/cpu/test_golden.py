"""Golden numerics without a GPU: the plans are those whose gradients' hashes are checked in."""

from __future__ import annotations

import json

import pytest
import torch

from dash_attn.machine import WORKERS
from dash_attn.schedule import Plan, build_forward_plan
from dash_attn.schedule.constants import FORWARD_SEGMENT
from golden_cases import (
    GOLDEN,
    HASHED,
    auto_problems,
    completed,
    golden_inputs,
    golden_plans,
    identities,
    ring_problems,
)

torch.set_num_threads(1)

RESULTS = [name for names in HASHED.values() for name in names]
KNOWN = json.loads(GOLDEN.read_text())
AUTO = {name: plan for name, plan in golden_plans().items() if name in auto_problems()}
RINGS = {name: golden_plans()[name] for name in ring_problems()}


def test_fingerprints_are_the_golden_ones() -> None:
    assert {name: identities(plan) for name, plan in golden_plans().items()} == {
        name: {direction: case.get(direction) for direction in HASHED} for name, case in KNOWN.items()
    }


@pytest.mark.parametrize("name", golden_plans())
def test_a_case_has_hashes(name: str) -> None:
    """``DASH_ATTN_WRITE_GOLDEN`` writes those that are missing, on a Hopper GPU."""
    assert [x for x in RESULTS if len(KNOWN[name].get(x, "")) != 64] == []


@pytest.mark.parametrize("name", golden_plans())
def test_inputs_fit_their_problem(name: str) -> None:
    plan = golden_plans()[name]
    dout, q, k, v, out, lse = golden_inputs(plan)
    assert dout.shape == q.shape == out.shape
    assert k.shape == v.shape
    assert lse.numel() * plan.problem.head_dim == q.numel()
    assert 0.5 < q.float().std() < 1.2


# What "auto" runs is among the cases


def stride(plan: Plan) -> int:
    """q tiles between the first two members of the first ring."""
    first, second = (plan.pattern(0).runs_of(kv_tile)[0].q_first for kv_tile in (0, 1))
    return second - first


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rings_of_16_with_every_stride(head_dim: int) -> None:
    rings = [p for p in (AUTO | RINGS).values() if p.problem.mask.is_full and p.problem.head_dim == head_dim]
    assert {stride(plan) for plan in rings if plan.min_workers == 16} == {2, 3, 4}
    assert any(plan.min_workers < 16 for plan in rings), "no ring is shortened by its stride"


def test_every_full_case_has_several_rings() -> None:
    """So that contributions to a dQ tile come in another order where nothing orders them."""
    for name, plan in (AUTO | RINGS).items():
        if plan.problem.mask.is_full:
            assert max(grid.kv_tiles for grid in plan.problem.grids.values()) > plan.min_workers, name


def test_long_sequences_under_a_causal_mask() -> None:
    """Items of long ones go downwards, of others upwards: alone, with fewer queries, and side by side."""

    def directions(plan: Plan) -> set[int]:
        return {
            pattern.runs_of(0)[0].q_step for pattern in plan.patterns.values() if pattern.grid.q_tiles > 1
        }

    long = {
        name: directions(plan)
        for name, plan in AUTO.items()
        if plan.problem.mask.is_causal and plan.problem.group == 1 and plan.problem.head_dim == 128
    }
    for name in ("2100", "6144", "more-keys"):
        assert long[f"auto-d128-causal-{name}"] == {-1}
    assert long["auto-d128-causal-varlen"] == {-1, 1}
    assert AUTO["auto-d128-causal-6144"].problem.sequences == ((6144, 6144),)


def test_squares_under_a_causal_mask() -> None:
    """Of every length, alone, with grouped heads, and beside others: half of their kv tiles go round."""
    squares = {name: plan for name, plan in AUTO.items() if "square" in name}
    tiles = {name: max(p.kv_tiles for p in plan.problem.grids.values()) for name, plan in squares.items()}
    assert sorted(set(tiles.values())) == [16, 20, 32, 64, 128]
    for name, plan in squares.items():
        assert plan.min_workers == (8 if "varlen" in name else tiles[name] // 2), name


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_head_groups(mask: str, head_dim: int) -> None:
    """q heads of a kv head are dealt to several head groups, of several heads or of one each."""
    found = [
        (plan.pattern(0).head_groups, plan.problem.group)
        for plan in (AUTO | RINGS).values()
        if (plan.problem.mask.name, plan.problem.head_dim) == (mask, head_dim) and plan.problem.group > 1
    ]
    assert any(1 < groups < group for groups, group in found)
    if head_dim == 128:
        assert any(groups == group for groups, group in found)
    if (mask, head_dim) == ("causal", 128):
        assert any(groups == 1 for groups, group in found)


def test_windows() -> None:
    """q heads one after the other, all of a kv head or fewer; in a packed batch beside shorter sequences."""
    found = {
        name: [(p.passes, p.head_groups) for p in map(plan.pattern, range(len(plan.problem.shapes)))]
        for name, plan in AUTO.items()
        if "window" in name
    }
    assert found == {
        "auto-d128-window-gqa": [(4, 1)],
        "auto-d64-window-gqa": [(4, 2)],
        "auto-d128-varlen-window-gqa": [(3, 2), (1, 3), (1, 3)],
    }


@pytest.mark.parametrize("plans", [AUTO, RINGS], ids=["auto", "rings"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rings_that_start_apart(head_dim: int, plans: dict[str, Plan]) -> None:
    """Where a sequence has more q tiles than a ring spans."""
    firsts = [
        {plan.pattern(0).runs_of(kv)[0].q_first for kv in range(0, plan.pattern(0).grid.kv_tiles, 16)}
        for plan in plans.values()
        if plan.problem.head_dim == head_dim and plan.min_workers == 16
    ]
    assert any(len(starts) > 1 for starts in firsts)


def test_forwards_of_several_segments() -> None:
    """One worker after the other, and several at once with a fold."""
    long = [p for p in auto_problems().values() if p.lengths[:, 1].max() > FORWARD_SEGMENT]
    assert {build_forward_plan(p, 128, WORKERS).places > 0 for p in long} == {True, False}


def test_more_heads_leave_the_numerics_alone() -> None:
    for name, problem in auto_problems(times=3).items():
        assert problem.heads == 3 * AUTO[name].problem.heads
        assert (problem.group, problem.grids.keys()) == (
            AUTO[name].problem.group,
            AUTO[name].problem.grids.keys(),
        )


# Writing the file


def hashes(plan: Plan) -> dict[str, str]:
    return identities(plan) | dict.fromkeys(RESULTS, "new")


def test_known_hashes_are_never_replaced() -> None:
    whole = {name: identities(plan) | dict.fromkeys(RESULTS, "old") for name, plan in golden_plans().items()}
    assert completed(whole, hashes) == whole


def test_what_is_missing_and_what_has_other_numerics_is_written() -> None:
    other, partly, missing, *rest = golden_plans()
    known = completed({}, lambda plan: hashes(plan) | dict.fromkeys(RESULTS, "old"))
    known[other] = known[other] | {"fingerprint": "of an older version"}
    known[rest[0]] = known[rest[0]] | {"forward": "of an older version"}
    del known[partly]["dk"], known[missing]
    known["no case any more"] = {"fingerprint": "of nothing"}
    found = completed(known, hashes)
    assert [found[name]["dq"] for name in (other, partly, missing)] == ["new"] * 3
    assert {found[name]["dq"] for name in rest} == {"old"}
    assert [found[name]["out"] for name in (other, partly, rest[0], rest[1])] == ["old", "old", "new", "old"]
    assert list(found) == list(golden_plans())

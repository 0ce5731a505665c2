"""Lengths never seen before cost array arithmetic: what plans share is made and proven once."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
import torch

import dash_attn
from dash_attn.errors import ScheduleNameError
from dash_attn.ops import calls
from dash_attn.problem import Mask, Problem, TileGrid
from dash_attn.schedule import Schedule, build, build_plan, choose_policy, proof, to_table

MASKS = [Mask.full(), Mask.causal(), Mask.window(200, 0)]


def unseen(rng: random.Random, tile: int, tiles: range, sequences: int = 64) -> tuple[tuple[int, int], ...]:
    """Lengths of whole numbers of tiles in a range, less a few rows."""
    return tuple((n, n) for n in (tile * rng.choice(tiles) - rng.randrange(60) for _ in range(sequences)))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was made or proven anew, by name."""
    found: list[str] = []

    def count(module: ModuleType, name: str) -> None:
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given: found.append(name) or original(*given))

    count(build, "derive_runs")
    count(proof, "_check_coverage")
    count(proof, "_dependences")
    return found


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, 64), (4, 4, 128), (8, 2, 128), (16, 1, 64)]
)
def test_a_second_batch_of_new_lengths_proves_nothing_anew(
    made: list[str], mask: Mask, heads: int, kv_heads: int, head_dim: int
) -> None:
    rng = random.Random(7)
    tiles = range(2, 9)
    every = tuple((128 * n - rest, 128 * n - rest) for n in tiles for rest in range(60))
    build_plan(first := Problem(every, heads, kv_heads, head_dim, mask), choose_policy(first))
    made.clear()
    second = Problem(unseen(rng, 128, tiles), heads, kv_heads, head_dim, mask)
    plan = build_plan(second, choose_policy(second))
    to_table(plan)
    assert made == []
    assert plan.min_workers >= 1
    longer = 128 * (30 + 3 * heads + kv_heads + head_dim)
    other = Problem(((longer, longer),), heads, kv_heads, head_dim, mask)
    build_plan(other, choose_policy(other))
    assert set(made) == {"derive_runs", "_check_coverage", "_dependences"}, "the fixture sees nothing"


def test_few_patterns_cover_all_lengths() -> None:
    lengths = [(n, n) for n in range(1, 4097)]
    for mask, most in (
        (Mask.full(), 64),
        (Mask.causal(), 64),
        (Mask.window(511, 0), 64),
        (Mask.window(300, 0), 160),
    ):
        assert len(set(TileGrid.of(lengths, 64, 128, mask))) <= most, mask


@pytest.mark.parametrize(
    "mask", [*MASKS, Mask.window(0, 0), Mask.window(None, 99), Mask.window(64, None)], ids=str
)
@pytest.mark.parametrize("tiles", [(64, 128), (128, 128), (16, 24), (1, 1)])
def test_square_sequences_have_the_grids_of_any_others(mask: Mask, tiles: tuple[int, int]) -> None:
    lengths = range(700)
    for _ in range(2):  # made, and found
        assert TileGrid.of_squares(lengths, *tiles, mask) == TileGrid.of(
            [(n, n) for n in lengths], *tiles, mask
        )


def test_the_forward_makes_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "build_plan", lambda *_: pytest.fail("a plan was made"))
    q = torch.randn(1, 77, 2, 16)
    out = dash_attn.attention(q, q, q, causal=True)
    assert out.shape == q.shape
    ends = torch.tensor([0, 13, 77], dtype=torch.int32)
    dash_attn.flash_attn_varlen_func(q[0], q[0], q[0], ends, ends)
    leaf = q.clone().requires_grad_()
    with pytest.raises(pytest.fail.Exception, match="a plan was made"):
        dash_attn.attention(leaf, q, q, window=(3, 0)).sum().backward()


def test_auto_names_no_schedule() -> None:
    with pytest.raises(ScheduleNameError, match="auto is no schedule: choose_policy"):
        build_plan(Problem.dense(seqlen=300), "auto")


@pytest.mark.parametrize("mask", [*MASKS, Mask.window(10, 10)], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 64), (4, 64), (1, 128), (4, 128)])
def test_what_auto_chooses_can_be_logged_and_given_back(mask: Mask, heads: int, head_dim: int) -> None:
    problem = Problem.dense(seqlen=300, heads=heads, kv_heads=1, head_dim=head_dim, mask=mask)
    chosen = choose_policy(problem)
    assert Schedule.parse(str(chosen)) == chosen
    auto, pinned = build_plan(problem, chosen), build_plan(problem, str(chosen))
    assert (auto.policy, auto.fingerprint) == (pinned.policy, pinned.fingerprint)
    assert (auto.items == pinned.items).all()
    left, right = mask.sides
    q = torch.zeros(1, 300, heads, head_dim, dtype=torch.bfloat16)
    k = q[:, :, :1]
    pinned = dash_attn.plan_for(q, k, k, window=(left, right), policy=auto.policy)
    assert pinned.fingerprint == auto.fingerprint

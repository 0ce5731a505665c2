"""Policies and the derivation of tickets: orders against their definitions, task by task."""

from __future__ import annotations

import ast
import importlib
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import ALL_POLICIES, plans, problems

from dash_attn import attention
from dash_attn.errors import InputError, UnsupportedMaskError
from dash_attn.model import H200, H200_WORKERS, Costs, simulate
from dash_attn.problem import Mask, Problem, TileGrid
from dash_attn.schedule import (
    FA3,
    POLICIES,
    SPT,
    ByLength,
    Descending,
    Numerics,
    Plan,
    Policy,
    Schedule,
    Shift,
    SymmetricShift,
    build_plan,
    choose_policy,
    defaults,
    prove,
)
from dash_attn.schedule.constants import AUTO_RING
from dash_attn.schedule.placement import InOrder, lpt_placement
from dash_attn.schedule.tickets import SummationGroup, _compress, tickets_of

MEASURED = Path(__file__).parents[2] / "benchmarks/results/h100-choices.json"


def orders_by_definition(grid: TileGrid, groups: tuple[SummationGroup, ...]) -> list[list[int]]:
    """Summation orders written out kv tile by kv tile, without any interval arithmetic."""
    orders = []
    for q in range(grid.q_tiles):
        order: list[int] = []
        for group in groups:
            start = group.kv_first if group.step > 0 else group.kv_last
            kv = start if group.lead is None else int(group.lead[q])
            for _ in range(group.kv_last - group.kv_first + 1):
                order.append(kv)
                kv += group.step
                kv = group.kv_first if kv > group.kv_last else group.kv_last if kv < group.kv_first else kv
        orders.append([kv for kv in order if grid.kv_first[q] <= kv <= grid.kv_last[q]])
    return orders


def test_every_policy_is_tested() -> None:
    assert {type(policy) for policy in ALL_POLICIES} == set(POLICIES.values())


@pytest.mark.parametrize("numerics", ALL_POLICIES, ids=str)
@given(problem=problems())
def test_runs_hold_the_visits_and_the_summation_orders(numerics: Numerics, problem: Problem) -> None:
    for shape, grid in problem.tile_grids.items():
        policy = numerics.for_lengths(*shape)
        try:
            policy.check(grid)
        except UnsupportedMaskError:
            continue
        one = Problem((shape,), 1, 1, 16, problem.mask, "float32", grid.tile_m, grid.tile_n)
        pattern = build_plan(one, numerics).pattern(0)
        groups = tuple(policy.summation(grid))
        assert pattern.summation_orders() == orders_by_definition(grid, groups)
        for kv, visits in enumerate(policy.visits(grid)):
            wanted = [q0 + k * step for q0, step, count in visits for k in range(count)]
            assert pattern.tasks_of(kv)[0].tolist() == wanted
            assert [q for run in pattern.runs_of(kv) for q, _ in run.tasks()] == wanted


@given(problems())
def test_ascending_lead_goes_round_upwards(problem: Problem) -> None:
    """Direction +1 with a lead: used by no policy here, but part of what a policy may say."""
    for grid in problem.tile_grids.values():
        if grid.kv_tiles:
            lead = np.arange(grid.q_tiles) % grid.kv_tiles
            group = (SummationGroup(0, grid.kv_tiles - 1, 1, lead),)
            for q, order in enumerate(orders_by_definition(grid, group)):
                assert [int(tickets_of(grid, group, kv, np.array([q]))[0]) for kv in order] == list(
                    range(len(order))
                )


@given(plans())
def test_runs_are_few(plan: Plan) -> None:
    """Affine runs, not one run a task: at most one for each ticket change."""
    for pattern in plan.patterns.values():
        for kv in range(pattern.grid.kv_tiles):
            q, t = pattern.tasks_of(kv)
            changes = int(((np.diff(t) != 0) | (np.abs(np.diff(q)) != 1)).sum())
            assert len(pattern.runs_of(kv)) <= changes + 1


def test_compress_writes_every_sequence_of_tickets() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        lengths = rng.integers(1, 4, size=rng.integers(1, 12)).astype(np.int64)
        tickets = np.cumsum(rng.integers(-2, 3, size=len(lengths))).astype(np.int64) + 40
        written = [
            (q0 + k * step, t0 + t_step * (k // hold))
            for q0, step, count, t0, t_step, hold in _compress(7, -1, lengths, tickets)
            for k in range(count)
        ]
        assert written == [(7 - k, int(t)) for k, t in enumerate(np.repeat(tickets, lengths))]


@pytest.mark.parametrize(
    ("policy", "mask", "lengths", "message"),
    [
        (
            Shift(),
            Mask.causal(),
            (512, 512),
            "shift needs a mask that leaves every task, this one leaves 10 of 16: causal of 512 x 512",
        ),
        (Shift(ring=4, stride=2), Mask.full(), (512, 512), "ring of 4 with stride 2 needs 8 q tiles.* has 4"),
        (
            SymmetricShift(),
            Mask.full(),
            (512, 512),
            "causal mask and seqlen_q == seqlen_k: full of 512 x 512",
        ),
        (SymmetricShift(), Mask.causal(), (512, 640), "seqlen_q == seqlen_k: causal of 512 x 640"),
    ],
)
def test_masks_a_policy_does_not_cover(
    policy: Policy, mask: Mask, lengths: tuple[int, int], message: str
) -> None:
    problem = Problem.dense(seqlen_q=lengths[0], seqlen_k=lengths[1], head_dim=64, mask=mask)
    with pytest.raises(UnsupportedMaskError, match=message):
        build_plan(problem, policy)


def test_symmetric_shift_needs_whole_rows() -> None:
    problem = Problem.dense(seqlen=512, mask=Mask.causal(), tile_m=128, tile_n=64)
    with pytest.raises(UnsupportedMaskError, match="multiple of tile_m, got 64 and 128"):
        build_plan(problem, SymmetricShift())


def test_ring_size_is_what_must_be_resident() -> None:
    problem = Problem.dense(batch=2, heads=3, seqlen=16 * 128, head_dim=64)
    assert [build_plan(problem, Shift(ring=g)).min_workers for g in (1, 3, 4, 16)] == [1, 3, 4, 16]


def test_second_rings_are_claimed_after_other_heads_first() -> None:
    """With rings of half a head, and as many heads together as fill a GPU, no ring waits for another."""
    problem = Problem.dense(heads=80, seqlen=32 * 128, head_dim=64)
    plan = build_plan(problem, Shift(ring=16))
    assert plan.items[:512:16, 1].tolist() == [*range(8), *range(8), *range(8, 16), *range(8, 16)]
    assert plan.min_workers == 16
    assert simulate(plan, Costs(5, 2), 128).stall == 0
    head_by_head = prove(plan.with_items(plan.items[np.lexsort((plan.items[:, 2], plan.items[:, 1]))]))
    assert simulate(head_by_head, Costs(5, 2), 128).stall > 0.05
    few = build_plan(replace(problem, heads=16, kv_heads=16), Shift(ring=16))  # which fit L2 together
    assert few.items[::16, 1].tolist() == [*range(16), *range(16)]


def test_heads_that_fit_l2_take_turns_under_spt() -> None:
    """From the last kv tile on, among those that have equally many; without it, one head after the other."""

    def claimed(*lengths: int, heads: int = 2) -> list[tuple[int, ...]]:
        problem = Problem.varlen(lengths, heads=heads, head_dim=64, mask=Mask.causal())
        plan = build_plan(problem, SPT())
        assert plan.min_workers == 1
        return [tuple(item) for item in plan.items.tolist()]

    assert claimed(256, 128) == [(0, 0, 1), (0, 1, 1), (0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    for seqlen, heads in ((4096, 25), (2048, 50), (1024, 66)):  # up to 75 MiB, and 50 MiB of short ones
        last = seqlen // 128 - 1
        few, many = claimed(seqlen, heads=heads), claimed(seqlen, heads=heads + 1)
        assert [item[1:] for item in few[:heads]] == [(head, last) for head in range(heads)]
        assert [item[1:] for item in many[: last + 2]] == [
            *((0, kv) for kv in range(last, -1, -1)),
            (1, last),
        ]


def test_rings_of_unequal_sequences_are_placed_ring_by_ring() -> None:
    problem = Problem.varlen([2048, 1024, 300, 2048], heads=1, head_dim=64)
    plan = build_plan(problem, Shift(ring=4))
    rings = [(0, 0, 4), (3, 0, 4), (1, 0, 4), (2, 0, 3), (0, 4, 8), (3, 4, 8), (1, 4, 8)]
    rings += [(0, 8, 12), (3, 8, 12), (0, 12, 16), (3, 12, 16)]
    assert plan.items[:, [0, 2]].tolist() == [[n, k] for n, first, end in rings for k in range(first, end)]
    assert plan.min_workers == 4


@pytest.mark.parametrize(
    ("seqlen", "ring"), [(128, 1), (256, 1), (512, 2), (1920, 7), (8192, 32), (16384, 64)]
)
def test_a_least_stride_shortens_rings(seqlen: int, ring: int) -> None:
    """Two contributions to a dQ tile are two tasks apart, where one would wait for the hand-over."""
    problem = Problem.dense(heads=2, seqlen=seqlen, head_dim=64)
    plan = build_plan(problem, Shift(ring=64, min_stride=2))
    assert plan.min_workers == ring
    assert min(strides(plan), default=2) >= 2


@pytest.mark.parametrize(("seqlen", "stride"), [(1024, 2), (2048, 4), (1900, 3), (16384, 4)])
def test_a_greatest_stride_keeps_the_members_of_a_ring_together(seqlen: int, stride: int) -> None:
    problem = Problem.dense(heads=2, seqlen=seqlen, head_dim=64)
    plan = build_plan(problem, Shift(ring=4, max_stride=4))
    assert set(strides(plan)) == {stride}
    assert plan.min_workers == 4


def strides(plan: Plan) -> list[int]:
    """q tiles between the starts of the members of the first ring, one head's."""
    starts = [plan.pattern(0).runs_of(k)[0].q_first for k in range(plan.min_workers)]
    return np.diff(starts).tolist()


def test_policy_names_carry_their_parameters() -> None:
    assert [str(p) for p in (FA3(), Shift(), Shift(ring=4), SymmetricShift())] == [
        "fa3", "shift", "shift(ring=4)", "symmetric_shift",
    ]  # fmt: skip


def test_lpt_puts_long_items_first_within_what_fits_l2() -> None:
    problem = Problem.dense(heads=4, seqlen=512, head_dim=64, mask=Mask.causal())
    plan = build_plan(problem, Descending())
    one_head = 64 * 512 * (2 * 2 + 4 + 2 * 2)
    both = lpt_placement(plan, l2_bytes=2 * one_head)
    assert both[:8, 1].tolist() == [0, 1] * 4
    assert both[:8, 2].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (both[8:, 1] >= 2).all()
    alone = lpt_placement(plan, l2_bytes=one_head)
    assert np.array_equal(alone, plan.items)
    full = build_plan(Problem.dense(heads=4, seqlen=512, head_dim=64), SPT())
    assert np.array_equal(lpt_placement(full), full.items)


SLOWER = {
    "symmetric shift, which is slower with other numbers of heads": (
        "groups: 1 x 4096, 28:4, 128, causal",
        "few: 1 x 4096, 16:16, 64, causal",
    ),
    "not so in other runs": (
        "grid: 2 x 8192, 16:16, 128, causal",
        "grid: 4 x 4096, 16:16, 128, causal",
        "grid: 4 x 4096, 32:32, 64, causal",
        "fp16: 2 x 8192, 16:16, 128, causal",
        "packed: 65 up to 8192, 16:16, 128, causal",
        "tiny: 1 x 512, 16:16, 64, causal",
        "tiny: 4 x 256, 8:8, 128, causal",
    ),
}
"""Cases in which another schedule was more than 3 % faster, by what it was (docs/experiments/choices.md)."""


def test_no_measured_schedule_is_faster_than_what_auto_chooses() -> None:
    """By more than 3 %, but for those that are named. In most cases some schedule is slower by as much."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads(MEASURED.read_text())["rows"]:
        if row["head_groups"] is None:
            cases.setdefault(row["case"], []).append(row)
    assert len(cases) >= 80
    default = {
        name: statistics.mean(row["ms"] for row in rows if row["auto"]) for name, rows in cases.items()
    }
    others = {name: [row["ms"] for row in rows if not row["auto"]] for name, rows in cases.items()}
    faster = {name for name, ms in others.items() if ms and default[name] > 1.03 * min(ms)}
    assert faster == {name for names in SLOWER.values() for name in names}
    slower = [name for name, ms in others.items() if ms and max(ms) > 1.03 * default[name]]
    assert len(slower) > 0.75 * len(cases)


def test_measured_defaults_are_those_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(MEASURED.parents[1])
    shape_cases = importlib.import_module("shape_cases")
    named = {row["case"]: row["schedule"] for row in json.loads(MEASURED.read_text())["rows"] if row["auto"]}
    for name, point in (*shape_cases.cases(), *shape_cases.cases(shape_cases.GRID, ())):
        assert named.pop(name, str(choose_policy(point.problem))) == str(choose_policy(point.problem)), name
    assert not named


@given(problems())
def test_auto_needs_few_workers(problem: Problem) -> None:
    """Whatever the mask and lengths, the default plan runs on any GPU."""
    assert build_plan(problem, *choose_policy(problem)).min_workers <= AUTO_RING


@pytest.mark.parametrize(
    "mask", [Mask.window(512, 512), Mask.window(0, 4096), Mask.window(128, None)], ids=str
)
@pytest.mark.parametrize("lengths", [(4096, 4096), (4096, 4166), (8192, 4096)], ids=str)
def test_auto_under_windows(mask: Mask, lengths: tuple[int, int]) -> None:
    """Items of a window are not equally long at its edges: claimed by length, they would need hundreds."""
    problem = Problem.dense(heads=16, seqlen_q=lengths[0], seqlen_k=lengths[1], head_dim=64, mask=mask)
    plan = build_plan(problem, *choose_policy(problem))
    assert plan.min_workers == 1
    assert simulate(plan, H200, H200_WORKERS).utilization > 0.6


@given(problem=problems(), long_from=st.integers(0, 100))
def test_by_length_decides_sequence_by_sequence(problem: Problem, long_from: int) -> None:
    plan = build_plan(problem, ByLength(long_from=long_from))
    for pair in problem.tile_grids:
        like = build_plan(problem, Descending() if pair[1] >= long_from else SPT())
        assert np.array_equal(plan.patterns[pair].runs, like.patterns[pair].runs)
    if problem.mask.is_causal:
        assert plan.min_workers <= 1


def test_by_length_claims_long_sequences_first_and_there_the_longest_items() -> None:
    lengths = ((256, 256), (512, 512), (128, 128))
    plan = build_plan(Problem(lengths, 12, 12, head_dim=64, mask=Mask.causal()), ByLength(long_from=256))
    heads = [(sequence, head) for sequence in (1, 0) for head in range(12)]  # the longest sequence first
    expected = []
    for first in (0, 12):  # sections of 16 heads at most, equally large
        section = [(s, h, kv) for s, h in heads[first : first + 12] for kv in range(2 + 2 * s)]
        expected += sorted(section, key=lambda item: item[2] - 2 * item[0])
    assert plan.items.tolist() == [list(item) for item in expected] + [[2, head, 0] for head in range(12)]


@pytest.mark.parametrize(
    ("seqlen", "heads", "kv_heads", "together"),
    [
        (16_512, 32, 32, 16), (16_512, 32, 8, 16), (8320, 24, 24, 12), (8320, 64, 16, 16),
        (2048, 48, 12, 12), (2176, 64, 64, 16), (2048, 72, 18, 12),
    ],
)  # fmt: skip
def test_sections_of_heads(seqlen: int, heads: int, kv_heads: int, together: int) -> None:
    """16 heads or head groups at most, in sections of equal size; there the longest items come first."""
    problem = Problem.dense(seqlen=seqlen, heads=heads, kv_heads=kv_heads, mask=Mask.causal())
    plan = build_plan(problem, *choose_policy(problem))
    expected = [
        (head, kv)
        for first in range(0, problem.kv_heads * plan.pattern(0).head_groups, together)
        for kv in range(seqlen // 128)
        for head in range(first, first + together)
    ]
    assert list(map(tuple, plan.items[:, 1:].tolist())) == expected


def test_sections_of_wide_heads_and_of_unequal_ones() -> None:
    """Of 256 columns as of others; 40 packed heads in three sections."""

    def sections(problem: Problem) -> list[int]:
        """Head groups in each: a section begins where the kv tiles begin anew."""
        items = build_plan(problem, *choose_policy(problem)).items
        begins = np.flatnonzero(np.diff(items[:, 2], prepend=1) < 0)
        return [len({(s, g) for s, g, _ in part.tolist()}) for part in np.split(items, begins[1:])]

    causal = Mask.causal()
    assert sections(Problem.dense(seqlen=2048, heads=32, head_dim=256, mask=causal)) == [16, 16]
    assert sections(Problem.varlen([3840] * 5, heads=8, mask=causal)) == [14, 13, 13]


@pytest.mark.parametrize(
    ("seqlen", "heads", "sections"),
    [
        (16_384, 5, [2, 3]), (8192, 8, [4, 4]), (8192, 3, [3]), (8192, 7, [7]), (4096, 20, [8, 12]),
        (2048, 16, [16]),
    ],
)  # fmt: skip
def test_heads_of_squares_fill_a_gpu(seqlen: int, heads: int, sections: list[int]) -> None:
    """So many that their left halves keep 132 SMs busy; those left over come with the last ones."""
    problem = Problem.dense(seqlen=seqlen, heads=heads, mask=Mask.causal())
    plan = build_plan(problem, *choose_policy(problem))
    half = seqlen // 256
    expected, first = [], 0
    for count in sections:
        here = range(first, first + count)
        expected += [(head, kv) for head in here for kv in range(half)]
        expected += [(head, kv) for kv in range(half, 2 * half) for head in here]
        first += count
    assert list(map(tuple, plan.items[:, 1:].tolist())) == expected
    assert plan.min_workers == half


def test_squares_come_between_longer_sequences_and_others() -> None:
    """A longer one would keep a worker busy when all others are done. kv tiles tell which are squares."""
    lengths = ((4096, 4096), (300, 300), (5000, 5000), (2000, 2000), (2176, 2176), (2048, 4096))
    problem = Problem(lengths, 2, 2, head_dim=128, mask=Mask.causal())
    plan = build_plan(problem, *choose_policy(problem))
    policies = {
        pair: next(p for p in (SymmetricShift(), Descending(), SPT()) if _sums_like(plan, pair, p))
        for pair in lengths
    }
    assert [str(policies[pair]) for pair in lengths] == [
        "symmetric_shift", "spt", "descending", "symmetric_shift", "descending", "descending",
    ]  # fmt: skip
    turn = np.array([1, 2, 0, 1, 2, 2])[plan.items[:, 0]]  # longer ones, squares, others
    assert (np.diff(turn) >= 0).all()
    assert plan.min_workers == 16


def _sums_like(plan: Plan, pair: tuple[int, int], policy: Policy) -> bool:
    try:
        alone = build_plan(replace(plan.problem, sequences=(pair,)), policy)
    except UnsupportedMaskError:
        return False
    return np.array_equal(alone.patterns[pair].runs, plan.patterns[pair].runs)


def test_auto_is_by_length_at_head_dim_128() -> None:
    def auto(**kind: int) -> str:
        return str(choose_policy(Problem.dense(seqlen=8192, mask=Mask.causal(), **kind))[0])

    assert auto(head_dim=128) == "by_length(long_from=2048, shift_from=2048)"
    assert auto(head_dim=64) == "spt"
    assert auto(head_dim=64, heads=2, kv_heads=1) == "by_length(long_from=0, shift_from=4096)"
    assert auto(head_dim=128, heads=2, kv_heads=1) == "by_length(long_from=0, shift_from=8192)"
    assert auto(head_dim=128, tile_m=64, tile_n=64) == "by_length(long_from=2048)"


@given(problems())
def test_auto_looks_at_one_sequence_alone(problem: Problem) -> None:
    """The numerics of a sequence are the same with and without neighbours."""
    together = build_plan(problem, *choose_policy(problem))
    for pair in problem.tile_grids:
        single = Problem(
            (pair,),
            problem.heads,
            problem.kv_heads,
            16,
            problem.mask,
            "float32",
            problem.tile_m,
            problem.tile_n,
        )
        alone = build_plan(single, *choose_policy(single))
        assert np.array_equal(alone.patterns[pair].runs, together.patterns[pair].runs)


def test_what_auto_chooses_has_its_numbers_among_the_constants() -> None:
    """Numbers that decide bits have names in one file: nobody finds them between lines of code."""
    tree = ast.parse(Path(defaults.__file__).read_text())
    constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    numbers = {x for x in constants if type(x) in (int, float)}
    assert numbers == {0, 1, 256}  # the first sequence, several heads, and how many choices are kept


def test_a_section_of_more_heads_than_there_are() -> None:
    problem = Problem.dense(seqlen=512, heads=2, head_dim=64, mask=Mask.causal())
    for heads in (2, 10**30):
        plan = build_plan(problem, f"descending + pairs(heads_at_once={heads})")
        assert np.array_equal(plan.items, build_plan(problem, "descending + pairs(heads_at_once=2)").items)


def test_a_schedule_with_a_placement_of_ones_own_is_refused_by_calls() -> None:
    """Operators carry names, and a name would stand for a built-in placement, or for none."""

    class Mine(InOrder):
        pass

    schedule = Schedule(FA3(), Mine())
    q = torch.zeros(1, 64, 1, 16)
    with pytest.raises(
        InputError, match=r"placement .*Mine.* is none of the built-in ones, in_order, .*apply_plan"
    ):
        attention(q, q, q, policy=schedule)
    assert build_plan(Problem.dense(seqlen=64, head_dim=16), schedule).min_workers == 1
    attention(q, q, q, policy=Schedule(FA3(), InOrder()))

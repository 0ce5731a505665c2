"""The device table: its layout as documented, round trips, and refusal of what is no table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from machine import Contribution, Order, deepest_item
from strategies import plans

from dash_attn.errors import FingerprintError, PlanError, ProblemError, TableError
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import (
    FA3,
    Descending,
    Plan,
    Run,
    Shift,
    SymmetricShift,
    build_plan,
    from_table,
    to_table,
)
from dash_attn.schedule.layout import HEADER, ITEM, SEQUENCE
from dash_attn.schedule.table import _pack_runs
from dash_attn.schedule.tickets import MAX_HOLD, MAX_STEP


def read_back(plan: Plan, table: np.ndarray, **checks: str) -> Plan:
    problem = plan.problem
    sizes = {"head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v}
    return from_table(table, **sizes, dtype=problem.dtype, **checks)


@given(plans())
def test_round_trip(plan: Plan) -> None:
    table = to_table(plan)
    assert table.dtype == np.int32
    back = read_back(plan, table, fingerprint=plan.fingerprint)
    assert back.problem == plan.problem
    assert np.array_equal(back.items, plan.items)
    assert back.min_workers == plan.min_workers
    assert np.array_equal(to_table(back), table)


def test_round_trip_of_what_a_table_does_not_say() -> None:
    """Head dims, and of sequences without keys whether items go head by head."""
    wide = build_plan(Problem.dense(seqlen=512, head_dim=192, head_dim_v=128, mask=Mask.causal()), "spt")
    assert read_back(wide, to_table(wide), fingerprint=wide.fingerprint).problem == wide.problem
    with pytest.raises(FingerprintError):
        from_table(to_table(wide), head_dim=192, dtype="bfloat16", fingerprint=wide.fingerprint)
    empty = Problem.varlen([2048, 0], heads=8, kv_heads=1, head_dim=64, mask=Mask.window(0, 0))
    by_head = build_plan(empty, Descending(by_head_from=0))
    assert by_head.pattern(0).passes > 1
    read_back(by_head, to_table(by_head), fingerprint=by_head.fingerprint)


@given(plans())
def test_a_reader_that_knows_only_the_documentation(plan: Plan) -> None:
    """Walk the table as a kernel would and meet every task with its ticket."""
    words = to_table(plan).tolist()
    problem = plan.problem
    assert words[0] == 0x44534148
    tasks, partials, order, needs = 0, list[int](), Order(), list[int]()
    for i in range(words[2]):
        record = words[words[5] + 12 * i :][:12]
        sequence, kv_head, kv, head_first, heads, run_first, runs, count, partial, last, at_once, rest = (
            record
        )
        assert rest == 0
        needs.append(last)
        _, head_group, tile = plan.items[i].tolist()
        groups = plan.pattern(sequence).head_groups
        assert (kv, kv_head) == (tile, head_group // groups)
        assert range(head_first, head_first + heads) == plan.q_heads(sequence, head_group)
        if groups == 1:
            assert partial == -1
        else:
            kv_tiles, first = words[words[7] + 12 * sequence + 3], words[words[7] + 12 * sequence + 10]
            assert partial == first + (kv_head * kv_tiles + kv) * groups + head_group % groups
            partials.append(partial)
        walked = []
        for r in range(run_first, run_first + runs):
            q_first, length, t_first, steps = words[words[6] + 4 * r :][:4]
            q_step, t_step = ((steps & 0xFF) ^ 0x80) - 0x80, ((steps >> 8 & 0xFF) ^ 0x80) - 0x80
            walked += [
                (q_first + k * q_step, t_first + t_step * (k // (steps >> 16 & 0xFFFF)))
                for k in range(length)
            ]
        assert walked == list(zip(*(a.tolist() for a in plan.pattern(sequence).tasks_of(kv))))
        assert len(walked) == count
        tasks += count * heads
        order.append(
            [
                Contribution(i, (sequence, q_head, q_tile), ticket)
                for first in range(head_first, head_first + heads, at_once or 1)
                for q_tile, ticket in walked
                for q_head in range(first, first + at_once)
            ]
        )
    assert needs == deepest_item(order)
    assert tasks == problem.tasks
    assert sorted(partials) == list(range(words[19]))
    q_row = k_row = q_tile = kv_tile = 0
    for s, (seqlen_q, seqlen_k) in enumerate(problem.sequences):
        row, grid = words[words[7] + 12 * s :][:12], problem.grid(s)
        assert row[:7] == [seqlen_q, seqlen_k, grid.q_tiles, grid.kv_tiles, q_row, k_row, q_tile]
        assert row[8:10] == [kv_tile, plan.pattern(s).head_groups]
        assert words[row[7] : row[7] + grid.q_tiles] == grid.contributions.tolist()
        assert words[words[16] + q_tile :][: grid.q_tiles] == [s] * grid.q_tiles
        assert words[words[18] + kv_tile :][: grid.kv_tiles] == [s] * grid.kv_tiles
        q_row, k_row = q_row + seqlen_q, k_row + seqlen_k
        q_tile, kv_tile = q_tile + grid.q_tiles, kv_tile + grid.kv_tiles
    assert words[17] == q_tile
    assert all(offset % 4 == 0 for offset in (*words[5:9], words[16], words[18]))


def good() -> tuple[Plan, np.ndarray]:
    plan = build_plan(
        Problem.dense(heads=4, kv_heads=2, seqlen=700, head_dim=64, mask=Mask.causal()), SymmetricShift()
    )
    return plan, to_table(plan)


def test_two_tickets_swapped_in_the_table() -> None:
    """A swap on one dQ tile leaves a safe table: the fingerprint refuses it."""
    plan = build_plan(Problem.dense(seqlen=128 * 2, head_dim=64), FA3())
    table = to_table(plan)
    first_run = int(table[6])
    table[[first_run + 2, first_run + 6]] = table[[first_run + 6, first_run + 2]]
    table[13] = 2  # min_workers: item 0 now waits for item 1,
    table[int(table[5]) + 9] = 1  # its needs
    read_back(plan, table)
    with pytest.raises(FingerprintError, match="expected numerics"):
        read_back(plan, table, fingerprint=plan.fingerprint)


@pytest.mark.parametrize(
    ("word", "value", "message"),
    [
        (0, 1, "not a plan table.*magic 0x1"),
        (1, 1, "version 1"),
        (5, 22, "items at word 22 do not fit"),
        (3, 10**6, "1000000 runs at word"),
        (2, -1, "-1 items"),
        (13, 1, "contradicts itself"),
        (29, 5, "contradicts itself"),  # needs of item 0
        (19, 1, "contradicts itself"),
    ],
)
def test_damaged_tables(word: int, value: int, message: str) -> None:
    plan, table = good()
    table[word] = value
    with pytest.raises(TableError, match=message):
        read_back(plan, table)


@pytest.mark.parametrize(
    ("word", "value", "message"),
    [
        (HEADER.heads, 2**30, "items have .* q heads in all, 6 kv tiles with 1073741824 q heads have"),
        (HEADER.tile_m, 1, "the table has 6 q tiles, its sequences have 700"),
        (HEADER.tile_n, 1, "q heads in all, 700 kv tiles with 4 q heads have 2800"),
        ("seqlen_q", 2**30, "the table has 6 q tiles, its sequences have 8388608"),
        ("seqlen_k", 2**30, "items have .* kv tiles with 4 q heads have"),
    ],
)
def test_damage_makes_no_large_arrays(
    monkeypatch: pytest.MonkeyPatch, word: int | str, value: int, message: str
) -> None:
    """It is found before there is a problem, of which grids would be made."""
    plan, table = good()
    if isinstance(word, str):
        word = int(table[HEADER.sequence_offset]) + getattr(SEQUENCE, word)
    table[word] = value
    monkeypatch.setattr("dash_attn.schedule.table.Problem", lambda *_, **__: pytest.fail("made"))
    with pytest.raises(TableError, match=message):
        read_back(plan, table)


def test_every_changed_word_of_items_and_runs_is_noticed() -> None:
    plan, table = good()
    for word in range(int(table[5]), int(table[7])):
        damaged = table.copy()
        damaged[word] += 1
        with pytest.raises((PlanError, ValueError)):
            read_back(plan, damaged, fingerprint=plan.fingerprint)


def test_random_damage_has_a_named_error_or_is_noticed() -> None:
    plan, table = good()
    rng = np.random.default_rng(0)
    for _ in range(400):
        damaged = table.copy()
        damaged[rng.integers(len(table))] = rng.integers(-(2**31), 2**31)
        if not np.array_equal(damaged, table):
            with pytest.raises((PlanError, ProblemError)):
                read_back(plan, damaged, fingerprint=plan.fingerprint)
            try:
                read_back(plan, damaged)
            except (PlanError, ProblemError):
                continue


@pytest.mark.parametrize("table", [np.zeros(4, np.int32), np.zeros(64, np.int64), np.zeros((8, 8), np.int32)])
def test_other_arrays(table: np.ndarray) -> None:
    with pytest.raises(TableError, match="1-D int32 array"):
        from_table(table, head_dim=64, dtype="bfloat16")


@pytest.mark.parametrize("field", ["q_step", "t_step", "t_hold"])
@pytest.mark.parametrize("sign", [1, -1])
def test_fields_of_a_run_that_do_not_fit_are_named(field: str, sign: int) -> None:
    limit = {"q_step": MAX_STEP, "t_step": MAX_STEP, "t_hold": MAX_HOLD}[field]
    run = Run(0, 1, 2, 0, 0, 1)
    _pack_runs(np.array([run._replace(**{field: sign * limit})]))
    with pytest.raises(TableError, match=f"{field} {sign * (limit + 1)} of a run is beyond {limit}"):
        _pack_runs(np.array([run, run._replace(**{field: sign * (limit + 1)})]))


def test_words_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = good()
    monkeypatch.setattr("dash_attn.schedule.table.HEADER_WORDS", 2**31 + 20)
    with pytest.raises(TableError, match="a word of the table does not fit int32: 21"):
        to_table(plan)


def test_runs_outside_the_table_are_named() -> None:
    plan, table = good()
    items, runs = int(table[5]), int(table[3])
    for first in (runs, -1):
        damaged = table.copy()
        damaged[items + ITEM.run_first] = first
        with pytest.raises(TableError, match=f"an item's runs lie outside the table's {runs}"):
            read_back(plan, damaged)


def test_a_long_hold_has_several_runs() -> None:
    """A hold longer than its field is cut into several runs, so that every plan has a table."""
    plan = build_plan(Problem.dense(seqlen=70_000, head_dim=64, tile_m=1, tile_n=40_000), Shift())
    assert plan.pattern(0).runs[:, 5].max() <= 32767
    assert np.array_equal(to_table(read_back(plan, to_table(plan))), to_table(plan))

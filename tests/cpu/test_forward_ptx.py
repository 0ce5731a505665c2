"""The forward kernel's protocol: it ends, loads what items need in the order of the numerics, stores each
once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from forward_machine import REST, ForwardMachine, ForwardProgram, forward_ptx, plan_for
from ptx_machine import DeadlockError

from dash_attn.backends.shapes import Keys
from dash_attn.backends.sm90.forward.config import ForwardConfig, forward_config
from dash_attn.backends.sm90.forward.table import ENTRY_WORDS, forward_table
from dash_attn.backends.sm90.tiles import row_bytes_of
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import ForwardPlan, prove_forward

PACKED = 1 << 30


def problem(name: str, head_dim: int) -> Problem:
    if name == "causal":
        return Problem.dense(batch=2, heads=2, kv_heads=1, seqlen=700, head_dim=head_dim, mask=Mask.causal())
    if name == "full":
        return Problem.dense(batch=1, heads=2, seqlen_q=130, seqlen_k=1000, head_dim=head_dim)
    if name == "window":
        return Problem.dense(
            batch=1, heads=1, seqlen_q=900, seqlen_k=700, head_dim=head_dim, mask=Mask.window(200, 10)
        )
    return Problem.varlen(
        [300, (0, 50), (70, 0), (1, 600), 129], heads=2, head_dim=head_dim, mask=Mask.causal()
    )


Item = tuple[int, int, int]


def listed(plan: ForwardPlan) -> dict[tuple[int, ...], Item]:
    """The items (sequence, q head, q tile) in order, by where the copy engine finds their first row of Q."""
    p = plan.problem
    one_batch = len(p.sequences) == 1 or len(set(p.sequences)) > 1
    words = forward_table(plan).reshape(-1, ENTRY_WORDS).tolist()
    items = {}
    for number in range(plan.items):
        entry, head = plan.claimed(number)
        sequence, tile, _, _, seqlen_q, _, q_first, _ = words[entry]
        where = (tile * plan.tile_m, head, sequence, 0)
        if one_batch:
            where = (PACKED - seqlen_q + tile * plan.tile_m, head, PACKED, q_first + seqlen_q)
        items[where] = (sequence, head, tile)
    return items


def expected(p: Problem, config: ForwardConfig, item: tuple[int, int, int]) -> list[int]:
    """kv tiles of an item in order."""
    sequence, _, tile = item
    grid = p.grid(sequence)
    top = tile * config.tile_m
    rows = np.arange(top, min(top + config.tile_m, grid.seqlen_q))
    first, last = grid.columns(rows)
    seen = first <= last
    if not seen.any():
        return []
    per = config.segment // config.tile_n
    tiles = range(int(first[seen].min()) // config.tile_n, int(last[seen].max()) // config.tile_n + 1)
    return sorted(tiles, key=lambda kv: (kv // per, -kv))


@pytest.mark.parametrize("in_turns", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("head_dim", "warpgroups"),
    [*(pytest.param(*one, marks=pytest.mark.slow) for one in ((64, 2), (128, 2))), (64, 3)],
)
@pytest.mark.parametrize("name", ["causal", "full", "window", "packed"])
def test_it_ends_and_loads_and_stores_what_it_should(
    name: str, head_dim: int, warpgroups: int, in_turns: bool
) -> None:
    check(ForwardConfig(head_dim, segment=256, warpgroups=warpgroups, in_turns=in_turns), name)


@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["causal", *(pytest.param(name, marks=pytest.mark.slow) for name in ("full", "window", "packed"))]
)
def test_it_does_so_with_one_warpgroup(name: str, head_dim: int) -> None:
    """Two warps are left beside it, of which one loads V."""
    check(replace(forward_config(head_dim, "bf16").as_narrow(), segment=256), name)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "rest"), [(80, 0), (80, 16), (96, 0), (96, 32), (128, 0)])
@pytest.mark.parametrize("name", ["full", "packed"])
def test_it_does_so_as_users_run_it(name: str, head_dim: int, rest: int) -> None:
    """But for the length of a segment. Copies have 16, 32 or 64 columns."""
    check(replace(forward_config(head_dim, "bf16", rest=rest), segment=256), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "full", "window", "packed"])
def test_it_does_so_where_v_has_fewer_columns_and_q_one_stage(name: str) -> None:
    check(replace(forward_config(192, "bf16", 128), segment=256), name)


@pytest.mark.parametrize(
    ("kv_stages", "in_turns"),
    [
        pytest.param(2, False, marks=pytest.mark.slow),
        (4, False),
        pytest.param(4, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", ["causal", "full", "window", "packed"])
def test_it_does_so_where_the_next_item_starts_early(name: str, kv_stages: int, in_turns: bool) -> None:
    """Four stages is what users run at head dim 64, but for the length of a segment."""
    base = forward_config(64, "bf16")
    config = replace(base, segment=256, kv_stages=kv_stages, in_turns=in_turns)
    assert config.early
    check(config, name)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["causal", "packed"])
def test_it_does_so_with_a_softcap(name: str, head_dim: int) -> None:
    check(replace(forward_config(head_dim, "bf16"), segment=256, softcap=True), name)


def check(config: ForwardConfig, name: str) -> None:
    head_dim = config.head_dim
    program, p = ForwardProgram(forward_ptx(config)), problem(name, head_dim)
    for blocks, seed in ((1, 0), (3, 1), (5, 2)):
        machine = ForwardMachine(config, program, plan_for(p, config), blocks, seed)
        machine.run()
        items = listed(machine.plan)
        numbers = {item: number for number, item in enumerate(items.values())}
        parts, of_k, of_v, of_out = (
            2 * n // row_bytes_of(n) for n in (head_dim, *config.kv_columns, config.head_dim_v)
        )
        done = []
        for block in machine.blocks:
            queries = [where for which, where in block.loads if which == 0][::parts]
            mine = [items[where[1:]] for where in queries[:: config.warpgroups]]
            done += mine
            if mine:
                order = [numbers[item] for item in mine]
                assert order[0] == block.index
                assert order == sorted(order)
            keys = [where for which, where in block.loads if which == 2][::of_k]
            values = [where for which, where in block.loads if which == 4][::of_v]
            for which in REST:
                apart = [(config.kv_columns[0], *where[1:]) for where in keys] if config.rest else []
                assert [where for w, where in block.loads if w == which] == apart
            wanted = [(kv, item) for item in mine for kv in expected(p, config, item)]
            assert len(keys) == len(values) == len(wanted)
            for k, v, (kv, item) in zip(keys, values, wanted):
                seqlen_k = p.sequences[item[0]][1]
                packed = len(set(p.sequences)) > 1
                row = kv * 128 + (PACKED - seqlen_k if packed or len(p.sequences) == 1 else 0)
                assert k == v, (k, v)
                assert k[1] == row, (k, row, item)
                assert k[2] == item[1] // p.group
            assert len(queries) == config.warpgroups * len(mine)
            stores = [where for which, where in block.stores][::of_out]
            assert sorted(stores) == sorted(queries)
        assert sorted(done) == sorted(items.values())


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dense_q", [False, True])
def test_it_ends_at_the_used_keys(head_dim: int, dense_q: bool) -> None:
    """Rows behind the used ones lie beyond the extent of what the copy engine sees."""
    config, starts = ForwardConfig(head_dim, segment=256), (0, 600, 1300)
    of_q = (130, 130, 130) if dense_q else (130, 7, 300)
    used = (513, 0, 700)
    p = Problem.varlen(zip(of_q, used), heads=2, kv_heads=1, head_dim=head_dim, mask=Mask.causal())
    keys = Keys((1, 2000, 1, head_dim), starts)
    machine = ForwardMachine(
        config, ForwardProgram(forward_ptx(config)), plan_for(p, config), 3, 0, keys=keys
    )
    machine.run()
    found, parts = [], head_dim // 64
    for block in machine.blocks:
        found += [where[1:] for which, where in block.loads if which == 2][::parts]
        assert found[-1:] == [where[1:] for which, where in block.loads if which == 4][::parts][-1:]
    wanted = []
    for sequence, (length, start) in enumerate(zip(used, starts)):
        where = PACKED - length, PACKED, start + length
        for tile in range(-(-of_q[sequence] // config.tile_m)):
            for kv in expected(p, config, (sequence, 0, tile)):
                wanted += [(where[0] + kv * 128, 0, *where[1:])] * p.heads
    assert sorted(found) == sorted(wanted)
    queries = {where[3] for block in machine.blocks for which, where in block.loads if which == 0}
    assert queries == ({0, 1, 2} if dense_q else {PACKED})


@pytest.mark.parametrize("head_dim", [64, 128])
def test_split_tiles_leave_every_segment_once(head_dim: int) -> None:
    config = ForwardConfig(head_dim, segment=256)
    p = Problem.dense(
        batch=1, heads=2, seqlen_q=130, seqlen_k=1500, head_dim=head_dim, mask=Mask.window(900, 0)
    )
    plan = plan_for(p, config, 132)
    prove_forward(plan)
    assert len(plan.folds) == 2
    machine = ForwardMachine(config, ForwardProgram(forward_ptx(config)), plan, 3, 0)
    machine.run()
    keys = sorted(where[1:3] for b in machine.blocks for which, where in b.loads if which == 2)[
        :: head_dim // 64
    ]
    wanted = sorted(
        (kv * 128 + PACKED - 1500, head)
        for head in range(2) for tile in range(2) for kv in expected(p, config, (0, head, tile))
    )  # fmt: skip
    assert keys == wanted
    assert not any(b.stores for b in machine.blocks), "the other kernel stores O"


@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["causal", "packed", "split"])
def test_a_trace_has_every_item_once(name: str, head_dim: int) -> None:
    config = replace(forward_config(head_dim, "bf16"), segment=256, trace=True)
    split = Problem.dense(batch=1, heads=2, seqlen_q=130, seqlen_k=1500, head_dim=head_dim)
    plan = plan_for(split, config, 132) if name == "split" else plan_for(problem(name, head_dim), config)
    assert (len(plan.folds) > 0) == (name == "split")
    machine = ForwardMachine(config, ForwardProgram(forward_ptx(config)), plan, 3, 0)
    machine.run()
    found = machine.trace()
    assert len({time for begin, end, _ in found for time in (begin, end)}) == 2 * plan.items == machine.clock
    assert min(begin for begin, _, _ in found) == 1
    for block in range(3):
        mine = [(begin, end) for begin, end, sm in found if sm == block]
        assert mine == sorted(mine), "items are claimed in order"
        times = [time for item in mine for time in item]
        assert times == sorted(times), "items of a block do not overlap"
        assert mine[0] == found[block][:2]
    assert {sm for _, _, sm in found} == {0, 1, 2}


@pytest.mark.parametrize("number", [0, 3, 10, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 7, 11))])
def test_without_one_of_the_arrivals_it_does_not_end(number: int) -> None:
    """The negative control: of the load warp, the warps that store, and those that multiply."""
    config = replace(forward_config(64, "bf16"), segment=256)
    program = ForwardProgram(forward_ptx(config))
    arrivals = [
        at
        for at, one in enumerate(program.instructions)
        if one.operation.startswith("mbarrier.arrive") and "expect_tx" not in one.operation
    ]
    assert len(arrivals) == 12
    left_out = program.instructions[arrivals[number]]._replace(predicate="%never", wanted=True)
    program.instructions[arrivals[number]] = left_out
    with pytest.raises(DeadlockError):
        ForwardMachine(config, program, plan_for(problem("causal", 64), config), 3, 0).run()

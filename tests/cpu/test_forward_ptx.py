"""The forward kernel's protocol: it ends, loads what its items need in the order of the numerics, stores each tile once."""

from __future__ import annotations

import numpy as np
import pytest
from forward_machine import ForwardMachine, ForwardProgram, forward_ptx

from dash_attn.backends.sm90.forward.config import ForwardConfig
from dash_attn.backends.sm90.forward.table import forward_table
from dash_attn.problem import Mask, Problem

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


def listed(p: Problem, config: ForwardConfig) -> list[tuple[int, int, int]]:
    """The items (sequence, q head, q tile) in order."""
    table = forward_table(p, config.tile_m, config.segment, 0)
    entries = table.words[: 4 * table.entries].reshape(-1, 4)[:, :2].tolist()
    sections = range(0, p.heads, table.heads)
    return [(s, first + h, tile) for first in sections for s, tile in entries for h in range(table.heads)]


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


@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["causal", "full", "window", "packed"])
def test_it_ends_and_loads_and_stores_what_it_should(name: str, head_dim: int, in_turns: bool) -> None:
    config = ForwardConfig(head_dim, segment=256, in_turns=in_turns)
    program, p = ForwardProgram(forward_ptx(config)), problem(name, head_dim)
    for blocks, seed in ((1, 0), (3, 1), (5, 2)):
        machine = ForwardMachine(config, program, p, blocks, seed)
        machine.run()
        items = listed(p, config)
        parts = head_dim // 64
        for block in machine.blocks:
            mine = [
                items[at]
                for turn in range(-(-len(items) // blocks))
                if (at := turn * blocks + (block.index if turn % 2 == 0 else blocks - 1 - block.index))
                < len(items)
            ]
            keys = [where for which, where in block.loads if which == 2][::parts]
            values = [where for which, where in block.loads if which == 4][::parts]
            wanted = [(kv, item) for item in mine for kv in expected(p, config, item)]
            assert len(keys) == len(values) == len(wanted)
            for k, v, (kv, item) in zip(keys, values, wanted):
                seqlen_k = p.sequences[item[0]][1]
                packed = len(set(p.sequences)) > 1
                row = kv * 128 + (PACKED - seqlen_k if packed or len(p.sequences) == 1 else 0)
                assert k == v, (k, v)
                assert k[1] == row, (k, row, item)
                assert k[2] == item[1] // p.group
            queries = [where for which, where in block.loads if which == 0][::parts]
            assert len(queries) == 2 * len(mine)
            stores = [where for which, where in block.stores][::parts]
            assert sorted(stores) == sorted(queries)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_split_tiles_leave_every_segment_once(head_dim: int) -> None:
    config = ForwardConfig(head_dim, segment=256)
    p = Problem.dense(
        batch=1, heads=2, seqlen_q=130, seqlen_k=1500, head_dim=head_dim, mask=Mask.window(900, 0)
    )
    table = forward_table(p, config.tile_m, config.segment, 132)
    entries = table.words[: 4 * table.entries].reshape(-1, 4)
    folds = table.words[-4 * table.folds :].reshape(-1, 4)
    assert table.folds == 2
    assert sorted(entries[:, 3].tolist()) == list(range(table.places))
    for sequence, tile, first, segments in folds.tolist():
        mine = entries[(entries[:, 1] == tile) & (entries[:, 0] == sequence)]
        assert sorted(mine[:, 3].tolist()) == list(range(first, first + segments))
        wanted = sorted({kv // 2 for kv in expected(p, config, (sequence, 0, tile))})
        assert mine[np.argsort(mine[:, 3]), 2].tolist() == wanted
    machine = ForwardMachine(config, ForwardProgram(forward_ptx(config)), p, 3, 0, table)
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

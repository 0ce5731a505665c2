"""How many blocks of a launch get items, how many only convert dQ tiles, and who need not wait."""

from __future__ import annotations

import pytest
import torch

from dash_attn.backends.sm90.backward.config import Accumulation, BackwardConfig
from dash_attn.backends.sm90.convert.config import FEW, MANY, MANY_FROM, convert_config
from dash_attn.backends.sm90.resident import OnDevice, _place
from dash_attn.machine import APART_ITEMS, FEW_ROUNDS
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import build_plan, choose_policy

SQUARE = {"tile_m": 64, "tile_n": 64}
WIDE = {"head_dim": 192, "head_dim_v": 128, "tile_m": 64}


def on_device(items: int, min_workers: int = 1, converting: float = 0.0) -> OnDevice:
    return OnDevice(None, {}, torch.bfloat16, 1, 1, 1, 1, 0, 1, items, min_workers, converting, False)


@pytest.mark.parametrize("converting", [0.0, 0.03, 0.2, 1.0])
@pytest.mark.parametrize("items", [1, 10, 131, 132, 133, 250, 264, 265, 2048])
@pytest.mark.parametrize(("available", "min_workers"), [(132, 1), (132, 64), (78, 64), (64, 64), (3, 1)])
def test_blocks(items: int, available: int, min_workers: int, converting: float) -> None:
    min_workers = min(min_workers, items)
    blocks, with_items = on_device(items, min_workers, converting).blocks(available)
    assert min_workers <= with_items <= blocks <= available
    assert blocks == min(items, available)
    if items <= FEW_ROUNDS * available:
        assert -(-items // with_items) == -(-items // min(items, available)), "a round more"
    if items > available:
        assert available - with_items <= converting * available
    else:
        assert with_items == blocks == items, "blocks without items keep SMs from others"


def test_some_blocks_only_convert() -> None:
    assert on_device(2048, 1, 0.05).blocks(132) == (132, 126)  # 17 rounds, not 16
    assert on_device(264, 1, 0.03).blocks(132) == (132, 132)


@pytest.mark.parametrize(
    ("shape", "apart"),
    [
        ({"seqlen": 512, "heads": 24}, True),  # 12 MiB: 4 q tiles of 128 rows, 4 kv tiles
        ({"seqlen": 512, "heads": 25}, False),
        ({"seqlen": 1024, "heads": 16, "mask": Mask.full()}, True),  # 32 MiB, in two rings
        ({"seqlen": 1536, "heads": 8, "mask": Mask.full()}, True),
        ({"seqlen": 2048, "heads": 8, "mask": Mask.full()}, True),  # 64 MiB
        ({"seqlen": 2177, "heads": 7, "mask": Mask.full()}, False),
        ({"seqlen": 1, "heads": APART_ITEMS, "mask": Mask.full()}, True),
        ({"seqlen": 1, "heads": APART_ITEMS + 1, "mask": Mask.full()}, False),
        ({"seqlen": 256, "batch": 4, "heads": 8, "head_dim": 128, "tile_m": 64}, True),
        ({"seqlen": 512, "heads": 32, "head_dim": 128, "tile_m": 64, "mask": Mask.full()}, False),
        ({"seqlen": 256, "batch": 4, "heads": 8, "head_dim": 96, "tile_m": 64}, True),
        ({"seqlen": 1024, "heads": 4, "head_dim": 256, "mask": Mask.full()} | SQUARE, True),
        ({"seqlen": 1024, "heads": 4, "mask": Mask.full()} | WIDE, False),  # 24 MiB
        ({"seqlen_q": 128, "seqlen_k": 8192, "heads": 16}, True),  # 64 contributions, 8 tasks per worker
        ({"seqlen_q": 128, "seqlen_k": 8192, "heads": 66}, True),  # 32 tasks per worker
        ({"seqlen_q": 128, "seqlen_k": 8192, "heads": 67}, False),
        ({"seqlen_q": 2048, "seqlen_k": 3969, "heads": 2}, True),  # 32 contributions, 16 tasks per item
        ({"seqlen_q": 2048, "seqlen_k": 3968, "heads": 2}, False),
        ({"seqlen_q": 128, "seqlen_k": 131072, "heads": 16, "mask": Mask.full()}, True),  # 512 MiB
        ({"seqlen_q": 128, "seqlen_k": 131073, "heads": 16, "mask": Mask.full()}, False),
        ({"seqlen": 8192, "heads": 2, "mask": Mask.window(128, 0)}, False),  # 2 contributions to a tile
    ],
)
def test_who_need_not_wait(shape: dict[str, object], apart: bool) -> None:
    """Few items, whose contributions fit a part of L2, more of them where a head has several rings; and few
    rows behind many keys."""
    like = {"head_dim": 64, "tile_m": 128, "tile_n": 128, "mask": Mask.causal()}
    problem = Problem.dense(**like | shape)  # type: ignore[arg-type]
    assert _place(build_plan(problem, choose_policy(problem)), None).apart == apart


def test_packed_rows_that_queue() -> None:
    """The longest queue counts. Where nothing is added, nothing is kept."""
    lengths = [((64, 8192), (300, 300), (0, 70)), ((100, 0), (0, 100_000))]
    for sequences, apart in zip(lengths, (True, False)):
        problem = Problem.varlen(sequences, heads=8, head_dim=64, mask=Mask.causal(), tile_m=128, tile_n=128)
        assert _place(build_plan(problem, choose_policy(problem)), None).apart == apart


def test_how_many_contributions_are_read_at_a_time() -> None:
    config = BackwardConfig(64, "bf16", False, Accumulation.APART)
    assert [convert_config(config, n).apart for n in (1, MANY_FROM - 1, MANY_FROM)] == [FEW, FEW, MANY]
    assert convert_config(BackwardConfig(64, "bf16", False), MANY_FROM).apart == 0

"""How many blocks of a launch get items, and how many only convert dQ tiles."""

from __future__ import annotations

import pytest
import torch

from dash_attn.backends.sm90.resident import OnDevice
from dash_attn.machine import FEW_ROUNDS


def on_device(items: int, min_workers: int = 1, converting: float = 0.0) -> OnDevice:
    return OnDevice(None, {}, torch.bfloat16, 1, 1, 1, 1, 0, 1, items, min_workers, converting)


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

"""``dash-attn bench`` on a Hopper GPU: our rows run and repeat, whatever peers are installed."""

from __future__ import annotations

import pytest

from dash_attn.tools.bench import Settings, bench_shape
from dash_attn.tools.shapes import Shape

SHAPES = [
    Shape(batch=1, seqlen=1024, heads=4, kv_heads=2, causal=True),
    Shape(seqlens=(700, 0, 33), heads=2, head_dim=64, causal=True, window=(200, 0)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows(shape: Shape) -> None:
    result = bench_shape(shape, Settings(rounds=2, policies=("spt", "shift")), print)
    chosen, spt, shift, unordered, *peers = result.rows
    assert chosen.fingerprint != spt.fingerprint
    assert chosen.repeatable
    assert spt.repeatable
    assert "shift needs a mask" in shift.reason
    assert unordered.tflops
    assert not unordered.deterministic
    assert all((row.ms is None) == bool(row.reason) for row in result.rows)
    assert len(peers) == 6


def test_without_peers() -> None:
    result = bench_shape(SHAPES[0], Settings(rounds=1, peers=False), print)
    assert {row.impl for row in result.rows} == {"dash_attn"}

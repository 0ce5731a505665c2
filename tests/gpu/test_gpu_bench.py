"""``dash-attn bench`` on a Hopper GPU: our rows run and repeat, whatever peers are installed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dash_attn.tools.bench import Settings, bench_shape
from dash_attn.tools.cli import main
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


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_triton(shape: Shape) -> None:
    """It gains nothing without order, so there is no such row."""
    shape = replace(shape, backend="triton")
    result = bench_shape(shape, Settings(rounds=2, policies=("spt", "shift"), peers=False), print)
    chosen, spt, shift = result.rows
    assert chosen.fingerprint != spt.fingerprint
    for row in (chosen, spt):
        assert row.repeatable
        assert row.deterministic
        assert row.ms
    assert "shift needs a mask" in shift.reason
    assert result.as_json()["shape"]["backend"] == "triton"


def test_the_command_times_triton(capsys: pytest.CaptureFixture[str]) -> None:
    """Also what sm90 does not have."""
    line = "--backend triton --seqlen 1000 --heads 4 --head-dim 32 --dtype float32 --rounds 2 --no-peers"
    assert main(["bench", "--json", *line.split()]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    (row,) = result["rows"]
    assert row["impl"] == "dash_attn"
    assert row["repeatable"]
    assert row["ms"] > 0

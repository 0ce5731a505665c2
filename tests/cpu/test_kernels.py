"""Every kernel variant compiles for sm_90a on a machine without a GPU, without a spill."""

from __future__ import annotations

import json

import pytest

from dash_attn.cli import main
from dash_attn.kernels.compile import resources, variants
from dash_attn.kernels.cubin import resources_of_cubin

pytest.importorskip("cutlass", reason="the kernel compiler is not installed: pip install 'dash-attn[cuda]'")
pytest.importorskip("tvm_ffi", reason="the kernel compiler is not installed: pip install 'dash-attn[cuda]'")

# What a block of 384 threads with one resident block a SM may use at most, see kernels/sm90/config.py.
REGISTERS, SHARED = 168, 232_448


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", variants())
def test_compiles_without_spills(name: str) -> None:
    kernels = {kernel.name: kernel for kernel in resources(variants()[name])}
    assert set(kernels) == {"preprocess", "backward", "convert"}
    assert {name: kernel.stack for name, kernel in kernels.items()} == dict.fromkeys(kernels, 0)
    assert kernels["backward"].registers == REGISTERS
    assert kernels["backward"].shared <= SHARED
    assert 1 <= kernels["backward"].barriers <= 16


def test_an_unknown_variant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--only", "nonsense", "--json"]) == 2
    assert "unknown variant 'nonsense'; known: backward-d64-bf16" in capsys.readouterr().err


@pytest.mark.filterwarnings("default")
def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--only", "backward-d128-bf16", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["kernels"]
    assert {(row["variant"], row["arch"]) for row in rows} == {("backward-d128-bf16", "sm_90a")}


def test_what_is_no_cubin() -> None:
    with pytest.raises(ValueError, match="not a 64-bit little-endian ELF file"):
        resources_of_cubin(b"#!/bin/sh")

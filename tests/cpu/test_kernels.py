"""Every kernel variant compiles for sm_90a on a machine without a GPU, without a spill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ptx_machine import main_kernel_ptx

from dash_attn.backends.cuda.cubin import resources_of_cubin
from dash_attn.backends.sm90.backward.config import BackwardConfig
from dash_attn.backends.sm90.compile import resources, variants
from dash_attn.tools.cli import main

pytest.importorskip("cutlass", reason="the kernel compiler is not installed: pip install 'dash-attn[cuda]'")
pytest.importorskip("tvm_ffi", reason="the kernel compiler is not installed: pip install 'dash-attn[cuda]'")

# What a block of 384 threads may use at most with one resident block per SM, see backends/sm90/tiles.py.
REGISTERS, SHARED = 168, 232_448
SOURCES = Path(__file__).parents[2] / "src"


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", variants())
def test_compiles_without_spills(name: str) -> None:
    kernels = {kernel.name: kernel for kernel in resources(variants()[name])}
    assert set(kernels) == {"preprocess", "backward", "convert"}
    assert {name: kernel.stack for name, kernel in kernels.items()} == dict.fromkeys(kernels, 0)
    assert kernels["backward"].registers == REGISTERS
    assert kernels["backward"].shared <= SHARED
    assert 1 <= kernels["backward"].barriers <= 16


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_shared_memory_is_what_the_kernel_allocates(head_dim: int) -> None:
    from dash_attn.backends.sm90.backward.kernel import Backward

    config = variants()[f"backward-d{head_dim}-bf16"]
    assert Backward(config)._storage().size_in_bytes() == config.shared_bytes <= SHARED


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"head_dim": 96}, "head_dim 96 is not supported; supported: 64, 128"),
        ({"dtype": "fp32"}, "dtype must be 'bf16' or 'fp16', got 'fp32'"),
        ({"q_stages": 5}, "bytes of shared memory, limit 232448"),
        ({"do_stages": 1}, "has one stage of Q or dO"),
        ({"head_dim": 64, "ds_stages": 1}, "two stages of the buffer that dK leaves through"),
        ({"dq_stages": 1}, "two stages of the buffer that dK leaves through"),
    ],
)
def test_configurations_that_cannot_run(changed: dict[str, int | str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BackwardConfig(**({"head_dim": 128} | changed))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("default")
def test_one_lane_stores_dk_and_dv() -> None:
    """load.py elects the lane that stores and prefetches; a compiler that elects one would nest the two."""
    ptx = main_kernel_ptx(variants()["backward-d64-bf16"])
    before_stores = ptx.split("cp.async.bulk.tensor.5d.global.shared")[:-1]
    assert len(before_stores) == 4  # dV and dK, between items and at the end
    for before in before_stores:
        assert before.rpartition("bar.warp.sync")[2].count("elect.sync") == 1
    prefetches = ptx.split("cp.async.bulk.prefetch.tensor")
    assert [between.count("elect.sync") for between in prefetches[1:-1]] == [1]


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


FIRST_CALL = """
import sys
from dash_attn.backends.sm90 import compile
if sys.argv[1] == "load":
    compile._PROGRAMS._compile = lambda config: sys.exit("compiled again")
print("ready", flush=True)
sys.stdin.readline()
assert callable(compile.program(compile.variants()["backward-d128-bf16"]))
"""


def test_processes_that_make_the_first_call_together(tmp_path: Path) -> None:
    """Two processes compile and store one variant at the same time; a third one loads it."""
    environment = {**os.environ, "DASH_ATTN_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(SOURCES)}

    def start(what: str) -> subprocess.Popen[str]:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen([sys.executable, "-c", FIRST_CALL, what], text=True, env=environment, **pipes)

    for together in (["compile", "compile"], ["load"]):
        processes = [start(what) for what in together]
        assert [process.stdout.readline() for process in processes] == ["ready\n"] * len(together)
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        errors = [process.communicate(timeout=120)[1] for process in processes]
        assert [process.returncode for process in processes] == [0] * len(together), errors
        assert [path.suffix for path in tmp_path.iterdir()] == [".program"]

"""The Triton backend without a GPU: what it refuses, its kernels in an interpreter, and that they compile."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from dash_attn.backends.triton import backend as backend_module
from dash_attn.backends.triton.backend import BACKEND
from dash_attn.backends.triton.tiles import (
    DTYPES,
    FOLDED_KEYS,
    HEAD_DIMS,
    TILES,
    forward_numerics,
    padded,
    shapes_of,
)
from dash_attn.errors import UnavailableError
from dash_attn.problem import Problem, default_tiles

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")

with_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

FILES = [
    ("triton_interpreted.py", "triton_order.py"),
    ("triton_forward.py", "triton_caches.py", "triton_scores.py"),
]
"""Most of their tests are quick. Few processes: each of them takes seconds to begin."""
WITH_SLOW_TESTS = [f"triton_{part}.py" for part in ("interpreted", "order", "scores")]
SLOW_FILES = ["triton_intervals.py", "triton_split.py"]

INTERPRETED = {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "SANDYBRIDGE"}
"""The interpreter multiplies by OpenBLAS. For some CPUs that adds the products of a tile's last rows in
another order than those of the others. As for this one it adds all of them alike, on every CPU with AVX."""


def run_files(names: Sequence[str], *options: str, **environment: str) -> None:
    """Files of tests in a process of their own."""
    files = [f"tests/cpu/{name}" for name in names]
    command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", *files, *options]
    kept = {key: value for key, value in os.environ.items() if key not in INTERPRETED}
    done = subprocess.run(command, cwd=ROOT, env=kept | environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"


def test_no_kernel_is_tuned_at_run_time_or_adds_in_the_order_of_time() -> None:
    """Both would let time choose bits. ``triton_compiled.py`` looks for such additions in PTX."""
    sources = sorted(Path(backend_module.__file__).parent.glob("*.py"))
    assert len(sources) > 5
    for path in sources:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"autotune|heuristics|do_bench|atomic_", text), path.name


@with_triton
@pytest.mark.parametrize("names", FILES, ids="+".join)
def test_interpreted(names: Sequence[str]) -> None:
    run_files(names, "-m", "not slow", **INTERPRETED)


@with_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_SLOW_TESTS)
def test_interpreted_feature_by_feature(name: str) -> None:
    run_files([name], "-m", "slow", **INTERPRETED)


@with_triton
@pytest.mark.slow
@pytest.mark.parametrize("speed", ["not slow", "slow"])
@pytest.mark.parametrize("name", SLOW_FILES)
def test_interpreted_intervals_and_splits(name: str, speed: str) -> None:
    run_files([name], "-m", speed, **INTERPRETED)


@with_triton
@pytest.mark.slow
@pytest.mark.parametrize("part", ["models", "not models"])
def test_interpreted_from_end_to_end(part: str) -> None:
    run_files(["triton_end_to_end.py"], "-k", part, **INTERPRETED)


@with_triton
@pytest.mark.slow
def test_compiled(tmp_path: Path) -> None:
    run_files(["triton_compiled.py"], "-m", "not slow", TRITON_CACHE_DIR=str(tmp_path))


@with_triton
@pytest.mark.slow
@pytest.mark.parametrize("part", ["kernels_fit", "kernels_with", "not (kernels_fit or kernels_with)"])
def test_every_variant_compiles(part: str, tmp_path: Path) -> None:
    run_files(["triton_compiled.py"], "-m", "slow", "-k", part, TRITON_CACHE_DIR=str(tmp_path))


def test_without_triton_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "find_spec", lambda name: None)
    problem = Problem.dense(seqlen=10, head_dim=64)
    assert "pip install triton" in BACKEND.why_not(problem, CPU, packed=False)
    with pytest.raises(UnavailableError, match="pip install triton"):
        BACKEND.prepare(problem, CPU, packed=False)


def test_what_it_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "find_spec", lambda name: object())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    problem = Problem.dense(seqlen=10, head_dim=64)
    assert "does not run on cpu" in BACKEND.why_not(problem, CPU, packed=False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert BACKEND.why_not(problem, CPU, packed=False) == ""
    cases = {
        "dtype float64 is not supported": Problem.dense(seqlen=10, head_dim=64, dtype="float64"),
        "head_dim 12 is not supported": Problem.dense(seqlen=10, head_dim=12),
        "head_dim 264 is not supported": Problem.dense(seqlen=10, head_dim=264),
    }
    for reason, refused in cases.items():
        assert reason in BACKEND.why_not(refused, CPU, packed=False)


def test_on_a_gpu_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "find_spec", lambda name: object())
    device, problem = torch.device("cuda", 0), Problem.dense(seqlen=10, head_dim=80)
    for capability, reason in (
        ((7, 5), "sm_75; the triton backend needs sm_80"),
        ((8, 0), ""),
        ((12, 0), ""),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        found = BACKEND.why_not(problem, device, packed=False)
        assert reason in found
        assert bool(found) == bool(reason)


def test_importing_it_loads_no_triton() -> None:
    program = "import sys, dash_attn.backends.triton.backend; print('triton' in sys.modules)"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert found.stdout.strip() == "False", found.stderr


@pytest.mark.parametrize("roomy", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_shapes_divide_tiles(head_dim: int, dtype: str, roomy: bool) -> None:
    tile_m, tile_n = BACKEND.tiles(head_dim, head_dim)
    assert (tile_m, tile_n) == TILES[padded(head_dim)]
    shapes = shapes_of(head_dim, dtype, roomy)
    forward, dq = shapes.forward, shapes.dq
    backward = [shape for shape, *_ in shapes.of_keys()] + [dq]
    for shape in backward:
        assert tile_m % shape.rows == tile_n % shape.keys == 0
    assert min(n for shape in (forward, *backward) for n in shape[:2]) >= 16  # what a product takes at least
    assert dtype == "float32" or (head_dim > 128 and not roomy) or dq.keys == tile_n
    assert dq.keys == tile_n or not shapes.late
    assert tile_n % FOLDED_KEYS == 0
    numerics = forward_numerics(Problem.dense(seqlen=10, head_dim=head_dim, dtype=dtype), roomy)
    assert numerics.tile == forward.keys


def test_tiles_of_other_head_dims_are_any() -> None:
    assert BACKEND.tiles(12, 12) == default_tiles(12)

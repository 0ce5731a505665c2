"""``dash-attn trace`` without a GPU: what it prints and draws, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from cli_cases import Run, as_json

from dash_attn.model import H200, ForwardCosts, ForwardTimeline, simulate, simulate_forward
from dash_attn.problem import Problem, default_tiles
from dash_attn.schedule import build_forward_plan
from dash_attn.tools.cli import main


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_trace_has_the_tiles_of_the_kernel(
    capsys: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, head_dim: int
) -> None:
    """The recorded plan is simulated in place of running: there is no GPU."""
    measure = ModuleType("dash_attn.tools.measure")
    measure.simulated_and_measured = lambda plan: (simulate(plan, H200, 8),) * 2  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dash_attn.tools.measure", measure)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    facts = as_json(
        capsys, f"trace --tiles 8 --mask causal --head-dim {head_dim} --json --save {tmp_path / 'a.svg'}"
    )
    assert (facts["tile_m"], facts["tile_n"]) == default_tiles(head_dim)
    assert facts["tiles"] == 8


def test_a_trace_of_a_forward(capsys: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Simulated on fewer workers in place of running: there is no GPU."""
    pytest.importorskip("matplotlib")

    def traced(problem: Problem) -> tuple[ForwardTimeline, ForwardTimeline]:
        plan = build_forward_plan(problem, 128, 5)
        costs = ForwardCosts.h200(128)
        return simulate_forward(plan, costs, 132), simulate_forward(plan, costs, 5)

    measure = ModuleType("dash_attn.tools.measure")
    measure.simulated_and_measured_forward = traced  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dash_attn.tools.measure", measure)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    picture = tmp_path / "a.svg"
    line = f"trace --pass forward --mask causal --seqlen 1024 --heads 2 --json --save {picture}"
    facts = as_json(capsys, line)
    assert (facts["pass"], facts["items"], facts["workers"], facts["picture"]) == (
        "forward",
        16,
        5,
        str(picture),
    )
    assert facts["simulated_makespan"] == 8 * 2250 + 5700
    assert facts["measured_makespan"] >= facts["measured_bound"] > facts["simulated_makespan"]
    assert facts["measured_costs"] == facts["simulated_costs"] == {"tile": 2250, "item": 5700}
    assert "forward, causal, measured: makespan" in picture.read_text()


@pytest.mark.parametrize(
    "flags", ["--tiles 8", "--pass forward --seqlen 512", "--pass forward --seqlen 512 --json"]
)
def test_a_trace_needs_a_gpu(
    capsys: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([*f"trace {flags}".split(), "--save", str(tmp_path / "a.svg")]) == 2
    printed = capsys.readouterr()
    assert "a trace needs a Hopper GPU, and PyTorch sees no CUDA device" in printed.err
    assert not printed.out


@pytest.mark.parametrize(
    ("flags", "capability", "message"),
    [
        (
            "--seqlen 512 --head-dim 264",
            (9, 0),
            "head_dim 264 is not supported by sm90; supported: multiples of 8 from 40 to 256",
        ),
        (
            "--seqlen 512 --dtype float32",
            (9, 0),
            "dtype float32 is not supported by sm90; supported: bfloat16",
        ),
        ("--seqlen 512", (8, 0), "cuda:0 is sm_80; the sm90 kernels are for Hopper"),
    ],
)
def test_a_trace_of_what_the_forward_does_not_cover(
    capsys: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: str,
    capability: tuple[int, int],
    message: str,
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("dash_attn.backends.sm90.backend._capability", lambda device: capability)
    assert main([*f"trace --pass forward {flags}".split(), "--save", str(tmp_path / "a.svg")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--seqlen 512 --dtype float32", "dtype float32 is not supported by sm90; supported: bfloat16"),
        ("--seqlen 128 --seqlen-k 0", "there is nothing to trace: no row sees a key"),
    ],
)
def test_a_trace_of_what_the_backward_does_not_cover(
    capsys: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str, message: str
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("dash_attn.backends.sm90.backend._capability", lambda device: (9, 0))
    assert main([*f"trace {flags}".split(), "--save", str(tmp_path / "a.svg")]) == 2
    assert message in capsys.readouterr().err

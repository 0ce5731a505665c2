"""The demo on a tiny model: equal bytes, a run that drifts, and what it prints and writes."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace

import pytest
import torch

from dash_attn.errors import InputError
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import build_plan, choose_policy
from dash_attn.tools import demo
from dash_attn.tools.cli import main
from dash_attn.tools.demo import DemoSettings, run_demo
from dash_attn.tools.demo.gpt import GPT, GPTShape, batch_of, python_manual
from dash_attn.tools.demo.repeatable import THREADS, deterministic_torch, optimizer_sha256, weights_sha256
from dash_attn.tools.demo.report import ProgressBar, sparkline
from dash_attn.tools.demo.settings import demo_device, typical_settings

# Four kv tiles of 128: fewer than three contributions to a q tile would commute. In float32: bfloat16 often
# rounds the few differences of so small a model away.
TINY = DemoSettings(
    steps=3, batch=1, dtype="float32", shape=GPTShape(layers=1, width=16, head_dim=8, seqlen=450)
)


@pytest.fixture(scope="module")
def tiny():
    lines = []
    return run_demo(TINY, say=lines.append), "\n".join(lines)


def test_two_runs_agree_and_the_shuffled_one_does_not(tiny):
    result, text = tiny
    assert result.identical
    assert result.exit_code == 0
    first, second, shuffled = result.sha256
    assert first == second != shuffled
    assert result.drift[3] > 0
    assert 0 < result.changed <= 1
    assert text.count(first) == 2
    assert "IDENTICAL, byte for byte" in text
    assert result.fingerprint in text
    assert result.device == "cpu"
    first, second, shuffled = result.optimizer_sha256
    assert first == second != shuffled
    assert result.parameters == sum(w.numel() for w in GPT(TINY.shape, None, 0).parameters())
    assert min(result.tokens_per_second) > 0
    assert "tokens/s with the order" in text


def test_training_learns(tiny):
    result, _ = tiny
    assert len(result.losses) == 3
    assert result.losses[0] == pytest.approx(5.545, abs=0.05)  # log(256)
    assert result.losses[-1] < result.losses[0]


def test_the_run_is_repeated_by_another_call_and_changed_by_another_seed(tiny):
    assert run_demo(TINY, say=lambda line: None).sha256 == tiny[0].sha256
    assert run_demo(replace(TINY, seed=1), say=lambda line: None).sha256[0] != tiny[0].sha256[0]


def test_bfloat16(tiny):
    result = run_demo(replace(TINY, dtype="bfloat16"), say=lambda line: None)
    assert result.identical
    assert result.sha256[0] != tiny[0].sha256[0]
    assert result.losses == pytest.approx(tiny[0].losses, rel=0.01)


def test_sequences_that_calls_would_cut_are_trained_whole(tiny, monkeypatch):
    monkeypatch.setattr("dash_attn.spec.Q_SEGMENT", 128)
    result = run_demo(replace(TINY, steps=1), say=lambda line: None)
    assert result.identical
    assert result.fingerprint == tiny[0].fingerprint


def test_differing_runs_are_reported_and_end_with_1(monkeypatch):
    hashes = iter("abc")
    monkeypatch.setattr(demo.training, "weights_sha256", lambda model: next(hashes))
    lines = []
    result = run_demo(replace(TINY, steps=1), say=lines.append)
    assert result.exit_code == 1
    assert "DIFFERENT" in "\n".join(lines)


def test_torch_is_left_as_it_was(tiny):
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with deterministic_torch():
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_num_threads() == THREADS
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    result = run_demo(replace(TINY, steps=2, output=tmp_path / "new"), say=lambda line: None)
    names = {"plan.svg", "plan.png", "drift.svg", "drift.png"}
    assert {path.name for path in (tmp_path / "new").iterdir()} == names
    assert len(result.pictures) == 4


def test_without_matplotlib_it_says_so_and_finishes(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    lines = []
    result = run_demo(replace(TINY, steps=1, output=tmp_path), say=lines.append)
    assert result.identical
    assert result.pictures == []
    assert "pip install 'dash-attn[plots]'" in lines[-1]


def test_the_command_prints_one_json_object(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(demo, "typical_settings", lambda device: TINY)
    line = "demo --steps 1 --seqlen 130 --layers 1 --dtype float32 --seed 3 --json --output"
    assert main([*line.split(), str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert facts["identical"] is True
    assert len(facts["losses"]) == 1
    assert err == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be an integer >= 1, got 0"),
        ({"steps": 1.5}, "steps must be an integer >= 1, got 1.5"),
        ({"batch": -1}, "batch must be an integer >= 1, got -1"),
        ({"warm_up": 0}, "warm_up must be an integer >= 1, got 0"),
        ({"seed": 2**64}, f"seed must be an integer of 64 bits, got {2**64}"),
        ({"device": "foo"}, "device must be 'auto' or a device of PyTorch, got 'foo'"),
        ({"shape": GPTShape(layers=0)}, "layers must be an integer >= 1, got 0"),
        ({"shape": GPTShape(width=100)}, r"width \(100\) must be a multiple of head_dim \(64\)"),
        ({"dtype": "float8"}, "dtype must be one of float32, bfloat16, got 'float8'"),
    ],
)
def test_bad_settings(change, message):
    with pytest.raises(InputError, match=message):
        replace(TINY, **change)


def test_a_device_without_a_backend():
    with pytest.raises(InputError, match="device 'meta' is not supported"):
        run_demo(replace(TINY, device="meta"))


def test_another_optimizer_state_alone_is_reported(monkeypatch):
    hashes = iter("abc")
    monkeypatch.setattr(demo.training, "optimizer_sha256", lambda optimizer: next(hashes))
    result = run_demo(replace(TINY, steps=1), say=lambda line: None)
    assert result.sha256[0] == result.sha256[1]
    assert not result.identical


def test_typical_settings():
    gpu = typical_settings(torch.device("cuda"))
    weights = 12 * gpu.shape.layers * gpu.shape.width**2
    assert 90e6 < weights < 110e6
    assert typical_settings(torch.device("cpu")) == DemoSettings()
    assert demo_device("cpu") == torch.device("cpu")


def test_large_models_are_sampled(monkeypatch):
    whole = run_demo(TINY, say=lambda line: None)
    monkeypatch.setattr(demo.training, "SAMPLE", 500)
    sampled = run_demo(TINY, say=lambda line: None)
    assert sampled.identical
    assert sampled.sha256 == whole.sha256
    assert 0 < sampled.drift[3] <= whole.drift[3]


def test_optimizer_sha256_sees_every_bit():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    before = optimizer_sha256(optimizer)
    moment = optimizer.state[weight]["exp_avg"]
    moment[1] = torch.nextafter(moment[1], torch.tensor(2.0))
    assert optimizer_sha256(optimizer) != before


@pytest.mark.parametrize(
    "settings",
    [
        typical_settings(torch.device("cuda")),
        DemoSettings(batch=8, shape=GPTShape(layers=2, width=512, head_dim=64, seqlen=2048)),
    ],
    ids=["typical", "tests/gpu"],
)
def test_heads_of_a_demo_on_a_gpu_come_one_after_the_other(settings):
    """In turns, its sums without an order would often come in order, and nothing would drift."""
    shape = settings.shape
    heads = shape.width // shape.head_dim
    problem = Problem.dense(
        batch=settings.batch, seqlen=shape.seqlen, heads=heads, head_dim=shape.head_dim, mask=Mask.causal()
    )
    plan = build_plan(problem, choose_policy(problem))
    assert [list(item) for item in plan.items[:16, :2]] == [[0, 0]] * 16


def test_weights_sha256_sees_every_bit():
    model = GPT(TINY.shape, lambda q, k, v: q, 0)
    before = weights_sha256(model)
    assert before == weights_sha256(GPT(TINY.shape, lambda q, k, v: q, 0))
    with torch.no_grad():
        model.norm.weight[0] = torch.nextafter(model.norm.weight[0], torch.tensor(2.0))
    assert weights_sha256(model) != before


def test_batches_are_windows_of_the_text():
    text = python_manual()
    assert bytes(text.numpy()).decode().count("Python") > 100
    tokens, targets = batch_of(text, 2, 50, torch.Generator().manual_seed(0))
    assert tokens.shape == targets.shape == (2, 50)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_progress_bar_and_sparkline():
    stream = io.StringIO()
    bar = ProgressBar("run", 2, stream)
    bar.show(1, 3.25)
    assert "step 1/2  loss 3.250" in stream.getvalue()
    bar.show(2, 3.0)
    assert stream.getvalue().endswith("\r\033[K")
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert len(sparkline([float(x) for x in range(1000)])) == 40

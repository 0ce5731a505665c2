"""``dash-attn bench`` without a GPU: what is refused and why, tables and charts of made-up results."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from dash_attn.errors import InputError, UnavailableError
from dash_attn.model.output import PictureError
from dash_attn.peers.registry import PEERS, Inputs
from dash_attn.tools.bench import Settings, bench_shape, save_chart, table
from dash_attn.tools.bench.run import Result, Row
from dash_attn.tools.bench.timing import HEAD_START, Contender, measure, order_of_round
from dash_attn.tools.cli import main
from dash_attn.tools.shapes import Shape

SHAPE = Shape(seqlen=512, causal=True)
ROWS = (
    Row("dash_attn", "descending + lpt", True, "", True, 2.0, 0.01, 300.0, "ab" * 32),
    Row("dash_attn", "descending + lpt, no order", False, "", False, 1.6, 0.01, 375.0),
    Row("fa4", "", True, "not installed: pip install flash-attn-4"),
)


def inputs(shape: Shape) -> Inputs:
    """Empty tensors of a shape: enough for the reasons that are known beforehand."""
    lengths = [sum(side) if shape.packed else side[0] for side in zip(*shape.sequences)]
    rows = [(n,) if shape.packed else (shape.batch, n) for n in lengths]
    q, k = (torch.empty(*r, shape.heads, shape.head_dim, device="meta") for r in rows)
    bounds = (torch.empty(2), torch.empty(2)) if shape.packed else ()
    return Inputs(shape.problem, q, q, k, k, q, q, bounds, 1.0)


def reasons(shape: Shape) -> dict[tuple[str, bool], str]:
    return {(p.impl, p.deterministic): p.why_not(inputs(shape)) for p in PEERS}


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (Shape(seqlens=(100, 30)), "nested tensors"),
        (Shape(seqlen=512, window=(100, 0)), "no mask window"),
        (Shape(seqlen=512, seqlen_k=600, causal=True), "top-left"),
        (Shape(seqlen=512, seqlen_k=600), ""),
        (SHAPE, ""),
    ],
)
def test_pytorch_says_why_it_cannot(shape: Shape, reason: str) -> None:
    found = reasons(shape)["fa2 (PyTorch)", True]
    assert (reason in found) if reason else not found
    assert reasons(shape)["cudnn (PyTorch)", False] == found
    if reason:
        assert "square causal" in reasons(shape)["cudnn", True]


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("_no_gpu")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnavailableError, match="PyTorch sees no CUDA device"):
        bench_shape(SHAPE, Settings(), print)
    assert main(["bench", "--seqlen", "512"]) == 2
    found = capsys.readouterr()
    assert "PyTorch sees no CUDA device" in found.err
    assert not found.out


def test_another_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    with pytest.raises(UnavailableError, match="NVIDIA A100, sm_80"):
        bench_shape(SHAPE, Settings(), print)


def test_a_backend_that_is_named_needs_no_hopper_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = []

    def bench(shape: Shape, *_: object) -> Result:
        measured.append(shape.backend)
        return Result(shape, "NVIDIA A100", ROWS)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr("dash_attn.tools.bench.bench_shape", bench)
    assert main(["bench", "--seqlen", "512", "--backend", "triton"]) == 0
    assert main(["bench", "--seqlen", "512"]) == 2
    assert "needs a Hopper GPU (sm_90), got NVIDIA A100" in capsys.readouterr().err
    assert measured == ["triton"]


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize(
    ("line", "message"), [("--rounds 0", "rounds must be >= 1, got 0"), ("--seqlen 5 --seqlens 3", "seqlens")]
)
def test_wrong_values(capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    assert main(["bench", *line.split()]) == 2
    assert message in capsys.readouterr().err


def test_settings() -> None:
    with pytest.raises(InputError, match="got -1"):
        Settings(rounds=-1)


def test_median_and_spread() -> None:
    contender = Contender(lambda: tuple, times=[3.0, 1.0, 2.0, 4.0, 100.0])
    assert contender.ms == 3.0
    assert Contender(lambda: tuple, times=[2.0]).spread == 0.0
    assert Contender(lambda: tuple, times=[2.0, 2.0, 2.0]).spread == 0.0
    assert contender.spread > 1


@pytest.mark.parametrize("contenders", [1, 2, 3, 5, 11])
@pytest.mark.parametrize("rounds", [1, 5, 7])
def test_no_contender_has_a_place_of_its_own(contenders: int, rounds: int) -> None:
    calls = list(range(contenders))
    orders = [order_of_round(calls, number, rounds) for number in range(rounds)]
    assert all(sorted(order) == calls for order in orders)
    fair = -(-rounds // contenders)
    for place in range(contenders):
        assert max(Counter(order[place] for order in orders).values()) <= fair + (place > 0)


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return 2.0


def test_the_gpu_waits_for_every_call_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a pause of one length the last of many short calls would be timed by the host."""
    slept: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    contenders = [Contender(lambda: lambda: (torch.zeros(1),)) for _ in range(12)]
    contenders[5].reason = "not installed"
    measure(contenders, rounds=3)
    assert slept == 3 * [11 * HEAD_START]
    assert [c.times for c in contenders] == [[2.0] * 3] * 5 + [[]] + [[2.0] * 3] * 6


def test_table_and_json() -> None:
    result = Result(SHAPE, "NVIDIA H200", ROWS)
    _, _, first, second, third, _ = table(result).splitlines()
    assert "no order" in first
    assert "1.250" in first
    assert first.endswith("no")
    assert second.endswith("yes")
    assert "1.000" in second
    assert third.endswith("not installed: pip install flash-attn-4")
    facts = json.loads(json.dumps(result.as_json()))
    assert Shape.from_json(facts["shape"]) == SHAPE
    assert [row["ms"] for row in facts["rows"]] == [2.0, 1.6, None]


def test_a_first_row_without_figures_has_no_ratios() -> None:
    result = Result(
        SHAPE, "NVIDIA H200", (Row("dash_attn", "spt", True, "TooFewWorkersError: 3"), *ROWS[1:2])
    )
    assert "      -" in table(result)


def test_chart(tmp_path: Path) -> None:
    results = [Result(SHAPE, "NVIDIA H200", ROWS)] * 2
    text = save_chart(results, tmp_path / "a.svg").read_text()
    assert text.count("descending + lpt, det") == 2
    assert "fa4" not in text
    with pytest.raises(PictureError):
        save_chart(results, tmp_path / "a.pdf")

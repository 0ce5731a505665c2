"""What benchmarks/forward.py measures, what its file keeps, and what the docs would quote of made-up rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dash_attn.peers.registry import PEERS
from dash_attn.problem import Mask, Problem

FOLDER = Path(__file__).parents[2] / "benchmarks"
PEER_MS = {"fa4 forward": 1.0, "cudnn forward": 2.0, "fa4_det backward": 4.0, "cudnn_det backward": 5.0}
PEER_MS |= {"fa4 backward": 3.5, "cudnn backward": 3.0}


@pytest.fixture(scope="module")
def benchmark() -> Iterator[SimpleNamespace]:
    """Modules of benchmarks/ by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        names = ("forward_calls", "forward_points", "other_values", "record", "total_values")
        yield SimpleNamespace(**{name: import_module(name) for name in names})


def test_points_of_the_sets(benchmark: SimpleNamespace) -> None:
    found = {name: list(benchmark.forward_points.points(name)) for name in benchmark.forward_points.SETS}
    assert {name: len(points) for name, points in found.items()} == {
        "grid": 24, "grouped": 4, "other": 40, "total": 24,
    }  # fmt: skip
    assert [point.problem for point in found["total"]] == [point.problem for point in found["grid"]]
    for name, points in found.items():
        assert {point.set for point in points} == {name}
        assert len(set(points)) == len(points)
    packed = [point for point in found["other"] if point.packed]
    assert len(packed) == 6
    for point in packed:
        assert sum(q for q, _ in point.problem.sequences) == benchmark.forward_points.TOKENS
        assert point.problem.backward_flops > 0
    assert all(len(set(point.problem.sequences)) == 1 for point in found["other"] if not point.packed)


def test_every_peer_of_the_registry_has_a_short_name_or_is_left_out(benchmark: SimpleNamespace) -> None:
    modes = {(peer.impl, peer.deterministic) for peer in PEERS}
    named = benchmark.forward_calls.BACKWARDS
    assert modes - set(named) == {("fa2 (PyTorch)", True), ("fa2 (PyTorch)", False)}
    names = set(benchmark.total_values.BACKWARDS["any"])
    assert names == set(named.values()) <= set(benchmark.total_values.NAMES)


@pytest.fixture
def no_peers(benchmark: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    calls: ModuleType = benchmark.forward_calls
    monkeypatch.setattr(calls, "fa4", SimpleNamespace(why_not=lambda: "not here"))
    monkeypatch.setattr(calls, "PEERS", ())
    return calls


@pytest.mark.parametrize("packed", ["", "two"])
def test_a_forward_is_called_on_dense_and_packed_tensors(
    benchmark: SimpleNamespace, no_peers: ModuleType, packed: str
) -> None:
    make = Problem.varlen if packed else lambda seqlens, **rest: Problem.dense(seqlen=seqlens[0], **rest)
    problem = make([70, 5], heads=2, head_dim=64, mask=Mask.causal())
    (call,) = no_peers.contenders(benchmark.forward_points.Point("other", problem, packed), "cpu").values()
    out, lse = call()
    assert (out.shape, lse.shape) == (
        ((75, 2, 64), (2, 75)) if packed else ((1, 70, 2, 64), (1, 2, 70))
    )  # fmt: skip


def test_fa4_is_told_where_packed_sequences_begin(
    benchmark: SimpleNamespace, no_peers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    fa4 = SimpleNamespace(why_not=lambda: "", forward=lambda *given: given)
    monkeypatch.setattr(no_peers, "fa4", fa4)
    problem = Problem.varlen([70, 5], heads=2, head_dim=64, mask=Mask.causal())
    calls = no_peers.contenders(benchmark.forward_points.Point("other", problem, "two"), "cpu")
    *_, mask, lengths = calls["fa4"]()
    assert mask == Mask.causal()
    assert (lengths.cu_seqlens_q.tolist(), lengths.max_seqlen_k) == ([0, 70, 75], 70)


def test_forward_and_backward_go_through_the_public_function(
    benchmark: SimpleNamespace, no_peers: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def peer(impl: str, deterministic: bool, make: Any) -> SimpleNamespace:
        return SimpleNamespace(impl=impl, deterministic=deterministic, make=make, why_not=lambda x: "")

    def breaks(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such kernel\nand more")

    peers = [peer("fa4", True, lambda x: lambda: (x.q,)), peer("fa4", False, lambda x: breaks)]
    monkeypatch.setattr(no_peers, "PEERS", (*peers, peer("cudnn", True, breaks), peer("fa2", True, breaks)))
    problem = Problem.dense(seqlen=70, heads=2, head_dim=64, mask=Mask.causal())
    calls = no_peers.contenders(benchmark.forward_points.Point("total", problem), "cpu")
    assert list(calls) == ["dash_attn", "fa4_det backward"]
    assert [grad.shape for grad in calls["dash_attn"]()] == [torch.Size((1, 70, 2, 64))] * 3
    left_out = capsys.readouterr().err.splitlines()
    assert left_out == [
        "fa4 function is left out: not here",
        "fa4 forward is left out: not here",
        "cudnn_det backward is left out: RuntimeError: no such kernel",
        "fa4 backward is left out: RuntimeError: no such kernel",
    ]
    monkeypatch.setattr(no_peers.dash_attn, "flash_attn_func", breaks)
    with pytest.raises(RuntimeError, match="no such kernel"):  # ours is never left out
        no_peers.contenders(benchmark.forward_points.Point("total", problem), "cpu")


def test_public_functions_of_peers_are_timed_with_their_gradients(
    benchmark: SimpleNamespace, no_peers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def function(q: torch.Tensor, *_: object, **how: bool) -> torch.Tensor:
        asked.append(how)
        return 2 * q

    fa4 = SimpleNamespace(why_not=lambda: "", forward=lambda *given: given, function=function)
    monkeypatch.setattr(no_peers, "fa4", fa4)
    monkeypatch.setattr(torch.autograd, "grad", lambda out, leaves, dout: torch.equal(out, 2 * leaves[0]))
    problem = Problem.dense(seqlen=70, heads=2, head_dim=64, mask=Mask.causal())
    calls = no_peers.contenders(benchmark.forward_points.Point("total", problem), "cpu")
    assert list(calls) == ["dash_attn", "fa4_det function", "fa4 function", "fa4 forward"]
    assert asked == [{"causal": True, "deterministic": True}, {"causal": True, "deterministic": False}]
    assert calls["fa4 function"]()


def test_a_set_is_replaced_and_others_stay(benchmark: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    benchmark.record.Record(path).replace("grid", {"command": "a"}, [{"set": "grid", "ms": 1}])
    record = benchmark.record.Record(path)
    record.replace("total", {"command": "b"}, [{"set": "total", "ms": 2}])
    record.replace("total", {"command": "b"}, [{"set": "total", "ms": 3}, {"set": "total", "ms": 4}])
    found = json.loads(path.read_text())
    assert found["headers"] == {"grid": {"command": "a"}, "total": {"command": "b"}}
    assert [row["ms"] for row in found["rows"]] == [1, 3, 4]
    benchmark.record.Record(path).replace("grid", {"command": "c"}, [{"set": "grid", "ms": 5}])
    found = json.loads(path.read_text())
    assert found["headers"] == {"grid": {"command": "c"}, "total": {"command": "b"}}
    assert [row["ms"] for row in found["rows"]] == [3, 4, 5]


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_every_set_of_the_committed_files_says_which_run_it_is_of(gpu: str) -> None:
    found = json.loads((FOLDER / "results" / f"{gpu}-forward.json").read_text())
    assert set(found["headers"]) == {row["set"] for row in found["rows"]}
    assert all(header["command"] for header in found["headers"].values())
    assert all(gpu in header["gpu"].lower() for header in found["headers"].values())


def test_versions_of_what_is_not_installed_are_empty(benchmark: SimpleNamespace) -> None:
    found = benchmark.record.versions("torch", "no-such-package")
    assert found["torch"]
    assert found["no-such-package"] == ""


def total_rows(ours_ms: float, **more: float) -> list[dict[str, Any]]:
    """The set total with the same times at every point."""
    return [
        {"set": "total", "timing": timing, "impl": impl, "mask": mask, "head_dim": head_dim,
         "seqlen": seqlen, "ms": ms}
        for timing in ("sustained", "single") for head_dim in (64, 128) for mask in ("full", "causal")
        for seqlen in (512, 1024, 2048, 4096, 8192, 16_384)
        for impl, ms in {"dash_attn": ours_ms, **PEER_MS, **more}.items()
    ]  # fmt: skip


def values(module: ModuleType, name: str, rows: list[dict[str, Any]], *file: str) -> dict[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("documents.document", lambda name: {"rows": rows})
        return {key: value() for key, value in getattr(module, name)(*file)}


def total_values(module: ModuleType, rows: list[dict[str, Any]]) -> dict[str, str]:
    return values(module, "total_values", rows, "any.json")


def test_forward_and_backward_beside_the_fastest_of_any_peers(benchmark: SimpleNamespace) -> None:
    total = benchmark.total_values
    assert total_values(total, []) == {}
    found = total_values(total, total_rows(4.0))
    ratios = [x for by_length in total.FA3_TO_FA4.values() for x in by_length]
    forwards = [1 / max(x, 1) for x in ratios]  # of cuDNN 2.0, FlashAttention-4 1.0 and 3 by ratio
    assert found["total-any-least"] == f"{(min(forwards) + 3.0) / 4.0:.2f}"
    assert found["total-any-most"] == "1.00"
    assert found["total-any-behind"] == str(sum(x < 1 for x in forwards))
    assert found["total-det-least"] == found["total-single-det-least"]
    assert found["total-det-least"] == f"{(min(forwards) + 4.0) / 4.0:.2f}"
    assert float(found["total-builds-least"]) <= float(found["total-any-least"])
    lines = found["total-table"].splitlines()
    assert len(lines) == 2 + 24
    assert lines[3] == "| 64 | full | 1,024 | 4.000 | 1.000 FA4 | 4.000 FA4 | 3.000 cuDNN | 1.25 | 1.00 |"
    assert lines[2].split("|")[5] == " 0.971 FA3 "
    assert [line.split("|")[4].strip() for line in found["total-targets"].splitlines()[2:]] == 3 * [
        "**missed**"
    ]
    assert "total-functions-least" not in found
    functions = total_rows(4.0, **{"fa4_det function": 6.0, "fa4 function": 5.0, "cudnn function": 5.5})
    assert total_values(total, functions)["total-functions-least"] == "1.25"
    met = total_values(total, total_rows(3.0))["total-targets"]
    assert [line.split("|")[4].strip() for line in met.splitlines()[2:]] == 3 * ["met"]


def test_a_mark_needs_all_points_and_a_peer_each_way(benchmark: SimpleNamespace) -> None:
    total, rows = benchmark.total_values, total_rows(4.0)
    with pytest.raises(ValueError, match="23 of 24 points"):
        total_values(
            total, [row for row in rows if (row["head_dim"], row["mask"], row["seqlen"]) != (64, "full", 512)]
        )
    with pytest.raises(ValueError, match="no backward of fa4_det, cudnn_det was measured"):
        total_values(total, [row for row in rows if "_det" not in row["impl"]])
    without = total_values(total, [row for row in rows if "cudnn" not in row["impl"]])
    marks = [  # of the deterministic backward of cuDNN there is the ratio, too
        (1 / max(fa3, 1) + min(3.5, 4.0 / cudnn)) / 4.0
        for panel, ratios in total.FA3_TO_FA4.items()
        for fa3, cudnn in zip(ratios, total.CUDNN_TO_FA4[panel])
    ]
    assert without["total-any-least"] == f"{min(marks):.2f}"


def test_the_forward_outside_the_grid(benchmark: SimpleNamespace) -> None:
    other = benchmark.other_values
    assert values(other, "other_values", []) == {}
    rows = []
    for point in benchmark.forward_points.points("other"):
        seqlen_q, seqlen_k = (max(side) for side in zip(*point.problem.sequences))
        row = {"set": "other", "timing": "sustained", "mask": point.problem.mask.name, "seqlen": seqlen_q,
               "seqlen_k": seqlen_k, "head_dim": point.problem.head_dim,
               "batch": len(point.problem.sequences)}  # fmt: skip
        row |= {"packed": point.packed} if point.packed else {}
        speeds = {"dash_attn": 600.0, "fa4": 500.0 if point.packed else 400.0}
        if point.problem.mask.is_full and not point.packed:
            speeds["cudnn"] = 650.0
        rows += [row | {"impl": impl, "tflops": speed} for impl, speed in speeds.items()]
    found = values(other, "other_values", rows)
    counts = {name: found[f"{name}-any-points"] for name in other.SELECTIONS}
    assert counts == {"other": "40", "other-odd": "12", "other-long": "12", "other-window": "4",
                      "other-unequal": "6", "other-packed": "6"}  # fmt: skip
    assert (found["other-fa4-least"], found["other-fa4-most"]) == ("1.20", "1.50")
    assert (found["other-any-least"], found["other-any-behind"]) == ("0.92", "14")
    lines = found["other-table"].splitlines()
    assert len(lines) == 2 + 40
    assert "| 64 | full | 10 x 1,500 | 600 | 400 | 650 | 1.50 | 0.92 |" in lines
    assert "| 128 | causal | 4 x 1,024 of 8,192 keys | 600 | 400 | - | 1.50 | 1.50 |" in lines
    assert "| 64 | causal | packed: one long, 64 short | 600 | 500 | - | 1.20 | 1.20 |" in lines

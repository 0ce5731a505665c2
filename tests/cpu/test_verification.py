"""``dash-attn verify`` on the CPU: what passes, that every check can fail, and what the command prints."""

from __future__ import annotations

import json

import pytest
import torch

from dash_attn import fingerprints
from dash_attn.errors import InputError
from dash_attn.tools.cli import main
from dash_attn.tools.shapes import read_shapes
from dash_attn.tools.verify import CHECKS, Settings, Shape, Status, checks, verify_shape
from dash_attn.tools.verify.batch import Batch, random_inputs

SMALL = Shape(seqlen=400, heads=2, kv_heads=1, head_dim=16, causal=True, dtype="float32")
OTHER_V = Shape(seqlen=200, heads=2, kv_heads=1, head_dim=24, head_dim_v=16, causal=True, dtype="float32")
PACKED = Shape(seqlens=(290, 0, 40), heads=2, head_dim=16, window=(100, 50), dtype="float32")
CPU = Settings("cpu", 2)


@pytest.fixture(autouse=True)
def _no_new_process(request, monkeypatch):
    """A new process costs seconds; only the tests that name it start one."""
    if "process" not in request.node.name:
        monkeypatch.setitem(checks.CHECKS, "fresh process", lambda subject: "not asked for")


def quiet(line: str) -> None:
    pass


def verified(shape=SMALL, settings=CPU):
    return verify_shape(shape, settings, quiet)


def outcome(report):
    return {check.name: check.status.value for check in report.checks}


GOOD = {
    "accuracy": "passed",
    "replays": "passed",
    "neighbours": "passed",
    "fresh process": "passed",
    "CUDA graph": "skipped",
    "negative control": "passed",
}


@pytest.mark.parametrize("shape", [SMALL, OTHER_V, PACKED], ids=str)
def test_the_cpu_backend_passes_in_this_and_another_process(shape):
    lines = []
    report = verify_shape(shape, CPU, lines.append)
    assert outcome(report) == GOOD
    assert report.passed
    assert set(report.hashes) == {"out", "lse", "dq", "dk", "dv"}
    assert report.facts["backend"] == "cpu"
    assert len(lines) == 1 + len(GOOD) + 5
    assert next(check for check in report.checks if check.name == "CUDA graph").detail == "no GPU"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes_are_as_accurate_as_they_can_be(dtype):
    report = verified(Shape(batch=1, seqlen=700, heads=1, head_dim=16, dtype=dtype))
    assert outcome(report) == GOOD


def broken(monkeypatch, change):
    """Batch.run with its results changed: change(calls so far, results)."""
    honest, calls = Batch.run, []

    def run(self):
        calls.append(self)
        return change(len(calls), honest(self))

    monkeypatch.setattr(Batch, "run", run)


def nudged(results, name="dq", factor=1 + 2**-20):
    at = ("out", "lse", "dq", "dk", "dv").index(name)
    return tuple(x * factor if i == at else x for i, x in enumerate(results))


def test_one_different_replay_fails(monkeypatch):
    broken(monkeypatch, lambda call, results: nudged(results, "dv") if call == 3 else results)
    report = verified()
    assert outcome(report) == {**GOOD, "replays": "FAILED"}
    assert "replay 1: dv have other bytes" in str(report.checks[1])
    assert not report.passed


def test_dependence_on_the_batch_fails(monkeypatch):
    broken(monkeypatch, lambda call, results: nudged(results) if len(results[0]) == 3 else results)
    report = verified()
    assert outcome(report) == {**GOOD, "neighbours": "FAILED"}
    assert "sequence 1 at place 0 of 3: dq" in str(report.checks[2])


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
def test_wrong_numbers_fail(monkeypatch, name):
    broken(monkeypatch, lambda call, results: nudged(results, name, 1.01))
    report = verified()
    assert outcome(report)["accuracy"] == "FAILED"
    assert f"{name} of sequence 0: error norm" in report.checks[0].detail


def test_bfloat16_errors_are_held_to_a_few_roundings(monkeypatch):
    broken(monkeypatch, lambda call, results: nudged(results, "dk", 1.01))
    report = verified(Shape(seqlen=300, heads=1, head_dim=64))
    assert outcome(report)["accuracy"] == "FAILED"


def test_nan_fails(monkeypatch):
    broken(monkeypatch, lambda call, results: nudged(results, "dk", float("nan")))
    assert "dk of sequence 0: error norm inf" in verified().checks[0].detail


@pytest.mark.parametrize("seed", range(2))
def test_the_control_sees_order_whatever_the_head_dim(seed):
    """The rounding of four columns hides it with seed 0."""
    report = verified(Shape(seqlen=64, heads=1, head_dim=4, seed=seed), Settings("cpu", 1))
    assert outcome(report)["negative control"] == "passed"


def test_a_blind_control_fails(monkeypatch):
    monkeypatch.setattr(Batch, "planned_dq", lambda self, seed: self.run()[2])
    report = verified(SMALL, Settings("cpu", 1))
    assert outcome(report)["negative control"] == "FAILED"
    assert "gave the bytes of ordered ones" in report.checks[-1].detail


def test_the_control_of_sequences_that_are_cut_is_of_one_plan(monkeypatch):
    """Segments have another order than the plan of whole sequences: that must not pass for its absence."""
    of_plan = Batch.planned_dq
    rows = Shape(seqlen=1024, heads=1, head_dim=16, causal=True)
    monkeypatch.setattr(Shape, "options", property(lambda self: {"causal": True, "q_segment": 512}))
    q = torch.zeros(1, 1024, 1, 16, dtype=torch.bfloat16)
    report = verified(rows, Settings("cpu", 1))
    assert outcome(report)["negative control"] == "passed"
    assert report.facts["fingerprint"] == fingerprints(q, q, q, causal=True, q_segment=512).backward
    assert "or another one per segment of 16384 q rows" in report.facts["plan"]
    monkeypatch.setattr(Batch, "planned_dq", lambda self, seed: of_plan(self, None))
    assert outcome(verified(rows, Settings("cpu", 1)))["negative control"] == "FAILED"


def test_other_hashes_of_a_fresh_process_fail(monkeypatch):
    inputs = random_inputs(Shape(seqlen=400, heads=2, kv_heads=1, head_dim=16, seed=1), torch.device("cpu"))
    wide = [type(x)(*(tensor.float() for tensor in x)) for x in inputs]
    monkeypatch.setattr(checks, "random_inputs", lambda shape, device: wide)
    report = verified()
    assert outcome(report) == {**GOOD, "fresh process": "FAILED"}
    assert "out, lse, dq, dk, dv have other bytes in a new process" in report.checks[3].detail


def test_a_sum_of_two_has_no_order_and_a_longer_one_has():
    report = verified(Shape(seqlen=200, heads=1, head_dim=16))
    assert report.checks[-1].status is Status.PASSED
    assert report.checks[-1].detail.startswith(
        "this dq sums 2 contributions at most and hides their order; on 1 x "
    )


def test_the_command(capsys, tmp_path):
    line = "verify --device cpu --replays 1 --seqlen 140 --heads 1 --head-dim 8 --dtype float32"
    assert main(line.split()) == 0
    text = capsys.readouterr().out
    assert "PASSED: 1 shapes on cpu" in text
    assert all(name in text for name in CHECKS)
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps([{"seqlens": [3, 0, 9], "heads": 1, "head_dim": 8, "window": [2, -1]}]))
    assert main(["verify", "--device", "cpu", "--replays", "1", "--json", "--shapes", str(path)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["passed"] is True
    (shape,) = facts["shapes"]
    assert shape["shape"]["seqlens"] == [3, 0, 9]
    assert shape["facts"]["plan"]
    assert {check["name"]: check["status"] for check in shape["checks"]}["CUDA graph"] == "skipped"


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"kv_heads": 2}, "heads (3) must be a multiple of kv_heads (2)"),
        ({"policy": "foo"}, "unknown policy 'foo'"),
        ({"policy": "shift", "causal": True}, "shift needs a mask"),
        ({"backend": "sm90"}, "the sm90 backend does not run on cpu"),
    ],
)
def test_all_shapes_are_looked_at_before_one_is_verified(capsys, tmp_path, monkeypatch, second, message):
    monkeypatch.setattr(checks, "random_inputs", lambda *_: pytest.fail("it began"))
    like = {"seqlen": 300, "heads": 3, "head_dim": 8}
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps([like, like | second]))
    assert main(["verify", "--device", "cpu", "--shapes", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_failure_ends_with_one(capsys, monkeypatch):
    monkeypatch.setitem(checks.CHECKS, "accuracy", lambda subject: checks._compare("it", *subject.first[:2]))
    broken(monkeypatch, lambda call, results: nudged(results) if call == 2 else results)
    line = "verify --device cpu --replays 1 --seqlen 140 --heads 1 --head-dim 8 --dtype float32 --json"
    assert main(line.split()) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False


def test_no_lengths_of_keys_are_lengths():
    with pytest.raises(InputError, match="1 seqlens, but 0 seqlens_k"):
        Shape(seqlens=(3,), seqlens_k=(), heads=1, head_dim=8)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--seqlen 4 --seqlens 4", "give either seqlen or seqlens"),
        ("--heads 2", "give either seqlen or seqlens"),
        ("--seqlen 4 --heads 3 --kv-heads 2", "heads (3) must be a multiple of kv_heads (2)"),
        ("--seqlen 4 --window -2 0", "window must be (left, right), -1: unbounded; got (-2, 0)"),
        ("--seqlen 4 --replays 0", "replays must be >= 1, got 0"),
        ("--seqlens 4 5 --seqlens-k 4", "2 seqlens, but 1 seqlens_k"),
        ("--seqlen 4 --batch 0", "batch must be >= 1, got 0"),
        ("--seqlen 4 --batch -3", "batch must be >= 1, got -3"),
        ("--seqlen 400 --policy shift --mask causal", "shift needs a mask"),
        ("--seqlens 4 5 --batch 3", "batch 3 belongs to seqlen, not to seqlens"),
        ("--seqlens 4 5 --seqlen-k 3", "seqlen_k 3 belongs to seqlen, not to seqlens"),
        ("--seqlen 4 --seqlens-k 3", "seqlens_k (3,) belongs to seqlens, not to seqlen"),
        ("--seqlen 0", "seqlen must be >= 1, got 0"),
        (f"--seqlen 4 --seed {2**64}", f"seed must be an integer of 64 bits, got {2**64}"),
        ("--shapes missing.json", "missing.json"),
        ("--shapes missing.json --kv-heads 4", "--shapes missing.json and --kv-heads: give one of them"),
        ("--shapes missing.json --mask full", "--shapes missing.json and --mask: give one of them"),
    ],
)
def test_errors_name_the_value_and_end_with_two(capsys, line, message):
    assert main(["verify", "--device", "cpu", *line.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        (f'{{"seqlen": {"1" * 5000}}}', "is not JSON: Exceeds the limit"),
        ("[" * 100_000, "is not JSON: maximum recursion depth"),
        ("[]", "has no shapes"),
        ("[3]", "a shape must be a JSON object, got 3"),
        ('{"seqlen": 4, "hats": 2}', "unknown key 'hats'; known: batch, seqlen,"),
        ('{"heads": 2, "seqlens": []}', r"seqlens must have one length at least, got \[\]"),
        ('{"seqlens": 4}', "seqlens must be a list of integers, got 4"),
        ('{"seqlen": 4, "heads": "2"}', "heads must be an integer, got '2'"),
        ('{"seqlen": "4"}', "seqlen must be an integer, got '4'"),
        ('{"seqlen": 4, "causal": 1}', "causal must be true or false, got 1"),
        ('{"seqlen": 4, "mask": "window"}', "mask must be one of full, causal, got 'window'"),
        ('{"seqlen": 4, "mask": ["causal"]}', r"mask must be one of full, causal, got \['causal'\]"),
        (
            '{"seqlen": 4, "mask": "full", "causal": false}',
            "give either mask or causal, got 'full' and False",
        ),
    ],
)
def test_bad_files(tmp_path, text, message):
    path = tmp_path / "shapes.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_shapes(path)


def test_a_file_may_name_the_mask_as_the_flags_do(tmp_path):
    path = tmp_path / "shapes.json"
    path.write_text('[{"seqlen": 4, "mask": "causal", "window": [2, -1]}, {"seqlen": 4, "mask": "full"}]')
    assert read_shapes(path) == [Shape(seqlen=4, causal=True, window=(2, -1)), Shape(seqlen=4)]


def test_the_help_names_the_keys_of_a_file(capsys):
    values = {**Shape(seqlen=4).as_json(), "seqlen_k": 4, "kv_heads": 2, "head_dim_v": 64, "window": [1, 1]}
    for command in ("verify", "bench"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        listed = text.split("with the keys ")[1].split(";")[0].split(", ")
        assert {*values, "mask", "seqlens", "seqlens_k"} == set(listed)
    assert Shape.from_json(values).as_json() == {**values, "window": (1, 1)}


def test_a_file_that_is_no_text(capsys, tmp_path):
    path = tmp_path / "shapes.json"
    path.write_bytes(b"\xff\xfe{}")
    assert main(["verify", "--device", "cpu", "--shapes", str(path)]) == 2
    assert "shapes.json is not JSON" in capsys.readouterr().err

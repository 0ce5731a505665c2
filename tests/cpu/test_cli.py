"""The command line: its fixed interface, the closed forms through it, and its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from dash_attn.model import closed_form
from dash_attn.problem import Mask
from dash_attn.schedule import POLICIES
from dash_attn.tools.cli import main

Run = pytest.CaptureFixture[str]


def as_json(capsys: Run, line: str) -> dict[str, Any]:
    assert main(line.split()) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


MASKS = {"full": Mask.full(), "causal": Mask.causal()}
SIMULATE = (
    "simulate --mask {} --policy {} --tiles {} --heads {} --workers {} "
    "--compute {} --reduce {} --latency 0 --json"
)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_closed_forms_from_the_command_line(capsys: Run, mask: str, policy: str) -> None:
    compared = 0
    for n in range(2, 33):
        for m in range(1, 9):
            expected = closed_form(policy, MASKS[mask], n, m, 7, 3)
            if expected is not None:
                facts = as_json(capsys, SIMULATE.format(mask, policy, n, m, n, 7, 3))
                assert facts["makespan"] == expected, (n, m)
                assert facts["lower_bound"] <= expected
                compared += 1
    papers = {"fa3": {"full": 248, "causal": 248}, "shift": {"full": 248}, "descending": {"causal": 124}}
    papers["symmetric_shift"] = {"causal": 64}
    assert compared == papers.get(policy, {}).get(mask, 0)


def test_the_fixed_keys(capsys: Run) -> None:
    facts = as_json(
        capsys,
        "simulate --mask causal --policy symmetric_shift --tiles 8 --heads 2 --compute 5 --reduce 2 --json",
    )
    assert facts["makespan"] == facts["lower_bound"] == 63
    assert (facts["utilization"], facts["stall"], facts["min_workers"], facts["workers"]) == (1.0, 0.0, 4, 8)
    assert len(facts["fingerprint"]) == 64
    more_heads = as_json(capsys, "simulate --mask causal --policy symmetric_shift --tiles 8 --heads 6 --json")
    assert more_heads["fingerprint"] == facts["fingerprint"]


def test_preset_and_overrides(capsys: Run) -> None:
    facts = as_json(capsys, "simulate --preset h200 --seqlen 1024 --heads 8 --latency 5 --json")
    assert (facts["workers"], facts["costs"]["compute"], facts["costs"]["latency"]) == (132, 3400, 5)


def test_plan_of_a_window_with_grouped_heads(capsys: Run) -> None:
    facts = as_json(
        capsys,
        "plan --window 256 -1 --mask causal --seqlen 1000 --seqlen-k 2000 --heads 8 --kv-heads 2 --json",
    )
    assert (facts["mask"], facts["kv_heads"], facts["items"]) == ("window(256,0)", 2, 2 * 16)


def test_bounds(capsys: Run) -> None:
    facts = as_json(capsys, "bounds --mask causal --tiles 8 --heads 2 --compute 5 --reduce 2 --json")
    assert facts["lower_bounds"] == {"work": 63.0, "item": 56.0, "summation": 21.0}
    assert facts["policies"]["symmetric_shift"] == {"makespan": 63.0, "of_bound": 1.0, "closed_form": 63.0}
    assert "UnsupportedMaskError" in facts["policies"]["shift"]["error"]
    assert main(["bounds", "--mask", "full", "--tiles", "8"]) == 0
    assert "closed form" in capsys.readouterr().out


def test_doctor(capsys: Run) -> None:
    facts = as_json(capsys, "doctor --json")
    assert facts["cpu"].startswith("yes")
    assert {"python", "packages", "gpu", "pictures"} <= set(facts)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("simulate --tiles 0", "--tiles must be >= 1, got 0"),
        ("simulate --tiles 4 --heads 0", "heads must be an integer >= 1, got 0"),
        ("simulate --tiles 4 --heads 6 --kv-heads 4", "heads (6) must be a multiple of kv_heads (4)"),
        ("simulate --tiles 4 --compute -1", "compute must be finite and >= 0, got -1.0"),
        ("simulate --tiles 4 --reduce nan", "reduce must be finite and >= 0, got nan"),
        ("simulate --tiles 4 --workers 0", "workers must be an integer >= 1, got 0"),
        ("simulate --tiles 4 --policy shift --workers 3", "needs 4 resident workers"),
        ("simulate --tiles 4 --policy shift --mask causal", "shift needs a mask that leaves every task"),
        ("simulate --tiles 4 --policy fa3 --ring 2", "--ring only with --policy shift, got fa3"),
        ("plan", "give either --tiles or --seqlen"),
        ("plan --tiles 4 --seqlen-k 9", "--seqlen-k 9 belongs to --seqlen"),
        ("plan --tiles 4 --seqlen 4", "give either --tiles or --seqlen"),
        ("plan --seqlen -4", "seqlen_q of sequence 0 must be an integer >= 0, got -4"),
        ("plan --tiles 4 --window -2 0", "mask left must be None or an integer >= 0, got -2"),
        ("plan --tiles 4 --save plan.jpeg", ".jpeg"),
    ],
)
def test_errors_name_the_value_and_end_with_two(capsys: Run, line: str, message: str) -> None:
    assert main(line.split()) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.parametrize("line", ["", "simulate --policy best", "nonsense"])
def test_usage_errors(line: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == 2


COMMANDS = ["demo", "plan", "simulate", "trace", "bounds", "figures", "kernels", "verify", "bench", "doctor"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_that_runs(
    capsys: Run, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert "--json" in text
    example = text.split("example:")[1].split()
    assert example[:2] == ["dash-attn", command]
    if command not in ("demo", "trace", "figures", "kernels", "bench"):
        monkeypatch.chdir(tmp_path)
        assert main(example[1:]) == 0


def test_as_a_module() -> None:
    line = [sys.executable, "-m", "dash_attn", "simulate", "--tiles", "4", "--policy", "fa3", "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["makespan"] == 11

"""The command line: its fixed interface, the closed forms through it, and its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import Run, as_json

from dash_attn.model import closed_form
from dash_attn.model.output import check_writable
from dash_attn.problem import Mask
from dash_attn.schedule import POLICIES
from dash_attn.tools import limits
from dash_attn.tools.bench import Result, Settings
from dash_attn.tools.cli import main
from dash_attn.tools.shapes import Shape

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
    printed = capsys.readouterr().out
    assert "closed form" in printed
    assert "lower bounds for plans with 1 head group per kv head:" in printed


def test_bounds_name_the_head_groups_they_hold_for(capsys: Run) -> None:
    line = "bounds --mask causal --seqlen 1024 --heads 16 --kv-heads 1"
    groups = as_json(capsys, f"{line} --json")["head_groups"]
    plan = as_json(capsys, "plan --mask causal --seqlen 1024 --heads 16 --kv-heads 1 --json")
    assert groups == plan["head_groups"] > 1
    assert main(line.split()) == 0
    assert f"lower bounds for plans with {groups} head groups per kv head:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "shape",
    [
        "--window 300 0 --tiles 8 --heads 2",
        "--window 300 300 --tiles 8 --heads 2",
        "--mask causal --window 300 0 --tiles 8 --heads 2",
        "--mask causal --seqlen 1000 --seqlen-k 1020 --heads 2 --head-dim 64",
        "--mask causal --seqlen 1000 --seqlen-k 1200 --heads 2 --head-dim 64",
        "--mask causal --seqlen 1024 --heads 2 --head-dim 128",
        "--mask full --tiles 8 --heads 2 --kv-heads 1",
        "--mask full --tiles 8 --heads 2 --workers 9",
        "--mask full --tiles 8 --heads 2 --latency 1",
    ],
)
def test_no_closed_form_outside_the_papers_model(capsys: Run, shape: str) -> None:
    facts = as_json(capsys, f"bounds {shape} --compute 5 --reduce 2 --json")
    assert [row.get("closed_form") for row in facts["policies"].values()] == [None] * len(POLICIES)


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("costs", [(5, 2), (1, 3)])
def test_closed_forms_that_are_printed_hold(capsys: Run, mask: str, costs: tuple[int, int]) -> None:
    compared = 0
    for shape in ("--tiles 6 --batch 2 --heads 3", "--tiles 5 --heads 2", "--seqlen 1000 --head-dim 64"):
        facts = as_json(
            capsys, f"bounds --mask {mask} {shape} --compute {costs[0]} --reduce {costs[1]} --json"
        )
        for row in facts["policies"].values():
            if row.get("closed_form") is not None:
                assert row["closed_form"] == row["makespan"]
                compared += 1
    assert compared >= 4


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
        ("plan --tiles 4 --policy shift --ring 0", "shift: ring must be an integer >= 1, got 0"),
        ("simulate --tiles 4 --policy fa3 --ring 2", "--ring only with --policy shift, got fa3"),
        ("plan", "give either --tiles or --seqlen"),
        ("plan --tiles 4 --seqlen-k 9", "--seqlen-k 9 belongs to --seqlen"),
        ("plan --tiles 4 --seqlen 4", "give either --tiles or --seqlen"),
        ("plan --seqlen -4", "seqlen_q of sequence 0 must be an integer >= 0, got -4"),
        ("plan --tiles 4 --window -2 0", "mask left must be None or an integer >= 0, got -2"),
        ("plan --tiles 4 --save plan.jpeg", ".jpeg"),
        ("plan --tiles 100000", "10,000,000,000 tasks of one head, the limit is 1,073,741,824"),
        ("simulate --tiles 100000", "10,000,000,000 tasks of one head, the limit is 1,073,741,824"),
        ("bounds --tiles 100000", "10,000,000,000 tasks of one head, the limit is 1,073,741,824"),
        ("simulate --tiles 5000", "25,000,000 tasks to simulate, the limit is 20,000,000"),
        ("bounds --tiles 5000", "25,000,000 tasks to simulate, the limit is 20,000,000"),
        ("plan --tiles 5000 --save plan.svg", "25,000,000 tasks to simulate, the limit is 20,000,000"),
        ("plan --tiles 3000000 --window 0 0 --heads 2", "6,000,000 q tiles of all heads, the limit is"),
        ("plan --tiles 1 --batch 2000000000", "2,000,000,000 heads of all sequences, the limit is 2,097,152"),
        ("simulate --tiles 4 --workers 2000000", "2,000,000 workers, the limit is 1,048,576"),
    ],
)
def test_errors_name_the_value_and_end_with_two(capsys: Run, line: str, message: str) -> None:
    assert main(line.split()) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err


PRINTED = [
    "--mask full --tiles 40",  # rings with strides
    "--mask full --seqlen 4096 --head-dim 256",
    "--mask causal --tiles 8",
    "--mask causal --seqlen 1024 --head-dim 64",
    "--mask causal --tiles 8 --heads 4 --kv-heads 2",  # by_length
    "--mask causal --seqlen 1024 --head-dim 192 --heads 4 --kv-heads 2",  # lpt
    "--mask causal --tiles 8 --heads 4 --policy symmetric_shift",
    "--mask causal --tiles 8 --heads 4 --policy spt --placement lpt",
    "--mask full --tiles 8 --heads 4 --policy shift --ring 4 --stride 1",
]


@pytest.mark.parametrize("line", PRINTED)
def test_a_policy_that_is_printed_is_taken_back(capsys: Run, line: str) -> None:
    first = as_json(capsys, f"plan {line} --json")
    problem = line.partition(" --policy")[0].split()
    assert main(["plan", *problem, "--policy", first["policy"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == first


def test_what_was_printed_has_parameters_and_placements(capsys: Run) -> None:
    """So that the test above is not about plain names only."""
    names = {as_json(capsys, f"plan {line} --json")["policy"] for line in PRINTED}
    assert {"descending + lpt", "by_length(long_from=0, shift_from=8192)"} <= names
    assert {"shift(ring=16, min_stride=2, max_stride=2)", "spt + lpt"} <= names
    assert "shift(ring=4, stride=1)" in names


@pytest.mark.parametrize(
    "policy", ["shift(ring=4) + in_order", "fa3 + last_first", "spt + long_first(long_from=9)"]
)
def test_policies_of_every_form_are_taken(capsys: Run, policy: str) -> None:
    line = ["--tiles", "8", "--heads", "2", "--workers", "16", "--json", "--policy"]
    assert main(["simulate", *line, policy]) == 0
    assert json.loads(capsys.readouterr().out)["policy"] == policy


def test_shapes_take_a_printed_policy(capsys: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def bench(shape: Shape, settings: Settings, *_: object) -> Result:
        taken.extend([shape.policy, *settings.policies])
        return Result(shape, "a GPU", ())

    monkeypatch.setattr("dash_attn.tools.bench.require_gpu_for", lambda shape: None)
    monkeypatch.setattr("dash_attn.tools.bench.bench_shape", bench)
    names = ["descending + lpt", "shift(ring=16, min_stride=2, max_stride=4)", "spt"]
    assert main(["bench", "--seqlen", "512", "--json", "--policy", names[0], "--policies", *names[1:]]) == 0
    assert taken == names


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("plan --tiles 4 --policy", "unknown policy 'best'; known: auto, fa3, descending"),
        ("simulate --tiles 4 --policy", "unknown policy 'best'; known: auto, fa3, descending"),
        ("verify --policy", "unknown policy 'best'; known: auto, fa3, descending"),
        ("bench --policy", "unknown policy 'best'; known: auto, fa3, descending"),
        ("bench --policies spt", "unknown policy 'best'; known: auto, fa3, descending"),
    ],
)
def test_a_wrong_policy_is_named_beside_those_that_are_known(capsys: Run, flags: str, message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*flags.split(), "best"])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("descending + fast", "unknown placement 'fast'; known: policy, "),
        ("shift(ring=0)", "shift: ring must be an integer >= 1, got 0"),
        ("shift(ring=x)", "unknown policy 'shift(ring=x)'"),
        ("shift(rings=2)", "unknown policy 'shift(rings=2)'"),
    ],
)
def test_a_wrong_part_of_a_policy_is_named(capsys: Run, policy: str, message: str) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--tiles", "4", "--policy", policy])
    assert message in capsys.readouterr().err


def test_one_placement_only(capsys: Run) -> None:
    assert main(["plan", "--tiles", "4", "--policy", "spt + in_order", "--placement", "lpt"]) == 2
    assert "--placement lpt and --policy spt + in_order: give one of them" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["", "simulate --policy best", "nonsense"])
def test_usage_errors(line: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == 2


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:126] DefaultCPUAllocator: can't allocate memory: you"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_memory_is_no_difference_of_bytes(
    capsys: Run, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """An exit code of 1 would say that there was one."""
    from dash_attn.tools import doctor

    def fails() -> None:
        raise error

    monkeypatch.setattr(doctor, "examine", fails)
    assert main(["doctor"]) == 2
    assert "memory" in capsys.readouterr().err
    monkeypatch.setattr(doctor, "examine", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])


COMMANDS = [
    "demo",
    "plan",
    "simulate",
    "trace",
    "bounds",
    "figures",
    "precompile",
    "kernels",
    "verify",
    "bench",
    "doctor",
]


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
    if command not in ("demo", "trace", "figures", "precompile", "kernels", "bench"):
        monkeypatch.chdir(tmp_path)
        assert main(example[1:]) == 0


@pytest.mark.parametrize("command", ["plan", "simulate", "trace"])
def test_help_says_which_pass(capsys: Run, command: str) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--pass {backward,forward} which plan; one of the forward has no policy" in text


def never(*args: Any, **how: Any) -> Any:
    raise AssertionError("the work began before the target was checked")


@pytest.mark.parametrize(
    ("line", "work"),
    [
        ("plan --tiles 4 --save", "tools.schedules.plan_of"),
        ("simulate --tiles 4 --save", "tools.schedules.plan_of"),
        ("trace --tiles 4 --save", "tools.schedules.plan_of"),
        ("trace --pass forward --seqlen 512 --save", "tools.forward.build_forward_plan"),
        ("bench --seqlen 512 --save", "tools.bench.require_gpu_for"),
    ],
)
def test_targets_are_checked_before_the_work(
    capsys: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, work: str
) -> None:
    monkeypatch.setattr(f"dash_attn.{work}", never)
    (tmp_path / "file").touch()
    (tmp_path / "folder.svg").mkdir()
    for target in ("missing/a.svg", "file/a.svg", "folder.svg"):
        assert main([*line.split(), str(tmp_path / target)]) == 2
        assert f"cannot write {tmp_path / target}: " in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*line.split(), str(tmp_path / "a.svg")]) == 2
    assert "pip install 'dash-attn[plots]'" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.svg"]


def test_a_link_is_as_good_as_the_file_that_it_leads_to(capsys: Run, tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside.svg", tmp_path / "outside.svg"
    inside.symlink_to(tmp_path / "new.svg")
    outside.symlink_to(tmp_path / "missing" / "new.svg")
    assert main(["plan", "--tiles", "2", "--save", str(inside)]) == 0
    assert (tmp_path / "new.svg").stat().st_size
    assert main(["plan", "--tiles", "2", "--save", str(outside)]) == 2
    assert f"cannot write {outside}: No such file" in capsys.readouterr().err
    assert main(["kernels", "--hashes", "--save", str(tmp_path / "missing" / "hashes.json")]) == 2
    assert str(tmp_path / "missing" / "hashes.json") in capsys.readouterr().err
    os.mkfifo(tmp_path / "pipe")
    check_writable(tmp_path / "pipe")
    (tmp_path / "loop.svg").symlink_to(tmp_path / "loop.svg")
    assert main(["plan", "--tiles", "2", "--save", str(tmp_path / "loop.svg")]) == 2
    assert "Too many levels of symbolic links" in capsys.readouterr().err


def test_a_pipe_or_an_open_file_is_as_good_as_a_file_with_a_name(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    check_writable(Path(f"/dev/fd/{writer}"))
    os.close(reader)
    os.close(writer)
    with open(tmp_path / "file", "wb") as file:
        (tmp_path / "file").unlink()
        check_writable(Path(f"/dev/fd/{file.fileno()}"))


def test_many_tiles_are_announced(capsys: Run) -> None:
    assert main(["plan", "--tiles", "70000", "--window", "0", "0"]) == 0
    assert "planning 70,000 q tiles and 70,000 kv tiles ..." in capsys.readouterr().err


def test_folders_of_pictures_are_checked_before_the_work(
    capsys: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from dash_attn.model import figures
    from dash_attn.tools import demo

    monkeypatch.setattr(figures, "_FIGURES", dict.fromkeys(figures._FIGURES, never))
    monkeypatch.setattr(demo, "train", never)
    (tmp_path / "file").touch()
    (tmp_path / "full" / "fig7.svg").mkdir(parents=True)
    (tmp_path / "full" / "drift.png").mkdir()
    for line in ("figures", "demo --device cpu --output"):
        assert main([*line.split(), str(tmp_path / "file")]) == 2
        assert f"cannot make the folder {tmp_path / 'file'}: File exists" in capsys.readouterr().err
        assert main([*line.split(), str(tmp_path / "full")]) == 2
        assert f"cannot write {tmp_path / 'full'}/" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["plan --tiles 4", "bounds --tiles 4", "simulate --tiles 4"])
def test_long_work_is_announced_on_standard_error(
    capsys: Run, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    assert main([*line.split(), "--json"]) == 0
    assert not capsys.readouterr().err
    monkeypatch.setattr(limits, "LONG_HEAD_TASKS", 15)
    monkeypatch.setattr(limits, "LONG_SIMULATED_TASKS", 15)
    assert main([*line.split(), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)
    announced = printed.err.splitlines()
    assert announced[0] == "planning 16 tasks per head ..."
    assert len(announced) == {"plan": 1, "bounds": 1 + len(POLICIES), "simulate": 2}[line.split()[0]]
    assert all("simulating 16 tasks" in text for text in announced[1:])


def test_an_interrupt_ends_with_one_line_and_130(capsys: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dash_attn.tools.doctor.examine", interrupted)
    try:
        code = main(["doctor"])
    except KeyboardInterrupt:
        pytest.fail("the interrupt was not caught")
    assert code == 130
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "\ndash-attn doctor: interrupted\n")


def test_as_a_module() -> None:
    line = [sys.executable, "-m", "dash_attn", "simulate", "--tiles", "4", "--policy", "fa3", "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["makespan"] == 11

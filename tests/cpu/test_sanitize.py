"""How `make sanitize` judges what the tools print; the tools themselves need a GPU."""

from __future__ import annotations

import subprocess
from functools import cache
from typing import Any

import pytest
import torch

import sanitize
from dash_attn.backends.sm90.backward.config import BackwardConfig
from dash_attn.backends.sm90.cached.config import CachedConfig, ChunkConfig
from dash_attn.backends.sm90.compile import backward_variants, variants
from dash_attn.backends.sm90.forward.config import ForwardConfig
from dash_attn.backends.sm90.key_sums.config import KeySumsConfig
from dash_attn.backends.sm90.segments import check_sums
from dash_attn.backends.sm90.spread.config import SpreadConfig
from dash_attn.backends.sm90.tiles import kernel_of
from gpu_cases import CAUSAL, auto_plan, packed
from sanitize import (
    RACE_READERS,
    RACE_WRITERS,
    TOOLS,
    contributed,
    findings,
    inputs,
    kinds,
    plans,
    segment_of,
    sums_of,
)


def race(*accesses: tuple[str, str], kernel: str = "kernel_sm90Backward_1") -> str:
    """A hazard as racecheck prints it: (kind, offset) of the first access and of those after it."""
    (kind, place), *others = accesses
    lines = [f"========= Error: Race reported between {kind} access at {kernel}+{place}"]
    lines += [f"=========     and {kind} access at {kernel}+{place} [768 hazards]" for kind, place in others]
    return "\n".join([*lines, "========= ", ""])


def summary(hazards: int) -> str:
    return f"========= RACECHECK SUMMARY: {hazards} hazards displayed ({hazards} errors, 0 warnings)\n"


READ = ("Read", "0x4b50")
WRITES = ("0x1440", "0x1180", "0x1160", "0x4110", "0x44f0", "0x48d0", "0x4ca0")
READS = ("0x2410", "0x2470", "0xe7e0", "0xe8f0")
KNOWN = "".join(race(("Write", place), READ, ("Read", "0x4b90")) for place in WRITES)
KNOWN += "".join(race(("Read", place), ("Write", "0x40d0")) for place in READS)
DONE = "launched a, window\n"


def test_what_is_explained_is_no_finding() -> None:
    other = KNOWN.replace("0x1440", "0x1550").replace("0x2410", "0x2510")  # of another variant
    assert findings("racecheck", KNOWN + DONE + other + DONE + summary(22)) == []
    assert findings("racecheck", DONE + summary(0)) == []


@pytest.mark.parametrize(
    ("hazard", "message"),
    [
        (
            race(("Write", "0x2000"), READ),
            f"reads race with the writes at {', '.join(sorted([*WRITES, '0x2000']))} of",
        ),
        (
            race(("Read", "0x2000"), ("Write", "0x1440")),
            f"writes race with the reads at {', '.join(sorted([*READS, '0x2000']))} of",
        ),
        (race(("Write", "0x1440"), READ, ("Write", "0x10")), "Write at 0x1440 of"),
        (race(("Write", "0x10"), READ, kernel="kernel_Convert_1"), "0x10 of kernel_Convert_1"),
        (
            "".join(race(("Write", place), READ, kernel="kernel_Forward_1") for place in (*WRITES, "0x10")),
            "of kernel_Forward_1",
        ),
        (race(("Read", "0x10"), ("Write", "0x20"), kernel="kernel_Forward_1"), "0x10 of kernel_Forward_1"),
        (race(("Read", "0x10"), ("Write", "0x20"), kernel="kernel_Convert_1"), "0x10 of kernel_Convert_1"),
        *(
            (race(first, second, kernel=f"kernel_{name}_object_1"), f"0x10 of kernel_{name}_object_1")
            for name in CachedConfig.kernels
            if name != "Cached"
            for first, second in ((("Write", "0x10"), READ), (("Read", "0x10"), ("Write", "0x20")))
        ),
    ],
)
def test_any_other_race_is_a_finding(hazard: str, message: str) -> None:
    hazards = (KNOWN + hazard).count("Race reported")
    (found,) = findings("racecheck", DONE + KNOWN + hazard + DONE + summary(hazards))
    assert message in found


def test_main_kernels_have_numbers_of_their_own() -> None:
    """What a main kernel is excused for was looked up in its code, and is not that of another kernel."""
    configs = (
        BackwardConfig(64, padded=True, intervals=True),
        ForwardConfig(64, intervals=True),
        CachedConfig,
        ChunkConfig,
        SpreadConfig,
    )
    for config in configs:
        main = "Chunk" if config is ChunkConfig else config.direction.capitalize()
        assert main in config.kernels
        mangled = [f"{name}_object" for name in config.kernels]
        for table in (RACE_WRITERS, RACE_READERS):
            assert [name for name in table if any(f"{name}_" in x for x in mangled)] == [main]
    assert len(RACE_WRITERS) == len(RACE_READERS) == len(configs)


def test_the_forward_is_excused_for_seven_stores() -> None:
    stores = "".join(race(("Write", place), READ, kernel="kernel_Forward_1") for place in WRITES)
    assert findings("racecheck", stores + DONE + summary(7)) == []


@pytest.mark.parametrize("kernel", ["kernel_Backward_1", "kernel_Forward_1"])
def test_intervals_are_excused_for_one_store_more(kernel: str) -> None:
    stores = "".join(race(("Write", place), READ, kernel=kernel) for place in (*WRITES, "0x1170"))
    of_intervals = DONE.replace("launched a", "launched a-intervals")
    assert findings("racecheck", stores + of_intervals + summary(8)) == []
    assert len(findings("racecheck", stores + DONE + summary(8))) == 1
    one_more = stores + race(("Write", "0x10"), READ, kernel=kernel)
    assert len(findings("racecheck", one_more + of_intervals + summary(9))) == 1
    others = race(("Write", "0x10"), READ, kernel="kernel_MarkSeen_1")
    assert len(findings("racecheck", others + of_intervals + summary(1))) == 1


def test_cached_is_excused_for_five_stores_and_one_read() -> None:
    def of_cached(first: str, *places: str) -> str:
        second = ("Read" if first == "Write" else "Write", "0x10")
        return "".join(race((first, place), second, kernel="kernel_Cached_object_1") for place in places)

    known = of_cached("Write", *WRITES[:5]) + of_cached("Read", READS[0])
    assert findings("racecheck", known + DONE + summary(6)) == []
    for more in (of_cached("Write", WRITES[5]), of_cached("Read", READS[1])):
        assert len(findings("racecheck", known + more + DONE + summary(7))) == 1


def test_spread_is_excused_for_one_load_that_is_unrolled() -> None:
    loads = "".join(race(("Write", f"0xf{n}0"), READ, kernel="kernel_Spread_object_1") for n in range(8))
    other = race(("Write", "0xf80"), READ, kernel="kernel_Spread_object_1")
    assert findings("racecheck", loads + DONE + summary(8)) == []
    assert len(findings("racecheck", loads + other + DONE + summary(9))) == 1
    fold = other.replace("Spread", "SpreadFold")
    assert len(findings("racecheck", fold + DONE + summary(1))) == 1


@pytest.mark.parametrize("end", ["", summary(4), summary(11).replace("(11", "(96")])
def test_reports_that_were_not_understood_are_a_finding(end: str) -> None:
    (found,) = findings("racecheck", KNOWN + DONE + end)
    assert found.startswith("11 reports, of which racecheck's summary says")


@pytest.mark.parametrize(
    ("tool", "line"),
    [
        ("memcheck", "Invalid __global__ read of size 4 bytes"),
        ("initcheck", "Uninitialized __global__ memory read of size 4 bytes"),
        ("synccheck", "Barrier error detected. Divergent thread(s) in warp"),
    ],
)
def test_an_error_of_a_tool_is_a_finding(tool: str, line: str) -> None:
    log = f"========= COMPUTE-SANITIZER\n{DONE}========= {line}\n========= ERROR SUMMARY: 1 error\n"
    assert findings(tool, log) == [line]
    assert findings(tool, f"{DONE}========= something new\n========= ERROR SUMMARY: 1 error\n") == [
        "1 errors"
    ]
    assert findings(tool, DONE) == ["no errors summary"]
    assert findings(tool, f"{DONE}========= ERROR SUMMARY: 0 errors\n") == []


def test_kinds_are_all_variants() -> None:
    found = kinds(variants())
    assert sorted(name for names in found.values() for name in names) == sorted(variants())
    assert found["sinks"] == ["sinks"]
    assert len(found["backward-d64-bf16"]) == 40
    assert max(map(len, found.values())) == 40


def test_each_tool_runs_over_each_kind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, list[str]]] = []

    def run(command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        tool, names = command[command.index("--tool") + 1], command[command.index("--launch") + 1 :]
        ran.append((tool, names))
        error = "========= Invalid __global__ read of size 4 bytes\n" if "sinks" in names else ""
        log = f"{DONE}{error}========= ERROR SUMMARY: {len(error) // 50} errors\n"
        return subprocess.CompletedProcess(command, 0, log)

    class Here:  # in place of a pool of processes
        def __init__(self, jobs: int) -> None:
            self.map = lambda function, names, chunksize: None

        def __enter__(self) -> Here:
            return self

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(sanitize.shutil, "which", lambda name: name)
    monkeypatch.setattr(sanitize.subprocess, "run", run)
    monkeypatch.setattr(sanitize, "get_context", lambda how: type("Context", (), {"Pool": Here}))
    tools = ["memcheck", "initcheck"]
    assert sanitize.main(["--jobs", "3", "--only", "spread-d64", "--tools", *tools]) == 0
    names = {name for name in variants() if "spread-d64" in name}
    for tool in tools:
        assert sorted(name for of, here in ran if of == tool for name in here) == sorted(names)
    assert len(ran) == 4
    assert capsys.readouterr().out.count("1 launches, 0 findings") == 4
    assert sanitize.main(["--only", "sinks", "--tools", "memcheck"]) == 1
    assert "memcheck, sinks: 1 launches, 1 findings\n  Invalid __global__ read" in capsys.readouterr().out
    for wrong in (["--jobs", "0"], ["--launch", "nobody"], ["--only", "nobody"]):
        with pytest.raises(SystemExit):
            sanitize.main(wrong)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_run_that_launched_nothing_is_a_finding(tool: str) -> None:
    assert findings(tool, "========= ERROR SUMMARY: 0 errors\n") == ["nothing was launched"]


def test_the_launches_cover_what_the_kernels_do_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "cuda", lambda x: x)
    product = dict(plans(BackwardConfig(64)))
    assert set(product) == {"window", "rings", "packed", "head groups", "head after head"}
    assert product["head after head"].pattern(0).passes == 2
    assert product["rings"].min_workers == 3
    assert product["head groups"].group_sum_first[-1] > 0
    assert (0, 0) in product["packed"].problem.sequences
    given = cache(inputs)
    for name, config in backward_variants().items():
        for label, plan in plans(config):
            _, q, k, _, _, lse = given(plan.problem)
            rows = sum(seqlen_q for seqlen_q, _ in plan.problem.sequences)
            assert q.shape[:-2].numel() == rows, (name, label)
            assert lse.numel() == rows * plan.problem.heads
            assert k.shape[-2] == plan.problem.kv_heads


def test_backwards_are_launched_with_tensors_that_they_run_on() -> None:
    """And not a smaller kernel in their place."""
    for name, config in variants().items():
        if isinstance(config, BackwardConfig | KeySumsConfig):
            problem = segment_of(config).problem
            found = kernel_of(problem.head_dim, problem.head_dim_v)
            assert found == (config.head_dim, config.head_dim_v, config.padded), name


def test_dumped_places_that_nobody_contributes_are_left_out() -> None:
    plan = auto_plan(packed(130, (0, 100), 300, mask=CAUSAL, heads=2, kv_heads=1, head_dim=64))
    # q tiles of 128 rows, of both heads: 2 of the first sequence, 3 of the last. A tile gets contributions of
    # the kv tiles up to it.
    counts = 2 * [1, 2] + 2 * [1, 2, 3]
    dumped = torch.full((len(counts), 4, 128, 64), torch.nan)
    for tile, count in enumerate(counts):
        dumped[tile, :count] = tile
    found = contributed(plan, dumped)
    assert found[:, 0, 0].tolist() == [tile for tile, count in enumerate(counts) for _ in range(count)]
    dumped[3, 1, 127, 63] = torch.nan
    assert not contributed(plan, dumped).isfinite().all()


@pytest.mark.parametrize("name", [name for name, c in variants().items() if getattr(c, "key_sums", False)])
def test_segments_have_sums_of_every_item(name: str) -> None:
    plan = segment_of(variants()[name])
    check_sums(plan, sums_of(plan, torch.zeros(1, dtype=torch.bfloat16)))

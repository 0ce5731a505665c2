"""What ``dash-attn precompile`` compiles is what calls launch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from cli_cases import as_json
from emulator import backend as emulator

import dash_attn
from dash_attn.backends.cuda.cache import NOT_KEPT
from dash_attn.backends.sm90.backend import why_no_kernel
from dash_attn.backends.sm90.compile import Config, variants
from dash_attn.backends.sm90.kinds import programs_of
from dash_attn.problem import Problem
from dash_attn.scores import Scores
from dash_attn.tools import precompile
from dash_attn.tools.cli import main

PLAIN = Scores(1.0)
SCORES = {
    "plain": PLAIN,
    "softcap": Scores(1.0, softcap=30.0),
    "sink": Scores(1.0, sink=True),
    "intervals": Scores(1.0, row_intervals=True),
    "intervals and sink": Scores(1.0, sink=True, row_intervals=True),
    "softcap and sink": Scores(1.0, softcap=30.0, sink=True),
}


def of(head_dim: int, head_dim_v: int | None = None, dtype: str = "bfloat16") -> Problem:
    of_v = head_dim if head_dim_v is None else head_dim_v
    return Problem.dense(seqlen=1, head_dim=head_dim, head_dim_v=of_v, dtype=dtype)


@pytest.fixture
def launched() -> Iterator[set[Config]]:
    """Configurations of what is launched, and nothing runs."""
    found: set[Config] = set()

    def program(config: Config, *_: Any) -> Any:
        found.add(config)
        return lambda *arguments: None

    with mock.patch.object(emulator, "Emulated", program):
        yield found


def train(
    head_dim: int, scores: Scores, seqlen: int = 200, rows: int = 0, heads: int = 2, **how: Any
) -> None:
    """One kv head. ``rows``: of q, by default as many as keys."""
    q, k, v = (
        torch.zeros(1, length, number, head_dim, dtype=torch.bfloat16, requires_grad=True)
        for length, number in ((rows or seqlen, heads), (seqlen, 1), (seqlen, 1))
    )
    if scores.sink:
        how["learnable_sink"] = torch.zeros(heads, requires_grad=True)
    if scores.row_intervals:
        how["row_ends"] = torch.full((1, seqlen), seqlen, dtype=torch.int32)
    out = dash_attn.flash_attn_func(q, k, v, softcap=scores.softcap, backend="sm90", causal=True, **how)
    out.sum().backward()


def serve(head_dim: int, scores: Scores) -> None:
    """Few rows, many, and chunks; keys without pages, and in pages of 16 and 64."""
    for rows, page in product((1, 40, 600, 2000), (None, 16, 64)):
        q = torch.zeros(1, rows, 4, head_dim, dtype=torch.bfloat16)
        pages, size = (1, 2048) if page is None else (2048 // page, page)
        k, v = (torch.zeros(pages, size, 2, head_dim, dtype=torch.bfloat16) for _ in range(2))
        table = None if page is None else torch.arange(pages, dtype=torch.int32)[None]
        used = torch.tensor([2048], dtype=torch.int32)
        sink = torch.zeros(4) if scores.sink else None
        dash_attn.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=used, page_table=table, causal=True, softcap=scores.softcap,
            learnable_sink=sink, backend="sm90",
        )  # fmt: skip


def calls(head_dim: int, scores: Scores) -> None:
    for apart, turns, heads in product((False, True), (False, True), (1, 2)):
        with emulator.emulated(blocks=132, apart=apart, turns=turns):
            train(head_dim, scores, heads=heads)
            if not scores.row_intervals:
                train(head_dim, scores, heads=heads, q_segment=128)
    with emulator.emulated(blocks=132, narrow=True):
        train(head_dim, scores)
    with emulator.emulated(blocks=132):
        train(head_dim, scores, seqlen=1024, heads=8)  # sums of head groups
        train(head_dim, scores, seqlen=17_000, rows=64)  # keys of few rows in segments
    with emulator.emulated(blocks=132, apart=True):
        train(head_dim, scores, seqlen=3000)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("head_dims", [(64, 64), (72, 72), (80, 80), (88, 88), (128, 128), (256, 256)])
def test_calls_launch_nothing_else(launched: set[Config], head_dims: tuple[int, int], name: str) -> None:
    scores = SCORES[name]
    if why_no_kernel(of(*head_dims), scores):
        pytest.skip("there is no kernel")
    calls(head_dims[0], scores)
    found = programs_of(of(*head_dims), scores)
    assert launched <= {*found.values()}
    # Only ranks that share a sequence add sums to sums.
    assert {name for name, config in found.items() if config not in launched} <= {"add-sums"}


@pytest.mark.parametrize("name", ["plain", "softcap", "sink"])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192])
def test_calls_over_a_cache_launch_nothing_else(launched: set[Config], head_dim: int, name: str) -> None:
    problem, scores = of(head_dim), SCORES[name]
    for blocks in (1, 132):  # keys are spread where there are many
        with emulator.emulated(blocks=blocks):
            serve(head_dim, scores)
    training = {*programs_of(problem, scores).values()}
    found = {*programs_of(problem, scores, cached=True).values()} - training
    assert launched == found


def test_every_program_has_a_kind() -> None:
    """But those of debugging, and those without order."""
    found: set[Config] = set()
    dims = [(n, n) for n in (48, 64, 72, 80, 88, 96, 112, 128, 160, 256)] + [(192, 128), (184, 128)]
    for (head_dim, of_v), scores, dtype in product(dims, SCORES.values(), ("bfloat16", "float16")):
        problem = of(head_dim, of_v, dtype)
        if not why_no_kernel(problem, scores):
            found |= {*programs_of(problem, scores, cached=True).values()}
    left = {name for name, config in variants().items() if config not in found}
    others = "unordered", "bounded", "contributions", "trace"
    assert not {name for name in left if not name.endswith(others)}
    assert len(left) < len(found)


def test_the_command_keeps_what_it_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cutlass")
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("DASH_ATTN_CACHE_DIR", str(folder))
    monkeypatch.setattr(precompile, "programs_of", lambda *_, **__: {"add-sums": variants()["add-sums"]})
    facts = as_json(capsys, "precompile --jobs 1 --json")
    (entry,) = folder.iterdir()
    assert facts["folder"] == str(folder)
    assert list(facts["programs"]) == ["add-sums"]
    written = entry.stat().st_mtime_ns
    assert main(["precompile", "--jobs", "2"]) == 0
    assert "1 programs are in" in capsys.readouterr().out
    assert [x.stat().st_mtime_ns for x in folder.iterdir()] == [written]


def test_a_program_that_is_not_kept_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: the one that compiles cannot be told to fail."""
    monkeypatch.setenv("DASH_ATTN_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(precompile, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    for message in NOT_KEPT:
        monkeypatch.setattr(
            precompile, "program", lambda _, said=message: warnings.warn(f"{said}: full", RuntimeWarning, 1)
        )
        assert main(["precompile"]) == 2
        assert f"dash-attn precompile: {message}: full" in capsys.readouterr().err


def test_a_process_that_is_killed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DASH_ATTN_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(precompile, "_seconds", os._exit)
    monkeypatch.setattr(precompile, "programs_for", lambda _: {"a": 1, "b": 1})
    assert main(["precompile", "--jobs", "2"]) == 2
    assert "one of 2 processes that compiled was killed, which happens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--head-dim 100", "head_dim 100 is not supported by sm90"),
        ("--dtype float32", "dtype float32 is not supported by sm90"),
        ("--softcap --intervals", "row_starts and row_ends beside softcap"),
        ("--head-dim 192 --head-dim-v 128 --softcap", "is not supported by sm90 at head_dim 192 (V: 128)"),
        ("--jobs 0", "--jobs must be >= 1, got 0"),
    ],
)
def test_what_cannot_be_compiled_is_named(
    flags: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precompile, "compiled", mock.Mock(side_effect=AssertionError("it began")))
    assert main(["precompile", *flags.split()]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_that_keeps_nothing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("DASH_ATTN_CACHE_DIR", str(shared))
    assert main(["precompile"]) == 2
    assert f"kernels cannot be kept in {shared}" in capsys.readouterr().err

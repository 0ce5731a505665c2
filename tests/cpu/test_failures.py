"""What is missing or goes wrong around the kernels ends in a message that names it; the next call works."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dash_attn.backends.base import Tensors
from dash_attn.backends.sm90 import backend, launch, resident
from dash_attn.backends.sm90 import compile as compiling
from dash_attn.backends.sm90.backend import BACKEND
from dash_attn.backends.sm90.backward.config import BackwardConfig
from dash_attn.backends.sm90.compile import Config
from dash_attn.backends.sm90.compile import program as compiled
from dash_attn.errors import (
    CompilationError,
    DashError,
    HandOverError,
    InputError,
    MissingCompilerError,
    TooFewWorkersError,
)
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import FA3, Policy, Shift, build_plan
from dash_attn.scores import Scores

CONFIG = BackwardConfig(64)


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASH_ATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling._PROGRAMS, "_functions", {})


@pytest.mark.parametrize("missing", ["cutlass", "cutlass.cute", "tvm_ffi"])
def test_a_missing_compiler_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    pytest.importorskip("tvm_ffi")
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "dash_attn.backends.sm90.backward.program", raising=False)
    with pytest.raises(MissingCompilerError, match=r"pip install 'dash-attn\[cuda\]'") as caught:
        compiled(CONFIG)
    assert missing.partition(".")[0] in str(caught.value)
    assert isinstance(caught.value, DashError)


@pytest.mark.filterwarnings("default")
def test_a_compiler_that_fails_is_named_with_the_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    cute = pytest.importorskip("cutlass.cute")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("ptxas died")

    with monkeypatch.context() as patched:
        patched.setattr(cute, "compile", fail)
        with pytest.raises(CompilationError, match=r"BackwardConfig\(head_dim=64.*sm_90a.*ptxas died"):
            compiled(CONFIG)
    monkeypatch.setattr(compiling._PROGRAMS, "_compile", lambda config: Exported())
    assert isinstance(compiled(CONFIG), Exported)


class Exported:
    def export_to_c(self, path: str, name: str) -> None:
        with open(path, "w") as file:
            file.write(name)


@pytest.mark.parametrize(("capability", "name"), [((8, 0), "sm_80"), ((10, 0), "sm_100"), ((9, 1), "sm_91")])
def test_an_unsupported_gpu_is_named(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str
) -> None:
    monkeypatch.setattr(backend, "_capability", lambda device: capability)
    problem = Problem.dense(seqlen=256, heads=2, head_dim=64)
    reason = BACKEND.why_not(problem, torch.device("cuda", 1), False)
    assert reason == f"cuda:1 is {name}; the sm90 kernels are for Hopper"


class Allocator:
    """A device's memory: allocations fail after some, until it is given more."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed

    def of(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """A function of PyTorch that allocates, on this device."""

        def allocated(*what: object, **how: object) -> torch.Tensor:
            if not self.allowed:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            self.allowed -= 1
            return make(*what, **how)

        return allocated


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The launcher on the CPU: instead of a launch of the main kernel, its number of blocks is noted."""
    found: list[int] = []

    def program(config: Config) -> Callable[..., None]:
        return lambda *a: found.append(a[-3]) if isinstance(config, BackwardConfig) else None

    monkeypatch.setattr(launch, "program", program)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "in_turn", lambda device: nullcontext())  # tested in test_turns.py
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(resident, "Upload", lambda *_: SimpleNamespace(use=lambda: [None]))
    return found


@pytest.mark.parametrize("allowed", range(4))
def test_out_of_memory_launches_nothing_and_the_next_call_works(
    monkeypatch: pytest.MonkeyPatch, launches: list[int], allowed: int
) -> None:
    """Whichever allocation of a call fails: the workspace, or one of the gradients."""
    arguments = call(FA3())
    allocator = Allocator(allowed)
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, allocator.of(getattr(torch, name)))
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        launch.run_backward(*arguments)
    assert launches == []
    allocator.allowed = 4
    launch.run_backward(*arguments)
    assert (launches, allocator.allowed) == ([16], 0)


def call(policy: Policy, head_dim: int = 64) -> tuple[Any, ...]:
    """Arguments of a backward of 16 items, 8 kv tiles of 2 heads: a block for each. 256 columns: of 32."""
    plan = build_plan(Problem.dense(seqlen=1024, heads=2, head_dim=head_dim, mask=Mask.full()), policy)
    q = torch.zeros(1, 1024, 2, head_dim, dtype=torch.bfloat16)
    return (plan, Tensors(q, q, q, q, q, torch.zeros(1, 2, 1024)), 0.125)


def test_a_ring_gets_no_more_blocks_than_the_stream_has_sms(
    monkeypatch: pytest.MonkeyPatch, launches: list[int]
) -> None:
    """The device may have 132 SMs and a green context few of them."""
    ring = call(Shift())
    assert ring[0].min_workers == 8
    for sms in (132, 8):
        monkeypatch.setattr(launch, "usable_multiprocessors", lambda device, sms=sms: sms)
        launch.run_backward(*ring)
        launch.run_backward(*ring, workers=9)
    assert launches == [16, 9, 8, 8]
    monkeypatch.setattr(launch, "usable_multiprocessors", lambda device: 7)
    with pytest.raises(TooFewWorkersError, match="needs 8 resident workers .* got 7"):
        launch.run_backward(*ring)
    launch.run_backward(*ring, ordered=False)
    launch.run_backward(*ring, apart=True)
    assert launches[4:] == [16, 16], "where nobody waits"


def test_calls_with_few_items_do_not_wait_where_there_are_such_kernels(
    monkeypatch: pytest.MonkeyPatch, launches: list[int]
) -> None:
    """Others have none, or are asked for another one."""
    asked: list[bool] = []
    kept = launch.program

    def program(config: Config) -> Callable[..., None]:
        if isinstance(config, BackwardConfig):
            asked.append(config.apart)
        return kept(config)

    monkeypatch.setattr(launch, "program", program)
    monkeypatch.setattr(launch, "usable_multiprocessors", lambda device: 132)
    scale = 0.125
    rows = (torch.zeros(1, 1024, dtype=torch.int32),) * 2
    capped = {"scores": Scores(scale, softcap=20.0)}
    ways: list[tuple[int, dict[str, Any], bool]] = [
        (64, {}, True), (64, capped, True), (256, {}, True), (256, capped, False),
        (64, {"apart": False}, False), (64, {"workers": 16}, False), (64, {"ordered": False}, False),
        (64, {"rows": rows}, False), (64, {"debug": launch.Debug(bounded=True)}, False),
    ]  # fmt: skip
    for head_dim, way, apart in ways:
        plan, tensors, _ = call(Shift(), head_dim)  # a plan keeps the variants that it was launched with
        launch.run_backward(plan, tensors, **{"scores": scale, "apart": None} | way)
        assert asked.pop() == apart
    with pytest.raises(InputError, match="apart=True beside ordered=False"):
        launch.run_backward(plan, tensors, scale, apart=True, ordered=False)


def test_a_plan_that_one_worker_can_run_does_not_ask_for_sms(
    monkeypatch: pytest.MonkeyPatch, launches: list[int]
) -> None:
    monkeypatch.setattr(launch, "usable_multiprocessors", lambda device: pytest.fail("asked"))
    launch.run_backward(*call(FA3()))
    assert launches == [16]


@pytest.mark.parametrize(
    ("asked", "debug"),
    [
        ("", None),
        ("bounded", launch.Debug(bounded=True)),
        ("bounded,trace", launch.Debug(bounded=True, trace=True)),
    ],
)
def test_debugging_by_the_environment(monkeypatch: pytest.MonkeyPatch, asked: str, debug: object) -> None:
    monkeypatch.setenv("DASH_ATTN_DEBUG", asked)
    backend._debug.cache_clear()
    assert backend._debug() == debug
    backend._debug.cache_clear()


@pytest.mark.parametrize("asked", ["trace", "bound", "bounded, trace", "1"])
def test_an_unknown_wish_for_debugging(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv("DASH_ATTN_DEBUG", asked)
    backend._debug.cache_clear()
    with pytest.raises(InputError, match=f"must be bounded, or bounded,trace; got '{asked}'"):
        backend._debug()


def test_a_wait_that_gave_up_is_named_and_its_trace_is_kept() -> None:
    errors = torch.tensor([1, 2, 3, 4, 5, 6, 1, 0], dtype=torch.int32)
    what = "sequence 2, q head 3, kv tile 4, q tile 5: waited for ticket 6, the counter stayed at 1"
    with pytest.raises(HandOverError) as caught:
        launch.check_hand_overs(errors, None)
    assert str(caught.value) == what
    trace = torch.zeros(3, 2, 4, dtype=torch.int64)
    trace[0, :, 2] = 7
    with pytest.raises(HandOverError, match=f"{what}; 2 contributions were made until then") as caught:
        launch.check_hand_overs(errors, trace)
    path = Path(str(caught.value).rpartition(" is in ")[2])
    assert np.array_equal(np.load(path), trace.numpy())
    path.unlink()
    launch.check_hand_overs(torch.zeros(8, dtype=torch.int32), trace)

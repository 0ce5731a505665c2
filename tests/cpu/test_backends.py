"""Which backend runs a call: what is asked for, or the first one that covers it, and why not others."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from absent_gpu import absent_gpu
from torch import Tensor

from dash_attn import (
    attention,
    fingerprints,
    flash_attn_func,
    flash_attn_varlen_func,
    is_supported,
    plan_for,
)
from dash_attn.api import apply_plan
from dash_attn.backends import base
from dash_attn.backends.base import AUTO, BACKENDS, backend_named, backends_for
from dash_attn.backends.cached import CachedProblem
from dash_attn.backends.cpu.backend import _CPU
from dash_attn.backends.sm90 import backend as sm90
from dash_attn.backends.triton import tiles
from dash_attn.errors import InputError
from dash_attn.ops import policies
from dash_attn.problem import Problem
from dash_attn.schedule.constants import TRITON_VERSION
from dash_attn.testing import assert_same_bytes

CPU = torch.device("cpu")


@pytest.fixture
def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 200, heads, 32, generator=generator) for heads in (4, 2, 2)]


def test_names_are_those_of_the_backends() -> None:
    assert {name: backend_named(name).name for name in BACKENDS} == {name: name for name in BACKENDS}
    assert {name for names in AUTO.values() for name in names} == set(BACKENDS)


@pytest.mark.parametrize("wrong", ["gpu", "", None, 1, ["cpu"]])
def test_a_wrong_name_is_named(tensors: list[Tensor], wrong: object) -> None:
    message = f"backend must be auto, cpu, sm90, triton, got {wrong!r}"
    for function in (attention, flash_attn_func, plan_for, fingerprints):
        with pytest.raises(InputError) as raised:
            function(*tensors, backend=wrong)
        assert str(raised.value) == message
    assert is_supported(*tensors, backend=wrong).reason == message
    with pytest.raises(InputError) as raised:
        apply_plan(plan_for(*tensors), *tensors, 1.0, backend=wrong)
    assert str(raised.value) == message


def test_asking_for_what_auto_chooses_changes_nothing(tensors: list[Tensor]) -> None:
    assert is_supported(*tensors).backend == is_supported(*tensors, backend="cpu").backend == "cpu"
    assert_same_bytes(attention(*tensors), attention(*tensors, backend="cpu"))
    assert fingerprints(*tensors) == fingerprints(*tensors, backend="cpu")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sm90", "the sm90 backend does not run on cpu"),
        ("triton", "the triton backend (does not run on cpu|needs Triton).*"),
    ],
)
def test_no_other_backend_than_the_one_asked_for(tensors: list[Tensor], name: str, reason: str) -> None:
    ends = torch.tensor([0, 200], dtype=torch.int32)
    packed = [x[0] for x in tensors]
    with pytest.raises(InputError, match=reason):
        attention(*tensors, backend=name)
    with pytest.raises(InputError, match=reason):
        flash_attn_varlen_func(*packed, ends, ends, backend=name)
    with pytest.raises(InputError, match=reason):
        apply_plan(plan_for(*tensors), *tensors, 1.0, backend=name)
    assert not is_supported(*tensors, backend=name)


def test_the_cpu_backend_refuses_other_devices() -> None:
    problem = Problem.dense(seqlen=10, head_dim=64)
    reason = backend_named("cpu").why_not(problem, torch.device("cuda", 0), False)
    assert reason == "the cpu backend does not run on cuda:0"


class _Picky(_CPU):
    """Covers one head dim, with tiles of its own."""

    name: ClassVar[str] = "picky"

    def why_not(self, problem: Problem, device: torch.device, packed: bool, scores: object = None) -> str:
        return "" if problem.head_dim == 32 else f"head_dim {problem.head_dim} is not 32"

    def tiles(self, head_dim: int, head_dim_v: int) -> tuple[int, int]:
        return 32, 64


@pytest.fixture
def picky(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A backend that auto asks before the CPU's."""
    monkeypatch.setitem(BACKENDS, "picky", ".picky")
    monkeypatch.setitem(AUTO, "cpu", ("picky", "cpu"))
    found = base.import_module
    module = SimpleNamespace(BACKEND=_Picky())
    monkeypatch.setattr(
        base, "import_module", lambda name, package: module if name == ".picky" else found(name, package)
    )
    _forget()
    yield
    _forget()


def _forget() -> None:
    """Calls that were accepted with other backends."""
    for clear in policies._FORGET:
        clear()


@pytest.mark.usefixtures("picky")
def test_auto_takes_the_first_one_that_covers_a_call(tensors: list[Tensor]) -> None:
    wider = [torch.cat([x, x], 3) for x in tensors]
    assert [backend.name for backend in backends_for(CPU)] == ["picky", "cpu"]
    assert (is_supported(*tensors).backend, is_supported(*wider).backend) == ("picky", "cpu")
    assert (plan_for(*tensors).problem.tile_m, plan_for(*wider).problem.tile_m) == (32, 128)
    assert plan_for(*tensors, backend="cpu").problem.tile_m == 128
    assert attention(*wider).shape == wider[0].shape


@pytest.mark.usefixtures("picky")
def test_where_none_covers_a_call_each_says_why(
    monkeypatch: pytest.MonkeyPatch, tensors: list[Tensor]
) -> None:
    monkeypatch.setattr(_CPU, "why_not", lambda *_, **how: "no time")
    wider = [torch.cat([x, x], 3) for x in tensors]
    assert is_supported(*wider).reason == "picky: head_dim 64 is not 32; cpu: no time"
    assert is_supported(*wider, backend="cpu").reason == "no time"


# A Hopper GPU that is not there


def of_head_dim(head_dim: int = 64) -> Tensor:
    return torch.zeros(1, 256, 4, head_dim, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("installed", "missing"),
    [
        ((), "nvidia-cutlass-dsl and apache-tvm-ffi"),
        (("cutlass",), "apache-tvm-ffi"),
        (("tvm_ffi",), "nvidia-cutlass-dsl"),
    ],
)
def test_without_the_compiler_auto_takes_triton_and_says_so(installed: tuple[str, ...], missing: str) -> None:
    pytest.importorskip("triton")
    with absent_gpu(installed=lambda module: module in installed or None):
        q, wide = of_head_dim(), of_head_dim(256)
        assert is_supported(q, q, q).backend == "triton"
        assert fingerprints(q, q, q, causal=True).backend == "triton"
        found, other = (backend_named(name).tiles(256, 256) for name in ("triton", "sm90"))
        assert plan_for(wide, wide, wide).problem.tile_n == found[1] != other[1]
        reason = f"the sm90 backend needs {missing}: pip install 'dash-attn[cuda]'"
        assert is_supported(q, q, q, backend="sm90").reason == reason
        with pytest.raises(InputError) as raised:
            fingerprints(q, q, q, backend="sm90")
        assert str(raised.value) == reason


def test_with_the_compiler_auto_takes_sm90() -> None:
    with absent_gpu():
        q = of_head_dim()
        assert is_supported(q, q, q).backend == "sm90"
        assert fingerprints(q, q, q, causal=True).backend == "sm90"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ("CUDA 13", ""),
        ("no driver", ""),
        ("CUDA 12", "by the kernel compiler's build for CUDA 12, never run on a GPU: tested with CUDA 13"),
    ],
)
def test_a_build_of_the_compiler_that_was_not_tested(
    found: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sm90, "flavour", lambda: found)
    assert backend_named("sm90").untried(torch.device("cuda")) == said


def test_a_scale_may_lead_to_another_backend() -> None:
    pytest.importorskip("triton")
    with absent_gpu():
        q = of_head_dim()
        for scale, backend in ((0.1, "sm90"), (-0.1, "triton")):
            assert is_supported(q, q, q, softmax_scale=scale).backend == backend
            names = fingerprints(q, q, q, softmax_scale=scale)
            plan = plan_for(q, q, q, softmax_scale=scale)
            assert names == fingerprints(q, q, q, backend=backend)
            assert plan.fingerprint == plan_for(q, q, q, backend=backend).fingerprint


def test_what_the_kernels_lack_is_said_before_what_is_not_installed() -> None:
    with absent_gpu(installed=lambda module: None):
        q = of_head_dim(264)
        reason = is_supported(q, q, q, backend="sm90").reason
    assert reason.startswith("head_dim 264 is not supported by sm90")


def of_a_cache() -> str:
    """Triton's fingerprint of a forward over a cache."""
    problem = CachedProblem(
        batch=1, heads=4, kv_heads=4, head_dim=64, head_dim_v=64, dtype="bfloat16", sides=(-1, 0),
        seqlen_q=256, total_q=256, longest_q=256, page_size=256, pages=1, most_pages=1,
    )  # fmt: skip
    return backend_named("triton").prepare_cached(problem, torch.device("cuda", 0)).fingerprint


def test_the_version_of_tritons_kernels_is_in_their_fingerprints_and_in_no_others(
    monkeypatch: pytest.MonkeyPatch, tensors: list[Tensor]
) -> None:
    pytest.importorskip("triton")
    assert fingerprints(*tensors).backward == plan_for(*tensors).fingerprint
    with absent_gpu():
        q = of_head_dim()
        mine, other = (plan_for(q, q, q, causal=True, backend=name) for name in ("triton", "sm90"))
        assert fingerprints(q, q, q, causal=True, backend="sm90").backward == other.fingerprint
        found = []
        for version in (TRITON_VERSION, TRITON_VERSION + 1):
            monkeypatch.setattr(tiles, "TRITON_VERSION", version)
            found.append(fingerprints(q, q, q, causal=True, backend="triton"))
            assert found[-1].forward == of_a_cache()
    # Without a version they were those of the numerics alone.
    numerics = tiles.forward_numerics(mine.problem, roomy=True)
    assert len({numerics.fingerprint, *(x.forward for x in found)}) == 3
    assert len({mine.fingerprint, *(x.backward for x in found)}) == 3


def test_segments_on_triton_have_its_version_too() -> None:
    pytest.importorskip("triton")
    with absent_gpu():
        q = of_head_dim()
        names = [
            fingerprints(q, q, q, causal=True, q_segment=128, backend=name).backward
            for name in ("triton", "sm90")
        ]
    assert names[0] == backend_named("triton").fingerprint_of(names[1]) != names[1]

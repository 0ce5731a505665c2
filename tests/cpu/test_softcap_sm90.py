"""Softcap in the Hopper kernels: the instructions of tanh in NumPy, beside float64, and what is refused."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from absent_gpu import absent_gpu

from dash_attn import fingerprints
from dash_attn.backends.sm90 import backend
from dash_attn.backends.sm90.softcap import FAR, HUGE, STRETCH, Cap, cap_of, why_no_cap
from dash_attn.problem import Problem
from dash_attn.schedule.constants import SOFTCAP_VERSION
from dash_attn.scores import Scores
from dash_attn.values import LARGEST_SOFTCAP

CAPS = (15.0, 30.0, 50.0)


def instructions(name: str) -> list[list[str]]:
    """Those of the kernels' tanh: operation, target, operands."""
    pytest.importorskip(
        "cutlass", reason="the kernel compiler is not installed: pip install 'dash-attn[cuda]'"
    )
    from dash_attn.backends.sm90.device import tanh

    lines = [line.strip(" \n") for line in getattr(tanh, name).strip("{} \n").split(";")]
    return [re.findall(r"[^\s,]+", line) for line in lines if line and not line.startswith(".reg")]


def executed(
    scores: np.ndarray, factor: float, off: tuple[int, int] = (0, 0), name: str = "_TANH"
) -> np.ndarray:
    """tanh of products by these instructions; exponentials and reciprocals, in this order, are exact, or too
    large or small by 2^-22."""
    f32 = np.float32
    values: dict[str, Any] = {"$1": scores.astype(f32) * f32(factor)}

    def of(name: str) -> Any:
        return (
            np.frombuffer(bytes.fromhex(name[2:]), ">f4").astype(f32)[0] if name[:2] == "0f" else values[name]
        )

    for operation, to, *names in instructions(name):
        x = [np.asarray(of(name), np.float64) for name in names]
        if ".approx" in operation:
            is_exponential = operation.startswith("ex2")
            found = np.exp2(x[0]) if is_exponential else 1 / x[0]
            with np.errstate(over="ignore"):
                values[to] = (found * (1 + off[not is_exponential] * 2.0**-22)).astype(f32)
            continue
        compute: Any = {
            "mul.rn.f32": np.multiply, "add.rn.f32": np.add, "fma.rn.f32": lambda a, b, c: a * b + c,
            "mov.f32": np.positive, "abs.f32": np.abs, "copysign.f32": lambda a, b: np.copysign(b, a),
            "setp.lt.f32": np.less, "selp.f32": lambda a, b, first: np.where(first, a, b),
        }[operation]  # fmt: skip
        values[to] = compute(*x).astype(bool if operation.startswith("setp") else f32)
    return values["$0"]


def test_what_is_near_the_kernels_have_a_shorter_way_for() -> None:
    """A warp takes it where it sees nothing else, so it must give the same bits."""
    u = np.concatenate([np.linspace(-FAR, FAR, 400_003)[1:-1], [0.0, -0.0, 1e-30]]).astype(np.float32)
    near = executed(u, 1.0, name="_TANH_NEAR")
    assert near.tobytes() == executed(u, 1.0).tobytes()
    beyond = np.float32([FAR, -FAR, 3.0])
    assert (executed(beyond, 1.0, name="_TANH_NEAR") != executed(beyond, 1.0)).all()


@pytest.mark.parametrize("u", [0.0, 1.0, FAR, 1e38, np.inf, np.nan])
def test_one_bit_tells_what_is_near(u: float) -> None:
    for value in np.float32([u, -u]):
        assert bool(value.view(np.uint32) & (1 << 30)) == (not abs(value) < FAR)
        below = np.nextafter(value, np.float32(0))
        assert bool(below.view(np.uint32) & (1 << 30)) == (not abs(below) < FAR)


@pytest.mark.parametrize("off", [*product((-1, 0, 1), repeat=2)])
def test_tanh_has_seven_digits_everywhere(off: tuple[int, int]) -> None:
    """Near 0, too, where a difference of numbers close to 1 would have none."""
    x = np.concatenate([np.logspace(-30, 2, 200_001), np.linspace(1e-3, 20, 200_001)]).astype(np.float32)
    exact = np.tanh(x.astype(np.float64))
    found = executed(x, STRETCH, off)
    assert (np.abs(found / exact - 1) < 7e-7).all()
    assert (np.abs(executed(x, STRETCH)) <= 1).all()
    assert (executed(-x, STRETCH, off) == -found).all()


def test_tanh_of_what_is_not_finite() -> None:
    x = np.array([np.nan, np.inf, -np.inf, 0.0, 3e38], np.float32)
    with np.errstate(over="ignore"):
        found = executed(x, 1.0)
    assert np.isnan(found[0])
    assert found[3] == 0
    assert found[1] == -found[2] == found[4] == executed(np.float32([100]), 1.0)[0]


@pytest.mark.parametrize("softcap", CAPS)
def test_capped_scores(softcap: float) -> None:
    """Scores up to 300: what is capped is off by less than a hundredth of what float16 makes of it."""
    scale, x = 0.125, np.linspace(-2400, 2400, 400_001).astype(np.float32)
    cap = cap_of(Scores(scale, softcap=softcap))
    found = np.log(2) * np.float64(np.float32(cap[1])) * executed(x, cap[0])
    exact = softcap * np.tanh(x.astype(np.float64) * scale / softcap)
    error = np.abs(found - exact)
    assert error.max() < 7e-7 * softcap
    assert error.max() < 0.01 * np.spacing(np.float16(softcap))
    near = np.abs(exact) < softcap / 100
    assert error[near].max() < 7e-9 * softcap


def test_large_caps_leave_scores_alone() -> None:
    x = np.linspace(-300, 300, 10_001).astype(np.float32)
    inner, outer = cap_of(Scores(1.0, softcap=1e8))
    found = np.log(2) * np.float64(np.float32(outer)) * executed(x, inner)
    np.testing.assert_allclose(found, x, rtol=1e-6)


def test_no_softcap_has_no_numbers() -> None:
    assert cap_of(Scores(0.125)) == ()
    assert cap_of(Scores(0.125, softcap=2.0)) == Cap(STRETCH * 0.0625, 2.0 / np.log(2.0))


@pytest.mark.parametrize("softcap", [LARGEST_SOFTCAP, 1 / LARGEST_SOFTCAP, 1.0])
def test_what_is_masked_has_no_weight(softcap: float) -> None:
    """In the backward -HUGE is in place of tanh: P and P (1 - tanh^2) must be 0 and not NaN."""
    outer, hidden = np.float32(cap_of(Scores(1.0, softcap=softcap))[1]), np.float32(-HUGE)
    with np.errstate(over="ignore", under="ignore"):
        for lse in (np.float32(-2) * outer, np.float32(2) * outer, np.float32(40), np.float32(np.inf)):
            p = np.exp2(hidden * outer - lse)
            assert p == 0
            assert -(p * hidden) * hidden + p == 0


@pytest.mark.parametrize(
    ("scale", "softcap", "reason"),
    [
        (0.125, 30.0, ""),
        (0.125, 0.0, ""),
        (1e-9, 1e30, "for sm90 softmax_scale / softcap must be a normal float32, got 1e-09 / 1e+30"),
        (1e12, 1e-30, "for sm90 softmax_scale / softcap must be a normal float32, got 1e12 / 1e-30"),
    ],
)
def test_what_makes_no_sense_is_refused(
    monkeypatch: pytest.MonkeyPatch, scale: float, softcap: float, reason: str
) -> None:
    scores = Scores(scale, softcap=softcap)
    assert why_no_cap(scores) == reason.replace("1e12", f"{1e12}")
    monkeypatch.setattr(backend, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(backend, "_why_no_compiler", lambda: "")
    problem = Problem.dense(seqlen=256, head_dim=64)
    assert backend.BACKEND.why_not(problem, torch.device("cuda", 0), False, scores) == why_no_cap(scores)


def test_fingerprints_have_a_version_of_tanh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with a softcap have it, and no others."""
    found = {}
    for version in (SOFTCAP_VERSION, SOFTCAP_VERSION + 1):
        monkeypatch.setattr(backend, "SOFTCAP_VERSION", version)
        with absent_gpu():
            q = torch.zeros(1, 256, 4, 64, device="cuda", dtype=torch.bfloat16)
            for softcap in (0.0, 30.0):
                names = fingerprints(q, q, q, causal=True, backend="sm90", softcap=softcap)
                found[version, softcap] = (names.forward, names.backward)
    assert len(set(found.values())) == 3
    assert len({x for both in found.values() for x in both}) == 6
    assert found[SOFTCAP_VERSION, 0.0] == found[SOFTCAP_VERSION + 1, 0.0]

"""``dash-attn doctor`` on machines that lack this or that."""

from __future__ import annotations

import sys
from importlib.metadata import version

import pytest
import torch

from dash_attn.tools import doctor
from dash_attn.tools.cli import main


def test_this_machine(capsys):
    facts = doctor.examine()
    assert set(facts["packages"]) == set(doctor.PACKAGES)
    assert facts["packages"]["torch"] == version("torch")
    assert facts["supported_on_cpu"] == dict.fromkeys(doctor.CALLS, "yes")
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in [*facts, *doctor.CALLS])


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.examine()["gpu"].startswith("no: PyTorch sees no CUDA device")


class _Properties:
    name, major, minor, multi_processor_count = "Test GPU", 8, 0, 108


@pytest.mark.parametrize(
    ("capability", "missing", "expected"),
    [
        ((8, 0), (), "no: the kernels are for Hopper, sm_90 (Test GPU, sm_80, 108 SMs; "),
        ((9, 0), ("apache-tvm-ffi",), "no: apache-tvm-ffi missing: pip install 'dash-attn[cuda]' (Test GPU"),
        ((9, 0), (), "yes: Test GPU, sm_80, 108 SMs; Test GPU"),
    ],
)
def test_gpus(monkeypatch, capability, missing, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: _Properties())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(doctor, "_installed", lambda name: "missing" if name in missing else "1.0")
    assert doctor._gpu(torch).startswith(expected)


def test_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert doctor._devices()["gpu"] == "no: PyTorch does not load"


def test_unsupported_calls_say_why(monkeypatch):
    monkeypatch.setitem(doctor.CALLS, "head_dim 96", {"kv_heads": 3})
    reason = doctor.examine()["supported_on_cpu"]["head_dim 96"]
    assert reason == "no: heads (4) must be a multiple of kv_heads (3)"


def test_kernel_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DASH_ATTN_CACHE_DIR", str(tmp_path / "none"))
    assert doctor._kernel_cache().endswith("none (made by the first kernel)")
    monkeypatch.setenv("DASH_ATTN_CACHE_DIR", str(tmp_path))
    (tmp_path / "a.program").write_bytes(b"1234")
    assert doctor._kernel_cache() == f"{tmp_path} (1 program, 4 bytes)"
    tmp_path.chmod(0o777)
    assert doctor._kernel_cache().endswith(
        "(not used: " + f"{tmp_path} can be written by others (mode 0777))"
    )


@pytest.mark.parametrize(("found", "answer"), [("missing", "no: pip"), ("5.3.0", "no: "), ("5.4.0", "yes")])
def test_transformers(monkeypatch, found, answer):
    monkeypatch.setattr(doctor, "_installed", lambda name: found)
    assert doctor._transformers().startswith(answer)

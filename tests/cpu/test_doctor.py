"""``dash-attn doctor`` on machines that lack this or that."""

from __future__ import annotations

import errno
import sys
import tempfile
import warnings
from importlib.metadata import version

import pytest
import torch
from absent_gpu import absent_gpu

from dash_attn.backends.cuda.cache import KernelCache
from dash_attn.tools import doctor
from dash_attn.tools.cli import main


def test_this_machine(capsys):
    facts = doctor.examine()
    assert set(facts["packages"]) == set(doctor.PACKAGES)
    assert facts["packages"]["torch"] == version("torch")
    assert facts["backend_cpu"] == dict.fromkeys(doctor.CALLS, "yes")
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
        ((8, 0), (), "see backend_triton: the sm90 kernels are for Hopper (Test GPU, sm_80, 108 SMs; "),
        (
            (9, 0),
            ("apache-tvm-ffi",),
            "by Triton only: apache-tvm-ffi missing: pip install 'dash-attn[cuda]' (Test GPU",
        ),
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


def _supported_on(monkeypatch, backend, capability, **how):
    """A line of the matrix on a GPU that is not there."""
    monkeypatch.setattr(doctor, "CALLS", {"head_dim 96": doctor.CALLS["head_dim 96"]})
    with absent_gpu(capability, **how):
        return doctor._supported("cuda", backend)["head_dim 96"]


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((9, 0), "yes"),
        ((8, 0), "yes (compiled for sm_80, never run on sm_80)"),
        ((8, 6), "yes (compiled for sm_80, never run on sm_86)"),
        ((8, 9), "yes (compiled for sm_89, never run on sm_89)"),
        ((10, 3), "yes (compiled for sm_100, never run on sm_103)"),
        ((12, 0), "yes (compiled for sm_120, never run on sm_120)"),
        ((11, 0), "yes (never compiled for sm_110, and never run there)"),
        ((7, 5), "no: cuda:0 is sm_75; the triton backend needs sm_80 or newer"),
    ],
)
def test_what_nobody_tried_on_triton_is_said(monkeypatch, capability, expected):
    pytest.importorskip("triton")
    assert _supported_on(monkeypatch, "triton", capability) == expected


def test_triton_was_never_run_on_rocm(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert _supported_on(monkeypatch, "triton", (9, 0)) == "yes (never run on ROCm)"


def test_without_the_compiler_sm90_is_no_yes(monkeypatch):
    assert _supported_on(monkeypatch, "sm90", (9, 0)) == "yes"
    missing = "nvidia-cutlass-dsl and apache-tvm-ffi: pip install 'dash-attn[cuda]'"
    found = _supported_on(monkeypatch, "sm90", (9, 0), installed=lambda module: None)
    assert found == f"no: the sm90 backend needs {missing}"


def test_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert doctor._devices()["gpu"] == "no: PyTorch does not load"


def test_unsupported_calls_say_why(monkeypatch):
    monkeypatch.setitem(doctor.CALLS, "head_dim 96", {"kv_heads": 3})
    reason = doctor.examine()["backend_cpu"]["head_dim 96"]
    assert reason == "no: heads (4) must be a multiple of kv_heads (3)"


def cache_at(monkeypatch, folder):
    monkeypatch.setenv("DASH_ATTN_CACHE_DIR", str(folder))
    text = doctor._kernel_cache()
    assert text.startswith(f"{folder} (")
    return text.removeprefix(f"{folder} (").removesuffix(")")


def really_used(folder):
    """What the cache itself does with the folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return KernelCache(None, None, folder)._usable_folder() is not None


def test_kernel_cache(monkeypatch, tmp_path):
    folder = tmp_path / "some" / "folder"
    assert cache_at(monkeypatch, folder) == "made by the first kernel"
    assert not list(tmp_path.iterdir())
    assert really_used(folder)
    (folder / "a.program").write_bytes(b"1234")
    assert cache_at(monkeypatch, folder) == "1 program, 4 bytes"
    monkeypatch.setenv("PATH", str(tmp_path))
    without = (
        "1 program, 4 bytes; no linker (cc, gcc or clang) is on the PATH: a program that is loaded imports"
    )
    assert cache_at(monkeypatch, folder) == f"{without} the compiler"


def test_unsafe_kernel_caches(monkeypatch, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(0o777)
    reason = f"not used: {folder} can be written by others (mode 0777)"
    for place in (folder, folder / "new", folder / "new" / "newer"):
        assert cache_at(monkeypatch, place) == reason
        assert not really_used(place)
    folder.chmod(0o1777)  # nobody else can replace what the user makes in it
    assert cache_at(monkeypatch, folder / "other") == "made by the first kernel"
    assert really_used(folder / "other")


def test_kernel_caches_that_are_no_folders(monkeypatch, tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to(tmp_path / "nothing")
    for place in (file, file / "new"):
        assert cache_at(monkeypatch, place) == f"not used: {file} is not a folder"
        assert not really_used(place)
    assert cache_at(monkeypatch, link).startswith("not used: [Errno 2] No such file or directory")
    assert not really_used(link)


def test_kernel_caches_that_cannot_be_written(monkeypatch, tmp_path):
    def refuse(*args, **how):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    reason = f"{tmp_path} cannot be written: Permission denied"
    assert cache_at(monkeypatch, tmp_path / "new") == f"not used: {reason}"
    assert cache_at(monkeypatch, tmp_path) == f"0 programs, 0 bytes; new ones are not kept: {reason}"


@pytest.mark.parametrize(
    ("found", "answer"),
    [
        ("missing", "no: pip install 'dash-attn[transformers]'"),
        ("5.3.0", "no: transformers 5.3.0 is older than 5.4"),
        ("5.4.0", "yes: dash_attn.integrations.transformers"),
        ("5.18.1", "yes: dash_attn.integrations.transformers"),
        ("5.19.0", "yes: dash_attn.integrations.transformers, but not in continuous batching"),
    ],
)
def test_transformers(monkeypatch, found, answer):
    monkeypatch.setattr(doctor, "_installed", lambda name: found)
    assert doctor._transformers() == answer


def test_the_sdpa_hook_without_a_registry(monkeypatch):
    monkeypatch.delattr("torch.nn.attention.register_flash_attention_impl", raising=False)
    assert doctor._sdpa_hook().startswith("yes: dash_attn.integrations.sdpa, enabled() alone")

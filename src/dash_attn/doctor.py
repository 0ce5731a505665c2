"""What is installed on this machine, what this version supports on it, and why not more."""

from __future__ import annotations

import platform
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from . import __version__

__all__ = ["examine"]

PACKAGES = (
    "numpy",
    "torch",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "flash-attn-4",
    "matplotlib",
    "transformers",
)


def examine() -> dict[str, Any]:
    """Facts for ``dash-attn doctor``: versions, devices, and support with reasons."""
    return {
        "dash_attn": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _installed(name) for name in PACKAGES},
        **_devices(),
        "pictures": "yes" if _installed("matplotlib") != "missing" else "no: pip install 'dash-attn[plots]'",
    }


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _devices() -> dict[str, Any]:
    try:
        torch = import_module("torch")
    except ImportError as error:
        return {"cpu": f"no: PyTorch does not load ({error})", "gpu": "no: PyTorch does not load"}
    cpu = f"yes: reference executor, {torch.get_num_threads()} threads"
    if not torch.cuda.is_available():
        return {"cpu": cpu, "gpu": "no: PyTorch sees no CUDA device"}
    properties = torch.cuda.get_device_properties(0)
    name = (
        f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.multi_processor_count} SMs"
    )
    if (properties.major, properties.minor) != (9, 0):
        return {"cpu": cpu, "gpu": f"no: the kernels are for Hopper, sm_90 ({name})"}
    missing = [p for p in ("nvidia-cutlass-dsl", "apache-tvm-ffi") if _installed(p) == "missing"]
    if missing:
        return {
            "cpu": cpu,
            "gpu": f"no: {' and '.join(missing)} missing: pip install 'dash-attn[cuda]' ({name})",
        }
    return {"cpu": cpu, "gpu": f"yes: {name}"}

"""What is installed on this machine, what this version supports on it, and why not more."""

from __future__ import annotations

import platform
import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import __version__
from ..backends.base import AUTO, backend_named
from ..integrations import NO_CONTINUOUS_BATCHING, OLDEST_TRANSFORMERS, release

__all__ = ["examine"]

PACKAGES = (
    "numpy",
    "torch",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "triton",
    "flash-attn-4",
    "matplotlib",
    "transformers",
)

CALLS: dict[str, dict[str, Any]] = {
    "causal, bf16, head_dim 128": {"causal": True},
    "full, fp16, head_dim 64": {"head_dim": 64, "dtype": "float16"},
    "sliding window": {"causal": True, "window_size": (100, 0)},
    "variable lengths": {"causal": True, "packed": True},
    "grouped heads": {"causal": True, "kv_heads": 2},
    "fp32": {"causal": True, "dtype": "float32"},
    "head_dim 96": {"causal": True, "head_dim": 96},
    "head_dim 256": {"causal": True, "head_dim": 256},
    "softcap": {"causal": True, "softcap": 30.0},
    "learnable sink": {"causal": True, "sink": True},
    "ALiBi": {"causal": True, "alibi": True},
    "head_dim 192, of v 128": {"causal": True, "head_dim": 192, "head_dim_v": 128},
    "documents by row_ends": {"causal": True, "documents": True},
    "dropout": {"causal": True, "dropout_p": 0.1},
    "a cache of keys, in pages": {"causal": True, "pages": True},
}
"""Typical calls: which backend supports each of them here?"""


def examine() -> dict[str, Any]:
    """Facts for ``dash-attn doctor``: versions, devices, and support with reasons."""
    return {
        "dash_attn": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _installed(name) for name in PACKAGES},
        "driver": _driver(),
        **_devices(),
        "kernel_cache": _kernel_cache(),
        "sdpa_hook": _sdpa_hook(),
        "transformers": _transformers(),
        "pictures": "yes" if _installed("matplotlib") != "missing" else "no: pip install 'dash-attn[plots]'",
    }


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _driver() -> str:
    """The version in what NVIDIA's kernel module says of itself."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "no NVIDIA driver found"
    found = re.search(r"\d+\.\d+(\.\d+)?", text)
    return found.group() if found else "unknown"


def _devices() -> dict[str, Any]:
    try:
        torch = import_module("torch")
    except ImportError as error:
        return {"cpu": f"no: PyTorch does not load ({error})", "gpu": "no: PyTorch does not load"}
    cpu = f"yes: reference executor, {torch.get_num_threads()} threads"
    facts: dict[str, Any] = {"cpu": cpu, "gpu": _gpu(torch)}
    if torch.cuda.is_available():
        facts["cuda"] = f"PyTorch is built for {torch.version.cuda}"
    facts["backend_cpu"] = _supported("cpu", "cpu")
    for name in AUTO["cuda"]:
        facts[f"backend_{name}"] = (
            _supported("cuda", name) if torch.cuda.is_available() else "no: PyTorch sees no CUDA device"
        )
    return facts


def _gpu(torch: Any) -> str:
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build for CPUs"
        return f"no: PyTorch sees no CUDA device ({built})"
    names = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        names.append(f"{p.name}, sm_{p.major}{p.minor}, {p.multi_processor_count} SMs")
    listed = "; ".join(names)
    if torch.cuda.get_device_capability() != (9, 0):
        return f"see backend_triton: the sm90 kernels are for Hopper ({listed})"
    missing = [p for p in ("nvidia-cutlass-dsl", "apache-tvm-ffi") if _installed(p) == "missing"]
    if missing:
        how = "pip install 'dash-attn[cuda]'"
        return f"by Triton only: {' and '.join(missing)} missing: {how} ({listed})"
    return f"yes: {listed}"


def _supported(device: str, backend: str) -> dict[str, str]:
    """ "yes", with what was never tried, or the reason why not, for each of ``CALLS``."""
    try:
        return {name: _support(device, backend, **call) for name, call in CALLS.items()}
    except ImportError as error:
        return dict.fromkeys(CALLS, f"no: {error}")


def _support(
    device: str,
    backend: str,
    *,
    causal: bool = False,
    window_size: tuple[int, int] | None = None,
    packed: bool = False,
    kv_heads: int = 4,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    dtype: str = "bfloat16",
    softcap: float = 0.0,
    sink: bool = False,
    alibi: bool = False,
    documents: bool = False,
    dropout_p: float = 0.0,
    pages: bool = False,
) -> str:
    from ..api import is_supported

    torch = import_module("torch")
    rows = (256,) if packed else (1, 256)
    like = {"dtype": getattr(torch, dtype), "device": device}
    q, k = (torch.zeros(*rows, heads, head_dim, **like) for heads in (4, kv_heads))
    v = k if head_dim_v is None else k[..., :head_dim_v]
    ends = torch.tensor([0, 100, 256], dtype=torch.int32)
    bounds = (ends, ends) if packed else ()
    found = is_supported(
        q, k, v, *bounds, causal=causal, window_size=window_size, backend=backend, softcap=softcap,
        learnable_sink=torch.zeros(4, device=device) if sink else None,
        alibi_slopes=torch.zeros(4, device=device) if alibi else None, dropout_p=dropout_p,
        row_ends=torch.full(k.shape[:-2], 256, dtype=torch.int32) if documents else None,
        page_table=torch.zeros(1, 1, dtype=torch.int32) if pages else None,
    )  # fmt: skip
    if not found:
        return f"no: {found.reason}"
    unknown = backend_named(str(found.backend)).untried(q.device)
    return f"yes ({unknown})" if unknown else "yes"


def _kernel_cache() -> str:
    """The folder, and what the next kernel would do with it."""
    from ..backends.cuda.cache import cache_folder, examine_folder
    from ..backends.cuda.linking import linker

    try:
        folder = cache_folder()
    except OSError as error:
        return f"none: {error}"
    used, reason = examine_folder(folder)
    if not used:
        found = f"not used: {reason}"
    elif not folder.exists():
        found = "made by the first kernel"
    else:
        sizes = [entry.stat().st_size for entry in folder.glob("*.program")]
        found = f"{len(sizes)} program{'s' * (len(sizes) != 1)}, {sum(sizes):,} bytes"
        found += f"; new ones are not kept: {reason}" if reason else ""
        if linker() is None:
            found += (
                "; no linker (cc, gcc or clang) is on the PATH: a program that is loaded imports the compiler"
            )
    return f"{folder} ({found})"


def _sdpa_hook() -> str:
    try:
        registry = import_module("torch.nn.attention")
    except ImportError:
        return "no: PyTorch does not load"
    if hasattr(registry, "register_flash_attention_impl"):
        return "yes: dash_attn.integrations.sdpa"
    return (
        "yes: dash_attn.integrations.sdpa, enabled() alone: this PyTorch has no registry of flash "
        "implementations, which activate() needs"
    )


def _transformers() -> str:
    found = _installed("transformers")
    if found == "missing":
        return "no: pip install 'dash-attn[transformers]'"
    if release(found) < OLDEST_TRANSFORMERS:
        return f"no: transformers {found} is older than {'.'.join(map(str, OLDEST_TRANSFORMERS))}"
    batching = "" if release(found) < NO_CONTINUOUS_BATCHING else ", but not in continuous batching"
    return f"yes: dash_attn.integrations.transformers{batching}"

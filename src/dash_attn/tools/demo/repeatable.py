"""What else a training run needs to be repeatable, and how to tell that it was."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["THREADS", "deterministic_torch", "optimizer_sha256", "weights_sha256"]

_filling: Any = torch.utils.deterministic

THREADS = 1
"""Fixed, because the bits of PyTorch's own CPU kernels may depend on it. Products of tiles are too small
for a second thread to save more than a fifth, and on a busy machine threads wait for one another."""


@contextmanager
def deterministic_torch() -> Iterator[None]:
    """Deterministic PyTorch on ``THREADS`` threads; afterwards all settings are as before."""
    threads = torch.get_num_threads()
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.set_num_threads(THREADS)
    # cuBLAS is deterministic only with this, and reads it when its first handle is made.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling memory that is about to be written repairs nothing here and costs time.
    filling = _filling.fill_uninitialized_memory
    _filling.fill_uninitialized_memory = False
    try:
        yield
    finally:
        _filling.fill_uninitialized_memory = filling
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.set_num_threads(threads)


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 over name, dtype, shape and bytes of every weight, in order of names."""
    return _sha256(dict(sorted(model.state_dict().items())))


def optimizer_sha256(optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 over every tensor that the optimizer keeps, in order of weights and names."""
    state = optimizer.state_dict()["state"]
    return _sha256(
        {f"{weight}.{name}": x for weight in sorted(state) for name, x in sorted(state[weight].items())}
    )


def _sha256(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, x in tensors.items():
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        digest.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

"""What else a training run needs to be repeatable on a CPU, and how to tell that it was."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["THREADS", "deterministic_torch", "weights_sha256"]

THREADS = 1
"""Fixed, because the bits of PyTorch's own CPU kernels may depend on it. Products of tiles are too small
for a second thread to save more than a fifth, and on a busy machine threads wait for one another."""


@contextmanager
def deterministic_torch() -> Iterator[None]:
    """Deterministic PyTorch on ``THREADS`` threads; afterwards both settings are as before."""
    threads = torch.get_num_threads()
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.set_num_threads(THREADS)
    # cuBLAS is deterministic only with this, and reads it when its first handle is made.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.set_num_threads(threads)


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 over name, dtype, shape and bytes of every weight, in order of names."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

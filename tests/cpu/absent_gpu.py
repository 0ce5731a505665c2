"""A GPU that is not there: what is chosen for tensors on it, without a launch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dash_attn.backends.sm90 import backend as sm90
from dash_attn.ops.policies import forget


@contextmanager
def absent_gpu(
    capability: tuple[int, int] = (9, 0), installed: Callable[[str], Any] = lambda module: object()
) -> Iterator[None]:
    """PyTorch sees a GPU. Tensors made here are fake. Nothing is kept of calls before, nor for later ones.

    Args:
        capability: of the GPU.
        installed: of a module of the Hopper kernels' compiler, not None if it is installed.
    """
    cuda = mock.patch.multiple(
        torch.cuda,
        is_available=mock.Mock(return_value=True),
        get_device_capability=mock.Mock(return_value=capability),
    )
    _forget()
    try:
        with cuda, mock.patch.object(sm90, "find_spec", installed), FakeTensorMode():
            yield
    finally:
        _forget()


def _forget() -> None:
    forget()
    sm90._capability.cache_clear()
    sm90._why_no_compiler.cache_clear()
    if (launch := sys.modules.get("dash_attn.backends.triton.launch")) is not None:
        launch.is_roomy.cache_clear()

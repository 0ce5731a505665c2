"""Joules of a call, from the counter of the GPU's driver."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch

CALLS_AT_ONCE_S = 0.05
"""About so many seconds of calls are launched before the GPU is waited for."""


def joules(call: Callable[[], Any], seconds: float, call_s: float) -> float:
    """Joules of a call, the mean over ``seconds`` of back-to-back calls.

    Args:
        call: launches work on the current device.
        seconds: how long it runs; the driver's counter moves every tenth of a second or so.
        call_s: about how long one call takes.

    Raises:
        RuntimeError: the driver does not count energy.
    """
    count, many = 0, max(1, int(CALLS_AT_ONCE_S / call_s))
    torch.cuda.synchronize()
    began, before = time.perf_counter(), _millijoules()
    while time.perf_counter() - began < seconds:
        for _ in range(many):
            call()
        torch.cuda.synchronize()
        count += many
    return (_millijoules() - before) / 1e3 / count


def _millijoules() -> int:
    found = ctypes.c_ulonglong()
    _checked(_nvml().nvmlDeviceGetTotalEnergyConsumption(_handle(), ctypes.byref(found)))
    return found.value


def _nvml() -> ctypes.CDLL:
    library = ctypes.CDLL("libnvidia-ml.so.1")
    _checked(library.nvmlInit_v2())
    return library


def _handle() -> ctypes.c_void_p:
    """Of the current device, whose index may differ from the one it has in CUDA."""
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    handle = ctypes.c_void_p()
    _checked(_nvml().nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)))
    return handle


def _checked(status: int) -> None:
    if status:
        raise RuntimeError(f"the driver does not count energy: NVML says {status}")

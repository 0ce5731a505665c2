"""Joules of a call, from the counter of the GPU's driver."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

BATCH_S, PATIENCE_S = 0.005, 5.0
"""About so many seconds of calls are launched before the GPU is waited for; so long the counter may rest."""


def joules(call: Callable[[], Any], seconds: float, call_s: float) -> float:
    """Joules of a call, the mean over about ``seconds`` of back-to-back calls.

    The driver's counter moves now and then, so energy and calls are counted from one of its steps to another.

    Args:
        call: launches work on the current device.
        seconds: how long it runs at least.
        call_s: about how long one call takes.

    Raises:
        RuntimeError: the driver does not count energy, or its counter rests.
    """
    count, many = 0, max(1, int(BATCH_S / call_s))
    torch.cuda.synchronize()
    steps: list[tuple[int, int]] = []
    began, seen = time.perf_counter(), _millijoules()
    while len(steps) < 2 or time.perf_counter() - began < seconds:
        for _ in range(many):
            call()
        torch.cuda.synchronize()
        count += many
        if (now := _millijoules()) != seen:
            steps, seen = [*steps[:1], (count, now)], now
        if time.perf_counter() - began > seconds + PATIENCE_S:
            raise RuntimeError(f"the driver's counter of energy made {len(steps)} steps in {PATIENCE_S} s")
    (first, before), (last, after) = steps
    return (after - before) / 1e3 / (last - first)


def _millijoules() -> int:
    found = ctypes.c_ulonglong()
    _checked(
        _nvml().nvmlDeviceGetTotalEnergyConsumption(_handle(torch.cuda.current_device()), ctypes.byref(found))
    )
    return found.value


@cache
def _nvml() -> ctypes.CDLL:
    library = ctypes.CDLL("libnvidia-ml.so.1")
    _checked(library.nvmlInit_v2())
    return library


@cache
def _handle(device: int) -> ctypes.c_void_p:
    """Of a device, whose index may differ from the one it has in CUDA."""
    uuid = torch.cuda.get_device_properties(device).uuid
    handle = ctypes.c_void_p()
    _checked(_nvml().nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)))
    return handle


def _checked(status: int) -> None:
    if status:
        raise RuntimeError(f"the driver does not count energy: NVML says {status}")

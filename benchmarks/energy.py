"""Energy of a call, from the driver's counter."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable

import torch
from card import keep_busy

__all__ = ["Meter"]

SECONDS = 1.0
"""Of calls back to back. The driver counts in steps of some 20 to 100 ms."""


class Meter:
    """The counter of the current GPU.

    Raises:
        OSError: there is no NVML.
        RuntimeError: NVML does not count energy for this GPU.
    """

    @classmethod
    def of_current_gpu(cls) -> Meter | None:
        """None, with a line that says why, where nothing counts energy."""
        try:
            return cls()
        except (OSError, RuntimeError) as why:
            print(f"energy is left out: {why}", file=sys.stderr)
            return None

    def __init__(self) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        self._ask("nvmlInit_v2")
        self._ask("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}".encode(), ctypes.byref(self._device))
        self.millijoules()

    def _ask(self, name: str, *arguments: object) -> None:
        if (code := getattr(self._nvml, name)(*arguments)) != 0:
            raise RuntimeError(f"{name} failed with NVML's error {code}")

    def millijoules(self) -> int:
        """What the GPU has taken since its driver was loaded."""
        found = ctypes.c_ulonglong()
        self._ask("nvmlDeviceGetTotalEnergyConsumption", self._device, ctypes.byref(found))
        return found.value

    def joules(self, call: Callable[[], object], seconds: float = SECONDS) -> float:
        """Energy of one call among calls back to back, everything that the GPU takes counted."""
        self._until_counted()
        before, end = self.millijoules(), time.monotonic() + seconds
        calls = max(keep_busy(call, lambda: time.monotonic() >= end), 1)
        self._until_counted()
        return (self.millijoules() - before) / calls / 1000

    def _until_counted(self) -> None:
        """Wait for a step of the counter: of what came before, nothing is counted later."""
        start, late = self.millijoules(), time.monotonic() + 0.2
        while self.millijoules() == start and time.monotonic() < late:
            pass

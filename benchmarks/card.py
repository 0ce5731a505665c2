"""What is said of the current GPU: its driver, and clock and power under a load; and of a run on it."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from record import versions

import dash_attn

HEAT_S = 0.2
"""Seconds of load before nvidia-smi is asked."""
PATIENCE_S = 5.0


def facts_of_run(rounds: int, *packages: str) -> dict[str, Any]:
    """What a file of results says of the run that made it, with the versions of packages."""
    return {
        "gpu": torch.cuda.get_device_name(), "driver": driver(), "dash_attn": dash_attn.__version__,
        "versions": versions(*packages), "rounds": rounds, "command": shlex.join(["python", *sys.argv]),
    }  # fmt: skip


def driver() -> str:
    """Version of the driver, empty where nvidia-smi does not say."""
    try:
        command = _command("driver_version")
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()


def clock_and_power(call: Callable[[], object]) -> tuple[float | None, float | None]:
    """SM clock in MHz and power in W while ``call`` runs back to back; None where nvidia-smi does not say.

    The GPU has work from ``HEAT_S`` before nvidia-smi starts until it has ended. The power is the momentary
    one: the average that nvidia-smi gives by default is over a second.
    """
    start = time.monotonic()
    keep_busy(call, lambda: time.monotonic() >= start + HEAT_S)
    command = _command("clocks.sm,power.draw.instant")
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None, None
    late = time.monotonic() + PATIENCE_S
    keep_busy(call, lambda: process.poll() is not None or time.monotonic() > late)
    process.kill()  # does nothing to one that has ended
    fields = process.communicate()[0].split(",")
    return (_number(fields[0]), _number(fields[1])) if len(fields) == 2 else (None, None)


def keep_busy(call: Callable[[], object], until: Callable[[], bool]) -> int:
    """Launch ``call`` again and again, one ahead of the GPU, then wait for all of it; how often."""
    before, calls = None, 0
    while not until():
        call()
        calls += 1
        end = torch.cuda.Event()
        end.record()
        if before:
            before.synchronize()
        before = end
    torch.cuda.synchronize()
    return calls


def _command(fields: str) -> list[str]:
    """Asks for fields of the current GPU, whose index may differ from the one it has in CUDA."""
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    return ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None

"""Running the example that trains over several processes, for tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

__all__ = ["weights"]

EXAMPLE = Path(__file__).parents[1] / "examples" / "context_parallel.py"

AND_END_AT_ONCE = """
import os, runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
os._exit(0)
"""
"""Threads of gloo live as long as the process. On a busy machine one of them may still give tensors back when
Python is already gone, and PyTorch then aborts ("terminate called without an active exception")."""


def weights(ranks: int, *options: str, device: str = "cpu") -> tuple[str, list[str]]:
    """SHA-256 of the weights after two steps, and the losses of these as they were printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["--no-python", sys.executable, "-c", AND_END_AT_ONCE]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    done = subprocess.run(
        [*command, str(EXAMPLE), "--steps=2", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", **hidden},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(rf"weights sha256 (\w{{64}}) with {ranks} processes on {device}", done.stdout)
    assert found, done.stdout
    losses = re.findall(r"loss (\S+)", done.stdout)
    assert len(losses) == 2
    return found[1], losses

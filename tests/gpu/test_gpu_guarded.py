"""No kernel touches what lies beside its tensors: there is nothing. A fault ends its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from guarded import CALLS, HEAD_DIMS

PROGRAM = Path(__file__).with_name("guarded.py")


def run(what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, PROGRAM, what], capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("backend", HEAD_DIMS)
def test_no_call_touches_what_lies_beside_its_tensors(backend: str) -> None:
    done = run(backend)
    assert done.returncode == 0, f"behind {done.stdout[-200:]!r}: {done.stderr[-1000:]}"
    lines = done.stdout.splitlines()
    assert len(lines) == CALLS * len(HEAD_DIMS[backend])
    assert all(line.endswith(" finite") and "not" not in line for line in lines), done.stdout


def test_an_access_behind_a_tensor_is_found() -> None:
    """The negative control."""
    done = run("control")
    assert done.returncode != 0
    assert "illegal memory access" in done.stderr

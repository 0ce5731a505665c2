"""The soak's watchdog and its verdict; what it watches needs a GPU."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

from soak import Hang, failures, signs_of_life


def python(code: str) -> list[str]:
    return [sys.executable, "-u", "-c", code]


def test_lines_come_as_they_are_printed() -> None:
    assert list(signs_of_life(python("print('a'); print('b')"), 60, 60)) == ["a", "b"]


@pytest.mark.parametrize(
    ("patience", "limit", "message"),
    [
        (1.0, 60.0, "no sign of life for 1 s; the last one was: replay 7"),
        (60.0, 1.0, "not done after 1 s; the last one was: replay 7"),
    ],
)
def test_a_hang_is_a_message_and_everything_it_started_is_ended(
    patience: float, limit: float, message: str
) -> None:
    code = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid)
print("replay 7")
time.sleep(600)
"""
    lines: list[str] = []
    with pytest.raises(Hang, match=message):
        lines.extend(signs_of_life(python(code), patience, limit))
    assert lines[1:] == ["replay 7"]
    for _ in range(100):
        if _state(int(lines[0])) in ("", "Z"):
            return
        time.sleep(0.05)
    raise AssertionError(f"process {lines[0]} still runs")


def _state(pid: int) -> str:
    """A process's state as Linux names it: Z has ended; empty where there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def test_a_failure_is_not_an_end() -> None:
    with pytest.raises(RuntimeError, match="ended with 3; the last line was: half"):
        list(signs_of_life(python("import sys; print('half'); sys.exit(3)"), 60, 60))


def test_a_slow_one_with_signs_of_life_is_left_alone() -> None:
    code = "import time\nfor i in range(4):\n    print(i); time.sleep(0.5)"
    assert len(list(signs_of_life(python(code), 1.5, 60))) == 4


def phase(**how: Any) -> dict[str, Any]:
    return {"phase": "p", "wanted": 10, "replays": 10, "differing": 0, "control": False} | how


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({}, ""),
        ({"control": True, "differing": 1}, ""),
        ({"differing": 1}, "p: 1 of 10 replays differ"),
        ({"replays": 9}, "p: 9 of 10 replays in the time given"),
        ({"control": True}, "p: no replay differed, so this harness would not see a difference"),
    ],
)
def test_verdict(how: dict[str, Any], message: str) -> None:
    assert "; ".join(failures({"phases": [phase(**how)]})) == message

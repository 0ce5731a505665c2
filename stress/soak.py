"""Soak: thousands of replays under contention, and all of them the same bytes. ``make soak`` on a Hopper GPU.

This process uses no GPU. It starts the one that does (``soak_phases.py``), watches that it shows signs of
life, and ends it with everything it started if it does not: a hang is a message, never a wait.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["Hang", "main", "signs_of_life"]

PHASES = Path(__file__).with_name("soak_phases.py")


class Hang(Exception):
    """A process showed no sign of life; it has been killed. The message has its last line."""


def signs_of_life(command: list[str], patience: float, limit: float) -> Iterator[str]:
    """Lines that a command prints, each as soon as it is there.

    Args:
        command: what to run; it leads a process group of its own.
        patience: seconds that may pass between two lines.
        limit: seconds that it may take altogether.

    Raises:
        Hang: one of them was exceeded; the whole process group has been killed.
        RuntimeError: the command failed.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    lines: queue.Queue[str | None] = queue.Queue()
    assert process.stdout
    reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
    reader.start()
    end, last = time.monotonic() + limit, "nothing"
    try:
        while True:
            left = end - time.monotonic()
            try:
                line = lines.get(timeout=max(0.0, min(patience, left)))
            except queue.Empty:
                waited = (
                    f"no sign of life for {patience:g} s"
                    if left > patience
                    else f"not done after {limit:g} s"
                )
                raise Hang(f"{waited}; the last one was: {last}") from None
            if line is None:
                process.wait()
                break
            last = line.rstrip()
            yield last
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join()
        process.stdout.close()
    if process.returncode:
        raise RuntimeError(f"{command[-1]} ended with {process.returncode}; the last line was: {last}")


def _read(stream: Any, lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def failures(report: dict[str, Any]) -> list[str]:
    """What is wrong with a finished report, in words; nothing if all is well."""
    found = []
    for phase in report["phases"]:
        differing, made, name = phase["differing"], phase["replays"], phase["phase"]
        if made < phase["wanted"]:
            found.append(f"{name}: {made:,} of {phase['wanted']:,} replays in the time given")
        if phase["control"] and not differing:
            found.append(f"{name}: no replay differed, so this harness would not see a difference")
        if not phase["control"] and differing:
            found.append(f"{name}: {differing:,} of {made:,} replays differ")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the soak; 0 if every byte was the same, 1 if not, 2 if something hung or broke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--replays", type=int, default=10_000, help="replays under contention")
    parser.add_argument("--seconds", type=float, default=600, help="time for all phases together")
    parser.add_argument("--patience", type=float, default=60, help="seconds without a sign of life: a hang")
    parser.add_argument("--json", type=Path, help="where to write the report")
    given = parser.parse_args(arguments)
    command = [sys.executable, str(PHASES), str(given.replays), str(given.seconds * 0.8)]
    last = ""
    try:
        for line in signs_of_life(command, given.patience, given.seconds):
            if not line.startswith("{"):
                print(line, flush=True)
            last = line
        report = json.loads(last)
    except (Hang, RuntimeError, ValueError) as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2
    print(f"\n{'phase':<34} {'replays':>8} {'differing':>9} {'seconds':>8}")
    for phase in report["phases"]:
        print(
            f"{phase['phase']:<34} {phase['replays']:>8,} {phase['differing']:>9,} {phase['seconds']:>8.1f}"
        )
    print(f"one hash: {report['sha256']}")
    if given.json:
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    for failure in failures(report):
        print(f"soak: {failure}", file=sys.stderr)
    return 1 if failures(report) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Random problems on a Hopper GPU, each run in many ways that must agree (``fuzz_case.check``).

    python stress/fuzz.py --problems 2000 --json fuzz.json
    python stress/fuzz.py --seconds 3600 --first-seed 100000

The seed of a problem decides all about it. A failure is made smaller and written to a script that needs
dash_attn and torch alone. Exits with 1 if anything failed, or if sums without order never differed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dash_attn.problem import Mask
from fuzz_case import Backend, FuzzCase, Outcome, check, hopper
from fuzz_draw import draw, script_of, shrink

LONGEST_CASE = 120.0
"""Seconds after which a case counts as a hang."""

CONTROL = 20
"""Problems from which on the negative control must have shown."""


LENGTHS = (64, 300, 1500, 5120)
"""Upper ends of the classes of lengths in a summary."""


def mask_kind(mask: Mask) -> str:
    """ "full", "causal" or "window"."""
    return "full" if mask.is_full else "causal" if mask.is_causal else "window"


@dataclass
class Summary:
    """What a run has seen.

    Attributes:
        failures: (seed, what did not hold, script) of every failed case.
        counts: cases by kind and value, such as ("policy", "spt").
        worst: largest share of the allowed error by dtype, and the seed of its case.
    """

    seeds: list[int] = field(default_factory=list)
    failures: list[tuple[int, list[str], str]] = field(default_factory=list)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    worst: dict[str, tuple[float, int]] = field(default_factory=dict)
    launches: int = 0
    unordered_differs: int = 0
    seconds: float = 0.0

    def add(self, case: FuzzCase, outcome: Outcome) -> None:
        self.seeds.append(case.seed)
        mask = mask_kind(case.problem.mask)
        heads = "mha" if case.group == 1 else "mqa" if case.kv_heads == 1 else "gqa"
        tokens = max(n for pair in case.lengths for n in pair)
        kinds = {
            "layout": "packed" if case.packed else "dense", "heads": heads, "mask": mask, "dtype": case.dtype,
            "head dim": case.head_dim, "policy": case.policy, "placement": case.placement,
            "longest": next(f"<= {n}" for n in LENGTHS if tokens <= n), "streams": case.streams,
            "strides": "contiguous" if set(case.layouts) == {"plain"} else "others",
        }  # fmt: skip
        self.counts.update((kind, str(value)) for kind, value in kinds.items())
        if outcome.worst > self.worst.get(case.dtype, (0.0, 0))[0]:
            self.worst[case.dtype] = outcome.worst, case.seed
        self.launches += outcome.launches
        self.unordered_differs += outcome.unordered_differs

    @property
    def passed(self) -> bool:
        return not self.failures and (len(self.seeds) < CONTROL or self.unordered_differs > 0)

    def as_json(self) -> dict[str, Any]:
        kinds: dict[str, dict[str, int]] = {}
        for (kind, value), count in sorted(self.counts.items()):
            kinds.setdefault(kind, {})[value] = count
        return {
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
            "problems": len(self.seeds),
            "first_seed": min(self.seeds, default=None),
            "last_seed": max(self.seeds, default=None),
            "launches": self.launches,
            "seconds": round(self.seconds, 1),
            "without_order_differs": self.unordered_differs,
            "worst_share_of_allowed_error": {
                dtype: {"share": round(share, 3), "seed": seed} for dtype, (share, seed) in self.worst.items()
            },
            "failures": [{"seed": s, "what": what, "script": script} for s, what, script in self.failures],
            "by": kinds,
        }

    def __str__(self) -> str:
        facts = self.as_json()
        lines = [
            f"{facts['problems']} problems (seeds {facts['first_seed']} to {facts['last_seed']}), "
            f"{self.launches} launches, {self.seconds:.0f} s: {len(self.failures)} failures"
        ]
        lines += [
            f"  {kind:<10} {', '.join(f'{v} {n}' for v, n in of.items())}" for kind, of in facts["by"].items()
        ]
        lines += [
            f"  worst share of the allowed error, {d}: {w:.3f} (seed {s})" for d, (w, s) in self.worst.items()
        ]
        lines.append(f"  without order dQ differed in {self.unordered_differs}")
        lines += [f"  seed {seed}: {what[0]} -> {script}" for seed, what, script in self.failures]
        return "\n".join(lines)


@contextmanager
def watchdog(case: FuzzCase, folder: Path) -> Iterator[None]:
    """End the process, leaving the case's script, if it takes so long that it must be a hang."""

    def give_up() -> None:
        print(f"seed {case.seed} hangs: {write_script(case, folder)}", flush=True)
        os._exit(3)

    timer = threading.Timer(LONGEST_CASE, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def write_script(case: FuzzCase, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"fuzz-{case.seed}.py"
    path.write_text(script_of(case))
    return path


def outcome_of(case: FuzzCase, backend: Backend) -> Outcome:
    """What came of a case; an exception is a failure of it."""
    try:
        return check(case, backend)
    except Exception as error:
        return Outcome([f"{type(error).__name__}: {error}".splitlines()[0]])


def usable(backend: Backend) -> bool:
    """Whether the device still works: an illegal access leaves it broken for this process."""
    try:
        return bool(torch.ones(1, device=backend.device).sum() == 1)
    except RuntimeError:
        return False


def run(
    seeds: Iterator[int],
    backend: Backend,
    folder: Path,
    say: Callable[[str], None],
    seconds: float = float("inf"),
) -> Summary:
    """Check the case of every seed, for so many seconds; failures are shrunk and written to ``folder``.

    A failure that leaves the device unusable ends the run, with the script of the case as it was.
    """
    summary, start = Summary(), time.monotonic()
    for seed in seeds:
        if time.monotonic() - start > seconds:
            break
        case = draw(seed)
        with watchdog(case, folder):
            outcome = outcome_of(case, backend)
        summary.add(case, outcome)
        if not outcome.failures:
            continue
        script = write_script(case, folder)
        alive = usable(backend)
        say(f"seed {seed}: {outcome.failures}\n  {case}")
        if alive:
            small = shrink(
                case, lambda smaller: usable(backend) and bool(outcome_of(smaller, backend).failures)
            )
            script = write_script(small, folder)
            say(f"  shrunk to {small}")
        summary.failures.append((seed, outcome.failures, str(script)))
        if not usable(backend):
            say("the device does not work any more: the run ends here")
            break
    summary.seconds = time.monotonic() - start
    return summary


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--problems", type=int, metavar="N", help="how many (default 100, or what --seconds allow)"
    )
    parser.add_argument("--seconds", type=float, metavar="S", help="start no problem after so long")
    parser.add_argument("--first-seed", type=int, default=0, metavar="SEED")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary as JSON")
    parser.add_argument("--scripts", type=Path, default=Path("fuzz-failures"), metavar="FOLDER")
    args = parser.parse_args(argv)
    problems = args.problems if args.problems or args.seconds else 100
    last = args.first_seed + problems if problems else sys.maxsize
    seconds = float("inf") if args.seconds is None else args.seconds
    summary = run(
        iter(range(args.first_seed, last)), hopper(), args.scripts, lambda s: print(s, flush=True), seconds
    )
    print(summary)
    if args.json:
        args.json.write_text(json.dumps(summary.as_json(), indent=1) + "\n")
    return 0 if summary.passed else 1


if __name__ == "__main__":
    sys.exit(main())

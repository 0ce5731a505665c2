"""The checks of ``dash-attn verify``: bytes against those of the first run, numbers against float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...api import Support, backend_for, is_supported
from ...backends.base import backend_named
from ...backends.cpu import plain_attention
from ...errors import DashError, InputError
from ...schedule.constants import Q_SEGMENT
from ...testing import same_bytes
from ..shapes import Shape
from .accuracy import allowed_errors, error_norms
from .batch import NAMES, Batch, Inputs, Results, digest, empty_inputs, random_inputs
from .report import Check, Report, Status

__all__ = ["CHECKS", "Settings", "contention", "require_supported", "verify_shape"]


@dataclass(frozen=True)
class Settings:
    """How thorough to be.

    Attributes:
        device: "cpu" or "cuda".
        replays: runs that are compared with the first one, >= 1.
    """

    device: str
    replays: int

    def __post_init__(self) -> None:
        if self.replays < 1:
            raise InputError(f"replays must be >= 1, got {self.replays}")


@dataclass(frozen=True)
class _Subject:
    """What is checked: the sequences as one batch, and the results of its first run."""

    shape: Shape
    settings: Settings
    inputs: list[Inputs]
    batch: Batch
    first: Results


class _Skipped(Exception):
    """The check does not apply here; the message says why."""


class _Failed(Exception):
    """The check failed; the message says how."""


def require_supported(shape: Shape, settings: Settings) -> None:
    """Raise InputError, with the reason, unless a shape can be verified. Nothing runs."""
    _support_of(Batch(shape, empty_inputs(shape, torch.device(settings.device))))


def _support_of(batch: Batch) -> Support:
    found = is_supported(batch.q, batch.k, batch.v, *batch.bounds, **batch.shape.options)
    if not found:
        raise InputError(f"{batch.shape}: {found.reason}")
    return found


def verify_shape(shape: Shape, settings: Settings, say: Callable[[str], None]) -> Report:
    """Run every check on a shape.

    Args:
        shape: the call in question.
        settings: device and number of replays.
        say: takes each line of the table as soon as it is known.

    Raises:
        InputError: the shape is not supported on this device; the message says why.
    """
    device = torch.device(settings.device)
    inputs = random_inputs(shape, device)
    batch = Batch(shape, inputs)
    support, plan = _support_of(batch), batch.plan()
    name = batch.fingerprint()
    whole = name == backend_named(str(support.backend)).fingerprint_of(plan.fingerprint)
    policy = plan.policy if whole else f"{plan.policy}, or another one per segment of {Q_SEGMENT} q rows"
    facts = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "backend": support.backend, "plan": policy, "items": len(plan.items) if whole else None,
        "min_workers": plan.min_workers if whole else None, "fingerprint": name,
    }  # fmt: skip
    report = Report(shape.as_json(), facts)
    ran = plan if whole else policy
    say(f"{shape}\n  on {facts['device']} by {facts['backend']}: {ran}, fingerprint {name[:16]}")
    subject = _Subject(shape, settings, inputs, batch, batch.run())
    report.hashes.update(digest(subject.first))
    for name, check in CHECKS.items():
        report.checks.append(_checked(name, check, subject))
        say(str(report.checks[-1]))
    for name, sha256 in report.hashes.items():
        say(f"  {name:<4} sha256 {sha256}")
    return report


def _checked(name: str, check: Callable[[_Subject], str], subject: _Subject) -> Check:
    start = time.perf_counter()
    try:
        status, detail = Status.PASSED, check(subject)
    except _Skipped as reason:
        status, detail = Status.SKIPPED, str(reason)
    except (_Failed, DashError, RuntimeError) as reason:
        status, detail = Status.FAILED, str(reason) or type(reason).__name__
    return Check(name, status, detail, time.perf_counter() - start)


def _accuracy(subject: _Subject) -> str:
    """Every tensor against float64, sequence by sequence."""
    shape, worst = subject.shape, 0.0
    dtype, scale = getattr(torch, shape.dtype), float(shape.head_dim) ** -0.5
    for index, found in enumerate(subject.batch.split(subject.first)):
        inputs = subject.inputs[index]
        exact = plain_attention(inputs, shape.problem.mask, scale, torch.float64)
        expected = plain_attention(inputs, shape.problem.mask, scale, dtype)
        allowed = allowed_errors(inputs, expected, exact)
        for name, error, limit in zip(NAMES, error_norms(found, exact), allowed):
            if not error <= limit:
                raise _Failed(f"{name} of sequence {index}: error norm {error:.3g}, allowed {limit:.3g}")
            worst = max(worst, error / limit if limit else 0.0)
    return f"errors against float64 at most {worst:.0%} of what is allowed"


def _replays(subject: _Subject) -> str:
    runs = subject.settings.replays
    with contention(subject.settings.device) as disturb:
        for replay in range(runs):
            disturb()
            _compare(f"replay {replay}", subject.first, subject.batch.run())
    beside = " beside a busy second stream" if subject.settings.device == "cuda" else ""
    return f"{runs} runs{beside}: the same bytes"


@contextmanager
def contention(device: str) -> Iterator[Callable[[], None]]:
    """A function that gives a second stream work of its own; on the CPU it does nothing."""
    if device != "cuda":
        yield lambda: None
        return
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    stream.wait_stream(torch.cuda.current_stream())

    def disturb() -> None:
        with torch.cuda.stream(stream):
            torch.mm(a, a)

    yield disturb
    stream.synchronize()


def _neighbours(subject: _Subject) -> str:
    """Every sequence in another place among others, and one of them alone."""
    parts = subject.batch.split(subject.first)
    order = [*reversed(range(len(parts))), 0]
    moved = Batch(subject.shape, [subject.inputs[i] for i in order])
    for place, (index, found) in enumerate(zip(order, moved.split(moved.run()))):
        _compare(f"sequence {index} at place {place} of {len(order)}", parts[index], found)
    alone = Batch(subject.shape, subject.inputs[-1:])
    _compare(f"sequence {len(parts) - 1} alone", parts[-1], alone.split(alone.run())[0])
    return "permuted, in a larger batch, and alone: the same bytes"


def _fresh_process(subject: _Subject) -> str:
    question = {"shape": subject.shape.as_json(), "device": subject.settings.device}
    command = [sys.executable, "-m", "dash_attn.tools.verify"]
    # The process must find this package where this one found it, whatever the working directory is.
    paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        command, input=json.dumps(question), capture_output=True, text=True, env=environment
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise _Failed(f"the process ended with {done.returncode}: {lines[-1]}")
    hashes = json.loads(done.stdout.splitlines()[-1])
    mine = digest(subject.first)
    if different := [name for name in NAMES if hashes[name] != mine[name]]:
        raise _Failed(f"{', '.join(different)} have other bytes in a new process")
    return "a new process: the same hashes"


def _graph(subject: _Subject) -> str:
    if subject.settings.device != "cuda":
        raise _Skipped("no GPU")
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        subject.batch.run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = subject.batch.run()
    for replay in range(subject.settings.replays):
        graph.replay()
        _compare(f"graph replay {replay}", subject.first, captured)
    return f"captured once, {subject.settings.replays} replays: the same bytes"


def _control(subject: _Subject) -> str:
    """Without order dq must change, or equal bytes above would prove nothing."""
    grids = subject.shape.problem.grids.values()
    most = max(int(grid.contributions.max(initial=0)) for grid in grids)
    if most > 2 and (change := _change_without_order(subject.batch, subject.settings)):
        return change
    # Two contributions have no order, and the rounding of dq can hide that of a few more.
    longer = replace(
        subject.shape, batch=1, seqlen=_CONTROL_LENGTH, seqlen_k=None, seqlens=None, seqlens_k=None, heads=2,
        kv_heads=None, head_dim=max(subject.shape.head_dim, _CONTROL_HEAD_DIM), causal=False, window=None,
        policy="auto",
    )  # fmt: skip
    batch = Batch(longer, random_inputs(longer, torch.device(subject.settings.device)))
    if change := _change_without_order(batch, subject.settings):
        return f"this dq sums {most} contributions at most and hides their order; on {longer}, {change}"
    raise _Failed(f"runs without order gave the bytes of ordered ones, here and on {longer}")


_CONTROL_LENGTH = 2048
_CONTROL_HEAD_DIM = 64
"""At least; the rounding of fewer columns may hide the order of 2048 keys, too."""


def _change_without_order(batch: Batch, settings: Settings) -> str:
    """What giving up the order changed in dq; empty if nothing, in several runs."""
    dq = batch.planned_dq(None)
    with contention(settings.device) as disturb:
        for attempt in range(1, 21 if settings.device == "cuda" else 4):
            disturb()
            found = batch.planned_dq(attempt)
            if not same_bytes(dq, found):
                changed = int((dq != found).sum())
                return f"without order, run {attempt} changed {changed:,} of {dq.numel():,} elements of dq"
    return ""


def _compare(what: str, first: Results, again: Results) -> None:
    different = [name for name, a, b in zip(NAMES, first, again) if not same_bytes(a, b)]
    if different:
        raise _Failed(f"{what}: {', '.join(different)} have other bytes")


CHECKS: dict[str, Callable[[_Subject], str]] = {
    "accuracy": _accuracy,
    "replays": _replays,
    "neighbours": _neighbours,
    "fresh process": _fresh_process,
    "CUDA graph": _graph,
    "negative control": _control,
}
"""Every check, in the order in which they run."""


def hashes_of(shape: Shape, device: str) -> dict[str, str]:
    """SHA-256 of what one run of a shape gives; the part of a fresh process."""
    backend_for(torch.device(device))
    return digest(Batch(shape, random_inputs(shape, torch.device(device))).run())

"""``dash-attn demo``: the same training run twice, byte for byte, and a third one that drifts.

Two runs train a small GPT from one seed with deterministic attention and must end in the same bytes.
The third differs in one thing: dQ is summed in no fixed order, by atomics on a GPU, on a CPU in an order
that is shuffled at every step. All of its drift comes from the order of a few additions.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...api import backend_for, fingerprints, plan_for
from ...model.output import FORMATS, PlotsMissingError, prepare_folder
from ...model.render import save_plan
from ...schedule import Plan
from ...schedule.segments import WHOLE
from ...testing import same_bytes
from ..limits import why_no_simulation
from .gpt import GPT
from .repeatable import deterministic_torch
from .report import ProgressBar, draw_drift, sparkline
from .settings import DemoSettings, attention_inputs, demo_device, typical_settings
from .training import TrainingRun, train

__all__ = ["DemoResult", "DemoSettings", "main_demo", "run_demo"]


@dataclass(frozen=True)
class DemoResult:
    """What the three runs showed.

    Attributes:
        identical: the two deterministic runs had the same losses at every step, the same weights at the
            steps of ``drift``, and at the end the same bytes of weights and of the optimizer's state.
        sha256: hashes of the final weights: first run, second run, run without order.
        optimizer_sha256: of the optimizer's final state, likewise.
        losses, shuffled_losses: loss of every step (nats per byte), first run and run without order.
        drift: step -> largest absolute difference of a weight between these two (of a large model: among
            four million of its weights).
        changed: fraction of those weights that differ at the end.
        tokens_per_second: of the three runs, without their first steps.
        parameters: number of weights.
        fingerprint: of the attention plan's numerics, as the backend runs them.
        device: its name.
        versions: of what ran.
        settings: of the demo, without the folder.
        seconds: of all three runs.
        pictures: files written.
    """

    identical: bool
    sha256: tuple[str, str, str]
    optimizer_sha256: tuple[str, str, str]
    losses: list[float]
    shuffled_losses: list[float]
    drift: dict[int, float]
    changed: float
    tokens_per_second: tuple[float, float, float]
    parameters: int
    fingerprint: str
    device: str
    versions: dict[str, str]
    settings: dict[str, object]
    seconds: float
    pictures: list[str]

    @property
    def exit_code(self) -> int:
        """0 if the deterministic runs agree, 1 if not."""
        return 0 if self.identical else 1


def main_demo(args: argparse.Namespace) -> int:
    """The command: run, print, and return the exit code. Flags that are None keep the typical settings."""
    device = demo_device(args.device)
    typical = replace(typical_settings(device), device=args.device)
    sizes, given = (
        {name: value for name in names if (value := getattr(args, name)) is not None}
        for names in (("layers", "seqlen"), ("steps", "batch", "dtype", "seed", "output"))
    )
    settings = replace(typical, shape=replace(typical.shape, **sizes), **given)
    say = _silent if args.json else partial(print, flush=True)
    progress = sys.stderr.isatty() and not args.quiet
    result = run_demo(settings, say=say, progress=progress)
    if args.json:
        print(json.dumps(asdict(result)))
    return result.exit_code


def _silent(text: str) -> None:
    pass


def run_demo(
    settings: DemoSettings | None = None, *, say: Callable[[str], None] = print, progress: bool = False
) -> DemoResult:
    """Train three times, compare, draw.

    Args:
        settings: default ``DemoSettings()``.
        say: takes each line of the report.
        progress: draw a progress bar on standard error.

    Raises:
        InputError: the device has no backend.
        PictureError: the pictures cannot be written; found before the training.
    """
    device = demo_device("auto" if settings is None else settings.device)
    settings = typical_settings(device) if settings is None else settings
    if settings.output is not None:
        _check_output(settings.output)
    backend_for(device)  # an error before any work if there is none
    q = attention_inputs(settings, device)
    whole: dict[str, Any] = {"causal": True, "q_segment": WHOLE}  # apply_plan runs one plan
    plan, fingerprint = plan_for(q, q, q, **whole), fingerprints(q, q, q, **whole).backward
    parameters = _parameters(settings)
    say(f"Training a GPT of {parameters:,} weights on Python's own manual, three times,")
    say(f"{settings.steps} steps each, {settings.dtype} attention on {_name(device)} by {plan}\n")
    disorder = random.Random(settings.seed)
    runs = []
    with deterministic_torch():
        for name, chosen in (("first run", None), ("second run", None), ("no fixed order", disorder)):
            bar = ProgressBar(name, settings.steps) if progress else None
            runs.append(train(settings, device, plan, chosen, bar))
            for line in _of_run(name, runs[-1]):
                say(line)
    result = _compare(runs, settings, fingerprint, device, parameters)
    for line in _verdict(result):
        say(line)
    if settings.output is not None:
        result.pictures.extend(_draw(settings.output, plan, result, say))
    return result


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _parameters(settings: DemoSettings) -> int:
    return sum(w.numel() for w in GPT(settings.shape, lambda q, k, v: q, 0).parameters())


def _of_run(name: str, run: TrainingRun) -> list[str]:
    tail = run.losses[-10:]
    end = f"{sum(tail) / len(tail):.3f} (mean of the last {len(tail)} steps)"
    return [
        f"{name:<15} loss {sparkline(run.losses)} {run.losses[0]:.3f} -> {end}",
        f"{'':<15} weights   sha256 {run.sha256}",
        f"{'':<15} optimizer sha256 {run.optimizer_sha256}",
        f"{'':<15} {run.tokens_per_second:,.0f} tokens/s, {run.seconds:.0f} s",
    ]


def _compare(
    runs: list[TrainingRun], settings: DemoSettings, fingerprint: str, device: torch.device, parameters: int
) -> DemoResult:
    first, second, careless = runs
    drift = {s: float((w - careless.snapshots[s]).abs().max()) for s, w in first.snapshots.items()}
    last = max(drift)
    return DemoResult(
        identical=(first.sha256, first.optimizer_sha256) == (second.sha256, second.optimizer_sha256)
        and first.losses == second.losses
        and all(same_bytes(w, second.snapshots[s]) for s, w in first.snapshots.items()),
        sha256=(first.sha256, second.sha256, careless.sha256),
        optimizer_sha256=(first.optimizer_sha256, second.optimizer_sha256, careless.optimizer_sha256),
        losses=first.losses,
        shuffled_losses=careless.losses,
        drift=drift,
        changed=float((first.snapshots[last] != careless.snapshots[last]).double().mean()),
        tokens_per_second=(first.tokens_per_second, second.tokens_per_second, careless.tokens_per_second),
        parameters=parameters,
        fingerprint=fingerprint,
        device=_name(device),
        versions={"dash_attn": __version__, "torch": torch.__version__, "python": platform.python_version()},
        settings={name: value for name, value in asdict(settings).items() if name != "output"},
        seconds=sum(run.seconds for run in runs),
        pictures=[],
    )


def _verdict(result: DemoResult) -> list[str]:
    last = max(result.drift)
    apart = abs(result.losses[-1] - result.shuffled_losses[-1])
    agree = "IDENTICAL, byte for byte" if result.identical else "DIFFERENT: this is a bug, please report it"
    rows = [f"  step {step:>5}  largest weight difference {d:.1e}" for step, d in result.drift.items()]
    return [
        f"\nfirst and second run: {agree}",
        "first run and the one without a fixed order:",
        *rows[:: max(len(rows) // 6, 1)][:-1],
        f"  step {last:>5}  largest weight difference {result.drift[last]:.1e}, loss apart by {apart:.1e}, "
        f"{result.changed:.1%} of the weights differ",
        _throughput(result),
        f"plan fingerprint {result.fingerprint}",
        f"{result.seconds:.0f} s in all",
    ]


def _throughput(result: DemoResult) -> str:
    ordered = max(result.tokens_per_second[:2])
    return f"{ordered:,.0f} tokens/s with the order, {result.tokens_per_second[2]:,.0f} without"


def _check_output(folder: Path) -> None:
    """Find out before the training whether its pictures can be written. Without Matplotlib there are none."""
    names = [f"{name}.{kind}" for name in ("plan", "drift") for kind in FORMATS]
    with suppress(PlotsMissingError):
        prepare_folder(folder, names)


def _draw(folder: Path, plan: Plan, result: DemoResult, say: Callable[[str], None]) -> list[str]:
    """plan.* and drift.* in the folder, or lines that say why not."""
    caption = (
        f"{result.parameters / 1e6:.3g} million weights on {result.device}, {_throughput(result)}.\n"
        f"Two runs summed in the order of the plan: {'the same' if result.identical else 'other'} bytes."
    )
    too_large = why_no_simulation(plan)
    paths = []
    try:
        for kind in FORMATS:
            if not too_large:
                paths.append(save_plan(plan, folder / f"plan.{kind}"))
            drift = folder / f"drift.{kind}"
            paths.append(draw_drift(drift, result.losses, result.shuffled_losses, result.drift, caption))
    except PlotsMissingError as error:
        say(f"no pictures: {error}")
    else:
        if too_large:
            say(f"no picture of the plan: {too_large}")
        say("pictures: " + ", ".join(map(str, paths)))
    return [str(path) for path in paths]

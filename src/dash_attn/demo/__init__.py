"""``dash-attn demo``: the same training run twice, byte for byte, and a third one that drifts.

Two runs train a small GPT from one seed with deterministic attention and must end in the same bytes.
The third differs in one thing: dQ is summed in an order that is shuffled at every step, as atomic adds
would. Nothing else is random, so all of its drift comes from the order of a few additions.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..api import Backend, apply_plan, backend_for, is_supported, plan_for
from ..errors import InputError
from ..model.charts import PlotsMissingError
from ..model.render import save_plan
from ..schedule import Plan
from ..testing import same_bytes
from .gpt import GPT, GPTShape, batch_of, python_manual
from .repeatable import deterministic_torch, weights_sha256
from .report import ProgressBar, draw_drift, sparkline

__all__ = ["DemoResult", "DemoSettings", "main_demo", "run_demo"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LEARNING_RATE, WARM_UP = 2e-3, 10
SNAPSHOTS = 24


@dataclass(frozen=True)
class DemoSettings:
    """What the demo does; the defaults take about 80 seconds on one core.

    Attributes:
        steps: optimizer steps of each run, >= 1.
        batch: sequences a step.
        shape: size of the model.
        dtype: "float32" or "bfloat16", of the tensors that go into attention.
        seed: of weights, data and the shuffled order.
        device: "auto" for the GPU where there is a kernel for it, or "cpu".
        output: folder for the pictures, None for none.
    """

    steps: int = 150
    batch: int = 2
    shape: GPTShape = field(default_factory=GPTShape)
    dtype: str = "bfloat16"
    seed: int = 0
    device: str = "auto"
    output: Path | None = None

    def __post_init__(self) -> None:
        shape = self.shape
        named = [("steps", self.steps), ("batch", self.batch), *asdict(shape).items()]
        for name, value in named:
            if value < 1:
                raise InputError(f"{name} must be >= 1, got {value}")
        if shape.width % shape.head_dim:
            raise InputError(f"width ({shape.width}) must be a multiple of head_dim ({shape.head_dim})")
        if self.dtype not in DTYPES:
            raise InputError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")


@dataclass(frozen=True)
class TrainingRun:
    """Loss of every step, weights (one flat vector) at some steps, and the hash of the last ones."""

    losses: list[float]
    snapshots: dict[int, Tensor]
    sha256: str
    seconds: float


@dataclass(frozen=True)
class DemoResult:
    """What the three runs showed.

    Attributes:
        identical: the two deterministic runs had the same losses at every step, and the same bytes of
            weights at the steps of ``drift`` and at the end.
        sha256: hashes of the final weights: first run, second run, shuffled run.
        losses, shuffled_losses: loss of every step (nats a byte), first and shuffled run.
        drift: step -> largest absolute difference of a weight between first and shuffled run.
        changed: fraction of the final weights that differ between these two.
        fingerprint: of the attention plan's numerics.
        seconds: of all three runs.
        pictures: files written.
    """

    identical: bool
    sha256: tuple[str, str, str]
    losses: list[float]
    shuffled_losses: list[float]
    drift: dict[int, float]
    changed: float
    fingerprint: str
    device: str
    seconds: float
    pictures: list[str]

    @property
    def exit_code(self) -> int:
        """0 if the deterministic runs agree, 1 if not."""
        return 0 if self.identical else 1


def main_demo(args: argparse.Namespace) -> int:
    """The command: run, print, and return the exit code. Flags that are None keep their defaults."""
    sizes, settings = (
        {name: value for name in names if (value := getattr(args, name)) is not None}
        for names in (("layers", "seqlen"), ("steps", "dtype", "seed", "output"))
    )
    say = _silent if args.json else partial(print, flush=True)
    progress = sys.stderr.isatty() and not args.quiet
    result = run_demo(DemoSettings(shape=GPTShape(**sizes), **settings), say=say, progress=progress)
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
    """
    settings = DemoSettings() if settings is None else settings
    device = _device(settings)
    backend = backend_for(device)
    q = _attention_inputs(settings, device)
    plan = plan_for(q, q, q, causal=True)
    say(f"Training a GPT of {_parameters(settings):,} weights on Python's own manual, three times,")
    say(f"{settings.steps} steps each, {settings.dtype} attention on {device} by {plan}\n")
    shuffled = backend._replace(backward=backend.unordered(random.Random(settings.seed)))
    runs = []
    with deterministic_torch():
        for name, chosen in (("first run", backend), ("second run", backend), ("shuffled order", shuffled)):
            bar = ProgressBar(name, settings.steps) if progress else None
            runs.append(_train(settings, device, plan, chosen, bar))
            last = runs[-1]
            tail = last.losses[-10:]
            end = f"{sum(tail) / len(tail):.3f} (mean of the last {len(tail)} steps)"
            say(f"{name:<15} loss {sparkline(last.losses)} {last.losses[0]:.3f} -> {end}")
            say(f"{'':<15} sha256 {last.sha256}   {last.seconds:.0f} s")
    result = _compare(runs, plan, device)
    for line in _verdict(result):
        say(line)
    if settings.output is not None:
        result.pictures.extend(_draw(settings.output, plan, result, say))
    return result


def _attention_inputs(settings: DemoSettings, device: torch.device) -> Tensor:
    shape = settings.shape
    size = (settings.batch, shape.seqlen, shape.width // shape.head_dim, shape.head_dim)
    return torch.zeros(size, dtype=DTYPES[settings.dtype], device=device)


def _device(settings: DemoSettings) -> torch.device:
    """The device; "auto" takes a GPU that supports the demo's attention."""
    if settings.device != "auto":
        return torch.device(settings.device)
    if torch.cuda.is_available():
        gpu = torch.device("cuda")
        q = _attention_inputs(settings, gpu)
        if is_supported(q, q, q, causal=True):
            return gpu
    return torch.device("cpu")


def _parameters(settings: DemoSettings) -> int:
    return sum(w.numel() for w in GPT(settings.shape, lambda q, k, v: q, 0).parameters())


def _train(
    settings: DemoSettings, device: torch.device, plan: Plan, backend: Backend, bar: ProgressBar | None
) -> TrainingRun:
    """One run from the seed."""
    shape, dtype = settings.shape, DTYPES[settings.dtype]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, _ = apply_plan(backend, plan, q.to(dtype), k.to(dtype), v.to(dtype), shape.head_dim**-0.5)
        return out.to(q.dtype)

    start = time.perf_counter()
    text = python_manual()
    data = torch.Generator().manual_seed(settings.seed)
    model = GPT(shape, attend, settings.seed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min((done + 1) / WARM_UP, 1.0))
    losses, snapshots = [], {}
    for step in range(1, settings.steps + 1):
        tokens, targets = batch_of(text, settings.batch, shape.seqlen, data)
        loss = model(tokens.to(device), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warm_up.step()
        losses.append(loss.item())
        if step in _snapshot_steps(settings.steps):
            snapshots[step] = nn.utils.parameters_to_vector(model.parameters()).detach().cpu()
        if bar is not None:
            bar.show(step, losses[-1])
    return TrainingRun(losses, snapshots, weights_sha256(model), time.perf_counter() - start)


def _snapshot_steps(steps: int) -> set[int]:
    """About ``SNAPSHOTS`` steps, evenly, with the first and the last."""
    return {1, steps, *range(0, steps, -(-steps // SNAPSHOTS))} - {0}


def _compare(runs: list[TrainingRun], plan: Plan, device: torch.device) -> DemoResult:
    first, second, shuffled = runs
    drift = {s: float((w - shuffled.snapshots[s]).abs().max()) for s, w in first.snapshots.items()}
    last = max(drift)
    steps_agree = all(same_bytes(w, second.snapshots[s]) for s, w in first.snapshots.items())
    return DemoResult(
        identical=first.sha256 == second.sha256 and first.losses == second.losses and steps_agree,
        sha256=(first.sha256, second.sha256, shuffled.sha256),
        losses=first.losses,
        shuffled_losses=shuffled.losses,
        drift=drift,
        changed=float((first.snapshots[last] != shuffled.snapshots[last]).double().mean()),
        fingerprint=plan.fingerprint,
        device=str(device),
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
        "first run and shuffled summation order:",
        *rows[:: max(len(rows) // 6, 1)][:-1],
        f"  step {last:>5}  largest weight difference {result.drift[last]:.1e}, loss apart by {apart:.1e}, "
        f"{result.changed:.1%} of the weights differ",
        f"plan fingerprint {result.fingerprint}",
        f"{result.seconds:.0f} s in all",
    ]


def _draw(folder: Path, plan: Plan, result: DemoResult, say: Callable[[str], None]) -> list[str]:
    """plan.* and drift.* in the folder, or a line that says why not."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    try:
        for kind in ("svg", "png"):
            paths.append(save_plan(plan, folder / f"plan.{kind}"))
            drift = folder / f"drift.{kind}"
            paths.append(draw_drift(drift, result.losses, result.shuffled_losses, result.drift))
    except PlotsMissingError as error:
        say(f"no pictures: {error}")
    else:
        say("pictures: " + ", ".join(map(str, paths)))
    return [str(path) for path in paths]

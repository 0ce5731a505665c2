"""One training run from a seed, and what is kept of it."""

from __future__ import annotations

import random
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...api import apply_plan
from ...schedule import Plan
from .gpt import GPT, batch_of, python_manual
from .repeatable import optimizer_sha256, weights_sha256
from .report import ProgressBar
from .settings import DTYPES, DemoSettings

__all__ = ["TrainingRun", "train"]

SNAPSHOTS = 24
SAMPLE = 2**22
"""Weights of a snapshot, at most."""


@dataclass(frozen=True)
class TrainingRun:
    """What one run left.

    Attributes:
        losses: of every step, nats per byte.
        snapshots: step -> weights (every n-th of a large model), one flat vector on the CPU.
        sha256: of the last weights.
        optimizer_sha256: of the last state of the optimizer.
        seconds: all of it.
        tokens_per_second: of the steps after the warm-up.
    """

    losses: list[float]
    snapshots: dict[int, Tensor]
    sha256: str
    optimizer_sha256: str
    seconds: float
    tokens_per_second: float


def train(
    settings: DemoSettings,
    device: torch.device,
    plan: Plan,
    disorder: random.Random | None,
    bar: ProgressBar | None,
) -> TrainingRun:
    """Train from the seed; with ``disorder``, dQ is summed in no fixed order."""
    shape, dtype = settings.shape, DTYPES[settings.dtype]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q16, k16, v16 = (x.to(dtype) for x in (q, k, v))
        out, _ = apply_plan(plan, q16, k16, v16, shape.head_dim**-0.5, disorder=disorder)
        return out.to(q.dtype)

    start = time.perf_counter()
    text = python_manual()
    data = torch.Generator().manual_seed(settings.seed)
    model = GPT(shape, attend, settings.seed).to(device)
    optimizer = _optimizer(model, settings, device)
    warm_up = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min((done + 1) / settings.warm_up, 1.0)
    )
    losses: list[Tensor] = []
    snapshots: dict[int, Tensor] = {}
    clock = _Clock(settings, device)
    for step in range(1, settings.steps + 1):
        tokens, targets = batch_of(text, settings.batch, shape.seqlen, data)
        with _autocast(device, dtype):
            loss = model(tokens.to(device), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warm_up.step()
        losses.append(loss.detach())
        if step in _snapshot_steps(settings.steps):
            snapshots[step] = _sample(model)
        clock.tick(step)
        if bar is not None:
            bar.show(step, loss.item())
    return TrainingRun(
        torch.stack(losses).tolist(),
        snapshots,
        weights_sha256(model),
        optimizer_sha256(optimizer),
        time.perf_counter() - start,
        clock.tokens_per_second(),
    )


def _optimizer(model: nn.Module, settings: DemoSettings, device: torch.device) -> torch.optim.Optimizer:
    how: dict[str, Any] = {"fused": True} if device.type == "cuda" else {}
    return torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), **how)


def _autocast(device: torch.device, dtype: torch.dtype) -> Any:
    """On a GPU every product is in the demo's dtype, on a CPU attention alone."""
    mixed = device.type == "cuda" and dtype != torch.float32
    return torch.autocast("cuda", dtype) if mixed else nullcontext()


def _snapshot_steps(steps: int) -> set[int]:
    """About ``SNAPSHOTS`` steps, evenly, with the first and the last."""
    return {1, steps, *range(0, steps, -(-steps // SNAPSHOTS))} - {0}


def _sample(model: nn.Module) -> Tensor:
    """All weights of a small model, every n-th of a large one."""
    weights = [w.detach() for w in model.parameters()]
    stride = -(-sum(w.numel() for w in weights) // SAMPLE)
    return torch.cat([w.flatten()[::stride] for w in weights]).cpu()


class _Clock:
    """Tokens per second from the end of the warm-up (the first step, if runs are shorter) to the end."""

    def __init__(self, settings: DemoSettings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.first = min(settings.warm_up, settings.steps - 1)
        self.start = time.perf_counter()
        self.seconds = 0.0

    def tick(self, step: int) -> None:
        """Step ``step`` was issued."""
        if step not in (self.first, self.settings.steps):
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if step == self.first:
            self.start = time.perf_counter()
        else:
            self.seconds = time.perf_counter() - self.start

    def tokens_per_second(self) -> float:
        steps = self.settings.steps - self.first
        return steps * self.settings.batch * self.settings.shape.seqlen / self.seconds

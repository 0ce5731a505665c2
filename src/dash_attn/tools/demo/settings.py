"""What the demo trains, and on which machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ...api import is_supported
from ...errors import InputError
from .gpt import GPTShape

__all__ = ["DTYPES", "DemoSettings", "attention_inputs", "demo_device", "typical_settings"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class DemoSettings:
    """What the demo does; the defaults take about 80 seconds on one core.

    Attributes:
        steps: optimizer steps of each run, >= 1.
        batch: sequences per step.
        shape: size of the model.
        dtype: "float32" or "bfloat16", of the tensors that go into attention; on a GPU of all products.
        learning_rate: the highest one, reached after ``warm_up`` steps.
        warm_up: steps of linear warm-up, >= 1.
        seed: of weights, data and the shuffled order.
        device: "auto" for the GPU where there is a kernel for it, "cpu" or "cuda".
        output: folder for the pictures, None for none.
    """

    steps: int = 150
    batch: int = 2
    shape: GPTShape = field(default_factory=GPTShape)
    dtype: str = "bfloat16"
    learning_rate: float = 2e-3
    warm_up: int = 10
    seed: int = 0
    device: str = "auto"
    output: Path | None = None

    def __post_init__(self) -> None:
        shape = self.shape
        named = [(name, getattr(self, name)) for name in ("steps", "batch", "warm_up")]
        for name, value in [*named, *asdict(shape).items()]:
            if type(value) is not int or value < 1:
                raise InputError(f"{name} must be an integer >= 1, got {value!r}")
        if type(self.seed) is not int or not -(2**63) <= self.seed < 2**64:
            raise InputError(f"seed must be an integer of 64 bits, got {self.seed!r}")
        if self.device != "auto":
            _device(self.device)
        if shape.width % shape.head_dim:
            raise InputError(f"width ({shape.width}) must be a multiple of head_dim ({shape.head_dim})")
        if self.dtype not in DTYPES:
            raise InputError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")


def typical_settings(device: torch.device) -> DemoSettings:
    """Settings that take a few minutes: 100 million weights on a GPU, half a million on a CPU."""
    if device.type == "cpu":
        return DemoSettings()
    shape = GPTShape(layers=14, width=768, head_dim=64, seqlen=2048)
    return DemoSettings(steps=400, batch=16, shape=shape, learning_rate=6e-4, warm_up=40)


def demo_device(name: str = "auto") -> torch.device:
    """The device of a name; "auto" is a GPU that supports the demo's attention, or else the CPU.

    Raises:
        InputError: PyTorch knows no such device.
    """
    if name != "auto":
        return _device(name)
    if torch.cuda.is_available():
        gpu = torch.device("cuda")
        q = attention_inputs(typical_settings(gpu), gpu)
        if is_supported(q, q, q, causal=True):
            return gpu
    return torch.device("cpu")


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device must be 'auto' or a device of PyTorch, got {name!r}") from error


def attention_inputs(settings: DemoSettings, device: torch.device) -> Tensor:
    """q of one layer, zeros: (batch, seqlen, heads, head_dim)."""
    shape = settings.shape
    size = (settings.batch, shape.seqlen, shape.width // shape.head_dim, shape.head_dim)
    return torch.zeros(size, dtype=DTYPES[settings.dtype], device=device)

"""What runs a plan: the executor on the CPU, the Hopper kernels on a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..problem import Problem
from ..schedule import Plan
from .cpu import dense

__all__ = ["Backend", "BackwardFunction", "backend_for", "check_device"]

BackwardFunction = Callable[
    [Plan, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]
]


class Backend(NamedTuple):
    """What runs a plan. Tensors of four dimensions are a dense batch, of three a packed one.

    Attributes:
        name: "cpu" or "sm90".
        why_not: (problem, device, packed) to why they cannot run, empty if they can.
        forward, backward: (plan, q, k, v, scale) and (plan, dout, q, k, v, out, lse, scale).
        fast_backward: what ``deterministic=False`` allows: on a GPU dQ summed by atomics. It is
            ``backward`` where giving up the order gains nothing.
        unordered: makes a backward that adds to dQ in no fixed order; a simulated disorder draws from rng.
    """

    name: str
    why_not: Callable[[Problem, torch.device, bool], str]
    forward: Callable[[Plan, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    backward: BackwardFunction
    fast_backward: BackwardFunction
    unordered: Callable[[random.Random], BackwardFunction]


_CPU = Backend(
    "cpu",
    lambda problem, device, packed: "",
    dense.forward,
    dense.backward,
    dense.backward,
    lambda rng: partial(dense.backward, rng=rng, ordered=False),
)


@cache
def _gpu() -> Backend:
    """The Hopper kernels, loaded when the first tensor is on a GPU."""
    launch = import_module(".sm90.launch", __package__)
    unordered = launch.unordered_backward
    return Backend("sm90", launch.why_not, launch.forward, launch.backward, unordered, lambda rng: unordered)


def check_device(device: torch.device) -> None:
    """Raise InputError if the device has no backend. It loads nothing, so that torch.compile can trace it."""
    if device.type != "cpu" and not (device.type == "cuda" and torch.cuda.is_available()):
        raise InputError(
            f"device {str(device)!r} is not supported; supported: cpu, and cuda where there is one"
        )


def backend_for(device: torch.device) -> Backend:
    """The backend of a device.

    Raises:
        InputError: there is none.
    """
    check_device(device)
    return _CPU if device.type == "cpu" else _gpu()

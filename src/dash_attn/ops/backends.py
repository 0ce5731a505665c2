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
from ..reference import dense
from ..schedule import Plan

__all__ = ["Backend", "BackwardFunction", "backend_for"]

BackwardFunction = Callable[
    [Plan, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]
]


class Backend(NamedTuple):
    """What runs a plan. Tensors of four dimensions are a dense batch, of three a packed one.

    Attributes:
        name: "cpu" or "sm90".
        why_not: why a problem cannot run on a device, empty if it can.
        forward, backward: (plan, q, k, v, scale) and (plan, dout, q, k, v, out, lse, scale).
        fast_backward: what ``deterministic=False`` allows: on a GPU dQ summed by atomics. It is
            ``backward`` where giving up the order gains nothing.
        unordered: makes a backward that adds to dQ in no fixed order; a simulated disorder draws from rng.
    """

    name: str
    why_not: Callable[[Problem, torch.device], str]
    forward: Callable[[Plan, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    backward: BackwardFunction
    fast_backward: BackwardFunction
    unordered: Callable[[random.Random], BackwardFunction]


_CPU = Backend(
    "cpu",
    lambda problem, device: "",
    dense.forward,
    dense.backward,
    dense.backward,
    lambda rng: partial(dense.backward, rng=rng, ordered=False),
)


@cache
def _gpu() -> Backend:
    """The Hopper kernels, loaded when the first tensor is on a GPU."""
    launch = import_module("..kernels.launch", __package__)
    unordered = launch.unordered_backward
    return Backend("sm90", launch.why_not, launch.forward, launch.backward, unordered, lambda rng: unordered)


def backend_for(device: torch.device) -> Backend:
    """The backend of a device.

    Raises:
        InputError: there is none.
    """
    if device.type == "cpu":
        return _CPU
    if device.type == "cuda" and torch.cuda.is_available():
        return _gpu()
    raise InputError(f"device {str(device)!r} is not supported; supported: cpu, and cuda where there is one")

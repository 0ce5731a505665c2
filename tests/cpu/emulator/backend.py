"""The Hopper backend on CPU tensors: its launches run in the emulator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import torch

from dash_attn.backends.sm90 import backend, launch, resident, segments
from dash_attn.backends.sm90.cached import launch as cached
from dash_attn.backends.sm90.compile import Config
from dash_attn.backends.sm90.forward import launch as forward
from dash_attn.backends.sm90.forward.config import ForwardConfig
from dash_attn.backends.sm90.places import Buffer
from dash_attn.backends.sm90.sinks import launch as sinks
from dash_attn.ops.policies import forget
from dash_attn.problem import Problem
from dash_attn.schedule import ForwardPlan, Plan
from dash_attn.scores import PLAIN, Scores

from .programs import Emulated


class _Upload:
    """What a plan keeps "on the device"."""

    def __init__(self, _owner: object, arrays: list, _device: torch.device):  # type: ignore[type-arg]
        self._tensors = [torch.from_numpy(array.copy()) for array in arrays]

    def use(self) -> list[torch.Tensor]:
        return self._tensors


class _Buffer(Buffer):
    """Its addresses are its parts."""

    def __init__(self, words: Sequence[int], device: torch.device) -> None:
        super().__init__(words, device)
        self.addresses = [self.part(i) for i in range(len(words))]  # type: ignore[misc]


@contextmanager
def emulated(
    blocks: int = 2,
    seed: int = 0,
    late: bool = True,
    races: bool = False,
    apart: bool = False,
    turns: bool = False,
    narrow: bool = False,
) -> Iterator[None]:
    """All functions with ``backend="sm90"`` take CPU tensors. Nothing is kept of calls before, nor for later
    ones: what a call has made would run again as it was made.

    Args:
        blocks: SMs of the GPU, each of which has one block.
        seed: of the order in which warps run and copies end.
        late, races: see :class:`~emulator.machine.Machine`.
        apart: contributions to dQ are kept apart where there are kernels for that; else they wait.
        turns: warpgroups of a forward start their products in turns where they may.
        narrow: a forward of few items has blocks of one warpgroup where they may be so.
    """

    def better_apart(_plan: Plan, _contributions: int) -> bool:
        return apart

    def faster_in_turns(config: ForwardConfig, _plan: ForwardPlan) -> bool:
        return config.in_turns or (turns and config.may_take_turns)

    def faster_narrow(*_: object) -> bool:
        return narrow

    def program(config: Config) -> Emulated:
        return Emulated(config, seed, late, races)

    def count(_device: torch.device) -> int:
        return blocks

    def nothing(_device: torch.device) -> nullcontext[None]:
        return nullcontext()

    # Emulated programs are given tensors in place of addresses: matrices of rank 4, and LSE of rank 3.
    as_tensors: dict[str, object] = {
        "place_of": lambda x: (x if x.dim() == 4 else x.unsqueeze(0),),
        "address_of": lambda x: x if x.dim() == 3 else x.unsqueeze(0),
        "Buffer": _Buffer,
    }
    why_not = backend.BACKEND.why_not

    def why_not_here(problem: Problem, _device: torch.device, packed: bool, scores: Scores = PLAIN) -> str:
        return why_not(problem, torch.device("cuda"), packed, scores)

    patches: dict[object, dict[str, object]] = {
        backend: {"_capability": lambda _: (9, 0), "multiprocessors": count},
        backend.BACKEND: {"why_not": why_not_here},
        launch: {
            "program": program, "multiprocessors": count, "usable_multiprocessors": count,
            "as_current": nothing, "in_turn": nothing, **as_tensors,
        },
        resident: {"Upload": _Upload, "_better_apart": better_apart},
        segments: {"program": program, "as_current": nothing},
        sinks: {"program": program, "as_current": nothing},
        forward: {
            "program": program, "multiprocessors": count, "Upload": _Upload,
            "_faster_in_turns": faster_in_turns, "_faster_narrow": faster_narrow, **as_tensors,
        },
        cached: {
            "program": program, "multiprocessors": count, "constant": lambda words, _: torch.from_numpy(words)
        },
    }  # fmt: skip
    with ExitStack() as stack:
        for module, values in patches.items():
            for name, value in values.items():
                stack.enter_context(mock.patch.object(module, name, value))
        stack.callback(forget)
        forget()
        yield

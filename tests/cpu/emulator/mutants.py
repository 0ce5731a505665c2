"""Whether anybody misses what orders accesses: fences, acquires and releases, each left out in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

from dash_attn.backends.sm90.compile import Config

from . import machine, programs
from .backend import emulated
from .program import Instruction, Kernel
from .races import RaceError

ORDERS = ("fence.proxy", "ld.acquire", "red.release", "st.release")


def unnoticed(
    config: Config, run: Callable[[], object], blocks: int = 2, product: str = "wgmma"
) -> tuple[int, list[str]]:
    """How many such instructions the first kernel with a product has, and those without which ``run`` fails
    nowhere."""
    kernels, missed = programs.kernels(config), []
    at = next(n for n, kernel in enumerate(kernels) if _multiplies(kernel, product))
    main = kernels[at]
    places = [n for n, i in enumerate(main.instructions) if i.operation.startswith(ORDERS)]
    for place in places:
        instructions = list(main.instructions)
        instructions[place] = _without(instructions[place])
        changed = [*kernels[:at], replace(main, instructions=instructions), *kernels[at + 1 :]]
        with (
            mock.patch.object(programs, "kernels", instead(config, changed)),
            mock.patch.object(machine, "PATIENCE", 300),
            emulated(blocks, seed=1, races=True),
        ):
            try:
                run()
            except RaceError:
                continue
        missed.append(main.instructions[place].operation)
    return len(places), missed


def _multiplies(kernel: Kernel, product: str) -> bool:
    return any(i.operation.startswith(product) for i in kernel.instructions)


def _without(instruction: Instruction) -> Instruction:
    """A fence that is none; a load or store that orders nothing."""
    if instruction.form[0] == "fence":
        return replace(instruction, operation="prefetch", form=("prefetch",), operands=())
    return replace(
        instruction, form=tuple(part for part in instruction.form if part not in ("acquire", "release"))
    )


def instead(config: Config, changed: list[Kernel]) -> Callable[[Config], list[Kernel]]:
    """``programs.kernels`` with other ones for one variant."""
    kernels = programs.kernels
    return lambda asked: changed if asked == config else kernels(asked)

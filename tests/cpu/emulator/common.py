"""What the instructions of all kinds need: operands, and who watches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .arithmetic import Slot
from .program import Address, Instruction
from .races import WORD

if TYPE_CHECKING:
    from .machine import Machine, Warp

Act = Callable[["Machine", "Warp", np.ndarray], bool]
"""What an instruction does to a warp, for some of its lanes; False if they must wait at it."""
Make = Callable[[Instruction, Slot], Act]
Pending = deque[list[Callable[[], None]]]
By = tuple[int, int, Any]


def nothing(_machine: Machine, _warp: Warp, _lanes: np.ndarray) -> bool:
    return True


def together(warp: Warp, lanes: np.ndarray) -> bool:
    """Whether all lanes that live are here: what needs them all waits for the others."""
    return lanes is warp.alive or bool((lanes == warp.alive).all())


def addresses(warp: Warp, address: Address) -> np.ndarray:
    register = warp.registers[address.register]
    found = register.astype(np.int64) + address.offset
    return found & 0xFFFFFFFF if register.dtype == np.uint32 else found


def one(values: np.ndarray, lanes: np.ndarray) -> int:
    """The value of the one lane that is here."""
    (found,) = values[lanes]
    return int(found)


def names(operand: object) -> tuple[int, ...]:
    return operand if isinstance(operand, tuple) else (operand,)  # type: ignore[return-value]


def put(machine: Machine, warp: Warp, register: int, lanes: np.ndarray, values: np.ndarray) -> None:
    """Write a register in some lanes; ``values`` are theirs."""
    kind, full = machine.kinds[register], warp.registers[register].copy()
    same = values.dtype.itemsize == np.dtype(kind).itemsize
    full[lanes] = values.view(kind) if same else values.astype(kind)
    warp.registers[register] = full


def issue(machine: Machine, pending: Pending, do: Callable[[], None]) -> None:
    """Do something now, or when it is waited for."""
    if machine.late:
        pending[-1].append(do)
    else:
        do()


def finish(pending: Pending, left: int) -> None:
    """Execute the oldest groups, so that so many are left beside the open one."""
    while len(pending) > left + 1:
        for each in pending.popleft():
            each()


# Who watches is told which words are touched.


def in_shared(warp: Warp, at: np.ndarray, size: int) -> tuple[object, int, np.ndarray]:
    """A region of shared memory, its words, and those of accesses of so many bytes."""
    region = f"shared memory of {warp.block}"
    return region, len(warp.block.shared) // WORD, _words(at, size)


def in_global(machine: Machine, at: np.ndarray, size: int) -> tuple[object, int, np.ndarray]:
    base, region = machine.memory.region(int(at.min()), int(at.max()) + size)
    return f"tensor {machine.memory.bases.index(base)}", len(region) // WORD + 1, _words(at - base, size)


def _words(at: np.ndarray, size: int) -> np.ndarray:
    return np.unique(((at // WORD)[:, None] + np.arange(-(-size // WORD))).ravel())

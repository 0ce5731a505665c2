"""Which instruction does what."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import accesses, barriers, engines, lanes
from .arithmetic import Slot
from .common import Act, Make, nothing
from .program import Instruction

if TYPE_CHECKING:
    from .machine import Machine, Warp

_MAKERS: dict[str, Make] = {
    "ld": accesses.load, "st": accesses.store, "atom": accesses.atomic, "red": accesses.reduction,
    "stmatrix": accesses.store_matrix, "ldmatrix": accesses.load_matrix,
    "mov": lanes.split, "elect": lanes.elect, "vote": lanes.vote, "redux": lanes.reduce,
    "shfl": lanes.shuffle, "mma": lanes.product,
    "bar": barriers.named, "barrier": barriers.named, "mbarrier": barriers.of_memory, "fence": barriers.fence,
    "wgmma": engines.product, "cp": engines.copy,
}  # fmt: skip
_NOTHING = ("prefetch", "griddepcontrol", "setmaxnreg", "nanosleep", "cp.async.bulk.prefetch")


def _wait_for_kernel(_machine: Machine, warp: Warp, _lanes: np.ndarray) -> bool:
    warp.waited = True
    return True


def action(i: Instruction, slot: Slot) -> Act:
    """What an instruction does that does not only compute."""
    if i.operation == "griddepcontrol.wait":
        return _wait_for_kernel
    if i.operation.startswith(_NOTHING):
        return nothing
    if i.form[0] not in _MAKERS:
        raise NotImplementedError(i.text)
    return _MAKERS[i.form[0]](i, slot)

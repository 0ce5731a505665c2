"""Which instruction does what."""

from __future__ import annotations

from . import accesses, barriers, engines, lanes
from .arithmetic import Slot
from .common import Act, Make, nothing
from .program import Instruction

_MAKERS: dict[str, Make] = {
    "ld": accesses.load, "st": accesses.store, "atom": accesses.atomic, "red": accesses.reduction,
    "stmatrix": accesses.store_matrix, "ldmatrix": accesses.load_matrix,
    "mov": lanes.split, "elect": lanes.elect, "vote": lanes.vote, "redux": lanes.reduce,
    "shfl": lanes.shuffle, "mma": lanes.product,
    "bar": barriers.named, "barrier": barriers.named, "mbarrier": barriers.of_memory, "fence": barriers.fence,
    "wgmma": engines.product, "cp": engines.copy,
}  # fmt: skip
_NOTHING = ("prefetch", "griddepcontrol", "setmaxnreg", "nanosleep", "cp.async.bulk.prefetch")


def action(i: Instruction, slot: Slot) -> Act:
    """What an instruction does that does not only compute."""
    if i.operation.startswith(_NOTHING):
        return nothing
    if i.form[0] not in _MAKERS:
        raise NotImplementedError(i.text)
    return _MAKERS[i.form[0]](i, slot)

"""Instructions by which the lanes of a warp learn of one another, and moves to several registers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import products
from .arithmetic import TYPES, Slot
from .common import Act, names, put, together
from .program import LANES, Instruction

if TYPE_CHECKING:
    from .machine import Machine, Warp


def split(i: Instruction, slot: Slot) -> Act:
    """mov of a register to two halves."""
    kind = TYPES[i.form[-1]]
    source, half = slot(i.operands[1], kind), {4: np.uint16, 8: np.uint32}[np.dtype(kind).itemsize]

    def act(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        parts = warp.registers[source].view(half).reshape(LANES, 2)
        for number, register in enumerate(i.operands[0]):
            put(machine, warp, register, lanes, parts[lanes, number])
        return True

    return act


def elect(i: Instruction, _slot: Slot) -> Act:
    def act(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        if not together(warp, lanes):
            return False
        here = np.flatnonzero(lanes)
        put(machine, warp, i.operands[0], lanes, np.full(len(here), here[0], np.uint32))
        put(machine, warp, i.operands[1], lanes, here == here[0])
        return True

    return act


def vote(i: Instruction, slot: Slot) -> Act:
    given, how = slot(i.operands[1], np.bool_), i.form[2]

    def act(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        if not together(warp, lanes):
            return False
        votes = warp.registers[given] & lanes
        if how == "ballot":
            found = np.full(int(lanes.sum()), sum(1 << int(n) for n in np.flatnonzero(votes)), np.uint32)
        else:
            found = np.full(int(lanes.sum()), {"all": votes[lanes].all, "any": votes.any}[how]())
        put(machine, warp, i.operands[0], lanes, found)
        return True

    return act


def reduce(i: Instruction, slot: Slot) -> Act:
    """redux: one value of all lanes."""
    kind = TYPES[i.form[-1]]
    given, combine = slot(i.operands[1], kind), {"min": np.min, "max": np.max, "add": np.sum}[i.form[-2]]

    def act(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        if not together(warp, lanes):
            return False
        found = combine(warp.registers[given].view(kind)[lanes]).astype(kind)
        put(machine, warp, i.operands[0], lanes, np.full(int(lanes.sum()), found))
        return True

    return act


def shuffle(i: Instruction, slot: Slot) -> Act:
    to = i.operands[0]
    value, by, clamp = (slot(each, np.uint32) for each in i.operands[-4:-1])
    inside_to = i.operands[1] if len(i.operands) == 6 else -1

    def act(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        if not together(warp, lanes):
            return False
        r, lane = warp.registers, np.arange(LANES)
        offset, limit = r[by].astype(np.int64), r[clamp].astype(np.int64)
        segment = limit >> 8 & 31
        last = (lane & segment) | (limit & 31 & ~segment)
        source = {
            "bfly": lane ^ offset,
            "idx": (lane & segment) | (offset & ~segment & 31),
            "up": lane - offset,
            "down": lane + offset,
        }[i.form[2]]
        inside = source >= last if i.form[2] == "up" else source <= last
        source = np.where(inside, source, lane)
        put(machine, warp, to, lanes, r[value][source][lanes])
        if inside_to >= 0:
            put(machine, warp, inside_to, lanes, inside[lanes])
        return True

    return act


def product(i: Instruction, _slot: Slot) -> Act:
    """mma.sync of 16 x 8 x 16: a product of what a warp has in registers."""
    assert i.form[3:6] == ("m16n8k16", "row", "col"), i.text
    (to, a, b, acc), dtype = map(names, i.operands), i.form[7]

    def act(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        if not together(warp, lanes):
            return False
        left = products.fragment([warp.registers[each] for each in a], dtype)
        right = products.fragment([warp.registers[b[n // 2]] for n in range(4)], dtype)[:8]
        sums = products.multiply(left, right, [warp.registers[each] for each in acc])
        for register, values in zip(to, sums, strict=True):
            put(machine, warp, register, lanes, values[lanes])
        return True

    return act

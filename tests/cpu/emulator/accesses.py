"""Loads and stores of lanes, and atomics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .arithmetic import TYPES, Slot
from .common import Act, addresses, in_global, in_shared, names, put, together
from .program import LANES, Address, Instruction

if TYPE_CHECKING:
    from .machine import Machine, Warp


def _touch(
    machine: Machine,
    warp: Warp,
    i: Instruction,
    at: np.ndarray,
    size: int,
    *,
    writes: bool = False,
    to: tuple[int, ...] = (),
) -> None:
    """Tell who watches; what synchronises is not raced for. ``to``: registers of a load."""
    if machine.watch is None:
        return
    if "acquire" in i.form or "release" in i.form:
        for address in set(at.tolist()):
            if writes:
                machine.watch.release(warp.agent, address, replaces=i.form[0] == "st")
            else:
                machine.watch.acquire(warp.agent, address)
        return
    if to and "shared" in i.operation:
        machine.watch.load(warp.agent, to, *in_shared(warp, at, size))
        return
    where = in_shared(warp, at, size) if "shared" in i.operation else in_global(machine, at, size)
    (machine.watch.write if writes else machine.watch.read)(warp.agent, *where)


def load(i: Instruction, _slot: Slot) -> Act:
    to, at, kind = names(i.operands[0]), i.operands[1], TYPES[i.form[-1]]
    assert isinstance(at, Address)
    size = np.dtype(kind).itemsize

    def param(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        given = machine.parameters[at.parameter]
        assert isinstance(given, bytes), i.text
        for number, register in enumerate(to):
            value = np.frombuffer(given, np.uint8, size, at.offset + number * size).view(kind)
            put(machine, warp, register, lanes, np.repeat(value, int(lanes.sum())))
        return True

    def act(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        where, width = addresses(warp, at)[lanes], size * len(to)
        assert (where % width == 0).all(), f"misaligned: {i.text}"
        _touch(machine, warp, i, where, width, to=to)
        if "shared" in i.operation:
            found = warp.block.shared[where[:, None] + np.arange(width)]
        else:
            machine.look(warp, int(where.min()), int(where.max()) + width)
            found = machine.memory.read(where, width)
        words = np.ascontiguousarray(found).view(kind)
        for number, register in enumerate(to):
            put(machine, warp, register, lanes, words[:, number])
        return True

    return param if at.parameter >= 0 else act


def store(i: Instruction, slot: Slot) -> Act:
    at, kind = i.operands[0], TYPES[i.form[-1]]
    given = [slot(each, kind) for each in names(i.operands[1])]
    size = np.dtype(kind).itemsize

    def act(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        where, width = addresses(warp, at)[lanes], size * len(given)
        assert (where % width == 0).all(), f"misaligned: {i.text}"
        values = np.stack([_narrow(warp.registers[each], size)[lanes] for each in given], 1)
        raw = np.ascontiguousarray(values).view(np.uint8)
        _touch(machine, warp, i, where, width, writes=True)
        if "shared" in i.operation:
            warp.block.shared[where[:, None] + np.arange(width)] = raw
        else:
            machine.memory.write(where, raw)
        machine.notice()
        return True

    return act


def _narrow(values: np.ndarray, size: int) -> np.ndarray:
    return values if values.dtype.itemsize == size else values.astype(f"u{size}")


_COMBINE: dict[str, Callable[..., object]] = {
    "add": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "or": np.bitwise_or,
    "cas": lambda old, compared, new: new if old == compared else old,
}


def atomic(i: Instruction, slot: Slot) -> Act:
    """atom and red of one word."""
    result = i.form[0] == "atom"
    at, kind = i.operands[result], TYPES[i.form[-1]]
    given = [slot(each, kind) for each in i.operands[result + 1 :]]
    combine = _COMBINE[i.form[-2]]

    def act(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        where, before = addresses(warp, at), np.zeros(LANES, kind)
        if "release" in i.form:
            _touch(machine, warp, i, where[lanes], before.itemsize, writes=True)
        for lane in np.flatnonzero(lanes):
            address = int(where[lane])
            if "shared" in i.operation:
                word = warp.block.shared[address : address + before.itemsize].view(kind)
            else:
                word = machine.memory.words(address, 1, kind)
            before[lane] = word[0]
            word[0] = combine(before[lane], *(warp.registers[each].view(kind)[lane] for each in given))
        if result:
            put(machine, warp, i.operands[0], lanes, before[lanes])
        machine.notice()
        return True

    return act


def reduction(i: Instruction, slot: Slot) -> Act:
    """red; of several floats at once it is a sum that somebody must order."""
    if not isinstance(i.operands[1], tuple):
        return atomic(i, slot)
    at, kind = i.operands[0], TYPES[i.form[-1]]
    given = [slot(each, kind) for each in i.operands[1]]

    def act(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        where = addresses(warp, at)
        _touch(machine, warp, i, where[lanes], np.dtype(kind).itemsize * len(given), writes=True)
        for lane in np.flatnonzero(lanes):
            words = machine.memory.words(int(where[lane]), len(given), kind)
            words += np.array([warp.registers[each][lane] for each in given]).view(kind)
        machine.notice()
        return True

    return act


def store_matrix(i: Instruction, _slot: Slot) -> Act:
    at, given = i.operands[0], i.operands[1]

    def act(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        if not together(warp, lanes):
            return False
        where, lane = addresses(warp, at)[: 8 * len(given)], np.arange(LANES)
        _touch(machine, warp, i, where, 16, writes=True)
        for number, register in enumerate(given):
            pairs = warp.registers[register].view(np.uint16).reshape(LANES, 2)
            matrix = np.zeros((8, 8), np.uint16)
            matrix[lane // 4, lane % 4 * 2], matrix[lane // 4, lane % 4 * 2 + 1] = pairs[:, 0], pairs[:, 1]
            matrix = np.ascontiguousarray(matrix.T if "trans" in i.form else matrix)
            rows = where[8 * number : 8 * number + 8]
            warp.block.shared[rows[:, None] + np.arange(16)] = matrix.view(np.uint8)
        machine.notice()
        return True

    return act


def load_matrix(i: Instruction, _slot: Slot) -> Act:
    to, at = i.operands[0], i.operands[1]

    def act(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        if not together(warp, lanes):
            return False
        where, lane = addresses(warp, at)[: 8 * len(to)], np.arange(LANES)
        _touch(machine, warp, i, where, 16, to=to)
        for number, register in enumerate(to):
            rows = where[8 * number : 8 * number + 8]
            matrix = warp.block.shared[rows[:, None] + np.arange(16)].view(np.uint16)
            matrix = matrix.T if "trans" in i.form else matrix
            pairs = np.stack([matrix[lane // 4, lane % 4 * 2], matrix[lane // 4, lane % 4 * 2 + 1]], 1)
            put(machine, warp, register, lanes, np.ascontiguousarray(pairs).view(np.uint32)[lanes, 0])
        return True

    return act

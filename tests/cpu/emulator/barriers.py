"""Barriers and fences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .arithmetic import Slot
from .common import Act, addresses, nothing, put, together
from .phases import Barrier
from .program import LANES, Address, Instruction

if TYPE_CHECKING:
    from .machine import Machine, Warp


def named(i: Instruction, slot: Slot) -> Act:
    """bar.sync and bar.arrive; bar.warp.sync."""
    if "warp" in i.form:
        return lambda _machine, warp, lanes: together(warp, lanes)
    which, *count = (slot(each, np.uint32) for each in i.operands)

    def act(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        if not together(warp, lanes):
            return False
        number = int(warp.registers[which][0])
        barrier, key = warp.block.named[number], (warp.block.index, "named", number)
        threads = int(warp.registers[count[0]][0]) if count else machine.kernel.threads
        if warp.came_in < 0:
            warp.came_in = barrier.phase
            if machine.watch is not None:
                machine.watch.arrive(warp.agent, key)
            barrier.come(LANES, threads)
            if barrier.phase > warp.came_in and machine.watch is not None:
                machine.watch.meeting(key).end()
            machine.notice()
        waits = "arrive" not in i.form
        if waits and barrier.phase == warp.came_in:
            return False
        warp.came_in = -1
        if waits and machine.watch is not None:
            machine.watch.leave(warp.agent, key)
        return True

    return act


def of_memory(i: Instruction, slot: Slot) -> Act:
    """mbarrier."""
    kind = i.form[1]
    at = next(each for each in i.operands if isinstance(each, Address))
    given = [slot(each, np.uint32) for each in i.operands[i.operands.index(at) + 1 :]]

    def act(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        where, barriers = addresses(warp, at), warp.block.barriers
        for lane in np.flatnonzero(lanes):
            address = int(where[lane])
            value = int(warp.registers[given[0]][lane]) if given else 1
            if kind == "init":
                barriers[address] = Barrier(value, value)
                continue
            if machine.watch is not None and kind == "arrive":
                machine.watch.arrive(warp.agent, (warp.block.index, address))
            if "expect_tx" in i.form:
                machine.change(warp.block, address, int(kind == "arrive"), value)
            else:
                machine.change(warp.block, address, value)
        machine.notice()
        return True

    def wait(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        where, parities = addresses(warp, at), warp.registers[given[0]]
        here = np.flatnonzero(lanes)
        over = np.array([warp.block.barriers[int(where[n])].phase % 2 != parities[n] for n in here])
        if machine.watch is not None:
            for address in set(where[here[over]].tolist()):
                machine.watch.leave(warp.agent, (warp.block.index, address))
        if kind == "test_wait":
            put(machine, warp, i.operands[0], lanes, over)
            return True
        return bool(over.all())

    return wait if kind in ("try_wait", "test_wait") else act


def fence(i: Instruction, _slot: Slot) -> Act:
    if "proxy" not in i.form:
        return nothing
    spaces = tuple(space for space in ("shared", "global") if space in i.operation) or ("shared", "global")

    def act(machine: Machine, warp: Warp, _lanes: np.ndarray) -> bool:
        if machine.watch is not None:
            machine.watch.fence(warp.agent, spaces)
        return True

    return act

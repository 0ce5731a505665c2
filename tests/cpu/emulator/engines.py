"""What works beside warps: wgmma, and copies. They end when somebody waits for them, or some time before."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from . import products
from .arithmetic import Slot
from .common import Act, By, Pending, addresses, finish, in_global, in_shared, issue, one, together
from .memory import TensorMap
from .program import DESCRIPTORS, Address, Instruction

if TYPE_CHECKING:
    from .machine import Machine, Warp

NAN = 0x7FFFFFFF
Which = Callable[["Warp"], Pending]


def _commit(*which: Which) -> Act:
    def act(_machine: Machine, warp: Warp, _lanes: np.ndarray) -> bool:
        for pending in which:
            pending(warp).append([])
        return True

    return act


def _wait(i: Instruction, *which: Which) -> Act:
    left = int(i.text.split()[-1])

    def act(machine: Machine, warp: Warp, _lanes: np.ndarray) -> bool:
        for pending in which:
            finish(pending(warp), left)
        machine.notice()
        return True

    return act


def _products(warp: Warp) -> Pending:
    return warp.products


def _stores(warp: Warp) -> Pending:
    return warp.stores


def _written(warp: Warp) -> Pending:
    return warp.written


def _fetches(warp: Warp) -> Pending:
    return warp.fetches


def _begin(machine: Machine, warp: Warp, kind: str, ends_in: Pending | None = None) -> By | None:
    """Who watches is told that something begins beside a warp, and when the warp has waited for it."""
    watch = machine.watch
    if watch is None:
        return None
    by = watch.begin(warp.agent, f"{kind} of {watch.names[warp.agent]}")
    if ends_in is not None:
        ends_in[-1].append(lambda: watch.done(warp.agent, *by[:2]))
    return by


# Products


def product(i: Instruction, slot: Slot) -> Act:
    if i.form[1] == "fence":
        return lambda _machine, warp, lanes: together(warp, lanes)
    if i.form[1] == "commit_group":
        return _commit(_products)
    if i.form[1] == "wait_group":
        return _wait(i, _products)
    columns, dtype = products.shape_of(i.form)
    acc, a, b, accumulate, *flags = i.operands
    b, accumulate = slot(b, np.uint64), slot(accumulate, np.bool_)
    immediate = [slot(each, np.uint32) for each in flags]
    a = a if isinstance(a, tuple) else slot(a, np.uint64)

    def act(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        if not together(warp, lanes):
            return False
        r, shared = warp.registers, warp.block.shared
        signs = [int(r[each][0]) for each in immediate]
        assert signs[:2] == [1, 1], i.text
        add = bool(r[accumulate][0])
        rows = warp.number % 4 * products.ROWS + np.arange(products.ROWS)
        at_b = products.places(int(r[b][0]), np.arange(columns), bool(signs[-1]))
        at_a = None if isinstance(a, tuple) else products.places(int(r[a][0]), rows, bool(signs[2]))
        by = _begin(machine, warp, "products", warp.products)
        if by is not None:
            for at in (at_a, at_b):
                if at is not None:
                    machine.watch.read_beside(by, "shared", *in_shared(warp, at.ravel(), 2))

        def do() -> None:
            if at_a is None:
                left = products.fragment([warp.registers[each] for each in a], dtype)
            else:
                left = products.operand(shared, at_a, dtype)
            right = products.operand(shared, at_b, dtype)
            sums = products.multiply(left, right, [warp.registers[each] for each in acc] if add else None)
            if by is not None and by[:2] in machine.poisoned:
                sums = [np.full_like(values, NAN) for values in sums]
            for register, values in zip(acc, sums, strict=True):
                warp.registers[register] = values

        issue(machine, warp.products, do)
        return True

    return act


# Copies


def copy(i: Instruction, slot: Slot) -> Act:
    bulk = "bulk" in i.form
    if "commit_group" in i.form:
        return _commit(_stores, _written) if bulk else _commit(_fetches)
    if "wait_group" in i.form:
        if not bulk:
            return _wait(i, _fetches)
        return _wait(i, _stores) if "read" in i.form else _wait(i, _stores, _written)
    if not bulk:
        return _fetch(i, slot)
    if "tensor" in i.form:
        return _tile(i, slot)
    return _line(i, slot)


def _fetch(i: Instruction, slot: Slot) -> Act:
    """cp.async: 4 to 16 bytes per lane, of which those beyond the source's size are zeros."""
    to, source = i.operands[:2]
    sizes = [slot(each, np.uint32) for each in i.operands[2:]]

    def act(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        shared, r = warp.block.shared, warp.registers
        targets, sources = addresses(warp, to), addresses(warp, source)
        size = int(r[sizes[0]][0])
        if (by := _begin(machine, warp, "cp.async", warp.fetches)) is not None:
            machine.watch.write_beside(by, "shared", *in_shared(warp, targets[lanes], size))

        def do() -> None:
            for lane in np.flatnonzero(lanes):
                given, at = int(r[sizes[-1]][lane]), int(targets[lane])
                shared[at : at + size] = 0
                if given:
                    shared[at : at + given] = machine.memory.words(int(sources[lane]), given, np.uint8)

        issue(machine, warp.fetches, do)
        return True

    return act


def _tile(i: Instruction, slot: Slot) -> Act:
    """Between a tensor map and shared memory."""
    loads = "mbarrier:complete_tx:bytes" in i.form
    given, place = (i.operands[1], i.operands[0]) if loads else (i.operands[0], i.operands[1])
    assert isinstance(given, Address)
    parts = [slot(each, np.int32) for each in given.parts]

    def act(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        r, memory, shared = warp.registers, machine.memory, warp.block.shared
        tensor_map = machine.parameters[(one(addresses(warp, given), lanes) - DESCRIPTORS) // 256]
        assert isinstance(tensor_map, TensorMap), i.text
        at = [one(r[each].view(np.int32), lanes) for each in parts]
        address = one(addresses(warp, place), lanes)
        inside = in_shared(warp, np.array([address]), tensor_map.bytes)
        if loads:
            barrier = one(addresses(warp, i.operands[2]), lanes)
            by = _begin(machine, warp, f"copies of barrier {barrier}")
            if by is not None:
                machine.watch.write_beside(by, "shared", *inside)
            do = lambda: tensor_map.fetch(memory, shared, address, at)  # noqa: E731
            _arrive_later(machine, warp, (barrier, tensor_map.bytes), do, by)
        else:
            _leave(machine, warp, inside, tensor_map.lines(at), "stores")
            issue(machine, warp.stores, lambda: tensor_map.store(memory, shared, address, at))
        machine.notice()
        return True

    return act


def _arrive_later(
    machine: Machine, warp: Warp, barrier: tuple[int, int], do: Callable[[], None], by: By | None
) -> None:
    """A load ends some time after it was started."""
    (address, size), block = barrier, warp.block

    def end() -> None:
        do()
        if by is not None:
            machine.watch.arrive_beside(by, (block.index, address))
        machine.change(block, address, expected=-size)

    block.copies.append(end)


def _leave(
    machine: Machine,
    warp: Warp,
    source: tuple[object, int, np.ndarray],
    lines: tuple[np.ndarray, int],
    kind: str,
) -> None:
    """Who watches is told what a store, or a sum, reads and writes."""
    by = _begin(machine, warp, f"reads of {kind}", warp.stores)
    if by is None:
        return
    machine.watch.read_beside(by, "shared", *source)
    by = _begin(machine, warp, f"writes of {kind}", warp.written)
    if len(lines[0]):
        machine.watch.write_beside(by, "global", *in_global(machine, *lines))


def _line(i: Instruction, slot: Slot) -> Act:
    """So many bytes to shared memory, or from there: stored, or added."""
    to, source, size = i.operands[:3]
    size = slot(size, np.uint32)
    loads, adds = "mbarrier:complete_tx:bytes" in i.form, i.form[1] == "reduce"
    assert not adds or {"add", "f32"} <= set(i.form), i.text

    def act(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        for lane in np.flatnonzero(lanes):
            count = int(warp.registers[size][lane])
            target, given = (int(addresses(warp, each)[lane]) for each in (to, source))
            assert count % 16 == target % 16 == given % 16 == 0, i.text
            if loads:
                barrier = int(addresses(warp, i.operands[3])[lane])
                _line_in(machine, warp, (target, given, count), barrier)
            else:
                _line_out(machine, warp, (target, given, count), adds)
        machine.notice()
        return True

    return act


def _line_in(machine: Machine, warp: Warp, of: tuple[int, int, int], barrier: int) -> None:
    target, given, count = of
    shared = warp.block.shared
    machine.look(warp, given, given + count)
    by = _begin(machine, warp, f"copies of barrier {barrier}")
    if by is not None:
        machine.watch.read_beside(by, "global", *in_global(machine, np.array([given]), count))
        machine.watch.write_beside(by, "shared", *in_shared(warp, np.array([target]), count))

    def do() -> None:
        shared[target : target + count] = machine.memory.words(given, count, np.uint8)

    _arrive_later(machine, warp, (barrier, count), do, by)


def _line_out(machine: Machine, warp: Warp, of: tuple[int, int, int], adds: bool) -> None:
    target, given, count = of
    shared = warp.block.shared
    _leave(machine, warp, in_shared(warp, np.array([given]), count), (np.array([target]), count), "stores")

    def do() -> None:
        if adds:
            words = machine.memory.words(target, count // 4, np.float32)
            words += shared[given : given + count].view(np.float32)
        else:
            machine.memory.words(target, count, np.uint8)[:] = shared[given : given + count]

    issue(machine, warp.stores, do)

"""Instructions that touch memory, barriers or other lanes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from . import products
from .arithmetic import TYPES, Slot
from .memory import TensorMap
from .program import DESCRIPTORS, LANES, Address, Instruction

if TYPE_CHECKING:
    from .machine import Act, Machine, Warp

_NOTHING = ("fence", "prefetch", "griddepcontrol", "setmaxnreg", "membar", "cp.async.bulk.prefetch")


def action(i: Instruction, slot: Slot) -> Act:
    """What an instruction does."""
    if i.operation.startswith(_NOTHING):
        return lambda machine, warp, lanes: True
    maker = globals().get(f"_{i.form[0]}")
    if maker is None:
        raise NotImplementedError(i.text)
    return maker(i, slot)


def finish(pending: deque[list[Callable[[], None]]], left: int) -> None:
    """Execute the oldest groups, so that so many are left beside the open one."""
    while len(pending) > left + 1:
        for each in pending.popleft():
            each()


def _issue(machine: Machine, pending: deque[list[Callable[[], None]]], do: Callable[[], None]) -> None:
    if machine.late:
        pending[-1].append(do)
    else:
        do()


def _together(warp: Warp, lanes: np.ndarray) -> bool:
    """Whether all lanes that live are here: what needs them all waits for the others."""
    return bool((lanes == warp.alive).all())


def _addresses(warp: Warp, address: Address) -> np.ndarray:
    register = warp.registers[address.register]
    found = register.astype(np.int64) + address.offset
    return found & 0xFFFFFFFF if register.dtype == np.uint32 else found


def _one(values: np.ndarray, lanes: np.ndarray) -> int:
    """The value of the one lane that is here."""
    (found,) = values[lanes]
    return int(found)


def _names(operand: object, address: bool = False) -> tuple[int, ...]:
    return operand if isinstance(operand, tuple) else (operand,)


# Loads and stores


def _put(machine: Machine, warp: Warp, register: int, lanes: np.ndarray, values: np.ndarray) -> None:
    kind, r = machine.kinds[register], warp.registers
    full = r[register].copy()
    full[lanes] = values.astype(kind) if values.dtype.itemsize != np.dtype(kind).itemsize else values.view(kind)
    r[register] = full


def _ld(i: Instruction, slot: Slot) -> Act:
    names, at, kind = _names(i.operands[0]), i.operands[1], TYPES[i.form[-1]]
    size = np.dtype(kind).itemsize

    def param(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        given = machine.parameters[at.parameter]
        assert isinstance(given, bytes), i.text
        for number, register in enumerate(names):
            value = np.frombuffer(given, np.uint8, size, at.offset + number * size).view(kind)
            _put(machine, warp, register, lanes, np.repeat(value, int(lanes.sum())))
        return True

    def load(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        addresses = _addresses(warp, at)[lanes]
        assert (addresses % (size * len(names)) == 0).all(), f"misaligned: {i.text}"
        if "shared" in i.operation:
            found = warp.block.shared[addresses[:, None] + np.arange(size * len(names))]
        else:
            found = machine.memory.read(addresses, size * len(names))
        words = np.ascontiguousarray(found).view(kind)
        for number, register in enumerate(names):
            _put(machine, warp, register, lanes, words[:, number])
        return True

    return param if at.parameter >= 0 else load


def _st(i: Instruction, slot: Slot) -> Act:
    at, kind = i.operands[0], TYPES[i.form[-1]]
    names = [slot(each, kind) for each in _names(i.operands[1])]

    def store(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        addresses = _addresses(warp, at)[lanes]
        size = np.dtype(kind).itemsize
        assert (addresses % (size * len(names)) == 0).all(), f"misaligned: {i.text}"
        values = np.stack([_width(warp.registers[name], size)[lanes] for name in names], 1)
        raw = np.ascontiguousarray(values).view(np.uint8)
        if "shared" in i.operation:
            warp.block.shared[addresses[:, None] + np.arange(raw.shape[1])] = raw
        else:
            machine.memory.write(addresses, raw)
        machine.notice()
        return True

    return store


def _width(values: np.ndarray, size: int) -> np.ndarray:
    return values if values.dtype.itemsize == size else values.astype(f"u{size}")


def _mov(i: Instruction, slot: Slot) -> Act:
    """To several registers."""
    kind = TYPES[i.form[-1]]
    source, half = slot(i.operands[1], kind), {4: np.uint16, 8: np.uint32}[np.dtype(kind).itemsize]

    def split(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        parts = warp.registers[source].view(half).reshape(LANES, 2)
        for number, register in enumerate(i.operands[0]):
            _put(machine, warp, register, lanes, parts[lanes, number])
        return True

    return split


_COMBINE: dict[str, Callable[..., object]] = {
    "add": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "cas": lambda old, compared, new: new if old == compared else old,
}


def _atom(i: Instruction, slot: Slot) -> Act:
    result = i.form[0] == "atom"
    at, kind = i.operands[result], TYPES[i.form[-1]]
    given = slot(i.operands[result + 1], kind)
    others = [slot(each, kind) for each in i.operands[result + 2 :]]
    combine = _COMBINE[i.form[-2]]

    def change(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        values = warp.registers[given].view(kind)
        addresses, before = _addresses(warp, at), np.zeros(LANES, kind)
        for lane in np.flatnonzero(lanes):
            address = int(addresses[lane])
            if "shared" in i.operation:
                word = warp.block.shared[address : address + before.itemsize].view(kind)
            else:
                word = machine.memory.words(address, 1, kind)
            before[lane] = word[0]
            word[0] = combine(before[lane], values[lane], *(warp.registers[o].view(kind)[lane] for o in others))
        if result:
            _put(machine, warp, i.operands[0], lanes, before[lanes])
        machine.notice()
        return True

    return change


def _red(i: Instruction, slot: Slot) -> Act:
    if not isinstance(i.operands[1], tuple):
        return _atom(i, slot)
    at, kind = i.operands[0], TYPES[i.form[-1]]
    names = [slot(each, kind) for each in i.operands[1]]

    def add(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        addresses = _addresses(warp, at)
        for lane in np.flatnonzero(lanes):
            words = machine.memory.words(int(addresses[lane]), len(names), kind)
            words += np.array([warp.registers[name][lane] for name in names]).view(kind)
        machine.notice()
        return True

    return add


def _stmatrix(i: Instruction, slot: Slot) -> Act:
    at, names = i.operands[0], i.operands[1]

    def store(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        if not _together(warp, lanes):
            return False
        addresses, lane = _addresses(warp, at), np.arange(LANES)
        for number, name in enumerate(names):
            pairs = warp.registers[name].view(np.uint16).reshape(LANES, 2)
            matrix = np.zeros((8, 8), np.uint16)
            matrix[lane // 4, lane % 4 * 2], matrix[lane // 4, lane % 4 * 2 + 1] = pairs[:, 0], pairs[:, 1]
            matrix = np.ascontiguousarray(matrix.T if "trans" in i.form else matrix)
            rows = addresses[8 * number : 8 * number + 8]
            warp.block.shared[rows[:, None] + np.arange(16)] = matrix.view(np.uint8)
        machine.notice()
        return True

    return store


def _ldmatrix(i: Instruction, slot: Slot) -> Act:
    names, at = i.operands[0], i.operands[1]

    def load(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        if not _together(warp, lanes):
            return False
        addresses, lane = _addresses(warp, at), np.arange(LANES)
        for number, name in enumerate(names):
            rows = addresses[8 * number : 8 * number + 8]
            matrix = warp.block.shared[rows[:, None] + np.arange(16)].view(np.uint16)
            matrix = matrix.T if "trans" in i.form else matrix
            pairs = np.stack([matrix[lane // 4, lane % 4 * 2], matrix[lane // 4, lane % 4 * 2 + 1]], 1)
            _put(machine, warp, name, lanes, np.ascontiguousarray(pairs).view(np.uint32)[lanes, 0])
        return True

    return load


# Other lanes


def _elect(i: Instruction, slot: Slot) -> Act:
    def elect(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        if not _together(warp, lanes):
            return False
        first = int(np.flatnonzero(lanes)[0])
        _put(machine, warp, i.operands[0], lanes, np.full(int(lanes.sum()), first, np.uint32))
        _put(machine, warp, i.operands[1], lanes, np.flatnonzero(lanes) == first)
        return True

    return elect


def _vote(i: Instruction, slot: Slot) -> Act:
    given, how = slot(i.operands[1], np.bool_), i.form[2]

    def vote(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        if not _together(warp, lanes):
            return False
        votes = warp.registers[given][lanes]
        if how == "ballot":
            bits = sum(1 << int(lane) for lane in np.flatnonzero(warp.registers[given] & lanes))
            found = np.full(len(votes), bits, np.uint32)
        else:
            found = np.full(len(votes), {"all": votes.all, "any": votes.any}[how]())
        _put(machine, warp, i.operands[0], lanes, found)
        return True

    return vote


def _shfl(i: Instruction, slot: Slot) -> Act:
    to = i.operands[0]
    value, by, clamp = (slot(each, np.uint32) for each in i.operands[-4:-1])
    partner = i.operands[1] if len(i.operands) == 6 else -1

    def shuffle(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        if not _together(warp, lanes):
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
        _put(machine, warp, to, lanes, r[value][source][lanes])
        if partner >= 0:
            _put(machine, warp, partner, lanes, inside[lanes])
        return True

    return shuffle


# Barriers


def _bar(i: Instruction, slot: Slot) -> Act:
    if "warp" in i.form:
        return lambda machine, warp, lanes: _together(warp, lanes)
    which, *count = (slot(each, np.uint32) for each in i.operands)

    def meet(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        if not _together(warp, lanes):
            return False
        barrier = warp.block.named[int(warp.registers[which][0])]
        threads = int(warp.registers[count[0]][0]) if count else machine.kernel.threads
        if warp.came_in < 0:
            warp.came_in = barrier.phase
            barrier.came += LANES
            assert barrier.came <= threads, "more threads than the barrier has"
            if barrier.came == threads:
                barrier.came, barrier.phase = 0, barrier.phase + 1
            machine.notice()
        if "arrive" in i.form or barrier.phase > warp.came_in:
            warp.came_in = -1
            return True
        return False

    return meet


_barrier = _bar


def _mbarrier(i: Instruction, slot: Slot) -> Act:
    from .machine import Barrier

    kind = i.form[1]
    at = next(each for each in i.operands if isinstance(each, Address))
    rest = [slot(each, np.uint32) for each in i.operands[i.operands.index(at) + 1 :]]

    def act(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        addresses, barriers = _addresses(warp, at), warp.block.barriers
        if kind in ("try_wait", "test_wait"):
            parities = warp.registers[rest[0]]
            over = [barriers[int(addresses[n])].phase % 2 != parities[n] for n in np.flatnonzero(lanes)]
            if kind == "test_wait":
                _put(machine, warp, i.operands[0], lanes, np.array(over))
            return kind == "test_wait" or all(over)
        for lane in np.flatnonzero(lanes):
            address = int(addresses[lane])
            value = int(warp.registers[rest[0]][lane]) if rest else 1
            if kind == "init":
                barriers[address] = Barrier(value, value)
            elif "expect_tx" in i.form:
                barriers[address].change(arrivals=int(kind == "arrive"), expected=value)
            else:
                barriers[address].change(arrivals=value)
        machine.notice()
        return True

    return act


def _nanosleep(i: Instruction, slot: Slot) -> Act:
    return lambda machine, warp, lanes: True


# Products


def _wgmma(i: Instruction, slot: Slot) -> Act:
    if i.form[1] == "fence":
        return lambda machine, warp, lanes: _together(warp, lanes)
    if i.form[1] == "commit_group":
        return _commit(lambda warp: warp.products)
    if i.form[1] == "wait_group":
        return _wait(i, lambda warp: warp.products)
    columns, dtype = products.shape_of(i.form)
    acc, a, b, accumulate, *flags = i.operands
    b, accumulate = slot(b, np.uint64), slot(accumulate, np.bool_)
    immediate = [slot(each, np.uint32) for each in flags]
    a = a if isinstance(a, tuple) else slot(a, np.uint64)

    def multiply(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        if not _together(warp, lanes):
            return False
        r, shared = warp.registers, warp.block.shared
        signs = [int(r[each][0]) for each in immediate]
        assert signs[:2] == [1, 1], i.text
        to_b, to_a = int(r[b][0]), 0 if isinstance(a, tuple) else int(r[a][0])
        add = bool(r[accumulate][0])

        def do() -> None:
            rows = warp.number % 4 * products.ROWS + np.arange(products.ROWS)
            if isinstance(a, tuple):
                left = products.fragment([warp.registers[each] for each in a], dtype)
            else:
                left = products.operand(shared, to_a, rows, bool(signs[2]), dtype)
            right = products.operand(shared, to_b, np.arange(columns), bool(signs[-1]), dtype)
            sums = products.multiply(left, right, [warp.registers[each] for each in acc] if add else None)
            for register, values in zip(acc, sums, strict=True):
                warp.registers[register] = values

        _issue(machine, warp.products, do)
        return True

    return multiply


def _commit(pending: Callable[[Warp], deque[list[Callable[[], None]]]]) -> Act:
    def commit(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        pending(warp).append([])
        return True

    return commit


def _wait(i: Instruction, pending: Callable[[Warp], deque[list[Callable[[], None]]]]) -> Act:
    left = int(i.text.split()[-1])

    def wait(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        finish(pending(warp), left)
        machine.notice()
        return True

    return wait


# Copies


def _cp(i: Instruction, slot: Slot) -> Act:
    bulk = "bulk" in i.form
    if "commit_group" in i.form:
        return _commit(lambda warp: warp.stores if bulk else warp.fetches)
    if "wait_group" in i.form:
        return _wait(i, lambda warp: warp.stores if bulk else warp.fetches)
    if not bulk:
        return _fetch(i, slot)
    if "tensor" in i.form:
        return _copy_tile(i, slot)
    if i.form[1] == "reduce":
        return _reduce(i, slot)
    if i.form[2] == "bulk":
        return _copy(i, slot)
    raise NotImplementedError(i.text)


def _fetch(i: Instruction, slot: Slot) -> Act:
    """cp.async: 4 to 16 bytes per lane, of which those beyond the source's size are zeros."""
    to, source = i.operands[:2]
    sizes = [slot(each, np.uint32) for each in i.operands[2:]]

    def fetch(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        shared, r = warp.block.shared, warp.registers
        targets, sources = _addresses(warp, to), _addresses(warp, source)

        def do() -> None:
            for lane in np.flatnonzero(lanes):
                size, given = (int(r[each][lane]) for each in (sizes[0], sizes[-1]))
                at = int(targets[lane])
                shared[at : at + size] = 0
                if given:
                    shared[at : at + given] = machine.memory.words(int(sources[lane]), given, np.uint8)

        _issue(machine, warp.fetches, do)
        return True

    return fetch


def _copy_tile(i: Instruction, slot: Slot) -> Act:
    loads = "mbarrier:complete_tx:bytes" in i.form
    named, place = (i.operands[1], i.operands[0]) if loads else (i.operands[0], i.operands[1])

    def copy(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        r = warp.registers
        tensor_map = machine.parameters[(_one(_addresses(warp, named), lanes) - DESCRIPTORS) // 256]
        assert isinstance(tensor_map, TensorMap), i.text
        at = [_one(r[slot(each, np.int32)].view(np.int32), lanes) for each in named.parts]
        shared, address = warp.block.shared, _one(_addresses(warp, place), lanes)
        if loads:
            barrier = warp.block.barriers[_one(_addresses(warp, i.operands[2]), lanes)]

            def arrive() -> None:
                barrier.change(expected=-tensor_map.fetch(machine.memory, shared, address, at))

            warp.block.copies.append(arrive)
        else:
            _issue(machine, warp.stores, lambda: tensor_map.store(machine.memory, shared, address, at))
        machine.notice()
        return True

    return copy


def _copy(i: Instruction, slot: Slot) -> Act:
    to, source, size = i.operands[:3]
    size = slot(size, np.uint32)
    loads = "mbarrier:complete_tx:bytes" in i.form

    def copy(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        for lane in np.flatnonzero(lanes):
            count = int(warp.registers[size][lane])
            target, given = (int(_addresses(warp, each)[lane]) for each in (to, source))
            shared = warp.block.shared
            assert count % 16 == target % 16 == given % 16 == 0, i.text
            if loads:
                barrier = warp.block.barriers[int(_addresses(warp, i.operands[3])[lane])]

                def arrive(target=target, given=given, count=count, barrier=barrier) -> None:  # noqa: ANN001
                    shared[target : target + count] = machine.memory.words(given, count, np.uint8)
                    barrier.change(expected=-count)

                warp.block.copies.append(arrive)
            else:

                def store(target=target, given=given, count=count) -> None:  # noqa: ANN001
                    machine.memory.words(target, count, np.uint8)[:] = shared[given : given + count]

                _issue(machine, warp.stores, store)
        machine.notice()
        return True

    return copy


def _reduce(i: Instruction, slot: Slot) -> Act:
    to, source, size = i.operands[:3]
    size = slot(size, np.uint32)
    assert i.form[-2:] == ("add", "f32") or i.form[-1] == "f32", i.text

    def add(machine: Machine, warp: Warp, lanes: np.ndarray) -> bool:
        count = _one(warp.registers[size], lanes)
        target, given = (_one(_addresses(warp, each), lanes) for each in (to, source))
        shared = warp.block.shared

        def do() -> None:
            words = machine.memory.words(target, count // 4, np.float32)
            words += shared[given : given + count].view(np.float32)

        _issue(machine, warp.stores, do)
        machine.notice()
        return True

    return add

"""Blocks of warps that execute a kernel: 32 lanes at a time, warps in any order, copies some time after they
were started."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np

from . import warps
from .arithmetic import Registers, compiled
from .common import Act, Pending, finish
from .memory import EarlyAccessError, Memory, TensorMap
from .phases import Barrier, Named
from .program import LANES, Instruction, Kernel
from .races import Races

SHARED_BYTES = 232448
PATIENCE = 2000
"""Turns of all warps without anything that others could notice."""
TURN = 10_000
"""Most instructions that a warp executes at a time."""


class DeadlockError(Exception):
    """No warp can do anything that another one could notice; says where each stands."""


@dataclass(eq=False)
class Block:
    """One block: its shared memory, and what it has under way.

    Attributes:
        copies: loads that were started: what they do when they end.
    """

    index: tuple[int, int, int]
    shared: np.ndarray
    barriers: dict[int, Barrier] = field(default_factory=dict)
    named: dict[int, Named] = field(default_factory=lambda: defaultdict(Named))
    copies: list[Callable[[], None]] = field(default_factory=list)
    warps: list[Warp] = field(default_factory=list)

    def __str__(self) -> str:
        return "block " + " ".join(map(str, self.index))


@dataclass(eq=False)
class Warp:
    """32 lanes.

    Attributes:
        pc: where all lanes that live are; ``pcs``: where each is, if they are not at one place.
        alive: lanes that have not ended.
        came_in: phase of the named barrier that it waits for.
        waited: whether it has waited for the kernel before.
        products: wgmma instructions that were issued and not executed, by group; the last one is open.
        stores, fetches: the same of copies from shared memory, and of cp.async.
        written: stores whose writes nobody has waited for.
    """

    block: Block
    number: int
    agent: int
    registers: Registers
    pc: int = 0
    pcs: np.ndarray | None = None
    alive: np.ndarray = field(default_factory=lambda: np.ones(LANES, bool))
    came_in: int = -1
    waited: bool = False
    products: Pending = field(default_factory=lambda: deque([[]]))
    stores: Pending = field(default_factory=lambda: deque([[]]))
    fetches: Pending = field(default_factory=lambda: deque([[]]))
    written: Pending = field(default_factory=lambda: deque([[]]))
    done: bool = False


@dataclass(frozen=True)
class Step:
    """An instruction that is ready to be executed: it computes, acts, goes to ``target``, or ends.

    ``reads``: the registers whose values it needs.
    """

    instruction: Instruction
    compute: Callable[[Registers], np.ndarray] | None
    target: int
    act: Act | None
    reads: frozenset[int]


class Machine:
    """A launch of a kernel.

    Args:
        kernel: what to run.
        grid: blocks in x, y, z. All of them run from the start.
        parameters: of each parameter its bytes, or a tensor map.
        memory: what the kernel sees.
        seed: of the interleaving.
        late: products and stores are executed when they are waited for, not when they are issued.
        races: whether to look for accesses that nothing orders.
        poisoned: products, as in ``Races.doubtful``, whose values are NaN.
        awaited: (first, last) bytes that only a warp may read that has waited for the kernel before.
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        parameters: list[bytes | TensorMap],
        memory: Memory,
        seed: int = 0,
        late: bool = True,
        races: bool = False,
        poisoned: Collection[tuple[int, int]] = (),
        awaited: Collection[tuple[int, int]] = (),
    ):
        assert [len(p) for p in parameters if isinstance(p, bytes)] == [
            size for p, size in zip(parameters, kernel.parameters, strict=True) if isinstance(p, bytes)
        ], kernel.parameters
        self.kernel, self.grid, self.parameters, self.memory = kernel, grid, parameters, memory
        self.random, self.late, self.noticed, self.agents = random.Random(seed), late, 0, 0
        self.kinds, self.constants = list(kernel.kinds), dict[tuple[int, type[np.generic]], int]()
        self.steps = [self._step(i) for i in kernel.instructions]
        self.blocks = [
            self._block((x, y, z), grid)
            for z in range(grid[2])
            for y in range(grid[1])
            for x in range(grid[0])
        ]

        names = [f"warp {w.number} of {b}" for b in self.blocks for w in b.warps]
        self.watch, self.poisoned, self.awaited = Races(names) if races else None, poisoned, awaited

    # Set-up

    def _slot(self, operand: object, kind: type[np.generic]) -> int:
        assert isinstance(operand, int), operand
        if operand not in self.kernel.constants:
            return operand
        if (operand, kind) not in self.constants:
            self.constants[operand, kind] = len(self.kinds)
            self.kinds.append(kind)
        return self.constants[operand, kind]

    def _step(self, instruction: Instruction) -> Step:
        compute = compiled(instruction, self._slot)
        act = None
        if compute is None and instruction.form[0] not in ("bra", "ret"):
            act = warps.action(instruction, self._slot)
        return Step(instruction, compute, instruction.target, act, instruction.reads)

    def _block(self, index: tuple[int, int, int], grid: tuple[int, int, int]) -> Block:
        block = Block(index, np.zeros(SHARED_BYTES, np.uint8))
        shape = tuple("xyz")
        for number in range(-(-self.kernel.threads // LANES)):
            registers = [np.zeros(LANES, kind) for kind in self.kinds]
            special = {
                **{f"%ctaid.{name}": index[i] for i, name in enumerate(shape)},
                **{f"%nctaid.{name}": grid[i] for i, name in enumerate(shape)},
                **{f"%ntid.{name}": (self.kernel.threads, 1, 1)[i] for i, name in enumerate(shape)},
                "%tid.x": LANES * number + np.arange(LANES), "%tid.y": 0, "%tid.z": 0,
                "%laneid": np.arange(LANES), "%smid": sum(index), "%globaltimer": 0,
            }  # fmt: skip
            for (operand, kind), slot in self.constants.items():
                value = self.kernel.constants[operand]
                value = special[value] if isinstance(value, str) else value
                registers[slot] = _constant(value, kind)
            block.warps.append(Warp(block, number, self.agents, registers))
            self.agents += 1
        return block

    # Running

    def run(self) -> None:
        """Until every lane has ended.

        Raises:
            DeadlockError: that will not be.
        """
        idle = 0
        running = [w for b in self.blocks for w in b.warps]
        while running:
            before = self.noticed
            warp = self.random.choice(running)
            if warp.block.copies and self.random.random() < 0.5:
                warp.block.copies.pop(self.random.randrange(len(warp.block.copies)))()
                self.notice()
            with np.errstate(all="ignore"):
                self._advance(warp)
            if warp.done:
                warp.stores.append([])
                finish(warp.stores, 0)
                assert not any([*warp.products, *warp.fetches]), "work that nobody waited for"
                running.remove(warp)
            idle = 0 if self.noticed > before else idle + 1
            if idle > PATIENCE + 50 * len(running):
                raise DeadlockError("\n".join(self._where(w) for w in running))

    def change(self, block: Block, address: int, arrivals: int = 0, expected: int = 0) -> None:
        """Arrivals at an mbarrier, and bytes that it shall wait for."""
        barrier = block.barriers[address]
        before = barrier.phase
        barrier.change(arrivals, expected)
        if self.watch is not None and barrier.phase > before:
            self.watch.meeting((block.index, address)).end()

    def notice(self) -> None:
        self.noticed += 1

    def look(self, warp: Warp, first: int, last: int) -> None:
        """A warp reads these bytes, or has them read.

        Raises:
            EarlyAccessError: it should have waited.
        """
        if not warp.waited and any(first < end and begin < last for begin, end in self.awaited):
            raise EarlyAccessError(self._where(warp))

    def _where(self, warp: Warp) -> str:
        pc = warp.pc if warp.pcs is None else int(warp.pcs[warp.alive].min())
        return f"{warp.block} warp {warp.number}: {self.kernel.instructions[pc].text}"

    def _advance(self, warp: Warp) -> None:
        """Execute a warp until it must wait, has looked at what others write, or has ended."""
        skipped: set[int] = set()
        for _ in range(TURN):
            if warp.pcs is None:
                pc, lanes = warp.pc, warp.alive
            elif (pc := self._behind(warp, skipped)) < 0:
                return
            else:
                lanes = warp.alive & (warp.pcs == pc)
            step = self.steps[pc]
            i, acting = step.instruction, lanes
            if i.predicate >= 0:
                acting = lanes & (warp.registers[i.predicate] == i.wanted)
                if not acting.any():
                    self._go(warp, lanes, pc + 1)
                    continue
            if self.watch is not None and self.watch.loads[warp.agent]:
                self.watch.use(warp.agent, step.reads)
            if step.compute is not None:
                self._compute(warp, step, acting)
            elif step.target >= 0:
                self._branch(warp, pc, lanes, acting, step.target)
                skipped.clear()
                continue
            elif step.act is None:
                if self._end(warp, acting):
                    return
                lanes = lanes & ~acting
            elif not step.act(self, warp, acting):
                if warp.pcs is None:
                    return
                skipped.add(pc)
                continue
            skipped.clear()
            self._go(warp, lanes, pc + 1)
            if "acquire" in i.form:
                return

    def _behind(self, warp: Warp, skipped: set[int]) -> int:
        """Where the lanes are that go next, those that are behind first; -1 if all must wait."""
        places = [int(p) for p in np.unique(warp.pcs[warp.alive]) if p not in skipped]
        return places[0] if places else -1

    def _end(self, warp: Warp, lanes: np.ndarray) -> bool:
        """Lanes have ended; whether all have."""
        warp.alive = warp.alive & ~lanes
        warp.done = not warp.alive.any()
        self.notice()
        return warp.done

    def _compute(self, warp: Warp, step: Step, lanes: np.ndarray) -> None:
        to, r = step.instruction.operands[0], warp.registers
        value = step.compute(r)
        kind = self.kinds[to]
        if value.dtype != kind:
            value = (
                value.astype(kind) if value.dtype.itemsize != np.dtype(kind).itemsize else value.view(kind)
            )
        r[to] = value if lanes is warp.alive else np.where(lanes, value, r[to])

    def _branch(self, warp: Warp, pc: int, lanes: np.ndarray, taken: np.ndarray, target: int) -> None:
        if taken is lanes or (taken == lanes).all():
            return self._go(warp, lanes, target)
        if warp.pcs is None:
            warp.pcs = np.full(LANES, pc)
        warp.pcs[lanes & ~taken] = pc + 1
        warp.pcs[taken] = target
        return None

    def _go(self, warp: Warp, lanes: np.ndarray, pc: int) -> None:
        if warp.pcs is None:
            warp.pc = pc
            return
        warp.pcs[lanes] = pc
        left = warp.pcs[warp.alive]
        if len(left) and (left == left[0]).all():
            warp.pc, warp.pcs = int(left[0]), None


def _constant(value: int | np.ndarray, kind: type[np.generic]) -> np.ndarray:
    if isinstance(value, int):
        size = np.dtype(kind).itemsize
        bits = (value % (1 << 8 * size)).to_bytes(size, "little")
        return np.repeat(np.frombuffer(bits, kind), LANES)
    return value.astype(kind)

"""The main kernel's PTX, executed on the CPU as far as control flow goes: claims, barriers, tickets, copies.

Everything that decides whether the kernel ends, and in which order it does what, is integers: this machine
executes them, instruction by instruction, with warps interleaved at random. Floating point, wgmma and the
contents of tiles are left out; a copy completes some time after it was started. Of most warps only lane 0
runs, and stands for all 32 where threads are counted. Of the load warp, whose lanes work together, all do,
and wait for a barrier as one, for the branches of that loop are uniform (bra.uni). Every access to memory is
seen by everybody at once: what fences and proxies are for is not tested here.
"""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from emulator.phases import Barrier
from outputs import output_of

from dash_attn.backends.sm90.backward.config import CLAIMED, CONTROL_WORDS, THREADS, BackwardConfig
from dash_attn.backends.sm90.compile import Config
from dash_attn.backends.sm90.tiles import kernel_of, row_bytes_of
from dash_attn.schedule import Plan, to_table

BITS = {"b64": 64, "u64": 64, "s64": 64, "b16": 16, "u16": 16, "s16": 16, "s8": 8, "u8": 8}
PLAN, CONTROL, ERRORS, TENSORS, DESCRIPTORS = 1 << 20, 1 << 28, 1 << 40, 1 << 44, 1 << 60  # where they are
LOAD_WARP, WARPS = 0, THREADS // 32
K = 4  # its descriptor, in the order of parameters; those before are of q tiles
PATIENCE = 300  # rounds a block without anything that others could notice
_LEFT_OUT = re.compile(
    r"(?:@!?%p\d+\s+)?(?:[a-z0-9.]*f(?:32|16)\b|[a-z0-9.]*bf16x?2?\b|ex2|fma|wgmma|stmatrix|ldmatrix|fence|prefetch|griddepcontrol"
    r"|setmaxnreg|nanosleep|shfl\.sync\.bfly|cp\.async\.bulk\.(?:wait|commit|prefetch)|st\.global\.v"
    r"|mov\.b\d+\s.*\{)"
)


class DeadlockError(Exception):
    """No thread can do anything that another one could notice; says where each warp stands."""


def main_kernel_ptx(config: Config) -> str:
    """The PTX file that has the main kernel of a configuration."""
    ptx = output_of(config).ptx
    assert "wgmma" in ptx
    return ptx


class Instruction(NamedTuple):
    """``form``: the operation's parts between dots. Executed if ``predicate``, if any, is ``wanted``."""

    predicate: str
    wanted: bool
    operation: str
    form: list[str]
    operands: list[str]


class Program:
    """The instructions of a kernel in a PTX file, and its parameters."""

    kernel: ClassVar[str] = "kernelBackward"
    """The end of its file's name, and its class."""

    def __init__(self, ptx: str):
        start = re.search(rf"\.visible \.entry \w*{self.kernel}_object[^(]*\(", ptx)
        assert start is not None
        head, body = ptx[start.end() :].split("\n{", 1)
        self.parameters = head.count(".param")
        body = body[: body.index("\tret;\n\n}") + 5]
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        for line in map(str.strip, body.splitlines()):
            if label := re.match(r"(\$L\w+):", line):
                self.labels[label[1]] = len(self.instructions)
            elif re.match(r"(@!?%p\d+\s+)?[a-z]", line) and not _LEFT_OUT.match(line):
                self.instructions.append(_instruction(line))


def _instruction(line: str) -> Instruction:
    predicate, wanted = "", True
    if found := re.match(r"@(!?)(%p\d+)\s+(.*)", line):
        predicate, wanted, line = found[2], not found[1], found[3]
    operation, _, rest = line.rstrip("; ").partition(" ")
    operation, _, first = operation.partition("\t")
    operands = re.findall(r"\[[^\]]*\]|\{[^}]*\}|[^,\s]+", first + rest)
    return Instruction(predicate, wanted, operation, operation.split("."), operands)


@dataclass(eq=False)
class Thread:
    block: Block
    warp: int
    lane: int
    pc: int = 0
    done: bool = False
    registers: dict[str, int] = field(default_factory=dict)
    meetings: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.registers |= {
            "%nctaid.x": self.block.count,
            "%ctaid.x": self.block.index,
            "%tid.x": 32 * self.warp + self.lane,
            "%laneid": self.lane,
            "%smid": self.block.index,
        }

    @property
    def stands_for(self) -> int:
        return 1 if self.warp == LOAD_WARP else 32


@dataclass(eq=False)
class Block:
    """One of ``count`` blocks: its shared memory, its threads, and what it did, in order."""

    index: int
    count: int
    shared: dict[int, int] = field(default_factory=dict)
    barriers: dict[int, Barrier] = field(default_factory=dict)
    threads: list[Thread] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # under way: (barrier, bytes)
    meetings: dict[tuple[int, int, int], dict[Thread, int]] = field(default_factory=lambda: defaultdict(dict))
    met: set[tuple[int, int, int]] = field(default_factory=set)
    items: list[int] = field(default_factory=list)
    loads: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # (descriptor, coordinates)
    stores: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)


class Machine:
    """A launch of the main kernel. A batch of sequences that are not all alike is packed.

    Args:
        program: the kernel, compiled for the plan's head dim.
        plan: what to execute.
        blocks: resident blocks. All of them run from the start.
        seed: of the interleaving.
        one_by_one: a block starts when those before it can do nothing more. A block that claims an item
            before it may then takes it from one that has not come yet.
    """

    def __init__(self, program: Program, plan: Plan, blocks: int, seed: int, one_by_one: bool = False):
        self._begin(program, blocks, WARPS, seed)
        self.plan, problem = plan, plan.problem
        self.workers = min(blocks, len(plan.items))
        contributions = [plan.pattern(i).grid.contributions for i in range(len(problem.sequences))]
        tiles = problem.heads * sum(map(len, contributions))
        self.complete = problem.heads * sum(int((counts > 0).sum()) for counts in contributions)
        words = np.frombuffer(np.asarray(to_table(plan)).tobytes(), dtype=np.uint32)
        self.memory = {PLAN + 4 * i: int(word) for i, word in enumerate(words)}
        for queued in range(CONTROL_WORDS + tiles, CONTROL_WORDS + 2 * tiles):
            self.memory[CONTROL + 4 * queued] = 0xFFFFFFFF
        self.started = 1 if one_by_one else blocks

    def _begin(self, program: Program, blocks: int, warps: int, seed: int) -> None:
        """What a launch of any kernel begins with. All blocks have started."""
        self.program, self.random, self.warps = program, random.Random(seed), warps
        self.noticed, self.started = 0, blocks
        self.contributions: list[tuple[int, int, bool]] = []  # (block, dQ tile, added), in order
        self.fetched: list[tuple[int, int]] = []  # to be converted: (dQ tile, contributions to it so far)
        self.blocks = [Block(index, blocks) for index in range(blocks)]
        for block in self.blocks:
            lanes = ((warp, lane) for warp in range(warps) for lane in range(32 if warp == LOAD_WARP else 1))
            block.threads = [Thread(block, warp, lane) for warp, lane in lanes]

    def run(self, patience: int = PATIENCE) -> None:
        """Until every thread has ended; DeadlockError if that will not be. Bounded waits need patience."""
        idle = 0
        while running := [b for b in self.blocks if not all(t.done for t in b.threads)]:
            here = [b for b in running if b.index < self.started]
            if not here or (self.started < len(self.blocks) and idle > patience):
                self.started, idle = self.started + 1, 0
                continue
            before, block = self.noticed, self.random.choice(here)
            if block.copies and self.random.random() < 0.5:
                barrier, size = block.copies.pop(self.random.randrange(len(block.copies)))
                self._notice()
                block.barriers[barrier].change(expected=-size)
            warp = self.random.choice(sorted({t.warp for t in block.threads if not t.done}))
            for thread in [t for t in block.threads if t.warp == warp and not t.done]:
                self._advance(thread, self.random.randint(20, 1000))
            idle = 0 if self.noticed > before else idle + 1
            if idle > patience * len(self.blocks):
                raise DeadlockError(
                    "\n".join(self._where(t) for b in running for t in b.threads if not t.done)
                )

    @property
    def errors(self) -> tuple[int, int]:
        """The error buffer (finish.py of the kernel): whether a wait gave up, and of which sequence."""
        failed, sequence = (_as(self.memory.get(ERRORS + 4 * word, 0), "s32") for word in range(2))
        return failed, sequence

    def _where(self, thread: Thread) -> str:
        at = self.program.instructions[thread.pc]
        return (
            f"block {thread.block.index} warp {thread.warp} lane {thread.lane}: {at.operation} {at.operands}"
        )

    def _notice(self) -> None:
        self.noticed += 1

    def _advance(self, thread: Thread, steps: int) -> None:
        """Execute so many instructions of a thread, or until it waits or has looked at what others write."""
        for _ in range(steps):
            predicate, wanted, operation, form, operands = self.program.instructions[thread.pc]
            if predicate and bool(thread.registers.get(predicate, 0)) != wanted:
                thread.pc += 1
                continue
            kind = form[0]
            if kind == "bra":
                if operands[0] in self.program.labels:  # others belong to the wait before them
                    thread.pc = self.program.labels[operands[0]]
                    continue
            elif kind == "ret":
                thread.done = True
                return self._notice()
            elif kind in COMPUTE:
                thread.registers[operands[0]] = self._computed(thread, form, operands)
            elif not getattr(self, f"_{kind}")(thread, operation, operands):
                return None
            thread.pc += 1
            if "acquire" in form:
                return None
        return None

    # Operands

    def _value(self, thread: Thread, operand: str) -> int:
        if operand[0] == "%":
            return thread.registers.get(operand, 0)
        if parameter := re.search(r"_param_(\d+)$", operand):
            return DESCRIPTORS + int(parameter[1])
        return 0 if operand.startswith(("0f", "__dynamic_shmem")) else int(operand, 0)

    def _address(self, thread: Thread, operand: str) -> int:
        base, _, offset = operand.strip("[]").partition("+")
        return self._value(thread, base) + int(offset or 0)

    def _parameter(self, number: int, offset: int) -> int:
        """What is at an offset in a kernel parameter; tensors are where nothing else is."""
        from_the_end, problem = self.program.parameters - number, self.plan.problem
        if from_the_end in (10, 11, 12):  # dv, dk, dq: pointer, extents, 3 strides
            heads = problem.heads if from_the_end == 12 else problem.kv_heads
            lengths = [pair[0 if from_the_end == 12 else 1] for pair in problem.sequences]
            batch = len(lengths) if len(set(problem.sequences)) == 1 else 1
            rows, row = sum(lengths) // batch, heads * problem.head_dim
            extents = {8: batch, 12: rows, 16: heads, 20: problem.head_dim}
            strides = {24: rows * row, 32: row, 40: problem.head_dim}
            if offset:
                return (extents | strides)[offset]
        known = {8: PLAN, 7: CONTROL, 6: ERRORS, 2: self.workers, 1: self.complete}
        return known.get(from_the_end, TENSORS << max(from_the_end, 0))

    # Instructions: each says whether the thread may go on to the next one

    def _computed(self, thread: Thread, form: list[str], operands: list[str]) -> int:
        kind = form[0]
        if kind == "selp":
            return self._value(thread, operands[1 if thread.registers.get(operands[3], 0) else 2])
        if kind == "cvt":
            return _as(_as(self._value(thread, operands[1]), form[-1]), form[-2])
        values = [self._value(thread, operand) for operand in operands[1:]]
        if form[-1] == "pred":
            return int(COMPUTE[kind](*(bool(v) for v in values)))
        if kind == "setp":
            return int(COMPARE[form[1]](*(_as(v, form[-1]) for v in values)))
        if kind in ("mov", "cvta"):
            return values[0]
        factors = [_as(v, form[-1]) for v in values[:2]]
        result = COMPUTE[kind](*factors, *values[2:])
        if kind == "mul" and form[1] == "hi":
            return result >> BITS.get(form[-1], 32)
        return result if form[1] == "wide" else _as(result, form[-1])

    def _ld(self, thread: Thread, operation: str, operands: list[str]) -> bool:
        names = re.findall(r"%\w+", operands[0])
        if ".param" in operation:
            found = re.search(r"_param_(\d+)(?:\+(\d+))?\]$", operands[1])
            assert found is not None
            number, offset, size = int(found[1]), int(found[2] or 0), 8 if "64" in operation else 4
            for i, register in enumerate(names):
                thread.registers[register] = self._parameter(number, offset + i * size)
            return True
        memory = thread.block.shared if ".shared" in operation else self.memory
        address = self._address(thread, operands[1])
        for i, register in enumerate(names):
            thread.registers[register] = memory.get(address + 4 * i, 0)
        return True

    def _st(self, thread: Thread, operation: str, operands: list[str]) -> bool:
        shared = ".shared" in operation
        memory, address = thread.block.shared if shared else self.memory, self._address(thread, operands[0])
        for i, operand in enumerate(re.findall(r"[-%\w]+", operands[1])):
            memory[address + 4 * i] = self._value(thread, operand) & 0xFFFFFFFF
        if ".release" in operation:
            self._notice()
        return True

    def _atom(self, thread: Thread, operation: str, operands: list[str]) -> bool:
        address = self._address(thread, operands[1])
        seen = self.memory.get(address, 0)
        self._notice()
        given = [self._value(thread, operand) for operand in operands[2:]]
        if ".cas" in operation:
            self.memory[address] = given[1] if seen == given[0] else seen
        else:
            assert ".add" in operation
            self.memory[address] = seen + given[0] & 0xFFFFFFFF
        thread.registers[operands[0]] = seen
        if address == CONTROL + 4 * CLAIMED and seen < len(self.plan.items):
            thread.block.items.append(seen)
        return True

    def _red(self, thread: Thread, operation: str, operands: list[str]) -> bool:
        return self._atom(thread, operation, ["", *operands])

    def _elect(self, thread: Thread, operation: str, operands: list[str]) -> bool:
        thread.registers[operands[0].partition("|")[2]] = int(thread.lane == 0)
        return True

    def _vote(self, thread: Thread, operation: str, operands: list[str]) -> bool:
        """About values that are left out: any answer may come."""
        thread.registers[operands[0]] = self.random.randint(0, 1)
        return True

    def _meet(
        self, thread: Thread, threads: int, value: int = 0, name: int = 0, ready: bool = True
    ) -> dict[Thread, int] | None:
        """The values of all, if so many have come here as often as this thread, and it was ready for one."""
        which = (thread.pc, name, thread.meetings[thread.pc])
        meeting = thread.block.meetings[which]
        meeting[thread] = value
        if which not in thread.block.met:
            if not ready or sum(t.stands_for for t in meeting) < threads:
                return None
            thread.block.met.add(which)
        thread.meetings[thread.pc] += 1
        return meeting

    def _shfl(self, thread: Thread, operation: str, operands: list[str]) -> bool:
        value, number = self._value(thread, operands[1]), self._value(thread, operands[2])
        if thread.warp == LOAD_WARP:
            met = self._meet(thread, 32, value)
            if met is None:
                return False
            values = {t.lane: v for t, v in met.items()}
            value = values.get(thread.lane - number, value) if ".up." in operation else values[number]
        thread.registers[operands[0]] = value
        return True

    def _bar(self, thread: Thread, operation: str, operands: list[str]) -> bool:
        if "warp" in operation:
            return thread.warp != LOAD_WARP or self._meet(thread, 32) is not None
        if len(operands) == 1:
            return self._meet(thread, 32 * WARPS) is not None
        threads, name = self._value(thread, operands[1]), self._value(thread, operands[0])
        return self._meet(thread, threads, name=name) is not None

    def _mbarrier(self, thread: Thread, operation: str, operands: list[str]) -> bool:
        barriers = thread.block.barriers
        address = self._address(thread, operands[operands[0][0] != "["])
        value = self._value(thread, operands[-1])
        if ".init" in operation:
            barriers[address] = Barrier(value, value)
        elif "try_wait" in operation:
            over = barriers[address].phase % 2 != self._value(thread, operands[2]) % 2
            return over if thread.warp != LOAD_WARP else self._meet(thread, 32, ready=over) is not None
        else:
            self._notice()
            bytes_too = "expect_tx" in operation
            barriers[address].change(1 if bytes_too else value, value if bytes_too else 0)
        return True

    def _cp(self, thread: Thread, operation: str, operands: list[str]) -> bool:
        block, problem, loaded = thread.block, self.plan.problem, "mbarrier" in operation
        kernel = kernel_of(problem.head_dim, problem.head_dim_v)
        if ".tensor." in operation:
            named, *coordinates = re.findall(r"%\w+", operands[loaded])
            which = self._value(thread, named) - DESCRIPTORS
            where = tuple(_as(self._value(thread, c), "s32") for c in coordinates)
            (block.loads if loaded else block.stores).append((which, where))
            config = BackwardConfig(kernel.head_dim, head_dim_v=kernel.head_dim_v)
            row_bytes = config.k_row_bytes if which == K else row_bytes_of(kernel.head_dim)
            size = row_bytes * (problem.tile_m if which < K else problem.tile_n)
        else:
            tile_bytes = 4 * problem.tile_m * kernel.head_dim
            size = self._value(thread, operands[2])
            tile = (self._address(thread, operands[loaded]) - (TENSORS << 13)) // tile_bytes
            if not loaded:
                self.contributions.append((block.index, tile, operation.startswith("cp.reduce")))
            elif size == tile_bytes:  # the others are LSE and delta
                self.fetched.append((tile, sum(tile == to for _, to, _ in self.contributions)))
        if loaded:
            barrier = operands[2 if ".tensor." in operation else 3]
            block.copies.append((self._address(thread, barrier), size))
        return True


def _as(value: int, form: str) -> int:
    """A value cut to the bits of a PTX type."""
    bits = BITS.get(form, 32)
    value &= (1 << bits) - 1
    return value - (1 << bits) if form[0] == "s" and value >> (bits - 1) else value


def _quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else 0


COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
COMPUTE: dict[str, Callable[..., Any]] = {
    "setp": lambda a, b: 0,
    "selp": lambda a, b: 0,
    "cvt": lambda a: a,
    "mov": lambda a: a,
    "cvta": lambda a: a,
    "neg": lambda a: -a,
    "bfind": lambda a: a.bit_length() - 1,
    "not": lambda a: not a if isinstance(a, bool) else ~a,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "mad": lambda a, b, c: a * b + c,
    "div": _quotient,
    "rem": lambda a, b: a - b * _quotient(a, b),
    "min": min,
    "max": max,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: a << min(b & 0xFFFFFFFF, 64),
    "shr": lambda a, b: a >> min(b & 0xFFFFFFFF, 64),
}

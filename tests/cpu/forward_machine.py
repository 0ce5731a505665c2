"""The forward kernel's PTX on the CPU: see ptx_machine.py."""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np
import ptx_machine as base
from emulator.phases import Named
from ptx_machine import LOAD_WARP, Machine, Thread, _as
from ptx_machine import main_kernel_ptx as forward_ptx

from dash_attn.backends.shapes import Keys
from dash_attn.backends.sm90.forward.config import ForwardConfig
from dash_attn.backends.sm90.forward.table import forward_table
from dash_attn.backends.sm90.tiles import row_bytes_of
from dash_attn.problem import Problem
from dash_attn.schedule import ForwardNumerics, ForwardPlan, build_forward_plan

__all__ = ["REST", "ForwardMachine", "ForwardProgram", "forward_ptx", "plan_for"]

TABLE, TENSORS = 1 << 20, 1 << 44
REST = (8, 10)
"""Parameters of the copies that load the rest of K and of V; those of Q, K and V are 0, 2 and 4."""
TRACE = (TENSORS << 2) + (15 << 40)  # the parameter behind those of the workspace


def plan_for(problem: Problem, config: ForwardConfig, workers: int = 1) -> ForwardPlan:
    numerics = ForwardNumerics(problem.head_dim, problem.dtype, segment=config.segment)
    return build_forward_plan(problem, config.tile_m, workers, numerics)


class ForwardProgram(base.Program):
    kernel = "kernelForward"


class ForwardMachine(Machine):
    def __init__(
        self,
        config: ForwardConfig,
        program,
        plan: ForwardPlan,
        blocks: int,
        seed: int,
        *,
        keys: Keys | None = None,
    ):
        self._begin(program, blocks, config.threads // 32, seed)
        self.config, self.plan, self.problem, self.keys = config, plan, plan.problem, keys
        words = np.frombuffer(forward_table(plan, keys and keys.starts).tobytes(), dtype=np.uint32)
        self.memory = {TABLE + 4 * i: int(word) for i, word in enumerate(words)}

    def _begin(self, program: base.Program, blocks: int, warps: int, seed: int) -> None:
        super()._begin(program, blocks, warps, seed)
        self.clock = 0
        self.named: dict[tuple[int, int], Named] = defaultdict(Named)
        self.waiting: dict[Thread, int] = {}

    def _parameter(self, number: int, offset: int) -> int:
        p = self.problem
        dense = len({pair[:1] if self.keys else pair for pair in p.sequences}) == 1
        batch = len(p.sequences) if dense else 1
        k_batch = batch if self.keys is None else self.keys.shape[0]
        left, right = p.mask.sides
        numbers = (
            len(self.plan.entries), self.plan.section, left, right, p.group, batch, p.heads, k_batch
        )  # fmt: skip
        first = 16 + self.config.trace + self.config.softcap
        more = 6 if self.config.rest else 0  # two parameters for each of two copies, and two products
        known = {11 + more: TABLE, **dict(enumerate(numbers, first + more))}
        if number in known and (offset == 0):
            return known[number]
        return (TENSORS << 2) + (number << 40) if offset == 0 else 1

    def _value(self, thread: Thread, operand: str) -> int:
        if operand != "%globaltimer":
            return super()._value(thread, operand)
        self.clock += 1
        return self.clock

    def trace(self) -> list[tuple[int, int, int]]:
        """What every item left."""
        words = [self.memory.get(TRACE + 8 * i, -1) for i in range(3 * self.plan.items)]
        return list(zip(words[::3], words[1::3], words[2::3]))

    def _bar(self, thread: Thread, operation: str, operands: list[str]) -> bool:
        if "warp" in operation:
            return thread.warp != LOAD_WARP or self._meet(thread, 32) is not None
        if len(operands) == 1:
            return self._meet(thread, 32 * self.warps) is not None
        name, threads = self._value(thread, operands[0]), self._value(thread, operands[1])
        barrier = self.named[thread.block.index, name]
        if "arrive" in operation:
            barrier.come(thread.stands_for, threads)
            self._notice()
            return True
        if thread not in self.waiting:
            self.waiting[thread] = barrier.phase
            barrier.come(thread.stands_for, threads)
            self._notice()
        if barrier.phase > self.waiting[thread]:
            del self.waiting[thread]
            return True
        return False

    _barrier = _bar

    def _vote(self, thread: Thread, operation: str, operands: list[str]) -> bool:
        thread.registers[operands[0]] = thread.registers.get(operands[1], 0)
        return True

    def _cp(self, thread: Thread, operation: str, operands: list[str]) -> bool:
        block, loaded = thread.block, "mbarrier" in operation
        named, *coordinates = re.findall(r"%\w+", operands[loaded])
        which = self._value(thread, named) - base.DESCRIPTORS
        where = tuple(_as(self._value(thread, c), "s32") for c in coordinates)
        (block.loads if loaded else block.stores).append((which, where))
        if loaded:
            c = self.config
            columns = c.head_dim if which == 0 else c.rest if which in REST else c.kv_columns[0]
            size = row_bytes_of(columns) * (64 if which == 0 else c.tile_n)
            block.copies.append((self._address(thread, operands[2]), size))
        return True

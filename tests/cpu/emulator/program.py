"""A kernel in PTX as a list of instructions whose operands are numbered registers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

LANES = 32
DESCRIPTORS = 1 << 60
"""Parameters that are tensor maps have addresses from here on, 256 bytes apart."""
SHARED_SYMBOL = "__dynamic_shmem__"


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        predicate: register that says which lanes execute it, -1 for all; ``wanted``: its value where they do.
        operation: "add.s32" and the like; ``form``: its parts between dots.
        operands: register numbers. One in brackets, or a parameter, is an :class:`Address`; one in braces a
            tuple of register numbers.
        target: of a branch, where it goes.
        text: the line, for errors.
    """

    predicate: int
    wanted: bool
    operation: str
    form: tuple[str, ...]
    operands: tuple[object, ...]
    target: int
    text: str

    @property
    def reads(self) -> frozenset[int]:
        """Registers whose values it needs: all, but for those that it only writes to."""
        only_written = self.operands and self.form[0] not in _READ_THEIR_FIRST
        found = {self.predicate}
        for operand in self.operands[bool(only_written) :]:
            if isinstance(operand, Address):
                found |= {operand.register, *operand.parts}
            else:
                found |= {*operand} if isinstance(operand, tuple) else {operand}
        return frozenset(found)


_READ_THEIR_FIRST = ("st", "stmatrix", "red", "wgmma", "cp", "mbarrier", "bar", "barrier")
"""Operations whose first operand is no result."""


@dataclass(frozen=True)
class Address:
    """What an operand in brackets names: a register or a parameter, an offset, and further registers.

    ``parts`` are the coordinates of a copy: ``[descriptor, {columns, rows, ...}]``.
    """

    register: int = -1
    parameter: int = -1
    offset: int = 0
    parts: tuple[int, ...] = ()


@dataclass
class Kernel:
    """A kernel of a PTX file.

    Attributes:
        name: as in the file.
        threads: per block.
        parameters: bytes of each.
        instructions: in order.
        constants: registers that hold a constant, with it: immediates, and addresses of parameters.
        registers: how many there are, constants included.
        kinds: of each register, its dtype.
    """

    name: str
    threads: int
    parameters: list[int]
    instructions: list[Instruction] = field(default_factory=list)
    constants: dict[int, int | str] = field(default_factory=dict)
    kinds: list[type[np.generic]] = field(default_factory=list)

    @property
    def registers(self) -> int:
        return len(self.kinds)


def kernels_of(ptx: str) -> list[Kernel]:
    """The kernels of a PTX file, in order."""
    found = []
    for part in ptx.split(".visible .entry ")[1:]:
        head, body = part.split("\n{", 1)
        name = head[: head.index("(")]
        parameters = [
            int(size or 0) for size in re.findall(r"\.param [^,\n]*?_param_\d+(?:\[(\d+)\])?", head)
        ]
        scalars = re.findall(r"\.param (?:\.align \d+ )?\.([a-z]\d+) \S*?_param_\d+(\[\d+\])?", head)
        sizes = [size or int(kind[1:]) // 8 for size, (kind, _) in zip(parameters, scalars, strict=True)]
        threads = re.search(r"\.reqntid (\d+)", head)
        assert threads is not None, name
        found.append(_Parser(Kernel(name, int(threads[1]), sizes)).parse(body))
    return found


_KINDS = {"p": np.bool_, "rs": np.uint16, "r": np.uint32, "rd": np.uint64, "f": np.float32}
_LEFT_OUT = re.compile(r"\.pragma |\.reg \.(pred|b\d+) %\w+<\d+>$|(@\w+ )?bra(\.uni)?\s+\w+$")
"""Statements that do nothing here. Branches to a label without $L belong to the wait before them."""
_OPERAND = re.compile(r"\[[^\]]*\]|\{[^}]*\}|[^,\s]+")


class _Parser:
    def __init__(self, kernel: Kernel):
        self.kernel, self.numbers, self.declared = kernel, dict[str, int](), dict[str, type[np.generic]]()

    def parse(self, body: str) -> Kernel:
        lines: list[str] = []
        labels: dict[str, int] = {}
        whole = body.split("\tret;\n\n}")[0].replace("\n\t\t{", " {")  # some instructions have several lines
        for line in [*whole.splitlines(), "ret;"]:
            text = line.split("//")[0].strip()
            if label := re.match(r"(\$L\w+):", text):
                labels[label[1]] = len(lines)
            *statements, rest = re.sub(r"^\{\s", "", text).split(";")
            if not re.fullmatch(r"[{}]?|\$?\w+:", rest.strip()):
                raise ValueError(f"expected a statement that ends in its line, got {rest!r}")
            for each in statements:
                if declared := re.match(r"\s*\.reg \.(pred|f32)\s+([\w, ]+)$", each):
                    kind = np.bool_ if declared[1] == "pred" else np.uint32
                    self.declared |= dict.fromkeys(re.findall(r"\w+", declared[2]), kind)
                elif re.match(r"\s*[@a-z]", each) and ("bra" not in each or "$L" in each):
                    lines.append(each.strip())
                elif not _LEFT_OUT.match(" ".join(each.split())):
                    raise ValueError(f"a statement of an unknown kind: {each.strip()!r}")
        self.kernel.instructions = [self._instruction(line, labels) for line in lines]
        return self.kernel

    def _instruction(self, line: str, labels: dict[str, int]) -> Instruction:
        predicate, wanted, text = -1, True, line
        if found := re.match(r"@(!?)(%?\w+)\s+(.*)", line):
            predicate, wanted, line = self._register(found[2]), not found[1], found[3]
        operation, _, rest = line.replace("\t", " ").partition(" ")
        form = tuple(operation.replace("::", ":").split("."))
        if form[0] == "bra":
            return Instruction(predicate, wanted, operation, form, (), labels[rest.strip()], text)
        operands = tuple(self._operand(each, operation) for each in _OPERAND.findall(rest.replace("|", ", ")))
        return Instruction(predicate, wanted, operation, form, operands, -1, text)

    def _operand(self, text: str, operation: str) -> object:
        if text[0] == "[":
            return self._address(text[1:-1])
        if text[0] == "{":
            return tuple(self._register(each) for each in re.findall(r"[^\s,{}]+", text))
        return self._register(text)

    def _address(self, text: str) -> Address:
        if parameter := re.search(r"_param_(\d+)(?:\+(\d+))?$", text):
            return Address(parameter=int(parameter[1]), offset=int(parameter[2] or 0))
        base, _, rest = text.partition(",")
        name, _, offset = base.strip().partition("+")
        parts = tuple(self._register(each) for each in re.findall(r"[^\s,{}]+", rest))
        return Address(register=self._register(name), offset=int(offset or 0), parts=parts)

    def _register(self, text: str) -> int:
        if text not in self.numbers:
            self.numbers[text] = len(self.kernel.kinds)
            self.kernel.kinds.append(self._kind(text))
        return self.numbers[text]

    def _kind(self, text: str) -> type[np.generic]:
        if text in self.declared:
            return self.declared[text]
        if found := re.match(r"%(p|rs|rd|r|f)\d+$", text):
            return _KINDS[found[1]]
        value: int | str = text
        if text.startswith("0f"):
            value = int(text[2:], 16)
        elif parameter := re.search(r"_param_(\d+)$", text):
            value = DESCRIPTORS + 256 * int(parameter[1])
        elif text.startswith(SHARED_SYMBOL):
            value = 0
        elif not text.startswith("%"):
            value = int(text, 0)
        self.kernel.constants[len(self.kernel.kinds)] = value
        return np.uint64

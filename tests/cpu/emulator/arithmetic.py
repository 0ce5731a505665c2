"""Instructions that only compute: each becomes a function from the registers of a warp to 32 new values.

Additions, products and fma are rounded as IEEE says (an fma by way of float64: once in 2^29 it is off by one
bit). The approximate instructions (ex2, lg2, tanh, rcp) are computed in float64 and rounded, so they are more
accurate here than on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .program import Instruction

Registers = list[np.ndarray]
Compute = Callable[[Registers], np.ndarray]
Slot = Callable[[object, type[np.generic]], int]
"""The register of an operand, which holds values of this dtype if it is a constant."""

TYPES: dict[str, type[np.generic]] = {
    "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16, "s16": np.int16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
    "f32": np.float32, "f64": np.float64, "pred": np.bool_, "f16": np.float16,
}  # fmt: skip
WIDE = {"s16": np.int32, "u16": np.uint32, "s32": np.int64, "u32": np.uint64}
PACKED = ("bf16x2", "f16x2")


def compiled(instruction: Instruction, slot: Slot) -> Compute | None:
    """What an instruction computes; None if it does more than compute."""
    make = _MAKERS.get(instruction.form[0])
    return make(instruction, slot) if make else None


def bf16_of(values: np.ndarray) -> np.ndarray:
    """float32 as the 16 bits of the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def float_of(bits: np.ndarray, dtype: str) -> np.ndarray:
    """16-bit values of a dtype ("bf16", "f16") as float32."""
    if dtype == "f16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _unsigned(values: np.ndarray) -> np.ndarray:
    if values.dtype == np.bool_:
        return values
    return values.view(f"u{values.dtype.itemsize}")


def _binary(function: Callable[..., np.ndarray]) -> Callable[[Instruction, Slot], Compute]:
    def make(i: Instruction, slot: Slot) -> Compute:
        kind = TYPES[i.form[-1]]
        a, b = (slot(operand, kind) for operand in i.operands[1:3])
        return lambda r: _unsigned(function(r[a].view(kind), r[b].view(kind)))

    return make


def _unary(function: Callable[..., np.ndarray]) -> Callable[[Instruction, Slot], Compute]:
    def make(i: Instruction, slot: Slot) -> Compute:
        kind = TYPES[i.form[-1]]
        a = slot(i.operands[1], kind)
        return lambda r: _unsigned(function(r[a].view(kind)))

    return make


def _approximate(function: Callable[..., np.ndarray]) -> Callable[[Instruction, Slot], Compute]:
    def near(x: np.ndarray) -> np.ndarray:
        found = function(x.astype(np.float64)).astype(np.float32)
        return np.where(np.abs(found) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), found), found)

    return _unary(near)


def _mul(i: Instruction, slot: Slot) -> Compute:
    kind = TYPES[i.form[-1]]
    a, b = (slot(operand, kind) for operand in i.operands[1:3])
    if i.form[1] == "wide":
        wide = WIDE[i.form[-1]]
        return lambda r: _unsigned(r[a].view(kind).astype(wide) * r[b].view(kind).astype(wide))
    if i.form[1] == "hi":
        wide = WIDE[i.form[-1]]
        shift = 8 * np.dtype(kind).itemsize
        return lambda r: _unsigned(
            (r[a].view(kind).astype(wide) * r[b].view(kind).astype(wide) >> shift).astype(kind)
        )
    return lambda r: _unsigned(r[a].view(kind) * r[b].view(kind))


def _mad(i: Instruction, slot: Slot) -> Compute:
    kind = TYPES[i.form[-1]]
    a, b = (slot(operand, kind) for operand in i.operands[1:3])
    if i.form[1] == "wide":
        wide = WIDE[i.form[-1]]
        c = slot(i.operands[3], wide)
        return lambda r: _unsigned(
            r[a].view(kind).astype(wide) * r[b].view(kind).astype(wide) + r[c].view(wide)
        )
    c = slot(i.operands[3], kind)
    return lambda r: _unsigned(r[a].view(kind) * r[b].view(kind) + r[c].view(kind))


def _fma(i: Instruction, slot: Slot) -> Compute:
    a, b, c = (slot(operand, np.float32) for operand in i.operands[1:4])

    def compute(r: Registers) -> np.ndarray:
        x, y, z = (r[each].view(np.float32).astype(np.float64) for each in (a, b, c))
        return (x * y + z).astype(np.float32).view(np.uint32)

    return compute


def _divide(whole: bool) -> Callable[[Instruction, Slot], Compute]:
    def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if a.dtype.kind == "f":
            return a / b
        b = np.where(b == 0, 1, b)  # in lanes that do not divide
        quotient = np.abs(a.astype(np.int64)) // np.abs(b.astype(np.int64))
        quotient = np.where((a < 0) != (b < 0), -quotient, quotient)
        return (quotient if whole else a - quotient * b).astype(a.dtype)

    return _binary(divide)


def _limits(function: Callable[..., np.ndarray], of_floats: Callable[..., np.ndarray]):
    def make(i: Instruction, slot: Slot) -> Compute:
        passes_nan = "NaN" in i.form or i.form[-1] != "f32"
        compute = _binary(function if passes_nan else of_floats)(i, slot)
        if "relu" not in i.form:
            return compute
        kind = TYPES[i.form[-1]]
        return lambda r: _unsigned(np.maximum(compute(r).view(kind), kind(0)))

    return make


def _shift(function: Callable[..., np.ndarray]) -> Callable[[Instruction, Slot], Compute]:
    def make(i: Instruction, slot: Slot) -> Compute:
        kind = TYPES[i.form[-1]]
        bits = 8 * np.dtype(kind).itemsize
        a, b = slot(i.operands[1], kind), slot(i.operands[2], np.uint32)

        def compute(r: Registers) -> np.ndarray:
            x, by = r[a].view(kind), r[b]
            moved = function(x, np.minimum(by, bits - 1).astype(kind))
            beyond = x >> (bits - 1) if x.dtype.kind == "i" else np.zeros_like(x)
            return _unsigned(np.where(by >= bits, beyond, moved))

        return compute

    return make


_COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
            "ge": np.greater_equal}  # fmt: skip
_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _setp(i: Instruction, slot: Slot) -> Compute:
    kind, name = TYPES[i.form[-1]], i.form[1]
    unordered = len(name) == 3 and name.endswith("u")
    compare = _COMPARE[name[:2]]
    a, b = (slot(operand, kind) for operand in i.operands[1:3])

    def compute(r: Registers) -> np.ndarray:
        x, y = r[a].view(kind), r[b].view(kind)
        found = compare(x, y)
        if kind is np.float32:
            nan = np.isnan(x) | np.isnan(y)
            found = np.where(nan, unordered, found)
        return found

    if len(i.form) == 4 and i.form[2] in _COMBINE:
        combine, c = _COMBINE[i.form[2]], slot(i.operands[3], np.bool_)
        return lambda r: combine(compute(r), r[c])
    return compute


def _selp(i: Instruction, slot: Slot) -> Compute:
    kind = TYPES[i.form[-1]]
    a, b, p = slot(i.operands[1], kind), slot(i.operands[2], kind), slot(i.operands[3], np.bool_)
    return lambda r: _unsigned(np.where(r[p], r[a].view(kind), r[b].view(kind)))


def _mov(i: Instruction, slot: Slot) -> Compute | None:
    kind, to, source = TYPES[i.form[-1]], i.operands[0], i.operands[1]
    if isinstance(to, tuple):
        return None  # to several registers
    if isinstance(source, tuple):
        half = {np.uint32: np.uint16, np.uint64: np.uint32}[kind]
        low, high = (slot(each, half) for each in source)
        shift = 8 * np.dtype(half).itemsize
        return lambda r: r[low].view(half).astype(kind) | r[high].view(half).astype(kind) << shift
    a = slot(source, kind)
    return lambda r: r[a]


def _cvt(i: Instruction, slot: Slot) -> Compute:
    to, source = i.form[-2], i.form[-1]
    if to in PACKED:
        high, low = (slot(operand, np.float32) for operand in i.operands[1:3])
        relu = "relu" in i.form

        def packed(r: Registers) -> np.ndarray:
            parts = []
            for each in (low, high):
                x = r[each].view(np.float32)
                x = np.maximum(x, np.float32(0)) if relu else x
                parts.append(bf16_of(x) if to == "bf16x2" else x.astype(np.float16).view(np.uint16))
            return parts[0].astype(np.uint32) | parts[1].astype(np.uint32) << 16

        return packed
    if source in ("bf16", "f16"):
        a = slot(i.operands[1], np.uint16)
        return lambda r: _unsigned(float_of(r[a], source))
    if to in ("bf16", "f16"):
        a = slot(i.operands[1], np.float32)
        return lambda r: (
            bf16_of(r[a].view(np.float32))
            if to == "bf16"
            else _unsigned(r[a].view(np.float32).astype(np.float16))
        )
    kind, given = TYPES[to], TYPES[source]
    a = slot(i.operands[1], given)
    # A narrow value may stand in a wide register.
    return lambda r: _unsigned(_narrowed(r[a], given).astype(kind))


def _narrowed(values: np.ndarray, kind: type[np.generic]) -> np.ndarray:
    size = np.dtype(kind).itemsize
    if values.dtype.itemsize == size:
        return values.view(kind)
    return values.astype(f"u{size}").view(kind)


def _of_bits(count: Callable[[int], int]) -> Callable[[Instruction, Slot], Compute]:
    """Of the integer that bits are, an int32."""

    def make(i: Instruction, slot: Slot) -> Compute:
        kind = TYPES[i.form[-1]]
        a = slot(i.operands[1], kind)
        unsigned = f"u{np.dtype(kind).itemsize}"

        def compute(r: Registers) -> np.ndarray:
            return np.array([count(int(x)) for x in r[a].view(unsigned)], np.int32).view(np.uint32)

        return compute

    return make


def _prmt(i: Instruction, slot: Slot) -> Compute:
    a, b, c = (slot(operand, np.uint32) for operand in i.operands[1:4])

    def compute(r: Registers) -> np.ndarray:
        both = np.stack([r[a], r[b]], 1).view(np.uint8)
        found = np.zeros((len(r[a]), 4), np.uint8)
        for byte in range(4):
            which = r[c] >> (4 * byte) & 15
            assert (which < 8).all(), "prmt with signs"
            found[:, byte] = both[np.arange(len(which)), which]
        return found.view(np.uint32)[:, 0]

    return compute


def _funnel(i: Instruction, slot: Slot) -> Compute:
    """The upper half of two words, shifted to the left."""
    assert i.form[1:3] == ("l", "wrap"), i.text
    low, high, by = (slot(operand, np.uint32) for operand in i.operands[1:4])
    return lambda r: (((r[high].astype(np.uint64) << 32 | r[low]) << (r[by] & 31)) >> 32).astype(np.uint32)


_MAKERS: dict[str, Callable[[Instruction, Slot], Compute | None]] = {
    "add": _binary(np.add), "sub": _binary(np.subtract), "mul": _mul, "mad": _mad, "fma": _fma,
    "div": _divide(True), "rem": _divide(False),
    "and": _binary(np.bitwise_and), "or": _binary(np.bitwise_or), "xor": _binary(np.bitwise_xor),
    "not": _unary(np.invert), "neg": _unary(np.negative), "abs": _unary(np.abs),
    "copysign": _binary(lambda sign, size: np.copysign(size, sign)),
    "max": _limits(np.maximum, np.fmax), "min": _limits(np.minimum, np.fmin),
    "shl": _shift(np.left_shift), "shr": _shift(np.right_shift), "shf": _funnel,
    "setp": _setp, "selp": _selp, "mov": _mov, "cvt": _cvt, "cvta": _mov, "prmt": _prmt,
    "bfind": _of_bits(lambda x: x.bit_length() - 1), "popc": _of_bits(int.bit_count),
    "ex2": _approximate(np.exp2), "lg2": _approximate(np.log2), "tanh": _approximate(np.tanh),
    "rcp": _approximate(np.reciprocal), "sqrt": _approximate(np.sqrt),
}  # fmt: skip

"""wgmma: products of tiles in shared memory (or registers) that a warp's 16 rows get in their registers."""

from __future__ import annotations

import re
from functools import cache

import numpy as np

from .arithmetic import float_of
from .memory import swizzled

DEPTH = 16
"""Values of K per instruction."""
ROWS = 16
"""Rows that a warp has of the 64 of its warpgroup."""


SWIZZLES = {0: 16, 1: 128, 2: 64, 3: 32}
"""Bytes of a row, by the code in a descriptor; rows of 16 are not swizzled."""


def _descriptor(value: int) -> tuple[int, int, int, int]:
    """Start, leading and stride offsets of a matrix in shared memory, and its rows, in bytes."""
    assert value >> 49 & 7 == 0, "no base offset"
    offsets = ((value >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    return *offsets, SWIZZLES[value >> 62]


def places(descriptor: int, rows: np.ndarray, transposed: bool) -> np.ndarray:
    """(rows, 16) addresses of a matrix in shared memory: K is contiguous, or rows are if ``transposed``."""
    start, leading, stride, size = _descriptor(descriptor)
    row, depth = rows[:, None], np.arange(DEPTH)[None, :]
    if size == 16:  # pieces of eight rows of 16 bytes
        across, along = (row, depth) if transposed else (depth, row)
        return start + across % 8 * 2 + along % 8 * 16 + row // 8 * stride + depth // 8 * leading
    if transposed:
        wide = size // 2
        at = start + row % wide * 2 + row // wide * leading + depth % 8 * size + depth // 8 * stride
    else:
        at = start + row // 8 * stride + row % 8 * size + depth * 2
    return swizzled(at, size)


def operand(shared: np.ndarray, at: np.ndarray, dtype: str) -> np.ndarray:
    """float64 values at these addresses."""
    return float_of(shared.view(np.uint16)[at >> 1], dtype).astype(np.float64)


def fragment(registers: list[np.ndarray], dtype: str) -> np.ndarray:
    """(16, 16) float64 of an operand A that lies in four registers of a warp."""
    found = np.zeros((ROWS, DEPTH))
    lane = np.arange(32)
    for number, values in enumerate(registers):
        both = float_of(values.view(np.uint16), dtype).reshape(32, 2)
        row, column = lane // 4 + number % 2 * 8, lane % 4 * 2 + number // 2 * 8
        found[row, column], found[row, column + 1] = both[:, 0], both[:, 1]
    return found


def shape_of(form: tuple[str, ...]) -> tuple[int, str]:
    """Columns and dtype of the operands of ``wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16``."""
    shape = re.match(r"m64n(\d+)k16$", form[4])
    assert shape is not None, form
    assert form[5] == "f32", form
    return int(shape[1]), form[6]


def multiply(a: np.ndarray, b: np.ndarray, acc: list[np.ndarray] | None) -> list[np.ndarray]:
    """acc + a b^T in the registers of a warp: one rounding per instruction, in an order of its own.

    A GPU truncates where this rounds, so bits are not a GPU's. They depend on the operands of a value only.
    """
    values = (a @ b.T)[_places_of(len(b))]
    if acc is not None:
        values = values + np.stack(acc).view(np.float32)
    return list(values.astype(np.float32).view(np.uint32))


@cache
def _places_of(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of what each register of each lane holds of 16 rows."""
    number, lane = np.arange(columns // 2)[:, None], np.arange(32)[None, :]
    return lane // 4 + number // 2 % 2 * 8, number // 4 * 8 + lane % 4 * 2 + number % 2

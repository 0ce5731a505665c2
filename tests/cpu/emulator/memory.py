"""Memory that a kernel sees: tensors where they lie, shared memory, tensor maps; every access is checked."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
import torch

PACKED_ROWS, MAX_INT32, WRAP = 1 << 30, (1 << 31) - 1, 1 << 64
ROW_BYTES = 128
"""Of a copy of tiles, mostly: how far the swizzle goes."""


class OutOfBoundsError(Exception):
    """A kernel touched memory that is nobody's."""


class EarlyAccessError(Exception):
    """A warp reads what the kernel before may still write, for it has not waited for that kernel."""


class Memory:
    """Regions of bytes at fixed addresses."""

    def __init__(self) -> None:
        self.bases: list[int] = []
        self.regions: list[np.ndarray] = []

    def add(self, base: int, region: np.ndarray) -> None:
        at = bisect_right(self.bases, base)
        self.bases.insert(at, base)
        self.regions.insert(at, region)

    def add_tensor(self, tensor: torch.Tensor) -> int:
        """The address of a CPU tensor, whose bytes are visible from now on."""
        storage = tensor.untyped_storage()
        base, size = storage.data_ptr(), storage.nbytes()
        if size and base not in self.bases:
            self.add(base, np.frombuffer((ctypes.c_uint8 * size).from_address(base), np.uint8))
        return tensor.data_ptr()

    def copied(self) -> list[bytes]:
        return [region.tobytes() for region in self.regions]

    def restore(self, copies: list[bytes]) -> None:
        for region, before in zip(self.regions, copies, strict=True):
            region[:] = np.frombuffer(before, np.uint8)

    def region(self, first: int, last: int) -> tuple[int, np.ndarray]:
        at = bisect_right(self.bases, first) - 1
        if at >= 0:
            base, region = self.bases[at], self.regions[at]
            if last <= base + len(region):
                return base, region
        raise OutOfBoundsError(f"bytes {first:#x} to {last:#x}")

    def read(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """(n, size) bytes."""
        base, region = self.region(int(addresses.min()), int(addresses.max()) + size)
        return region[self._places(addresses, base, size)]

    def write(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """``values``: (n, size) bytes."""
        size = values.shape[1]
        base, region = self.region(int(addresses.min()), int(addresses.max()) + size)
        region[self._places(addresses, base, size)] = values

    def words(self, address: int, count: int, kind: type[np.generic] = np.uint32) -> np.ndarray:
        """A view of so many values from an address on."""
        size = count * np.dtype(kind).itemsize
        base, region = self.region(address, address + size)
        return region[address - base : address - base + size].view(kind)

    @staticmethod
    def _places(addresses: np.ndarray, base: int, size: int) -> np.ndarray:
        return (addresses.astype(np.int64) - base)[:, None] + np.arange(size)


def swizzled(addresses: np.ndarray, row_bytes: int = ROW_BYTES) -> np.ndarray:
    """Where 16-byte pieces lie under the swizzle of so many bytes."""
    return addresses ^ ((addresses >> 7 & row_bytes // 16 - 1) << 4)


@dataclass(frozen=True)
class TensorMap:
    """What the copy engine knows of a tensor of two-byte values: modes (column, row, head, batch, shift).

    Attributes:
        address: of the first value.
        extents, strides: of the five modes; strides in bytes.
        rows: of a copy.
        row_bytes: of a copy, and of the swizzle.
    """

    address: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    rows: int
    row_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor, rows: int, row_bytes: int = ROW_BYTES) -> TensorMap:
        """As ``sm90/device/copies.py`` sees a (batch, seqlen, heads, head_dim) tensor."""
        batches, length, heads, columns = tensor.shape
        batch_stride, row_stride, head_stride, _ = tensor.stride()
        extents = [columns, length, heads, batches, 1]
        if batches == 1:
            extents = [columns, PACKED_ROWS, heads, MAX_INT32, MAX_INT32]
            batch_stride = (1 << 34) - row_stride
        strides = (1, row_stride, head_stride, batch_stride, row_stride)
        in_bytes = tuple(2 * stride for stride in strides)
        return cls(tensor.data_ptr(), tuple(extents), in_bytes, rows, row_bytes)

    def _rows(self, at: list[int]) -> tuple[int, int, int, int]:
        """First row and number of rows of a copy that exist, the address of the first, and its bytes."""
        column, row, *others = at
        inside = all(0 <= x < extent for x, extent in zip(others, self.extents[2:]))
        first, last = max(0, -row), min(self.rows, self.extents[1] - row)
        width = max(min(self.row_bytes, 2 * (self.extents[0] - column)), 0)
        assert column >= 0
        address = self.address + sum(
            x * stride for x, stride in zip((column, row + first, *others), self.strides)
        )
        return first, max(last - first, 0) if inside else 0, address % WRAP, width

    @property
    def bytes(self) -> int:
        """Of a copy, as a barrier counts them."""
        return self.rows * self.row_bytes

    def lines(self, at: list[int]) -> tuple[np.ndarray, int]:
        """Addresses of the rows of a copy that exist, and bytes of each."""
        _, count, address, width = self._rows(at)
        return address + np.arange(count if width else 0) * self.strides[1], width

    def _lines(self, memory: Memory, at: list[int]) -> tuple[np.ndarray, int]:
        """As ``lines``. Where there are none, an H200 looks up the first address of the view."""
        lines, width = self.lines(at)
        if not len(lines):
            memory.region(self.address, self.address + 1)
        return lines, width

    def fetch(self, memory: Memory, shared: np.ndarray, to: int, at: list[int]) -> None:
        """Copy to shared memory, zeros where nothing exists."""
        box = np.zeros((self.rows, self.row_bytes), np.uint8)
        first, (lines, width) = self._rows(at)[0], self._lines(memory, at)
        if len(lines):
            box[first : first + len(lines), :width] = memory.read(lines, width)
        shared[self._places(to)] = box.reshape(-1, 16)

    def store(self, memory: Memory, shared: np.ndarray, source: int, at: list[int]) -> None:
        box = shared[self._places(source)].reshape(self.rows, self.row_bytes)
        first, (lines, width) = self._rows(at)[0], self._lines(memory, at)
        if len(lines):
            memory.write(lines, box[first : first + len(lines), :width])

    def _places(self, address: int) -> np.ndarray:
        assert address % 128 == 0, "a tile begins at a multiple of 128 bytes"
        pieces = address + 16 * np.arange(self.rows * self.row_bytes // 16)
        return swizzled(pieces, self.row_bytes)[:, None] + np.arange(16)

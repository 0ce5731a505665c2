"""Tiles of packed tensors: where they lie, how they are copied, and what the mask hides in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor

from ...errors import InputError
from ...problem import Mask, Problem, SequenceGrid
from ..base import AuxTensors
from ..shapes import tensor_shapes
from ..sums import accumulator
from .masks import hidden_elements

__all__ = [
    "TileMasks",
    "TileRows",
    "check_packed",
    "copy_tile",
    "distances",
    "exact",
    "slope_of",
]


@contextmanager
def exact() -> Iterator[None]:
    """No graph, and no autocast that would multiply in another dtype.

    What PyTorch is told of float32 products (``torch.set_float32_matmul_precision``) stays: it is one flag of
    the process. To change it here would change what other threads compute, at times that nobody knows.
    """
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def copy_tile(x: Tensor, rows: slice, head: int) -> Tensor:
    """Rows of one head in accumulation precision, always a fresh contiguous copy."""
    tile = x[rows, head]
    return tile.to(accumulator(x.dtype), copy=True, memory_format=torch.contiguous_format)


def slope_of(aux: AuxTensors, sequence: int, head: int) -> float:
    """The ALiBi slope of a q head, 0 without slopes."""
    slopes = aux.alibi_slopes
    if slopes is None:
        return 0.0
    return float(slopes[head] if slopes.ndim == 1 else slopes[sequence, head])


def distances(start: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """(rows, columns): how far each column is from the one aligned with the row; ``start``: that of row 0."""
    column = torch.arange(columns, device="cpu")  # whatever the default device is
    return (torch.arange(start, start + rows, device="cpu")[:, None] - column).abs().to(dtype)


class TileRows:
    """Where the rows of each tile lie in packed tensors."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.q_start = [0, *accumulate(pair[0] for pair in problem.sequences)]
        self.k_start = [0, *accumulate(pair[1] for pair in problem.sequences)]

    def q(self, sequence: int, tile: int) -> slice:
        start = self.q_start[sequence] + tile * self.problem.tile_m
        return slice(start, min(start + self.problem.tile_m, self.q_start[sequence + 1]))

    def kv(self, sequence: int, tile: int) -> slice:
        start = self.k_start[sequence] + tile * self.problem.tile_n
        return slice(start, min(start + self.problem.tile_n, self.k_start[sequence + 1]))


class TileMasks:
    """Hidden elements of the tiles that the mask cuts; tiles cut alike share one tensor."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask
        self.bands: dict[tuple[int, int, int], Tensor] = {}

    def hidden(self, grid: SequenceGrid, kv_tile: int, q_tile: int) -> Tensor | None:
        """(rows, columns) bool, True where hidden; None for a tile that the mask leaves whole."""
        if grid.cut(kv_tile, q_tile) == "whole":
            return None
        top, left = q_tile * grid.tile_m, kv_tile * grid.tile_n
        rows, columns = min(grid.tile_m, grid.seqlen_q - top), min(grid.tile_n, grid.seqlen_k - left)
        start = top + grid.diagonal - left  # the tile's column that is aligned with its first row
        key = (rows, columns, start)
        if key not in self.bands:
            positions = torch.arange(start, start + rows, device="cpu")  # whatever the default device is
            self.bands[key] = hidden_elements(self.mask, positions, columns)
        return self.bands[key]


def check_packed(problem: Problem, **tensors: Tensor) -> None:
    """Packed shapes, dtype and device of q, k, v, out and dout."""
    shapes = tensor_shapes(problem)[3]._asdict()
    for name, x in tensors.items():
        shape = shapes["out" if name == "dout" else name]
        if x.shape != shape:
            raise InputError(f"{name} has shape {tuple(x.shape)}, the problem says {shape}")
        if str(x.dtype) != f"torch.{problem.dtype}":
            raise InputError(f"{name} has dtype {x.dtype}, the problem says torch.{problem.dtype}")
        if x.device.type != "cpu":
            raise InputError(f"{name} is on {x.device}, this backend runs on cpu")

"""What a mask leaves of a sequence: which elements, which tiles, which tasks.

Coordinates
    row ``i``       a query position of one sequence, ``0 <= i < seqlen_q``
    column ``j``    a key position of one sequence, ``0 <= j < seqlen_k``
    q tile          ``tile_m`` consecutive rows (the last one may be ragged)
    kv tile         ``tile_n`` consecutive columns (the last one may be ragged)
    task            one (kv tile, q tile) pair in which the mask leaves at least one element

Every mask here is a band: row ``i`` sees column ``j`` when ``-left <= j - (i + q_start) <= right``, each side
unbounded when it is None. ``q_start`` is the column aligned with row 0. By default it is
``seqlen_k - seqlen_q``, which aligns the band with the bottom-right corner, as FlashAttention does.

This module imports neither torch nor cutlass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import repeat
from math import gcd
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from .errors import ProblemError

__all__ = ["LONGEST", "IntArray", "Mask", "SequenceGrid", "TileGrid", "read_only"]

IntArray = NDArray[np.int64]
TileCut = Literal["empty", "cut", "whole"]

LONGEST = 2**30
"""Rows of the longest sequence; sums of two lengths fit the kernels' int32."""


@dataclass(frozen=True)
class Mask:
    """A band mask: ``left`` and ``right`` columns around the (bottom-right aligned) diagonal.

    Row i sees the columns j with ``i + shift - left <= j <= i + shift + right``, shift = seqlen_k - seqlen_q.
    Build one with :meth:`full`, :meth:`causal` or :meth:`window`.

    Args:
        left, right: columns, from 0 on. None, or 2^30 and more, leaves a side unbounded: no sequence is
            longer.

    Raises:
        ProblemError: a side is negative or no integer.

    >>> Mask.causal().name, Mask.window(128, 0).name, Mask.window(2**31 - 1, 0).name
    ('causal', 'window(128,0)', 'causal')
    """

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for side in ("left", "right"):
            value = getattr(self, side)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
                raise ProblemError(f"mask {side} must be None or an integer >= 0, got {value!r}")
            object.__setattr__(self, side, int(value) if value < LONGEST else None)

    @classmethod
    def full(cls) -> Mask:
        """Every row sees every column."""
        return cls()

    @classmethod
    def causal(cls) -> Mask:
        """Row ``i`` sees columns up to ``i + seqlen_k - seqlen_q``."""
        return cls(right=0)

    @classmethod
    def window(cls, left: int | None, right: int | None) -> Mask:
        """A sliding window: ``left`` columns before the diagonal, ``right`` after it."""
        return cls(left, right)

    @classmethod
    def of_sides(cls, left: int, right: int) -> Mask:
        """A mask from (left, right) as operators, tables and FlashAttention write it: -1 where unbounded."""
        return cls(None if left < 0 else left, None if right < 0 else right)

    @property
    def sides(self) -> tuple[int, int]:
        """(left, right), -1 where unbounded."""
        return -1 if self.left is None else self.left, -1 if self.right is None else self.right

    def interval(self, position: Any) -> tuple[Any, Any]:
        """First and last column that rows see, not clipped to the sequence; None where a side is unbounded.

        Args:
            position: the column aligned with each row: a number, or an array or tensor of integers.
        """
        return (
            None if self.left is None else position - self.left,
            None if self.right is None else position + self.right,
        )

    @property
    def is_full(self) -> bool:
        """Every row sees every column."""
        return self.left is None and self.right is None

    @property
    def is_causal(self) -> bool:
        """Rows see every column up to their own position."""
        return self.left is None and self.right == 0

    @property
    def name(self) -> str:
        """``full``, ``causal`` or ``window(left,right)`` with -1 for an unbounded side."""
        if self.is_full:
            return "full"
        if self.is_causal:
            return "causal"
        left, right = self.sides
        return f"window({left},{right})"


@dataclass(frozen=True)
class TileGrid:
    """Which tasks a head has: kv tiles by q tiles under a band, whatever the lengths behind them.

    Lengths that cut the same tiles have equal grids: a pattern is made and proven once for all of them.
    All arrays are int64. ``kv_first[q] > kv_last[q]`` marks a q tile without tasks, and the same
    holds for ``q_first`` and ``q_last`` of a kv tile.

    Attributes:
        q_tiles, kv_tiles: tiles of one head.
        tile_m, tile_n: rows of a q tile and of a kv tile.
        low, high: the band in steps of ``gcd(tile_m, tile_n)`` columns: the first row of q tile ``q`` sees
            columns from step ``q * tile_m / gcd + low`` on, its last row up to the end of step
            ``q * tile_m / gcd + high``; None where unbounded.
        ragged: the last kv tile that the last row of the sequence sees.
        beyond: q tiles from this one on begin behind the last key.

    >>> TileGrid.of([(300, 300), (270, 290)], 128, 128, Mask.causal())
    [TileGrid(q_tiles=3, kv_tiles=3, tile_m=128, tile_n=128, low=None, high=0, ragged=2, beyond=3), \
TileGrid(q_tiles=3, kv_tiles=3, tile_m=128, tile_n=128, low=None, high=1, ragged=2, beyond=3)]
    """

    q_tiles: int
    kv_tiles: int
    tile_m: int
    tile_n: int
    low: int | None
    high: int | None
    ragged: int
    beyond: int

    @staticmethod
    def by_shape(
        shapes: Iterable[tuple[int, ...]], tile_m: int, tile_n: int, mask: Mask
    ) -> dict[tuple[int, ...], TileGrid]:
        """The grid of each distinct shape (:meth:`of`), in order of first appearance."""
        known = _known_shapes(tile_m, tile_n, mask)
        found = {shape: known.get(shape) for shape in shapes}
        if missing := [shape for shape, grid in found.items() if grid is None]:
            if all(len(shape) == 2 and shape[0] == shape[1] for shape in missing):
                grids = TileGrid.of_squares([shape[0] for shape in missing], tile_m, tile_n, mask)
            else:
                grids = TileGrid.of(missing, tile_m, tile_n, mask)
            made = dict(zip(missing, grids))
            found.update(made)
            if len(known) + len(made) > _KEPT_GRIDS:
                known.clear()
            known.update((n, grid) for n, grid in made.items() if _is_kept(grid.q_tiles, grid.kv_tiles))
        return cast("dict[tuple[int, ...], TileGrid]", found)

    @staticmethod
    def of_squares(lengths: Sequence[int], tile_m: int, tile_n: int, mask: Mask) -> list[TileGrid]:
        """:meth:`of` sequences with as many rows as columns.

        There every row sees the diagonal, so the grid depends on the numbers of tiles alone, and they on the
        length in steps of ``gcd(tile_m, tile_n)``, rounded up.
        """
        known, step = _known_squares(tile_m, tile_n, mask), gcd(tile_m, tile_n)
        steps = [-(-length // step) for length in lengths]
        if missing := [n for n in dict.fromkeys(steps) if n not in known]:
            shapes = [(n * step, n * step) for n in missing]
            made = dict(zip(missing, TileGrid.of(shapes, tile_m, tile_n, mask)))
            if len(known) + len(made) <= _KEPT_GRIDS:
                known.update((n, grid) for n, grid in made.items() if _is_kept(grid.q_tiles, grid.kv_tiles))
            known = {**known, **made}
        return [known[n] for n in steps]

    @staticmethod
    def of(shapes: Sequence[tuple[int, ...]], tile_m: int, tile_n: int, mask: Mask) -> list[TileGrid]:
        """The grid of each (seqlen_q, seqlen_k), or with a q_start behind it; equal ones are one object."""
        table = np.array(shapes, dtype=np.int64).reshape(len(shapes), -1)
        rows, columns = table[:, 0], table[:, 1]
        diagonal = columns - rows if table.shape[1] == 2 else table[:, 2]
        q_tiles, kv_tiles = -(-rows // tile_m), -(-columns // tile_n)
        step = gcd(tile_m, tile_n)
        least, most = -q_tiles * (tile_m // step), kv_tiles * (tile_n // step)
        low: IntArray | list[None] = [None] * len(table)
        high: IntArray | list[None] = [None] * len(table)
        ragged, beyond = kv_tiles - 1, q_tiles
        first, last = mask.interval(diagonal)
        if last is not None:
            high = np.minimum(np.maximum((tile_m - 1 + last) // step, least), most)
            ragged = np.minimum(np.maximum((rows - 1 + last) // tile_n, -1), ragged)
        if first is not None:
            low = np.minimum(np.maximum(first // step, least), most)
            beyond = np.minimum(np.maximum(-((first - columns) // tile_m), 0), q_tiles)
        arrays = (q_tiles, kv_tiles, low, high, ragged, beyond)
        q, kv, *rest = (x.tolist() if isinstance(x, np.ndarray) else x for x in arrays)
        fields = list(zip(q, kv, repeat(tile_m), repeat(tile_n), *rest))
        made = {one: _tile_grid(*one) for one in dict.fromkeys(fields)}
        return [made[one] for one in fields]

    @cached_property
    def _kv_bounds(self) -> tuple[IntArray, IntArray]:
        step = gcd(self.tile_m, self.tile_n)
        start, size = np.arange(self.q_tiles, dtype=np.int64) * (self.tile_m // step), self.tile_n // step
        first, last = np.zeros_like(start), np.full_like(start, self.kv_tiles - 1)
        if self.low is not None:
            first = np.maximum((start + self.low) // size, 0)
        if self.high is not None:
            last = np.minimum((start + self.high) // size, last)
            last[-1:] = np.minimum(self.ragged, self.kv_tiles - 1)
        # A bound beyond either end keeps the arrays monotone and the interval empty.
        if not self.kv_tiles:
            first[:] = 0
        first[self.beyond :] = self.kv_tiles
        empty = last < first
        last[empty] = first[empty] - 1
        return read_only(first), read_only(last)

    @property
    def kv_first(self) -> IntArray:
        """First kv tile that has a task with each q tile, shape (q_tiles,), non-decreasing."""
        return self._kv_bounds[0]

    @property
    def kv_last(self) -> IntArray:
        """Last kv tile that has a task with each q tile, shape (q_tiles,), non-decreasing."""
        return self._kv_bounds[1]

    @cached_property
    def _q_bounds(self) -> tuple[IntArray, IntArray]:
        kv = np.arange(self.kv_tiles, dtype=np.int64)
        first = np.searchsorted(self.kv_last, kv, side="left")
        last = np.searchsorted(self.kv_first, kv, side="right") - 1
        return read_only(first), read_only(last)

    @property
    def q_first(self) -> IntArray:
        """First q tile that has a task with each kv tile, shape (kv_tiles,)."""
        return self._q_bounds[0]

    @property
    def q_last(self) -> IntArray:
        """Last q tile that has a task with each kv tile, shape (kv_tiles,)."""
        return self._q_bounds[1]

    @cached_property
    def contributions(self) -> IntArray:
        """Number of tasks of each q tile, shape (q_tiles,): the length of its summation order."""
        return read_only(np.maximum(self.kv_last - self.kv_first + 1, 0))

    @cached_property
    def complete_q_tiles(self) -> int:
        """Number of q tiles that have tasks."""
        return int((self.contributions > 0).sum())

    @cached_property
    def tasks(self) -> int:
        """Number of tasks of one head."""
        return int(self.contributions.sum())

    @property
    def is_full(self) -> bool:
        """True when every (kv tile, q tile) pair is a task."""
        return self.tasks == self.q_tiles * self.kv_tiles

    def __str__(self) -> str:
        return f"{self.tasks} tasks of {self.q_tiles} x {self.kv_tiles} tiles ({self.tile_m} x {self.tile_n})"


_KEPT_GRIDS, _KEPT_TILES = 4096, 2048
"""Grids kept, and tiles of one side of the largest: a long one keeps megabytes, and seldom comes again."""

_kept_grid = lru_cache(_KEPT_GRIDS)(TileGrid)


def _is_kept(q_tiles: int, kv_tiles: int) -> bool:
    return max(q_tiles, kv_tiles) <= _KEPT_TILES


def _tile_grid(q_tiles: int, kv_tiles: int, *rest: Any) -> TileGrid:
    make = _kept_grid if _is_kept(q_tiles, kv_tiles) else TileGrid
    return make(q_tiles, kv_tiles, *rest)


@lru_cache(64)
def _known_shapes(tile_m: int, tile_n: int, mask: Mask) -> dict[tuple[int, ...], TileGrid]:
    """Grids by the shapes of sequences."""
    return {}


@lru_cache(64)
def _known_squares(tile_m: int, tile_n: int, mask: Mask) -> dict[int, TileGrid]:
    """Grids of square sequences by their length in steps."""
    return {}


def read_only(x: IntArray) -> IntArray:
    """The array itself, which nobody can write to from now on: several grids and problems share it."""
    x.setflags(write=False)
    return x


@dataclass(frozen=True)
class SequenceGrid:
    """The tile grid of one sequence with its lengths: which tiles the mask cuts, and where.

    Attributes:
        seqlen_q, seqlen_k: rows and columns.
        tile_m, tile_n: rows of a q tile and of a kv tile.
        mask: the band.
        q_start: column aligned with row 0; by default ``seqlen_k - seqlen_q``, aligned bottom-right.
    """

    seqlen_q: int
    seqlen_k: int
    tile_m: int
    tile_n: int
    mask: Mask
    q_start: int | None = None

    @cached_property
    def tiles(self) -> TileGrid:
        """What of it plans are made from."""
        shape = (self.seqlen_q, self.seqlen_k, self.diagonal)
        return TileGrid.of([shape], self.tile_m, self.tile_n, self.mask)[0]

    @property
    def diagonal(self) -> int:
        """Column aligned with row 0."""
        return self.seqlen_k - self.seqlen_q if self.q_start is None else self.q_start

    @property
    def q_tiles(self) -> int:
        """Number of q tiles."""
        return self.tiles.q_tiles

    @property
    def kv_tiles(self) -> int:
        """Number of kv tiles."""
        return self.tiles.kv_tiles

    @property
    def kv_first(self) -> IntArray:
        """See :attr:`TileGrid.kv_first`."""
        return self.tiles.kv_first

    @property
    def kv_last(self) -> IntArray:
        """See :attr:`TileGrid.kv_last`."""
        return self.tiles.kv_last

    @property
    def q_first(self) -> IntArray:
        """See :attr:`TileGrid.q_first`."""
        return self.tiles.q_first

    @property
    def q_last(self) -> IntArray:
        """See :attr:`TileGrid.q_last`."""
        return self.tiles.q_last

    @property
    def contributions(self) -> IntArray:
        """See :attr:`TileGrid.contributions`."""
        return self.tiles.contributions

    @property
    def tasks(self) -> int:
        """Number of tasks of one head."""
        return self.tiles.tasks

    @property
    def is_full(self) -> bool:
        """See :attr:`TileGrid.is_full`."""
        return self.tiles.is_full

    def columns(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """First and last column that each row sees, within the sequence; first > last where it sees none."""
        first, last = self.mask.interval(rows + self.diagonal)
        first = np.zeros_like(rows) if first is None else np.maximum(first, 0)
        last = np.full_like(rows, self.seqlen_k - 1) if last is None else np.minimum(last, self.seqlen_k - 1)
        return first, last

    @property
    def visible(self) -> int:
        """Number of elements that the mask leaves."""
        first, last = self.columns(np.arange(self.seqlen_q, dtype=np.int64))
        return int(np.maximum(last - first + 1, 0).sum())

    def cut(self, kv_tile: int, q_tile: int) -> TileCut:
        """Whether the mask leaves a tile ``empty``, whole or ``cut`` (ragged ends do not count).

        >>> grid = SequenceGrid(256, 256, 128, 128, Mask.causal())
        >>> [[grid.cut(kv, q) for kv in range(2)] for q in range(2)]
        [['cut', 'empty'], ['whole', 'cut']]
        """
        if not self.kv_first[q_tile] <= kv_tile <= self.kv_last[q_tile]:
            return "empty"
        top, left = q_tile * self.tile_m, kv_tile * self.tile_n
        bottom = min(top + self.tile_m, self.seqlen_q) - 1
        right = min(left + self.tile_n, self.seqlen_k) - 1
        first, last = self.columns(np.array([top, bottom], dtype=np.int64))
        return "whole" if left >= first.max() and right <= last.min() else "cut"

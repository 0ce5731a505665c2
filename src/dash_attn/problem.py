"""What is to be computed: shapes, mask and tile grid of one attention backward.

Coordinates
    row ``i``       a query position of one sequence, ``0 <= i < seqlen_q``
    column ``j``    a key position of one sequence, ``0 <= j < seqlen_k``
    q tile          ``tile_m`` consecutive rows (the last one may be ragged)
    kv tile         ``tile_n`` consecutive columns (the last one may be ragged)
    task            one (kv tile, q tile) pair in which the mask leaves at least one element

Every mask here is a band: row ``i`` sees column ``j`` when
``-left <= j - (i + seqlen_k - seqlen_q) <= right``, each side unbounded when it is None. The term
``seqlen_k - seqlen_q`` aligns the band with the bottom-right corner, as FlashAttention does.

This module imports neither torch nor cutlass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .errors import ProblemError

__all__ = ["DTYPES", "Mask", "Problem", "SequenceGrid", "default_tiles"]

IntArray = NDArray[np.int64]
TileCut = Literal["empty", "cut", "whole"]

DTYPES = ("bfloat16", "float16", "float32", "float64")

LONGEST = 2**30
"""Rows of the longest sequence; sums of two lengths fit the kernels' int32."""


@dataclass(frozen=True)
class Mask:
    """A band mask: ``left`` and ``right`` columns around the (bottom-right aligned) diagonal.

    ``None`` leaves a side unbounded, and so does ``LONGEST``, for no sequence is longer. Build one with
    :meth:`full`, :meth:`causal` or :meth:`window`.

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
        left, right = (-1 if side is None else side for side in (self.left, self.right))
        return f"window({left},{right})"


def default_tiles(head_dim: int) -> tuple[int, int]:
    """Tile shape (tile_m, tile_n) of the kernels for a head dimension.

    Tile shape is part of the numerics, so it depends on the head dimension and on nothing else.
    """
    return (128, 128) if head_dim <= 64 else (64, 128)


@dataclass(frozen=True)
class SequenceGrid:
    """The tile grid of one sequence: which tasks exist, and which tiles the mask cuts.

    All arrays are int64. ``kv_first[q] > kv_last[q]`` marks a q tile without tasks, and the same
    holds for ``q_first`` and ``q_last`` of a kv tile.
    """

    seqlen_q: int
    seqlen_k: int
    tile_m: int
    tile_n: int
    mask: Mask

    @property
    def q_tiles(self) -> int:
        """Number of q tiles."""
        return -(-self.seqlen_q // self.tile_m)

    @property
    def kv_tiles(self) -> int:
        """Number of kv tiles."""
        return -(-self.seqlen_k // self.tile_n)

    @property
    def diagonal(self) -> int:
        """Column aligned with row 0: ``seqlen_k - seqlen_q``."""
        return self.seqlen_k - self.seqlen_q

    def _columns(self, row: IntArray, side: Literal["left", "right"]) -> IntArray:
        """First (left) or last (right) visible column of each row, not clipped to the sequence."""
        reach = self.mask.left if side == "left" else self.mask.right
        if reach is None:
            return np.full_like(row, 0 if side == "left" else self.seqlen_k - 1)
        return row + self.diagonal + (-reach if side == "left" else reach)

    @cached_property
    def _kv_bounds(self) -> tuple[IntArray, IntArray]:
        top = np.arange(self.q_tiles, dtype=np.int64) * self.tile_m
        bottom = np.minimum(top + self.tile_m, self.seqlen_q) - 1
        first = np.maximum(self._columns(top, "left"), 0)
        last = np.minimum(self._columns(bottom, "right"), self.seqlen_k - 1)
        kv_first, kv_last = first // self.tile_n, last // self.tile_n
        empty = first > last
        # A bound beyond either end keeps the arrays monotone and the interval empty.
        kv_first = np.where(empty & (first >= self.seqlen_k), self.kv_tiles, kv_first)
        kv_last = np.where(empty, kv_first - 1, kv_last)
        return kv_first, kv_last

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
        return first, last

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
        counts: IntArray = np.maximum(self.kv_last - self.kv_first + 1, 0)
        return counts

    @cached_property
    def tasks(self) -> int:
        """Number of tasks of one head."""
        return int(self.contributions.sum())

    @property
    def is_full(self) -> bool:
        """True when every (kv tile, q tile) pair is a task."""
        return self.tasks == self.q_tiles * self.kv_tiles

    def cut(self, kv_tile: int, q_tile: int) -> TileCut:
        """Whether the mask leaves a tile ``empty``, whole or ``cut`` (ragged ends do not count).

        >>> grid = SequenceGrid(256, 256, 128, 128, Mask.causal())
        >>> [[grid.cut(kv, q) for kv in range(2)] for q in range(2)]
        [['cut', 'empty'], ['whole', 'cut']]
        """
        top, left = q_tile * self.tile_m, kv_tile * self.tile_n
        bottom = min(top + self.tile_m, self.seqlen_q) - 1
        right = min(left + self.tile_n, self.seqlen_k) - 1
        if not self.kv_first[q_tile] <= kv_tile <= self.kv_last[q_tile]:
            return "empty"
        rows = np.array([top, bottom], dtype=np.int64)
        whole = left >= self._columns(rows, "left").max() and right <= self._columns(rows, "right").min()
        return "whole" if whole else "cut"


@dataclass(frozen=True)
class Problem:
    """One attention backward: sequences, heads, mask, dtype and tile shape.

    Args:
        sequences: (seqlen_q, seqlen_k) of every sequence of the batch.
        heads: number of q heads.
        kv_heads: number of kv heads (MHA: equal to heads, GQA: a divisor of it, MQA: 1).
        head_dim: elements of one head.
        mask: a band mask; see :class:`Mask`.
        dtype: one of ``DTYPES``.
        tile_m, tile_n: rows of a q tile and of a kv tile; default: :func:`default_tiles`.

    Raises:
        ProblemError: a value is out of range; the message names it.

    >>> p = Problem.dense(batch=2, heads=4, kv_heads=2, seqlen=300, head_dim=64, mask=Mask.causal())
    >>> p.group, p.grid(0).q_tiles, p.grid(0).tasks
    (2, 3, 6)
    """

    sequences: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    head_dim: int
    mask: Mask = field(default_factory=Mask)
    dtype: str = "bfloat16"
    tile_m: int = 0
    tile_n: int = 0

    def __post_init__(self) -> None:
        if not self.tile_m and not self.tile_n:
            tile_m, tile_n = default_tiles(self.head_dim)
            object.__setattr__(self, "tile_m", tile_m)
            object.__setattr__(self, "tile_n", tile_n)
        if not self.sequences:
            raise ProblemError("a problem needs at least one sequence, got none")
        for name in ("heads", "kv_heads", "head_dim", "tile_m", "tile_n"):
            object.__setattr__(self, name, _integer(name, getattr(self, name), least=1))
        if self.heads % self.kv_heads:
            raise ProblemError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.dtype not in DTYPES:
            raise ProblemError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        object.__setattr__(
            self, "sequences", tuple(map(_lengths, range(len(self.sequences)), self.sequences))
        )

    @classmethod
    def dense(
        cls,
        *,
        batch: int = 1,
        heads: int = 1,
        kv_heads: int | None = None,
        seqlen: int | None = None,
        seqlen_q: int | None = None,
        seqlen_k: int | None = None,
        head_dim: int = 128,
        mask: Mask | None = None,
        dtype: str = "bfloat16",
        tile_m: int = 0,
        tile_n: int = 0,
    ) -> Problem:
        """A batch of equal sequences; ``seqlen`` sets both lengths."""
        seqlen_q = seqlen if seqlen_q is None else seqlen_q
        seqlen_k = seqlen if seqlen_k is None else seqlen_k
        if seqlen_q is None or seqlen_k is None:
            raise ProblemError(f"give seqlen, or seqlen_q and seqlen_k, got {seqlen_q} and {seqlen_k}")
        batch = _integer("batch", batch, least=1)
        return cls(
            ((seqlen_q, seqlen_k),) * batch,
            heads,
            heads if kv_heads is None else kv_heads,
            head_dim,
            Mask() if mask is None else mask,
            dtype,
            tile_m,
            tile_n,
        )

    @classmethod
    def varlen(
        cls,
        seqlens: Iterable[int | tuple[int, int]],
        *,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int = 128,
        mask: Mask | None = None,
        dtype: str = "bfloat16",
        tile_m: int = 0,
        tile_n: int = 0,
    ) -> Problem:
        """A variable-length batch; an element is a length or a (seqlen_q, seqlen_k) pair.

        >>> Problem.varlen([128, (64, 256)], heads=1).sequences
        ((128, 128), (64, 256))
        """
        pairs = tuple(s if isinstance(s, tuple) else (s, s) for s in seqlens)
        kv_heads = heads if kv_heads is None else kv_heads
        return cls(pairs, heads, kv_heads, head_dim, Mask() if mask is None else mask, dtype, tile_m, tile_n)

    @property
    def group(self) -> int:
        """q heads that share one kv head."""
        return self.heads // self.kv_heads

    @cached_property
    def grids(self) -> dict[tuple[int, int], SequenceGrid]:
        """The tile grid of every distinct (seqlen_q, seqlen_k), in order of first appearance."""
        return {pair: SequenceGrid(*pair, self.tile_m, self.tile_n, self.mask) for pair in self.sequences}

    def grid(self, sequence: int) -> SequenceGrid:
        """The tile grid of one sequence."""
        return self.grids[self.sequences[sequence]]

    @property
    def tasks(self) -> int:
        """Number of tasks over all sequences and q heads."""
        return self.heads * sum(self.grids[pair].tasks for pair in self.sequences)

    @property
    def backward_flops(self) -> float:
        """FLOPs of the five matrix products over the elements the mask leaves (10 a element and dim)."""
        return 10.0 * self.head_dim * self.heads * sum(_visible(self.grids[p]) for p in self.sequences)


def _visible(grid: SequenceGrid) -> int:
    rows = np.arange(grid.seqlen_q, dtype=np.int64)
    first = np.maximum(grid._columns(rows, "left"), 0)
    last = np.minimum(grid._columns(rows, "right"), grid.seqlen_k - 1)
    return int(np.maximum(last - first + 1, 0).sum())


def _lengths(index: int, pair: object) -> tuple[int, int]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ProblemError(f"sequence {index} must be (seqlen_q, seqlen_k), got {pair!r}")
    return _length(f"seqlen_q of sequence {index}", pair[0]), _length(
        f"seqlen_k of sequence {index}", pair[1]
    )


def _length(name: str, value: object) -> int:
    length = _integer(name, value, least=0)
    if length > LONGEST:
        raise ProblemError(f"{name} must be at most 2**30, got {length}")
    return length


def _integer(name: str, value: object, *, least: int) -> int:
    """The value as a Python int, so that equal problems are the same whatever integers they came from."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ProblemError(f"{name} must be an integer >= {least}, got {value!r}")
    if value > 2**31 - 1:
        raise ProblemError(f"{name} must fit in int32, got {value}")
    return int(value)

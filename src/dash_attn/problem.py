"""What is to be computed: the shapes, the mask and the tiles of one attention backward.

This module imports neither torch nor cutlass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from .errors import ProblemError
from .grid import LONGEST, IntArray, Mask, SequenceGrid, TileGrid, read_only

__all__ = ["DTYPES", "IntArray", "Mask", "Problem", "SequenceGrid", "TileGrid", "default_tiles"]

DTYPES = ("bfloat16", "float16", "float32", "float64")


def default_tiles(head_dim: int, head_dim_v: int | None = None) -> tuple[int, int]:
    """Tile shape (tile_m, tile_n) of the Hopper kernels for head dims, of V by default that of Q and K.

    Tile shape is part of the numerics, so it depends on head dims and on nothing else.

    >>> default_tiles(64), default_tiles(128), default_tiles(192, 128), default_tiles(192)
    ((128, 128), (64, 128), (64, 128), (64, 64))
    """
    of_v = head_dim if head_dim_v is None else head_dim_v
    if max(head_dim, of_v) <= 64:
        return 128, 128
    return (64, 128) if head_dim <= 192 and of_v <= 128 else (64, 64)


@dataclass(frozen=True)
class Problem:
    """One attention backward: sequences, heads, mask, dtype and tile shape.

    Args:
        sequences: (seqlen_q, seqlen_k) of every sequence of the batch.
        heads: number of q heads.
        kv_heads: number of kv heads (MHA: equal to heads, GQA: a divisor of it, MQA: 1).
        head_dim: elements of one head of Q and K.
        mask: a band mask; see :class:`Mask`.
        dtype: one of ``DTYPES``.
        tile_m, tile_n: rows of a q tile and of a kv tile; default: :func:`default_tiles`.
        q_starts: for each sequence the column aligned with its row 0, as chunks and shards of sequences
            need it; by default ``seqlen_k - seqlen_q`` (bottom-right).
        head_dim_v: elements of one head of V, by default ``head_dim``.

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
    q_starts: tuple[int, ...] | None = None
    head_dim_v: int = -1

    def __post_init__(self) -> None:
        if self.head_dim_v == -1:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        if not isinstance(self.mask, Mask):
            raise ProblemError(f"mask must be a Mask, such as Mask.causal(), got {self.mask!r}")
        for name in ("head_dim", "head_dim_v"):
            object.__setattr__(self, name, _integer(name, getattr(self, name), least=1))
        if not self.tile_m and not self.tile_n:
            tile_m, tile_n = default_tiles(self.head_dim, self.head_dim_v)
            object.__setattr__(self, "tile_m", tile_m)
            object.__setattr__(self, "tile_n", tile_n)
        if not isinstance(self.sequences, (tuple, list)):
            raise ProblemError(f"sequences must be pairs (seqlen_q, seqlen_k), got {self.sequences!r:.80}")
        if not self.sequences:
            raise ProblemError("a problem needs at least one sequence, got none")
        for name in ("heads", "kv_heads", "tile_m", "tile_n"):
            object.__setattr__(self, name, _integer(name, getattr(self, name), least=1))
        if self.heads % self.kv_heads:
            raise ProblemError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.dtype not in DTYPES:
            raise ProblemError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if not _plain_lengths(self.sequences):
            checked = tuple(map(_lengths, range(len(self.sequences)), self.sequences))
            object.__setattr__(self, "sequences", checked)
        if self.q_starts is not None:
            _check_starts(self.q_starts, len(self.sequences))

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
        head_dim_v: int = -1,
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
            head_dim_v=head_dim_v,
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
        head_dim_v: int = -1,
    ) -> Problem:
        """A variable-length batch; an element is a length or a (seqlen_q, seqlen_k) pair.

        >>> Problem.varlen([128, (64, 256)], heads=1).sequences
        ((128, 128), (64, 256))
        """
        pairs: Any = tuple(tuple(s) if isinstance(s, (tuple, list)) else (s, s) for s in seqlens)
        kv_heads = heads if kv_heads is None else kv_heads
        mask = Mask() if mask is None else mask
        return cls(pairs, heads, kv_heads, head_dim, mask, dtype, tile_m, tile_n, head_dim_v=head_dim_v)

    @property
    def group(self) -> int:
        """q heads that share one kv head."""
        return self.heads // self.kv_heads

    @property
    def widest(self) -> int:
        """The larger head dim: kernels choose their tiles by it."""
        return max(self.head_dim, self.head_dim_v)

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """What distinguishes sequences: (seqlen_q, seqlen_k), and q_start where it is given."""
        if self.q_starts is None:
            return self.sequences
        return tuple((*pair, start) for pair, start in zip(self.sequences, self.q_starts))

    @cached_property
    def lengths(self) -> IntArray:
        """``sequences`` as an array, shape (sequences, 2). Read-only."""
        flat = np.fromiter(chain.from_iterable(self.sequences), np.int64, 2 * len(self.sequences))
        return read_only(flat.reshape(-1, 2))

    @cached_property
    def tile_grids(self) -> dict[tuple[int, ...], TileGrid]:
        """The tile grid of every distinct shape, in order of first appearance."""
        return TileGrid.by_shape(self.shapes, self.tile_m, self.tile_n, self.mask)

    @cached_property
    def grids(self) -> dict[tuple[int, ...], SequenceGrid]:
        """The grid of every distinct shape with its lengths, in order of first appearance."""
        return {
            shape: SequenceGrid(shape[0], shape[1], self.tile_m, self.tile_n, self.mask, *shape[2:])
            for shape in dict.fromkeys(self.shapes)
        }

    def reordered(self, order: IntArray) -> Problem:
        """The problem with its sequences in another order."""
        places, sequences, starts = order.tolist(), self.sequences, self.q_starts
        found = object.__new__(Problem)  # nothing has to be checked again
        found.__dict__.update((f.name, getattr(self, f.name)) for f in fields(self))
        found.__dict__["sequences"] = tuple([sequences[i] for i in places])
        found.__dict__["q_starts"] = starts and tuple([starts[i] for i in places])
        found.__dict__["lengths"] = read_only(self.lengths[order])
        return found

    def grid(self, sequence: int) -> SequenceGrid:
        """The tile grid of one sequence."""
        return self.grids[self.shapes[sequence]]

    @cached_property
    def tasks(self) -> int:
        """Number of tasks over all sequences and q heads."""
        grids = self.tile_grids
        return self.heads * sum([grids[shape].tasks for shape in self.shapes])

    @property
    def backward_flops(self) -> float:
        """FLOPs of the five matrix products over the elements the mask leaves: per element and dim 6 of Q and
        K, and 4 of V."""
        per_element = 6.0 * self.head_dim + 4.0 * self.head_dim_v
        return per_element * self.heads * sum(self.grids[shape].visible for shape in self.shapes)


def _plain_lengths(sequences: Any) -> bool:
    """Whether these are pairs of lengths in range, as they mostly are, without a look at each of them."""
    if (
        type(sequences) is not tuple
        or set(map(type, sequences)) != {tuple}
        or set(map(len, sequences)) != {2}
    ):
        return False
    flat = [*chain.from_iterable(sequences)]
    return set(map(type, flat)) == {int} and min(flat) >= 0 and max(flat) <= LONGEST


def _check_starts(starts: Any, sequences: int) -> None:
    if not isinstance(starts, tuple) or len(starts) != sequences:
        raise ProblemError(f"q_starts must be a tuple of {sequences} columns, got {starts!r:.80}")
    for start in starts:
        if type(start) is not int or abs(start) > LONGEST:
            raise ProblemError(f"q_starts must hold integers of at most 2**30, got {start!r}")


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

"""What each head dim runs with: the one table. It is part of the numerics; nothing is measured at run time.

Products take powers of two. Head dims between those of the table use the row of the next one, with zeros
behind their elements; those from 72 to 96 take two products each, of fewer zeros (``columns_of``). Where V
has another head dim than Q and K, the larger one says which row. Larger heads have smaller tiles: most GPUs
have 99 KB of shared memory per block. Heads beyond 32 have rows of their own on Hopper GPUs (``ROOMY``), and
so other bits there.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from ...problem import Problem
from ...schedule import ForwardNumerics
from ...schedule.constants import TRITON_VERSION

__all__ = [
    "DTYPES",
    "FOLDED_KEYS",
    "FOLDED_ROWS",
    "HEAD_DIMS",
    "ROOMY",
    "TILES",
    "Columns",
    "Shape",
    "Shapes",
    "columns_of",
    "fingerprint_of",
    "forward_numerics",
    "padded",
    "shapes_of",
]

FOLDED_KEYS = 32
"""Keys per program of the kernel that adds the sums of head groups."""

FOLDED_ROWS = 16
"""Rows per program of the kernel that folds segments."""

DTYPES = ("bfloat16", "float16", "float32")

HEAD_DIMS = range(8, 257, 8)

ROOMY = ((9, 0),)
"""Compute capabilities with 227 KB of shared memory per block that were measured."""


class Shape(NamedTuple):
    """Of a kernel.

    Attributes:
        rows, keys: what a product takes of a q tile and of a kv tile.
        warps: per program.
        stages: tiles in flight.
    """

    rows: int
    keys: int
    warps: int
    stages: int


class Shapes(NamedTuple):
    """Of the kernels of a head dim and dtype.

    Attributes:
        forward, dkdv, dq: of those kernels.
        dv: of a launch for dV alone; then ``dkdv`` is of one for dK. None: one launch makes both.
        late: whether dQ's kernel adds a contribution in the next task, where it is one step.
    """

    forward: Shape
    dkdv: Shape
    dq: Shape
    dv: Shape | None = None
    late: bool = False

    def of_keys(self) -> tuple[tuple[Shape, bool, bool], ...]:
        """The launches that make dK and dV: (shape, whether it makes dK, whether it makes dV)."""
        if self.dv is None:
            return ((self.dkdv, True, True),)
        return (self.dkdv, True, False), (self.dv, False, True)


# By padded head dim. A change of a row changes bits: raise TRITON_VERSION.
TILES = {16: (128, 128), 32: (128, 128), 64: (128, 128), 128: (64, 64), 256: (64, 128)}
"""(tile_m, tile_n) of plans. With 16 bits a contribution to dQ is one step where ``dq.keys`` is tile_n."""

_SIXTEEN_BITS = {
    16: Shapes(Shape(64, 128, 4, 2), Shape(64, 128, 8, 2), Shape(64, 128, 8, 2)),
    32: Shapes(Shape(64, 128, 4, 2), Shape(64, 128, 8, 2), Shape(64, 128, 8, 2)),
    64: Shapes(Shape(64, 128, 4, 2), Shape(32, 128, 4, 2), Shape(64, 128, 4, 3)),
    128: Shapes(Shape(64, 64, 4, 2), Shape(32, 64, 4, 2), Shape(64, 64, 4, 2)),
    256: Shapes(Shape(64, 32, 8, 2), Shape(32, 32, 8, 2), Shape(32, 32, 8, 2)),
}
_ROOMY = {
    64: Shapes(Shape(64, 128, 4, 3), Shape(64, 64, 4, 3), Shape(64, 128, 4, 3), late=True),
    96: Shapes(Shape(64, 64, 4, 3), Shape(32, 64, 4, 3), Shape(64, 64, 4, 3), late=True),
    128: Shapes(Shape(128, 64, 8, 3), Shape(32, 64, 4, 3), Shape(64, 64, 4, 2), late=True),
    256: Shapes(Shape(128, 64, 8, 2), Shape(32, 128, 8, 2), Shape(64, 128, 8, 1), Shape(64, 128, 8, 2)),
}
"""On GPUs of ``ROOMY``, where there is a row; that of 96 is of head dims with a rest."""

_DQ_WITH_DROPOUT_64 = Shape(64, 64, 4, 2)
"""What dropout computes takes registers: with 128 keys the compiler for sm_80 spills nearly all of them."""

_FP32 = {
    16: Shapes(Shape(32, 32, 4, 1), Shape(32, 32, 4, 1), Shape(32, 32, 4, 1)),
    32: Shapes(Shape(32, 32, 4, 1), Shape(32, 32, 4, 1), Shape(32, 32, 4, 1)),
    64: Shapes(Shape(32, 32, 4, 1), Shape(32, 32, 4, 1), Shape(32, 32, 4, 1)),
    128: Shapes(Shape(32, 32, 8, 1), Shape(32, 32, 8, 1), Shape(32, 32, 8, 1)),
    256: Shapes(Shape(32, 16, 8, 1), Shape(16, 16, 4, 1), Shape(16, 16, 4, 1)),
}


def padded(head_dim: int) -> int:
    """Elements of a head with the zeros behind it.

    >>> [padded(head_dim) for head_dim in (8, 64, 80, 256)]
    [16, 64, 128, 256]
    """
    return max(16, 1 << (head_dim - 1).bit_length())


class Columns(NamedTuple):
    """What products take of a head: ``block`` columns, and ``rest`` behind them, unless 0, by another one."""

    block: int
    rest: int


def columns_of(head_dim: int) -> Columns:
    """Those of a head dim; zeros are behind its elements.

    >>> for head_dim in (8, 64, 80, 96, 104):
    ...     print(head_dim, *columns_of(head_dim))
    8 16 0
    64 64 0
    80 64 16
    96 64 32
    104 128 0
    """
    if 64 < head_dim <= 96:
        return Columns(64, padded(head_dim - 64))
    return Columns(padded(head_dim), 0)


def shapes_of(head_dim: int, dtype: str, roomy: bool = False, dropout: bool = False) -> Shapes:
    """Those of a head dim of ``HEAD_DIMS`` and a dtype of ``DTYPES``; ``roomy``: on a GPU of ``ROOMY``."""
    row = padded(head_dim)
    if dtype == "float32":
        return _FP32[row]
    shapes = _ROOMY.get(96 if columns_of(head_dim).rest else row) if roomy else None
    shapes = shapes or _SIXTEEN_BITS[row]
    return shapes._replace(dq=_DQ_WITH_DROPOUT_64, late=False) if dropout and row == 64 else shapes


def forward_numerics(problem: Problem, roomy: bool = False) -> ForwardNumerics:
    """Those of a problem; they look at its head dims and dtype, and at the kind of GPU."""
    keys = shapes_of(problem.widest, problem.dtype, roomy).forward.keys
    return ForwardNumerics(problem.head_dim, problem.dtype, tile=keys, head_dim_v=problem.head_dim_v)


def fingerprint_of(numerics: str) -> str:
    """SHA-256 of numerics, by their own fingerprint, as the kernels of ``TRITON_VERSION`` run them."""
    return hashlib.sha256(repr(("triton", TRITON_VERSION, numerics)).encode()).hexdigest()

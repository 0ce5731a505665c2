"""The numerics of the forward: which keys a row takes together, and in which order.

Words
    kv tile  ``tile`` consecutive keys, from a multiple of ``tile`` on
    segment  ``segment`` consecutive keys, from a multiple of ``segment`` on

A row goes through the kv tiles of a segment from the last one to the first. It begins with maximum -inf,
sum 0 and output 0 (FlashAttention-2, algorithm 1, without the division). Scores s are in base 2: Q K^T times
softmax scale times log2(e), and -inf where the mask hides a key. Of each tile:

1. Is the largest s above the maximum by more than ``keep``? Then it becomes the maximum, and sum and output
   are multiplied by 2^(old - new). Otherwise nothing changes (FlashAttention-4's conditional rescaling).
2. The first maximum of a row is a little larger than its largest s, by ``room`` - floor(log2 n) if that is
   positive, for n keys that the row sees of the tile: the largest of few is low, and would soon be raised.
3. p = 2^(s - maximum). The sum takes the p, the output the p, rounded to the dtype, times V.

Segments are folded in ascending order. Of (m, l, O) and the next one's (m', l', O'), with n = max(m, m'), the
fold is (n, l 2^(m - n) + l' 2^(m' - n), O 2^(m - n) + O' 2^(m' - n)). At the end out = O / l, and the natural
log-sum-exp is (m + log2 l) ln 2. Zeros of out have no sign: a fold with nothing makes 0 of -0.

So a row's bits depend on its q, on the K and V that it sees and where they stand, and on these numbers. A
tile or a segment that it does not see changes nothing, bit for bit: the mask may have another form, the
sequence may end later, rows may come in other company, and any number of workers may share the segments.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from ..errors import ProblemError
from ..problem import Problem
from .constants import FORWARD_KEEP, FORWARD_ROOM, FORWARD_SEGMENT, FORWARD_TILE, FORWARD_VERSION

__all__ = ["ForwardNumerics"]


@dataclass(frozen=True)
class ForwardNumerics:
    """What decides the bits of out and lse beside the tensors, the softmax scale and what each row sees.

    Attributes:
        head_dim: elements of one head of Q and K.
        dtype: of Q, K and V.
        tile: keys per kv tile.
        segment: keys per segment.
        keep: by how much a score may exceed the row's maximum before that is raised.
        room: by how much the first maximum exceeds a single key; less beside more keys.
        head_dim_v: elements of one head of V, by default ``head_dim``.

    Raises:
        ProblemError: a number is out of range, or a segment is not a whole number of tiles.

    >>> short = ForwardNumerics(128, "bfloat16", tile=16, segment=32)
    >>> short.segments(20, 70)
    [[1], [3, 2], [4]]
    """

    head_dim: int
    dtype: str
    tile: int = FORWARD_TILE
    segment: int = FORWARD_SEGMENT
    keep: float = FORWARD_KEEP
    room: int = FORWARD_ROOM
    head_dim_v: int = -1

    def __post_init__(self) -> None:
        if self.head_dim_v == -1:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        for name in ("head_dim", "head_dim_v", "tile", "segment"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ProblemError(f"{name} must be an integer >= 1, got {value!r}")
        if self.segment % self.tile:
            raise ProblemError(f"segment ({self.segment}) must be a multiple of tile ({self.tile})")
        if self.tile % 8:
            raise ProblemError(f"tile must be a multiple of 8, got {self.tile}")
        if not 0 <= self.keep <= 15:  # no p is larger, and float16 holds no more
            raise ProblemError(f"keep must be in 0..15, got {self.keep!r}")
        if type(self.room) is not int or not 0 <= self.room <= 8:  # float16 holds smaller p less exactly
            raise ProblemError(f"room must be an integer in 0..8, got {self.room!r}")

    @classmethod
    def of(cls, problem: Problem) -> ForwardNumerics:
        """Those of a problem: they look at its head dims and dtype alone."""
        return cls(problem.head_dim, problem.dtype, head_dim_v=problem.head_dim_v)

    def segments(self, first: int, last: int) -> list[list[int]]:
        """The kv tiles that hold columns ``first .. last``: by segment, each in the order of its tiles."""
        per_segment = self.segment // self.tile
        found: list[list[int]] = []
        for kv in range(first // self.tile, last // self.tile + 1):
            if not found or kv % per_segment == 0:
                found.append([])
            found[-1].insert(0, kv)
        return found

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the numerics, 64 hexadecimal digits. Lengths, mask, heads and batch leave it alone."""
        numbers = (self.tile, self.segment, float(self.keep), self.room)
        same = self.head_dim_v == self.head_dim
        head_dim = self.head_dim if same else (self.head_dim, self.head_dim_v)
        facts = (FORWARD_VERSION, head_dim, self.dtype, *numbers)
        return hashlib.sha256(repr(facts).encode()).hexdigest()

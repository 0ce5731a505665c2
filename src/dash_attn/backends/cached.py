"""A forward over a cache of keys whose lengths are on the device: what backends are given, and supply.

Every cache is one of pages. In a contiguous one a page is the place of a sequence, and its table has one
column. What shapes decide is a :class:`CachedProblem`; grids and memory follow from it. Lengths and page
numbers are tensors, which the host does not read where they are on a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from ..problem import Mask, Problem
from ..scores import Scores
from .base import NO_AUX, AuxTensors

__all__ = ["PAGE_SIZES", "CachedProblem", "CachedTensors", "PreparedCached", "first_key"]

PAGE_SIZES = (16, 32, 64, 128, 256)
"""Tokens of a page."""


class CachedTensors(NamedTuple):
    """What such a forward reads.

    Values on a GPU that are out of range are clamped: lengths to what the table has room for, page numbers
    to pages that exist, bounds of rows to the rows of q.

    Attributes:
        q: (batch, seqlen_q, heads, head_dim), or packed (total_q, heads, head_dim).
        k, v: (pages, page_size, kv_heads, head_dim); v may have another head_dim.
        lengths: (batch,) int32, contiguous: how many keys every sequence uses.
        table: (batch, most_pages) int32, contiguous: its pages.
        cu_seqlens_q: (batch + 1,) int32, contiguous, of packed q.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor
    table: Tensor
    cu_seqlens_q: Tensor | None = None


class CachedProblem(NamedTuple):
    """What shapes, dtype and mask decide.

    Attributes:
        batch: sequences.
        heads, kv_heads, head_dim, head_dim_v, dtype: as in :class:`.problem.Problem`.
        sides: of the mask, -1: unbounded.
        seqlen_q: rows per sequence; -1: q is packed.
        total_q: rows of all sequences.
        longest_q: no sequence has more rows.
        page_size: tokens of a page.
        pages: how many there are.
        most_pages: of a sequence.
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str
    sides: tuple[int, int]
    seqlen_q: int
    total_q: int
    longest_q: int
    page_size: int
    pages: int
    most_pages: int

    @property
    def packed(self) -> bool:
        return self.seqlen_q < 0

    @property
    def keys(self) -> int:
        """No sequence has more."""
        return self.most_pages * self.page_size

    @property
    def group(self) -> int:
        """q heads that share one kv head."""
        return self.heads // self.kv_heads

    def problem(self) -> Problem:
        """One sequence with as many rows and keys as there may be.

        Raises:
            ProblemError: a number is out of range.
        """
        sizes = (self.heads, self.kv_heads, self.head_dim, Mask.of_sides(*self.sides), self.dtype)
        return Problem(((self.longest_q, self.keys),), *sizes, head_dim_v=self.head_dim_v)

    def q_tiles(self, rows: int) -> int:
        """No batch of these shapes has more tiles of ``rows`` rows, one per q head of a kv head."""
        if self.packed:
            return self.total_q * self.group // rows + self.batch
        return self.batch * -(-self.seqlen_q * self.group // rows)


def first_key(length: int, rows: int, left: int) -> int:
    """The first key that the last ``rows`` rows of a sequence see. ``left``: of the mask, -1: unbounded."""
    return 0 if left < 0 else max(0, length - rows - left)


class PreparedCached(ABC):
    """A problem on a device."""

    @cached_property
    @abstractmethod
    def fingerprint(self) -> str:
        """That of the forward in training: :attr:`.base.Prepared.forward_fingerprint`."""

    def load(self, scores: Scores) -> None:  # noqa: B027 - for backends that may fail here
        """Find what a forward needs: what is missing is an error before anything is written to a cache."""

    @abstractmethod
    def forward(
        self, tensors: CachedTensors, scores: Scores, aux: AuxTensors = NO_AUX
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) like :meth:`.base.Prepared.forward`. Rows of q that no sequence has are not written."""

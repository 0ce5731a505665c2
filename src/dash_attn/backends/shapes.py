"""Shapes of the tensors of a problem."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..problem import Problem

__all__ = ["Keys", "Shapes", "forward_shapes", "lse_shape", "tensor_shapes"]

_Size = tuple[int, ...]


class Shapes(NamedTuple):
    """Of a problem's tensors; dout is like out. By default those that no tensor has."""

    q: _Size = ()
    k: _Size = ()
    v: _Size = ()
    out: _Size = ()
    lse: _Size = ()

    @property
    def of_tensors(self) -> tuple[_Size, ...]:
        """In the order of :class:`.Tensors`."""
        return self.out, self.q, self.k, self.v, self.out, self.lse


def tensor_shapes(problem: Problem) -> dict[int, Shapes]:
    """Shapes of a problem's tensors by rank; none of rank 4 where sequences are not alike."""
    total_q, total_k = problem.lengths.sum(0).tolist()
    found = {3: _shapes(problem, (total_q,), (total_k,), (problem.heads, total_q))}
    if len(set(problem.shapes)) == 1:
        batch, (seqlen_q, seqlen_k) = len(problem.sequences), problem.sequences[0]
        lse = batch, problem.heads, seqlen_q
        found[4] = _shapes(problem, (batch, seqlen_q), (batch, seqlen_k), lse)
    return found


def _shapes(problem: Problem, rows_q: _Size, rows_k: _Size, lse: _Size) -> Shapes:
    q, k = (*rows_q, problem.heads), (*rows_k, problem.kv_heads)
    of_qk, of_v = problem.head_dim, problem.head_dim_v
    return Shapes((*q, of_qk), (*k, of_qk), (*k, of_v), (*q, of_v), lse)


def lse_shape(q: Tensor) -> _Size:
    """Of the lse of q: (batch, heads, seqlen_q), or of packed q (heads, total_q)."""
    *batch, rows, heads, _ = q.shape
    return (*batch, heads, rows)


class Keys(NamedTuple):
    """Where the keys of a forward lie in k and v, if these hold more than the problem's keys.

    The problem has the lengths: a sequence's keys are the first ones of its place. Values behind them may be
    anything.

    Attributes:
        shape: of k: (total_k, kv_heads, head_dim), or (batch, rows, kv_heads, head_dim); v has its own head
            dim.
        starts: of packed k and v: the row where the place of each sequence begins. None: a batch is a place.
    """

    shape: tuple[int, ...]
    starts: tuple[int, ...] | None


def forward_shapes(problem: Problem, packed: bool, keys: Keys | None) -> tuple[_Size, _Size, _Size]:
    """Shapes of q, k and v, () of what cannot be dense: no tensor fits then. ``packed``: q is."""
    if keys is None:
        return tensor_shapes(problem).get(3 if packed else 4, Shapes())[:3]
    lengths = problem.lengths[:, 0]
    q: _Size = (int(lengths.sum()), problem.heads, problem.head_dim)
    if not packed:
        alike = bool((lengths == lengths[0]).all())
        q = (len(lengths), int(lengths[0]), *q[1:]) if alike else ()
    return q, keys.shape, (*keys.shape[:-1], problem.head_dim_v)

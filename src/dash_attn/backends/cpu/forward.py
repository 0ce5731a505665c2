"""The forward on the CPU, by the numerics of :mod:`dash_attn.schedule.forward`, tile by tile.

It is the reference for every forward kernel. A row's bits do not depend on its company: tiles always have
ROWS rows and the numerics' number of keys, with zeros where there are none, so that products take one path.
Values that a row does not look at do not reach it, even if they are NaN or infinite.

Precision
    Products and sums in float32 (float64 for float64 tensors), as exact as PyTorch is told to make them. For
    bfloat16 and float16, P is rounded to the tensors' dtype before its product with V; results are rounded
    once, at the end.

Layout: packed, (total, heads, head_dim), sequences one after the other in the order of the problem.
"""

from __future__ import annotations

import math
import random
from functools import reduce
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...problem import Problem, SequenceGrid
from ...schedule import ForwardNumerics, Plan
from ...scores import Scores, scores_of
from ..base import NO_AUX, AuxTensors, RowIntervals
from ..sums import accumulator
from .dropout import Dropout, dropout_of
from .masks import hidden_elements, outside_intervals
from .tiles import TileRows, check_packed, distances, exact, slope_of

__all__ = ["forward"]

ROWS = 64
"""Rows of a q tile."""


def forward(
    plan: Plan | Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Scores | float,
    aux: AuxTensors = NO_AUX,
    *,
    numerics: ForwardNumerics | None = None,
    rng: random.Random | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention, segment by segment.

    Args:
        plan: a plan or its problem; the plan of a backward says nothing about the forward.
        q: (total_q, heads, head_dim), CPU, the problem's dtype.
        k, v: (total_k, kv_heads, head_dim); v may have another head dim.
        scores: what becomes of Q K^T; a number is the softmax scale alone.
        aux: the tensors that this takes; rows that see each key are packed.
        numerics: others than the problem's own, for tests.
        rng: computes segments in a random order. It changes no bit.

    Returns:
        out: (total_q, heads, head dim of v), the dtype of q; zero in rows that see no column.
        lse: (heads, total_q) float32 (float64 for float64), natural logarithm; -inf in such rows, or the
            sink.

    Raises:
        InputError: a tensor does not fit the problem.
    """
    problem = plan.problem if isinstance(plan, Plan) else plan
    check_packed(problem, q=q, k=k, v=v)
    numerics = ForwardNumerics.of(problem) if numerics is None else numerics
    scores = scores_of(scores)
    out = q.new_zeros((*q.shape[:-1], problem.head_dim_v))
    lse = q.new_full((problem.heads, q.shape[0]), -torch.inf, dtype=accumulator(q.dtype))
    starts = TileRows(problem)
    masks: _Masks = {}
    with exact():
        for sequence in range(len(problem.sequences)):
            both = (starts.q_start, starts.k_start)
            at, columns = (slice(*side[sequence : sequence + 2]) for side in both)
            intervals = None if aux.rows is None else RowIntervals(*(x[columns] for x in aux.rows))
            for kv_head in range(problem.kv_heads):
                keys = k[columns, kv_head], v[columns, kv_head]
                one = _Head(problem.grid(sequence), numerics, scores, *keys, masks, intervals)
                for head in range(kv_head * problem.group, (kv_head + 1) * problem.group):
                    sink = None if aux.learnable_sink is None else aux.learnable_sink[head]
                    dropout = dropout_of(scores, aux, sequence, head)
                    mine = _QHead(q[at, head], sink, slope_of(aux, sequence, head), dropout)
                    out[at, head], lse[head, at] = one.run(mine, rng)
    return out, lse


_Masks = dict[tuple[int, int], Tensor | None]
"""Hidden elements of tiles (None: there are none) by where they lie beside the diagonal and the last key."""


class _Values(NamedTuple):
    """V of a kv tile: ``tame`` has 0 in place of what is not finite, ``wild`` just that, by row.

    0 times infinity is NaN: a product with all of V would let rows see what their mask hides.
    """

    tame: Tensor
    wild: dict[int, Tensor]


class _State(NamedTuple):
    """What a q tile knows of the keys that it has gone through; columns of ROWS values, and the output."""

    maximum: Tensor
    total: Tensor
    out: Tensor


class _QHead(NamedTuple):
    """A q head of a sequence: q, (seqlen_q, head_dim), and what only its scores and weights take."""

    q: Tensor
    sink: Tensor | None
    slope: float
    dropout: Dropout | None


class _Head:
    """One kv head of a sequence; k and v are (seqlen_k, head_dim), v with a head dim of its own."""

    def __init__(
        self,
        grid: SequenceGrid,
        numerics: ForwardNumerics,
        scores: Scores,
        k: Tensor,
        v: Tensor,
        masks: _Masks,
        intervals: RowIntervals | None,
    ) -> None:
        """``masks``: of the mask alone, kept for all heads."""
        self.grid, self.numerics, self.dtype, self.masks = grid, numerics, k.dtype, masks
        self.intervals = intervals
        size, self.columns = numerics.tile, _columns(numerics.head_dim_v)
        starts = range(0, len(k), size)
        self.keys = [_padded(k[left : left + size], size) for left in starts]
        self.values = [_values(v[left : left + size], size) for left in starts]
        self.scale, self.cap = (x * math.log2(math.e) for x in (scores.softmax_scale, scores.softcap))

    def run(self, head: _QHead, rng: random.Random | None) -> tuple[Tensor, Tensor]:
        """(out, lse) of a q head. The sink is a segment behind all others."""
        q = head.q
        lse = q.new_full((len(q),), -torch.inf, dtype=accumulator(q.dtype))
        out = q.new_zeros((len(q), self.numerics.head_dim_v))
        for top in range(0, len(q), ROWS):
            at = slice(top, min(top + ROWS, len(q)))
            first, last = self.grid.columns(np.arange(at.start, at.stop))
            seen = first <= last
            found = []
            if seen.any():
                found = self._segments(head, top, int(first[seen].min()), int(last[seen].max()), rng)
            if head.sink is not None:
                found.append(_of_sink(head.sink, lse.dtype, self.columns))
            if found:
                rows = at.stop - at.start
                state = reduce(_folded, found)
                rescale = 1.0 if head.dropout is None else head.dropout.rescale
                results, lse[at] = (x[:rows] for x in _results(state, rescale))
                out[at] = results[:, : out.shape[1]]
        return out, lse

    def _segments(
        self, head: _QHead, top: int, first: int, last: int, rng: random.Random | None
    ) -> list[_State]:
        """What a q tile, from row ``top`` on, makes of each segment of columns ``first .. last``."""
        head = head._replace(q=_padded(head.q[top : top + ROWS], ROWS))
        segments = self.numerics.segments(first, last)
        order = list(range(len(segments)))
        if rng is not None:
            rng.shuffle(order)
        found = {at: self._segment(head, top, segments[at]) for at in order}
        return [found[at] for at in range(len(segments))]

    def _segment(self, head: _QHead, top: int, kv_tiles: list[int]) -> _State:
        q = head.q
        nothing = q.new_zeros(len(q), 1)
        state = _State(nothing - torch.inf, nothing, q.new_zeros((len(q), self.columns)))
        size = self.numerics.tile
        for kv in kv_tiles:
            left = kv * size
            scores = torch.mm(q, self.keys[kv].T)
            if self.cap:
                scores.mul_(self.scale / self.cap).tanh_().mul_(self.cap)
            else:
                scores.mul_(self.scale)
            if head.slope:
                far = distances(top + self.grid.diagonal - left, ROWS, size, scores.dtype)
                scores.sub_(far.mul_(head.slope * math.log2(math.e)))
            hidden = self._hidden(top, left)
            if self.intervals is not None:
                hidden = self._outside(top, left, hidden)
            if hidden is not None:
                scores.masked_fill_(hidden, -torch.inf)
            kept = None if head.dropout is None else head.dropout.kept(top, left, ROWS, size)
            state = self._with(state, scores, (hidden, kept), self.values[kv])
        return state

    def _hidden(self, top: int, left: int) -> Tensor | None:
        """(ROWS, tile) bool: what the mask hides, and columns that do not exist."""
        start, size = top + self.grid.diagonal - left, self.numerics.tile
        there = min(self.grid.seqlen_k - left, size)
        if (start, there) not in self.masks:
            positions = torch.arange(start, start + ROWS, device="cpu")  # whatever the default device is
            hidden = hidden_elements(self.grid.mask, positions, size)
            hidden[:, there:] = True
            self.masks[start, there] = hidden if hidden.any() else None
        return self.masks[start, there]

    def _outside(self, top: int, left: int, hidden: Tensor | None) -> Tensor:
        """(ROWS, tile) bool: what is hidden, by the intervals of the keys as well."""
        assert self.intervals is not None
        size = self.numerics.tile
        of_keys = RowIntervals(*(x[left : left + size] for x in self.intervals))
        outside = outside_intervals(of_keys, top, ROWS)
        outside = torch.nn.functional.pad(outside, (0, size - outside.shape[1]), value=True)
        return outside if hidden is None else outside | hidden

    def _with(
        self, state: _State, scores: Tensor, masks: tuple[Tensor | None, Tensor | None], values: _Values
    ) -> _State:
        """A state that has seen one more kv tile; ``masks``: what is hidden, and what dropout keeps."""
        hidden, kept = masks
        found = scores.amax(1, keepdim=True)
        rises = found > state.maximum + self.numerics.keep
        fresh = state.maximum == -torch.inf
        maximum = torch.where(rises, torch.where(fresh, found + self._room(hidden), found), state.maximum)
        shift = _finite(maximum)
        decay, p = torch.exp2(state.maximum - shift), torch.exp2(scores - shift)
        total = state.total * decay + p.sum(1, keepdim=True)
        if kept is not None:
            p.masked_fill_(~kept, 0.0)
        p = p.to(self.dtype).to(p.dtype)
        out = (state.out * decay).addmm_(p, values.tame)
        for column, wild in values.wild.items():
            seen = slice(None) if hidden is None else ~hidden[:, column]
            out[seen] += p[seen, column, None] * wild
        return _State(maximum, total, out)

    def _room(self, hidden: Tensor | None) -> Tensor | int:
        """What the first maximum of a row has more than its largest score."""
        room, tile = self.numerics.room, self.numerics.tile
        if hidden is None:
            return max(room + 1 - tile.bit_length(), 0)
        keys = (~hidden).sum(1, keepdim=True)
        return (room + 1 - torch.frexp(keys.float()).exponent).clamp_(min=0)  # no keys: -inf + anything


def _folded(before: _State, state: _State) -> _State:
    """Two neighbours as one."""
    maximum = torch.maximum(before.maximum, state.maximum)
    shift = _finite(maximum)
    left, right = torch.exp2(before.maximum - shift), torch.exp2(state.maximum - shift)
    return _State(maximum, before.total * left + state.total * right, before.out * left + state.out * right)


def _of_sink(sink: Tensor, wide: torch.dtype, columns: int) -> _State:
    """What a q tile knows of a key that has the sink for its score, and no value."""
    maximum = (sink.detach().to(wide) * math.log2(math.e)).expand(ROWS, 1)
    total = torch.exp2(maximum - _finite(maximum))  # 1, or 0 of a sink of -inf
    return _State(maximum, total, total.new_zeros(ROWS, columns))


def _results(state: _State, rescale: float) -> tuple[Tensor, Tensor]:
    """(out * rescale, lse); a row that saw nothing has total 0: out 0, lse log(0) = -inf."""
    lse = (_finite(state.maximum) + state.total.log2()).mul_(math.log(2.0)).squeeze(1)
    # 0 for -0: a fold with what a row does not see makes 0 of -0, too.
    return state.out / state.total.masked_fill(state.total == 0, 1.0) * rescale + 0.0, lse


def _finite(maximum: Tensor) -> Tensor:
    """The maximum, 0 in rows that have seen nothing yet (-inf - -inf would be NaN)."""
    return maximum.masked_fill(maximum == -torch.inf, 0.0)


def _padded(x: Tensor, rows: int) -> Tensor:
    """Rows in accumulation precision, in fresh memory, with zeros behind and beside them: products of some
    other numbers of columns round by a row's place in its tile."""
    padded = x.new_zeros((rows, _columns(x.shape[1])), dtype=accumulator(x.dtype))
    padded[: len(x), : x.shape[1]] = x
    return padded


def _columns(head_dim: int) -> int:
    return -(-head_dim // 8) * 8


def _values(v: Tensor, rows: int) -> _Values:
    whole = _padded(v, rows)
    finite = whole.isfinite()
    if finite.all():
        return _Values(whole, {})
    wild = whole.masked_fill(finite, 0.0)
    at = (~finite).any(1).nonzero().flatten().tolist()
    return _Values(whole.masked_fill(~finite, 0.0), {row: wild[row] for row in at})

"""The forward over a cache of keys on the CPU: keys are gathered, and the forward of training runs."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ...errors import InputError
from ...problem import Mask, Problem
from ...schedule import ForwardNumerics
from ...scores import Scores
from ..base import NO_AUX, AuxTensors
from ..cached import CachedProblem, CachedTensors, PreparedCached, first_key
from ..shapes import lse_shape
from ..sums import accumulator
from .forward import forward

__all__ = ["Cached", "append"]


class Cached(PreparedCached):
    """The reference of the others. Lengths and page numbers must be in range."""

    def __init__(self, problem: CachedProblem) -> None:
        self.problem = problem

    @cached_property
    def fingerprint(self) -> str:
        return ForwardNumerics.of(self.problem.problem()).fingerprint

    def forward(
        self, tensors: CachedTensors, scores: Scores, aux: AuxTensors = NO_AUX
    ) -> tuple[Tensor, Tensor]:
        p, q = self.problem, tensors.q
        if not p.batch:
            lse = q.new_zeros(lse_shape(q), dtype=accumulator(q.dtype))
            return q.new_zeros((*q.shape[:-1], p.head_dim_v)), lse
        lengths, of_q = _checked_lengths(p, tensors)
        sizes = (p.heads, p.kv_heads, p.head_dim, Mask.of_sides(*p.sides), p.dtype)
        problem = Problem(tuple(zip(of_q, lengths)), *sizes, head_dim_v=p.head_dim_v)
        first = [first_key(n, rows, p.sides[0]) for n, rows in zip(lengths, of_q)]
        k, v = (_gathered(x, tensors.table, lengths, first) for x in (tensors.k, tensors.v))
        out, lse = forward(problem, q.flatten(0, 1) if q.ndim == 4 else q, k, v, scores, aux)
        if q.ndim == 3:
            return out, lse
        lse = lse.view(p.heads, p.batch, p.seqlen_q).transpose(0, 1).contiguous()
        return out.view(*q.shape[:-1], p.head_dim_v), lse


def _checked_lengths(p: CachedProblem, tensors: CachedTensors) -> tuple[list[int], list[int]]:
    """Keys and rows of every sequence; compiled code is checked here only."""
    lengths, bounds = tensors.lengths.tolist(), tensors.cu_seqlens_q
    for at, length in enumerate(lengths):
        if not 0 <= length <= p.keys:
            raise InputError(f"sequence {at} would have {length} keys, there is room for 0 to {p.keys}")
    if bounds is None:
        return lengths, [p.seqlen_q] * p.batch
    ends, of_q = bounds.tolist(), bounds.diff().tolist()
    if ends[0] != 0 or ends[-1] != p.total_q or min(of_q) < 0:
        raise InputError(
            f"cu_seqlens_q must begin at 0, not decrease, and end at {p.total_q}, got {ends!r:.60}"
        )
    return lengths, of_q


def _gathered(pages: Tensor, table: Tensor, lengths: list[int], first: list[int]) -> Tensor:
    """The used rows of all sequences, one after the other; those before ``first`` hold anything."""
    size, found = max(pages.shape[1], 1), []
    for row, length, begin in zip(table, lengths, first):
        hidden = begin // size
        mine = _pages(row[hidden : -(-length // size)], pages)
        found += [pages.new_zeros(hidden * size, *pages.shape[2:]), pages[mine].flatten(0, 1)]
        found[-1] = found[-1][: length - hidden * size]
    return torch.cat(found)


def _pages(row: Tensor, cache: Tensor) -> Tensor:
    """Numbers of pages, which must exist: compiled code is checked here only."""
    found, number = row.long(), cache.shape[0]
    if found.numel() and not 0 <= int(found.min()) <= int(found.max()) < number:
        raise InputError(f"pages {found.tolist()} were given, k_cache has {number}")
    return found


def append(cache: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], at: Tensor, table: Tensor) -> None:
    """Write ``new`` (batch, rows, kv_heads, head_dim) behind the first ``at`` tokens of every sequence.

    Raises:
        InputError: a token has no place, or PyTorch forbids writing there. Nothing is written then.
    """
    if not torch.is_inference_mode_enabled() and any(x.is_inference() for x in cache):
        raise InputError("k_cache or v_cache was made in inference mode, and can be written to only there")
    size, rows = cache[0].shape[1], new[0].shape[1]
    places, taken = [], dict[int, int]()
    for sequence, first in enumerate(at.tolist()):
        if not 0 <= first <= size * table.shape[1] - rows:
            raise InputError(f"cache_seqlens has {first} at {sequence}: no room for {rows} new ones")
        tokens = torch.arange(first, first + rows, device="cpu")
        place = _pages(table[sequence, tokens // size], cache[0]), tokens % size
        for page in set(place[0].tolist()):
            if (other := taken.setdefault(page, sequence)) != sequence:
                raise InputError(f"sequences {other} and {sequence} would both write to page {page}")
        places.append(place)
    for sequence, place in enumerate(places):
        for where, what in zip(cache, new):
            where[place] = what[sequence].clone()  # it may lie where it is written

"""Launching the forward over a cache of keys. Everything follows from shapes."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ...schedule import ForwardNumerics
from ...scores import Scores
from ..base import NO_AUX, AuxTensors
from ..cached import CachedProblem, CachedTensors, PreparedCached
from .forward_kernel import forward_kernel
from .launch import (
    aligned,
    head_of,
    is_roomy,
    is_scaled,
    lse_strides,
    of_scores,
    options_of,
    strides_of,
    values_of,
    variant_of,
)
from .tiles import fingerprint_of, forward_numerics, shapes_of

__all__ = ["Cached"]


class Cached(PreparedCached):
    """The forward of a problem on a device: a program per q tile and kv head goes through all keys."""

    def __init__(self, problem: CachedProblem, device: torch.device) -> None:
        self.problem, whole = problem, problem.problem()
        self._head = head_of(whole)
        self._numerics: ForwardNumerics = forward_numerics(whole, is_roomy(device))
        self._shape = shapes_of(whole.widest, problem.dtype, is_roomy(device)).forward

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint_of(self._numerics.fingerprint)

    def forward(
        self, tensors: CachedTensors, scores: Scores, aux: AuxTensors = NO_AUX
    ) -> tuple[Tensor, Tensor]:
        p, shape, numerics = self.problem, self._shape, self._numerics
        q, k, v, lengths, table, bounds = tensors
        out = torch.empty((*q.shape[:-1], p.head_dim_v), dtype=q.dtype, device=q.device)
        *batch, rows, heads, _ = q.shape
        lse = torch.empty((*batch, heads, rows), dtype=torch.float32, device=q.device)
        if not q.numel():
            return out, lse
        q, k, v = (aligned(x) for x in (q, k, v))
        tiles = p.q_tiles(shape.rows)
        forward_kernel[(tiles * p.kv_heads,)](
            q, k, v, out, lse, values_of(aux.learnable_sink, lse), lse, lse, table, table, _whole(table),
            _whole(lengths), _whole(lengths if bounds is None else bounds),
            *strides_of(q), *strides_of(k), *strides_of(v), *strides_of(out), *lse_strides(lse),
            tiles, p.group, *p.sides, 0, 0, *of_scores(scores),
            p.batch, p.seqlen_q, p.total_q, p.most_pages, p.page_size, p.pages,
            **self._head, **variant_of(scores, NO_AUX), CACHED=True, SINK=aux.learnable_sink is not None,
            SCALED=is_scaled(scores, NO_AUX),
            ROWS=shape.rows, TILE=numerics.tile, SEGMENT=numerics.segment, KEEP=numerics.keep,
            ROOM=numerics.room, **options_of(shape),
        )  # fmt: skip
        return out, lse


def _whole(x: Tensor) -> Tensor:
    """At a multiple of 16 bytes: the compiler would make another variant for others."""
    return x.clone() if x.data_ptr() % 16 else x

"""Launching the forward over a cache of keys. Everything follows from shapes."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ...schedule import ForwardNumerics
from ...scores import Scores
from ..base import NO_AUX, AuxTensors
from ..cached import CachedProblem, CachedTensors, PreparedCached
from ..shapes import lse_shape
from .launch import head_of, is_roomy, is_scaled, of_scores, options_of, variant_of
from .split import Launch
from .strides import aligned, at_16_bytes, values_of
from .tiles import fingerprint_of, forward_numerics, shapes_of

__all__ = ["Cached"]


class Cached(PreparedCached):
    """The forward of a problem on a device: a program per q tile and kv head goes through all keys, or with
    few of them through those of a segment."""

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
        p = self.problem
        q, k, v, lengths, table, bounds = tensors
        out = torch.empty((*q.shape[:-1], p.head_dim_v), dtype=q.dtype, device=q.device)
        lse = torch.empty(lse_shape(q), dtype=torch.float32, device=q.device)
        if not q.numel() or not k.numel() or not p.batch:
            lse.fill_(-torch.inf)
            if aux.learnable_sink is not None:
                lse.copy_(aux.learnable_sink[:, None])
            return out.zero_(), lse
        tiles = p.q_tiles(self._shape.rows)
        bounds = lengths if bounds is None else bounds  # some tensor must be there
        places = at_16_bytes(table), at_16_bytes(lengths), at_16_bytes(bounds)
        flags = {"CACHED": True, "SINK": aux.learnable_sink is not None, "SCALED": is_scaled(scores, NO_AUX)}
        launch = Launch(
            (aligned(q), aligned(k), aligned(v)),
            (values_of(aux.learnable_sink, lse), lse, lse, table, table), places,
            tiles, p.group, p.sides, (0, 0), of_scores(scores),
            (p.batch, p.seqlen_q, p.total_q, p.most_pages, p.page_size, p.pages),
            self._numerics, self._shape, options_of(self._shape),
            self._head, variant_of(scores, NO_AUX) | flags,
        )  # fmt: skip
        launch(tiles * p.kv_heads, self._segments, out, lse)
        return out, lse

    @cached_property
    def _segments(self) -> int:
        """No tile sees keys of more, whatever lengths are on the device."""
        p, segment = self.problem, self._numerics.segment
        left, right = p.sides
        if left < 0 or right < 0:
            return -(-p.keys // segment)
        tokens = -(-(self._shape.rows - 1) // p.group) + 1  # of a tile, wherever in a token's group it begins
        return min(-(-p.keys // segment), (left + tokens + right + segment - 2) // segment + 1)

"""Launching the forward over a cache of keys on PyTorch tensors. Everything follows from shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....errors import InputError
from ....schedule.forward_plan import MOST_PARTS
from ....scores import Scores
from ...base import NO_AUX, AuxTensors
from ...cached import CachedProblem, CachedTensors, PreparedCached
from ...cuda.multiprocessors import multiprocessors
from ...cuda.upload import constant, loadable
from ..compile import program
from ..forward.config import ROWS
from ..forward.launch import numerics_of, why_no_scale
from ..softcap import cap_of, why_no_cap
from ..tiles import SHORT_DTYPES, cached_kernel_of
from .arguments import HEADER_WORDS, RECORD_WORDS, Launch, Places, Tensors, Workspace
from .config import CHUNK_PIECES, PIECES, CachedConfig, cached_config, chunk_config

__all__ = ["Cached", "allocate", "config_of"]


def allocate(sizes: list[int], device: torch.device) -> Sequence[Tensor]:
    """Buffers of so many fp32 words, from one allocation."""
    return torch.empty(sum(sizes), dtype=torch.float32, device=device).split_with_sizes(sizes)


def whole_lines(words: Sequence[int]) -> list[int]:
    """Sizes of buffers in multiples of 128 bytes: each begins where programs ask for, and none is empty."""
    return [-(-max(n, 1) // 32) * 32 for n in words]


def config_of(problem: CachedProblem) -> CachedConfig:
    """What a problem runs with. Which one decides no bit."""
    head_dim, head_dim_v = cached_kernel_of(problem.head_dim, problem.head_dim_v)
    rows = problem.longest_q
    if problem.packed and rows == problem.total_q:  # nobody said how many rows the longest one has
        rows = -(-problem.total_q // max(problem.batch, 1))
    dtype, few = SHORT_DTYPES[problem.dtype], rows * problem.group <= ROWS
    pieces = [n for n in CHUNK_PIECES if problem.most_pages == 1 or problem.page_size % n == 0]
    chunk = chunk_config(head_dim, dtype, pieces[0], head_dim_v)
    if _fill_tiles(problem, chunk.tile_m):
        return chunk
    piece = next(n for n in PIECES if n in pieces)
    return cached_config(head_dim, dtype, few, piece, head_dim_v)


def _fill_tiles(problem: CachedProblem, tile_m: int) -> bool:
    """Whether tiles of one q head are mostly full: nine rows of ten. Packed sequences, whose lengths the host
    does not know, must have eight tiles on the average."""
    if problem.packed:
        return problem.total_q >= 8 * tile_m * problem.batch
    return 10 * problem.seqlen_q >= 9 * -(-problem.seqlen_q // tile_m) * tile_m


class Cached(PreparedCached):
    """The forward of a problem on a Hopper GPU.

    Args:
        problem: what to compute.
        device: the GPU.
        blocks: thread blocks to launch, by default one per SM. Any number ends, and none changes a bit.
        config: another configuration than the problem's, for tests.
    """

    def __init__(
        self,
        problem: CachedProblem,
        device: torch.device,
        *,
        blocks: int | None = None,
        config: CachedConfig | None = None,
    ) -> None:
        self.problem, self.device = problem, device
        self.config = config_of(problem) if config is None else config
        self._blocks = blocks
        self._programs: dict[bool, object] = {}

    @cached_property
    def fingerprint(self) -> str:
        return numerics_of(self.problem.problem()).fingerprint

    @cached_property
    def _numbers(self) -> tuple[list[int], tuple[int, ...]]:
        """Words of the workspace, and what a launch is given besides the scale."""
        p, c = self.problem, self.config
        if c.by_head:  # as if every q head had a kv head
            p = p._replace(kv_heads=p.heads)
        blocks = multiprocessors(self.device) if self._blocks is None else self._blocks
        tiles, segments = p.q_tiles(c.tile_m), -(-p.keys // c.segment)
        share, folds, places = blocks * c.eager, 0, 0
        if segments > 1:
            folds = min(share // p.kv_heads + 2, tiles)
            places = min(folds * segments, max(MOST_PARTS // p.kv_heads, 1))
        grid = max(1, min(blocks, (tiles + places) * p.kv_heads))
        table = HEADER_WORDS + (tiles + places + folds) * RECORD_WORDS + tiles
        partial = places * p.kv_heads * c.warpgroups * c.partial_words
        state = grid * c.state_words if segments > 1 else 0
        words = whole_lines((table, 1, state, partial))
        numbers = (p.batch, tiles, p.seqlen_q, p.most_pages, share, places, folds, grid, *p.sides)
        return words, numbers

    @cached_property
    def _no_sink(self) -> NDArray[np.int32]:
        """-inf for every head, as words."""
        return np.full(self.problem.heads, -np.inf, np.float32).view(np.int32)

    def load(self, scores: Scores) -> None:
        self._program(scores.softcap > 0)

    def forward(
        self, tensors: CachedTensors, scores: Scores, aux: AuxTensors = NO_AUX
    ) -> tuple[Tensor, Tensor]:
        if reason := why_no_scale(scores.softmax_scale) or why_no_cap(scores):
            raise InputError(reason)
        q, k, v, lengths, table, bounds = tensors
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        packed = q.ndim == 3
        shape = (1, q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
        sink = self._sink(aux)
        if not q.numel() or not k.numel() or not self.problem.keys or not self.problem.batch:
            lse.copy_(sink[:, None].expand(lse.shape))
            return out.zero_(), lse.squeeze(0) if packed else lse
        four = [loadable(q), _with_rows(k), _with_rows(v), out]
        four = [x.unsqueeze(0) if x.ndim == 3 else x for x in four]
        self._program(scores.softcap > 0)(  # type: ignore[operator]
            *Tensors._make([*four, lse]),
            *Places(lengths, table.view(-1), lengths if bounds is None else bounds, sink),
            *self._work(scores.softmax_scale, q.device),
            *cap_of(scores),
        )
        return out, lse.squeeze(0) if packed else lse

    def _work(self, scale: float, device: torch.device) -> list[Any]:
        """The workspace, and the scalars of a launch."""
        words, numbers = self._numbers
        memory = [*allocate(words, device)]
        memory[:2] = (x.view(torch.int32) for x in memory[:2])
        return [*Workspace._make(memory), *Launch(scale, *numbers)]

    def _program(self, softcap: bool) -> object:
        found = self._programs.get(softcap)
        if found is None:
            found = self._programs[softcap] = program(replace(self.config, softcap=softcap))
        return found

    def _sink(self, aux: AuxTensors) -> Tensor:
        """(heads,) fp32; -inf where there is no sink."""
        if aux.learnable_sink is not None:
            return aux.learnable_sink.detach().resolve_neg().float().contiguous()
        kept = constant(self._no_sink, self.device)
        if kept is None:
            return torch.full((self.problem.heads,), -torch.inf, device=self.device)
        return kept.view(torch.float32)


def _with_rows(x: Tensor) -> Tensor:
    """Pages that the copy engine can load, and that begin a whole number of rows apart; copied otherwise."""
    x = loadable(x)
    if x.shape[0] == 1 or x.stride(0) % x.stride(1) == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)

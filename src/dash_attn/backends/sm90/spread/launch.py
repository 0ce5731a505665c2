"""When keys are spread over blocks, and the launch. Everything follows from shapes."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from ....machine import L2_BYTES
from ....schedule.constants import FORWARD_SEGMENT
from ...cached import CachedProblem
from ...cuda.limits import MOST_GRID
from ..cached.launch import Cached, allocate, config_of, whole_lines
from ..forward.config import ROWS, WARP_ROWS
from .arguments import Launch, Workspace
from .config import COLUMNS, HEAD_DIMS, SpreadConfig, spread_config

__all__ = ["LEAST_KEYS", "Spread", "spreads"]

LEAST_KEYS = 512
"""With fewer, more kernels take longer than the keys."""


def spreads(problem: CachedProblem, sms: int) -> bool:
    """Whether keys are spread. It looks at what there may be, never at lengths, so a CUDA graph may keep it.

    Every block of ``Spread`` must have an SM of its own (docs/experiments/spread.md), and scores must fit
    half of L2. It decides no bit.
    """
    p = problem
    if p.packed or p.head_dim != p.head_dim_v or p.head_dim not in HEAD_DIMS:
        return False
    rows, sequences = p.seqlen_q * p.group, p.batch * p.kv_heads
    if not 0 < rows <= ROWS or p.keys < LEAST_KEYS or max(p.batch, p.kv_heads) > MOST_GRID:
        return False
    blocks = sequences * -(-p.keys // FORWARD_SEGMENT) * -(-rows // WARP_ROWS) * (p.head_dim // COLUMNS)
    return blocks <= sms and 2 * 4 * sequences * rows * p.keys <= L2_BYTES


class Spread(Cached):
    """The forward of a problem on a Hopper GPU. ``config``: as of ``Cached``, for tests."""

    def __init__(
        self, problem: CachedProblem, device: torch.device, *, config: SpreadConfig | None = None
    ) -> None:
        base = config_of(problem)
        config = config or spread_config(base.head_dim, base.dtype, base.piece)
        super().__init__(problem, device, config=replace(config, piece=base.piece))

    @cached_property
    def _numbers(self) -> tuple[list[int], tuple[int, ...]]:
        """Words of the workspace, and what a launch is given besides the scale."""
        p, c = self.problem, self.config
        assert isinstance(c, SpreadConfig)
        sequences, tiles, segments = p.batch * p.kv_heads, -(-p.keys // c.tile_n), -(-p.keys // c.segment)
        words = [n * sequences * tiles for n in (p.seqlen_q * p.group * c.tile_n, ROWS)]
        words.append(sequences * segments * c.partial_words * (segments > 1))
        return whole_lines(words), (p.batch, p.most_pages, tiles, segments, *p.sides)

    def _work(self, scale: float, device: torch.device) -> list[Any]:
        words, numbers = self._numbers
        return [*Workspace._make(allocate(words, device)), *Launch(scale, *numbers)]

"""Small launches of the forward over a cache of keys, for the sanitizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from dash_attn.backends.cached import CachedProblem, CachedTensors
from dash_attn.backends.sm90.cached.config import CachedConfig
from dash_attn.backends.sm90.cached.launch import Cached
from dash_attn.backends.sm90.spread.config import SpreadConfig
from dash_attn.backends.sm90.spread.launch import Spread
from dash_attn.schedule.constants import FORWARD_SEGMENT
from dash_attn.scores import Scores

__all__ = ["cached_problems", "launch_cached"]

LENGTHS = (300, 0, 17)
BOUNDS = (0, 5, 6, 80)
"""Of packed rows; the longest sequence has more than a tile."""


def cached_problems(config: CachedConfig, fewer: int) -> Iterator[tuple[str, CachedProblem, int | None]]:
    """What a variant is launched with, and on how many blocks (None: on all). ``fewer``: columns than tiles
    have."""
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[config.dtype]
    size = 2 * config.piece  # of a page
    most = -(-max(LENGTHS) // size) + 1
    sizes = (4, 2, config.head_dim - fewer, config.head_dim_v - fewer, dtype, (-1, 0))
    long = -(-(FORWARD_SEGMENT + 400) // size)
    if not isinstance(config, SpreadConfig):
        yield "packed", CachedProblem(3, *sizes, -1, BOUNDS[-1], 74, size, 3 * most, most), 2
    if not isinstance(config, SpreadConfig) or not fewer:
        yield "a fold", CachedProblem(3, *sizes, 1, 3, 1, size, 3 * long, long), None


def launch_cached(config: CachedConfig, problem: CachedProblem, blocks: int | None) -> None:
    """One forward, waited for. Pages hold NaN behind the used keys, and page numbers there are wild."""
    device, dtype = torch.device("cuda", torch.cuda.current_device()), getattr(torch, problem.dtype)
    lengths = list(LENGTHS) if problem.packed else [FORWARD_SEGMENT + 300, *LENGTHS[1:]]
    shape = (problem.pages, problem.page_size, problem.kv_heads)
    k, v = (
        torch.full((*shape, columns), torch.nan, dtype=dtype, device=device)
        for columns in (problem.head_dim, problem.head_dim_v)
    )
    table = torch.full((problem.batch, problem.most_pages), -5, dtype=torch.int32)
    for at, length in enumerate(lengths):
        count = -(-length // problem.page_size)
        table[at, :count] = torch.arange(count) * problem.batch + at
        for x in (k, v):
            rows = torch.randn(count * problem.page_size, *x.shape[2:], device=device).to(dtype)
            rows[length:] = torch.nan
            x[table[at, :count].long().to(device)] = rows.view(count, *x.shape[1:])
    rows_of_q = (problem.total_q,) if problem.packed else (problem.batch, problem.seqlen_q)
    q = torch.randn(*rows_of_q, problem.heads, problem.head_dim, device=device).to(dtype)
    bounds = torch.tensor(BOUNDS, dtype=torch.int32, device=device) if problem.packed else None
    used = torch.tensor(lengths, dtype=torch.int32, device=device)
    tensors = CachedTensors(q, k, v, used, table.to(device), bounds)
    if isinstance(config, SpreadConfig):
        prepared: Cached = Spread(problem, device, config=config)
    else:
        prepared = Cached(problem, device, blocks=blocks, config=config)
    new_empty = torch.Tensor.new_empty

    def filled(like: torch.Tensor, *shape: Any, **how: Any) -> torch.Tensor:
        return new_empty(like, *shape, **how).fill_(torch.nan)

    # initcheck does not see what the copy engine stores: out of chunks.
    with mock.patch.object(torch.Tensor, "new_empty", filled):
        out, lse = prepared.forward(tensors, Scores(0.1, 2.0 * config.softcap))
    if not out.cpu().isfinite().all() or lse.cpu().isnan().any():
        raise RuntimeError("out or lse is not a number")

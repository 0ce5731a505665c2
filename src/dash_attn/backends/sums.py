"""Sums to which several backwards add: of dK and dV, and of the gradient of a sink."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..problem import Problem

if TYPE_CHECKING:
    from .base import Backend

__all__ = ["accumulator", "finish_rows", "new_key_sums", "new_sink_sums"]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Of sums, and of lse, for tensors of a dtype: fp32, fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def new_key_sums(backend: Backend, problem: Problem, kv_tiles: int, groups: int, like: Tensor) -> Tensor:
    """Zeros for sums of dK and dV, to which the backwards of several segments of q rows add.

    Args:
        backend: whose they are.
        problem: of a segment.
        kv_tiles: of the keys that there are sums of.
        groups: head groups per kv head.
        like: a tensor of the call, for its dtype and device.

    Returns:
        (kv_tiles, batch, kv_heads, head_groups, words) fp32 (fp64 for fp64). What the words are is the
        backend's own business.
    """
    dtype = accumulator(like.dtype)
    size = kv_tiles, len(problem.sequences), problem.kv_heads, *backend.key_sums(problem, groups)
    return torch.zeros(size, dtype=dtype, device=like.device)


def new_sink_sums(sequences: int, sink: Tensor) -> Tensor:
    """(sequences, heads): zeros, to which backwards of the rows of sequences add the gradient of a sink.

    The rows of a sequence come in ascending order. Those of a backward begin at a multiple of ``SINK_ROWS``.
    Then the bytes do not depend on how many backwards there are. What the sums are is the backend's own
    business.
    """
    return torch.zeros(sequences, len(sink), dtype=accumulator(sink.dtype), device=sink.device)


def finish_rows(sums: Tensor, scales: tuple[float, float], dk: Tensor, dv: Tensor) -> None:
    """:meth:`.Backend.finish_keys` of sums whose words are rows of (head_dim + head_dim_v) numbers.

    ``scales``: factors on dK and on dV.
    """
    rows, of_qk = dk.shape[1], dk.shape[3]
    total = sums[..., 0, :]
    for group in range(1, sums.shape[3]):
        total += sums[..., group, :]
    tiles, batch, kv_heads, words = total.shape
    columns = of_qk + dv.shape[3]
    by_row = total.reshape(tiles, batch, kv_heads, words // columns, columns).permute(1, 0, 3, 2, 4)
    by_row = by_row.flatten(1, 2)[:, :rows]
    dk.copy_(by_row[..., :of_qk] * scales[0])
    dv.copy_(by_row[..., of_qk:] * scales[1])

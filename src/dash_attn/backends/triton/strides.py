"""Tensors as the kernels read them: rows that are contiguous and aligned, strides."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["MOST_STRIDE", "UNIT", "aligned", "at_16_bytes", "lse_strides", "strides_of", "values_of"]

UNIT = 8
"""Elements: what strides are counted in."""

MOST_STRIDE = 2**24
"""Elements between rows: places of a tile's rows, counted from its first one, must fit 32 bits."""


def at_16_bytes(x: Tensor) -> Tensor:
    """x itself if it begins at a multiple of 16 bytes, otherwise a copy.

    The compiler would make another variant of a kernel for a tensor that begins elsewhere.
    """
    return x.clone() if x.data_ptr() % 16 else x


def values_of(x: Tensor | None, unread: Tensor) -> Tensor:
    """As contiguous fp32, at a multiple of 16 bytes.

    Without any ``unread``, a tensor of fp32 that stands in its place.
    """
    if x is None:
        return unread
    return at_16_bytes(x.detach().resolve_neg().to(torch.float32).contiguous())


def aligned(x: Tensor) -> Tensor:
    """x itself if its rows are contiguous, with strides in UNITs and a base of 16 bytes; otherwise a copy."""
    if x.is_neg():
        x = x.resolve_neg()
    strides = [stride for stride, size in zip(x.stride()[:-1], x.shape) if size > 1]
    near = x.shape[-3] == 1 or x.stride(-3) < MOST_STRIDE
    plain = near and x.stride(-1) == 1 and all(s % UNIT == 0 and s >= 0 for s in strides)
    if plain and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def strides_of(x: Tensor) -> tuple[int, ...]:
    """Of batch, row and head in UNITs; 0 where there is one or none."""
    steps = [stride // UNIT if size > 1 else 0 for stride, size in zip(x.stride()[:-1], x.shape)]
    return (0, *steps)[-3:]


def lse_strides(lse: Tensor) -> tuple[int, int]:
    """Of batch and head, of a contiguous lse."""
    heads, rows = lse.shape[-2:]
    return heads * rows, rows

"""Sequence lengths of packed batches on the host, read once from each ``cu_seqlens``.

A plan is made from lengths, so they must be known on the host. All layers of a model usually share one
``cu_seqlens`` tensor: the first one to use it pays for the copy, the others and the backward find the
lengths here, until the tensor is changed in place or freed.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from ..errors import InputError

__all__ = ["Lengths", "host_lengths"]


class Lengths(NamedTuple):
    """Lengths of the sequences of a packed batch, their sum and the longest of them."""

    seqlens: tuple[int, ...]
    total: int
    longest: int


class _Known(NamedTuple):
    tensor: ref[Tensor]
    version: int
    lengths: Lengths


_KNOWN: dict[int, _Known] = {}


def host_lengths(name: str, cu_seqlens: Tensor) -> Lengths:
    """The lengths of a ``cu_seqlens``, (batch + 1,) int32 on any device.

    The first call with a tensor on a GPU waits for the device. A tensor made in inference mode has no
    version counter, so it is read at every call.

    Raises:
        InputError: it does not start at 0, decreases, or would have to be read while a CUDA graph is
            being captured.
    """
    key = id(cu_seqlens)
    version = -1 if cu_seqlens.is_inference() else cu_seqlens._version
    known = _KNOWN.get(key)
    if known is not None and known.version == version and known.tensor() is cu_seqlens:
        return known.lengths
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        raise InputError(
            f"{name} on {cu_seqlens.device} cannot be read while a CUDA graph is captured: make the same "
            "call once before the capture, with the same tensor"
        )
    lengths = _lengths(name, cu_seqlens.tolist())
    if version >= 0:
        _KNOWN[key] = _Known(ref(cu_seqlens, lambda _: _KNOWN.pop(key, None)), version, lengths)
    return lengths


def _lengths(name: str, ends: list[int]) -> Lengths:
    if ends[0] != 0:
        raise InputError(f"{name} must start at 0, got {ends[0]}")
    seqlens = tuple(end - start for start, end in pairwise(ends))
    if min(seqlens) < 0:
        at = next(i for i, length in enumerate(seqlens) if length < 0)
        raise InputError(f"{name} must not decrease, got {ends[at]}, {ends[at + 1]} at {at}, {at + 1}")
    return Lengths(seqlens, ends[-1], max(seqlens))

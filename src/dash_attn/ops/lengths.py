"""Sequence lengths of packed batches on the host, read once from each ``cu_seqlens``.

A plan is made from lengths, so they must be known on the host. All layers of a model usually share one
``cu_seqlens`` tensor: where it is on a GPU the first one to use it pays for the copy, the others and the
backward find the lengths here, until the tensor is changed in place or freed.
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
    """What was read of a tensor.

    Attributes:
        copy: what it held, on its device. ``same`` and ``all_same`` are where comparisons with it are put.
        stream: the CUDA stream that this memory belongs to.
    """

    tensor: ref[Tensor]
    version: int
    lengths: Lengths
    copy: Tensor
    same: Tensor
    all_same: Tensor
    stream: int


_KNOWN: dict[int, _Known] = {}

_CAPTURED: dict[int, _Known] = {}
"""What CUDA graphs read and write when they are replayed; never freed: nobody says when a graph is gone."""


def host_lengths(name: str, cu_seqlens: Tensor, *, check: bool = True) -> Lengths:
    """The lengths of a ``cu_seqlens``, (batch + 1,) int32 on any device.

    On the CPU it is read at every call. On a GPU the first call with a tensor waits for the device; later
    ones do not. A write that PyTorch does not count (by a collective, another library's kernel, ``.data``)
    cannot be seen without waiting, so with ``check`` the device compares what it holds with what was read:
    if it differs, the process ends with a device-side assertion. A tensor made in inference mode has no
    version counter and is read at every call.

    Raises:
        InputError: it does not start at 0, decreases, or would have to be read while a CUDA graph is
            being captured.
    """
    if not cu_seqlens.is_cuda:
        return _lengths(name, cu_seqlens.tolist())
    key = id(cu_seqlens)
    version = -1 if cu_seqlens.is_inference() else cu_seqlens._version
    known = _KNOWN.get(key)
    if known is not None and known.version == version and known.tensor() is cu_seqlens:
        if check:
            _assert_unchanged(name, cu_seqlens, known)
        return known.lengths
    if torch.cuda.is_current_stream_capturing():
        raise InputError(
            f"{name} on {cu_seqlens.device} cannot be read while a CUDA graph is captured: make the same "
            "call once before the capture, with the same tensor"
        )
    copy = cu_seqlens.clone()
    lengths = _lengths(name, copy.tolist())
    if version >= 0:
        tensor = ref(cu_seqlens, lambda _: _KNOWN.pop(key, None))
        stream = torch._C._cuda_getCurrentRawStream(copy.device.index)
        with torch.inference_mode(False):  # or nobody could write to them outside of it
            same = torch.empty(copy.shape, dtype=torch.bool, device=copy.device)
            _KNOWN[key] = _Known(tensor, version, lengths, copy, same, same.new_empty(()), stream)
    return lengths


def _assert_unchanged(name: str, cu_seqlens: Tensor, known: _Known) -> None:
    index = known.copy.device.index
    if torch.cuda.is_current_stream_capturing():
        _CAPTURED[id(known)] = known
    elif torch._C._cuda_getCurrentRawStream(index) != known.stream:
        for x in (known.copy, known.same, known.all_same):
            x.record_stream(torch.cuda.current_stream(index))  # the tensor may go while the stream reads
    torch.eq(cu_seqlens, known.copy, out=known.same)
    torch.all(known.same, out=known.all_same)
    torch._assert_async(
        known.all_same,
        f"{name} was changed without PyTorch's knowledge after its lengths were read; pass a new tensor",
    )


def _lengths(name: str, ends: list[int]) -> Lengths:
    if ends[0] != 0:
        raise InputError(f"{name} must start at 0, got {ends[0]}")
    seqlens = tuple(end - start for start, end in pairwise(ends))
    if min(seqlens) < 0:
        at = next(i for i, length in enumerate(seqlens) if length < 0)
        raise InputError(f"{name} must not decrease, got {ends[at]}, {ends[at + 1]} at {at}, {at + 1}")
    return Lengths(seqlens, ends[-1], max(seqlens))

"""Small tensors on a GPU whose values the host must know, each read once.

Reading one waits for the device. All layers of a model usually share such a tensor: the first one to use it
pays for the copy, the others and the backward find here what was made of it, until the tensor is changed in
place or freed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor

from ..errors import InputError

__all__ = ["HostReads"]

T = TypeVar("T")


class _Copy(NamedTuple):
    """What a tensor held, on its device. ``same`` and ``all_same`` are where comparisons with it are put.

    ``stream``: the CUDA stream that this memory belongs to.
    """

    held: Tensor
    same: Tensor
    all_same: Tensor
    stream: int


_CAPTURED: dict[int, _Copy] = {}
"""What CUDA graphs read and write when they are replayed; never freed: nobody says when a graph is gone."""


class HostReads(Generic[T]):
    """What ``make(name, tensor)`` makes of tensors; ``make`` may read the tensor, and may refuse it."""

    def __init__(self, make: Callable[[str, Tensor], T]) -> None:
        self._make = make
        self._known: dict[int, tuple[ref[Tensor], int, T, _Copy]] = {}

    def of(self, name: str, tensor: Tensor, *, check: bool = True) -> T:
        """What ``make`` makes of a tensor on any device.

        On the CPU it is read at every call. On a GPU the first call with a tensor waits for the device, later
        ones do not. A write that PyTorch does not count (by a collective, another library's kernel,
        ``.data``) cannot be seen without waiting. So with ``check`` the device compares what the tensor holds
        with what was read; if it differs, the process ends with a device-side assertion. A tensor made in
        inference mode has no version counter and is read at every call.

        Raises:
            InputError: it would have to be read while a CUDA graph is being captured.
        """
        if not tensor.is_cuda:
            return self._make(name, tensor)
        key = id(tensor)
        version = -1 if tensor.is_inference() else tensor._version
        known = self._known.get(key)
        if known is not None and known[1] == version and known[0]() is tensor:
            if check:
                _assert_unchanged(name, tensor, known[3])
            return known[2]
        if torch.cuda.is_current_stream_capturing():
            what = "make the same call once before the capture, with the same tensor"
            if version < 0:  # nobody could see that its numbers change
                what = "it was made in inference mode: make it outside, or give it on the CPU"
            raise InputError(
                f"{name} on {tensor.device} cannot be read while a CUDA graph is captured: {what}"
            )
        held = tensor.clone()
        made = self._make(name, held)
        if version >= 0:
            stream = torch._C._cuda_getCurrentRawStream(held.device.index)
            with torch.inference_mode(False):  # or nobody could write to them outside of it
                same = torch.empty(held.shape, dtype=torch.bool, device=held.device)
                copy = _Copy(held, same, same.new_empty(()), stream)
            self._known[key] = ref(tensor, lambda _: self._known.pop(key, None)), version, made, copy
        return made


def _assert_unchanged(name: str, tensor: Tensor, copy: _Copy) -> None:
    index = copy.held.device.index
    if torch.cuda.is_current_stream_capturing():
        _CAPTURED[id(copy)] = copy
    elif torch._C._cuda_getCurrentRawStream(index) != copy.stream:
        for x in (copy.held, copy.same, copy.all_same):
            x.record_stream(torch.cuda.current_stream(index))  # the tensor may go while the stream reads
    torch.eq(tensor, copy.held, out=copy.same)
    torch.all(copy.same, out=copy.all_same)
    torch._assert_async(
        copy.all_same,
        f"{name} was changed without PyTorch's knowledge after it was read; pass a new tensor",
    )

"""Arrays of the host on a GPU, copied there once and without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import InputError

__all__ = ["Upload"]

_LINE = 32  # words of 128 bytes: where buffers that the copy engine reads may begin
_CAPTURED: set[Upload] = set()
"""What CUDA graphs read when they are replayed; never freed, for nobody says when a graph is gone."""


class Upload:
    """int32 arrays on a device, copied there on the current stream. Nobody waits for the copy on the host.

    Raises:
        InputError: a CUDA graph is being captured, which would keep the copy and not its source.
    """

    def __init__(self, what: object, arrays: Sequence[NDArray[Any]], device: torch.device) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise InputError(f"{what} is not on {device} yet: make the same call once before capturing it")
        sizes = [-(-len(x) // _LINE) * _LINE for x in arrays]
        staging = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=True)
        words, start = staging.numpy(), 0
        for x, size in zip(arrays, sizes):
            words[start : start + len(x)] = x
            start += size
        whole = staging.to(device, non_blocking=True)
        stream = torch.cuda.current_stream(device)
        self._what, self._whole, self._stream = what, whole, stream.cuda_stream
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._ready.record(stream)
        self._done = False
        self.arrays = [part[: len(x)] for part, x in zip(whole.split_with_sizes(sizes), arrays)]

    def use(self) -> list[Tensor]:
        """The arrays, for work that is next on the current stream.

        Raises:
            InputError: a CUDA graph is being captured and the copy is not done.
        """
        if torch.cuda.is_current_stream_capturing():
            if not self._is_done():
                raise InputError(f"{self._what} is still on its way: synchronize before the capture")
            _CAPTURED.add(self)
            return self.arrays
        stream = torch.cuda.current_stream(self._whole.device)
        if stream.cuda_stream != self._stream:
            if not self._is_done():
                stream.wait_event(self._ready)
            self._whole.record_stream(stream)
        return self.arrays

    def _is_done(self) -> bool:
        self._done = self._done or bool(self._ready.query())  # type: ignore[no-untyped-call]
        return self._done

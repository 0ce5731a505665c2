"""Launches of which several blocks must be resident together take turns on a GPU.

Blocks of a ring wait for one another. Other kernels end and give their SMs back, but two rings that have
half of the SMs each may both need more than half: streams of different priorities get SMs in such an
order. So a ring begins when the one before it, on whatever stream, is done. (A cooperative launch, all
blocks or none, would also wait for every kernel that keeps a single SM, such as a collective of NCCL.)
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["in_turn"]


@dataclass
class _Last:
    """The last launch of this kind on a device."""

    stream: torch.cuda.Stream
    done: torch.cuda.Event


_LOCKS: dict[torch.device, threading.Lock] = {}
"""One per device: a launch waits while its GPU's queue is full, and must not keep other GPUs waiting."""
_LAST: dict[torch.device, _Last] = {}


class in_turn:
    """Launch on the current stream of the current device, behind the last launch of this kind in the process.

    A launch that is captured in a CUDA graph takes no turns: graphs with rings must not be replayed side by
    side, or beside calls with rings, on streams of different priorities.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, _LOCKS.setdefault(device, threading.Lock())
        self._mine: _Last | None = None

    def __enter__(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        self._lock.acquire()
        try:
            self._mine = self._take()
        except BaseException:
            self._lock.release()
            raise

    def _take(self) -> _Last:
        stream, last = torch.cuda.current_stream(self._device), _LAST.get(self._device)
        if last is None or last.stream != stream:
            if last is not None:
                stream.wait_event(last.done)
            last = _LAST[self._device] = _Last(stream, torch.cuda.Event())  # type: ignore[no-untyped-call]
        return last

    def __exit__(self, *_: Any) -> None:
        if self._mine is not None:
            try:  # also after a failed launch: this stream has waited for the one before
                self._mine.done.record(self._mine.stream)
            finally:
                self._lock.release()

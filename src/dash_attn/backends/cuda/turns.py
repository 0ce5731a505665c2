"""Launches of which several blocks must be resident together take turns on a GPU.

Blocks of a ring wait for one another. Other kernels end and give their SMs back, but two rings that have
half of the SMs each may both need more than half: streams of different priorities get SMs in such an
order. So a ring begins when the one before it, on whatever stream, is done. (A cooperative launch, all
blocks or none, would also wait for every kernel that keeps a single SM, such as a collective of NCCL.)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

__all__ = ["in_turn"]


@dataclass
class _Turn:
    stream: int
    done: torch.cuda.Event


_LOCK = threading.Lock()
_LAST: dict[torch.device, _Turn] = {}


@contextmanager
def in_turn(device: torch.device) -> Iterator[None]:
    """Launch on the current stream of the current device, behind the last launch of this kind in the process.

    A launch that is captured in a CUDA graph takes no turns: graphs with rings must not be replayed side by
    side on streams of different priorities.
    """
    if torch.cuda.is_current_stream_capturing():
        yield
        return
    stream = torch.cuda.current_stream(device)
    with _LOCK:
        turn = _LAST.get(device)
        if turn is None or turn.stream != stream.cuda_stream:
            if turn is not None:
                stream.wait_event(turn.done)
            turn = _LAST[device] = _Turn(stream.cuda_stream, torch.cuda.Event())  # type: ignore[no-untyped-call]
        try:
            yield
        finally:  # also after a failed launch: this stream has waited for the one before
            turn.done.record(stream)

"""What a GPU reads: arrays of the host, copied once and without waiting, and tensors for its copy engine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import InputError, UnavailableError

__all__ = ["Upload", "constant", "loadable"]

_LINE = 32  # words of 128 bytes: where buffers that the copy engine reads may begin
_GRAPHS_OF_PYTORCH = "torch._inductor.cudagraph_trees"
_ANOTHER_THREAD = ThreadPoolExecutor(1, "dash-attn-upload")
"""Where that module is, a first call may be one of ``torch.compile(mode="reduce-overhead")``. What its thread
allocates belongs to a graph's memory and must not outlive the call; what another one does, does not."""
_CAPTURED: set[Upload] = set()
"""What CUDA graphs read when they are replayed; never freed, for nobody says when a graph is gone."""

_MOST_CONSTANTS = 256
_CONSTANTS: dict[tuple[bytes, torch.device], Upload] = {}


class Upload:
    """int32 arrays on a device, copied there on the current stream. Nobody waits for the copy on the host.

    Attributes:
        arrays: the arrays there; :meth:`use` says when they may be read.

    Raises:
        InputError: a CUDA graph is being captured, which would keep the copy and not its source.
    """

    def __init__(self, what: object, arrays: Sequence[NDArray[Any]], device: torch.device) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise InputError(
                f"{what} is not on {device} yet: make the same call once before capturing it, with fewer "
                "than 64 others of other lengths in between"
            )
        if _GRAPHS_OF_PYTORCH in sys.modules:
            copied = _ANOTHER_THREAD.submit(_copied, arrays, device).result()
        else:
            copied = _copied(arrays, device)
        self._whole, self.arrays, self._stream, self._ready = copied
        self._device, self._done = self._whole.device.index, False

    def use(self) -> list[Tensor]:
        """The arrays, for work that is next on the current stream."""
        if torch.cuda.is_current_stream_capturing():
            if not self._done:
                _finish_while_capturing(self._ready)
                self._done = True
            _CAPTURED.add(self)
        elif torch._C._cuda_getCurrentRawStream(self._device) != self._stream:
            stream = torch.cuda.current_stream(self._device)
            if not self._done:
                stream.wait_event(self._ready)
            self._whole.record_stream(stream)
        return self.arrays

    def finish(self) -> None:
        """Wait on the host until the arrays are there. Then no stream and no capture has to."""
        self._ready.synchronize()
        self._done = True


def _copied(
    arrays: Sequence[NDArray[Any]], device: torch.device
) -> tuple[Tensor, list[Tensor], int, torch.cuda.Event]:
    """One buffer on the device, the arrays in it, the stream that copies them, and when it is done."""
    sizes = [size for x in arrays for size in (len(x), -len(x) % _LINE)]
    sizes[-1] = 0  # nothing stands behind the last one
    staging = torch.empty(sum(sizes), dtype=torch.int32, device="cpu", pin_memory=True)
    words, start = staging.numpy(), 0
    for x, size, padding in zip(arrays, sizes[::2], sizes[1::2]):
        words[start : start + size] = x
        start += size + padding
    whole = staging.to(device, non_blocking=True)
    stream, ready = torch.cuda.current_stream(device), torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record(stream)
    parts = list(whole.split_with_sizes(sizes)[::2]) if len(arrays) > 1 else [whole]
    return whole, parts, stream.cuda_stream, ready


def _finish_while_capturing(event: torch.cuda.Event) -> None:
    """Wait on the host for an event from before the capture.

    A graph reads the arrays when it is replayed, on whatever stream, so the copy must be done by then. CUDA
    forbids waiting during a capture unless the thread says that it knows what it does.
    """
    try:
        driver = import_module("cuda.bindings.driver")
    except ImportError as error:
        raise UnavailableError(
            f"capturing a call in a CUDA graph needs a package that is not installed ({error}): pip install "
            "cuda-bindings"
        ) from error
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    _, before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    try:
        event.synchronize()
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)


def constant(words: NDArray[np.int32], device: torch.device) -> Tensor | None:
    """A constant on a device, for work that is next on the current stream. Its first call waits for the copy.

    None where a CUDA graph is being captured and no call before it had this constant.
    """
    key = words.tobytes(), device
    found = _CONSTANTS.get(key)
    if found is None:
        if torch.cuda.is_current_stream_capturing():
            return None
        if len(_CONSTANTS) >= _MOST_CONSTANTS:
            _CONSTANTS.clear()
        with torch.inference_mode(False):
            found = Upload("a constant", [words], device)
        found.finish()
        _CONSTANTS[key] = found
    return found.use()[0]


def loadable(x: Tensor) -> Tensor:
    """x itself if the copy engine can read it: last dimension contiguous, rows and base 16-byte aligned."""
    if x.is_neg():
        x = x.resolve_neg()
    if x.data_ptr() % 16 == 0 and _are_loadable(x.stride(), x.element_size()):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@lru_cache(1024)
def _are_loadable(strides: tuple[int, ...], element_size: int) -> bool:
    """Whether rows with such strides begin at multiples of 16 bytes, if the first one does."""
    *others, last = strides
    unit = 16 // element_size
    return last == 1 and all(s % unit == 0 and s > 0 for s in others)

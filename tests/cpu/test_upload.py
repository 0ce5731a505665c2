"""Arrays on their way to a device, with CUDA's part faked."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dash_attn.backends.cuda import upload
from dash_attn.backends.cuda.upload import Upload
from dash_attn.errors import InputError


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Where copies were made."""
    found: list[threading.Thread] = []
    event = SimpleNamespace(
        record=lambda stream: found.append(threading.current_thread()), synchronize=lambda: None
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=3))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory, **how: empty(*a, **how))  # needs a GPU
    monkeypatch.delitem(sys.modules, upload._GRAPHS_OF_PYTORCH, raising=False)
    return found


@pytest.mark.parametrize("lengths", [(5,), (32, 1), (33, 64, 2)])
def test_arrays_arrive_and_begin_at_lines(threads: list[threading.Thread], lengths: tuple[int, ...]) -> None:
    arrays = [np.arange(n, dtype=np.int64) + 100 * n for n in lengths]
    there = Upload("numbers", arrays, torch.device("cpu")).arrays
    assert [x.tolist() for x in there] == [x.tolist() for x in arrays]
    assert all(x.storage_offset() % 32 == 0 and x.dtype is torch.int32 for x in there)
    assert threads == [threading.current_thread()]


def test_where_pytorch_makes_graphs_another_thread_allocates(
    monkeypatch: pytest.MonkeyPatch, threads: list[threading.Thread]
) -> None:
    """PyTorch gives what the thread of a compiled function allocates to the memory of a graph."""
    monkeypatch.setitem(sys.modules, upload._GRAPHS_OF_PYTORCH, SimpleNamespace())
    there = Upload("numbers", [np.arange(7)], torch.device("cpu")).arrays
    assert there[0].tolist() == list(range(7))
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


def test_a_capture_is_told_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, threads: list[threading.Thread]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(InputError, match="numbers is not on cpu yet: make the same call once before captur"):
        Upload("numbers", [np.arange(7)], torch.device("cpu"))
    assert not threads


def test_constants_are_kept_unless_they_are_captured(
    monkeypatch: pytest.MonkeyPatch, threads: list[threading.Thread]
) -> None:
    """They know their values and dtype by bytes; a capture takes what is there and leaves nothing."""
    monkeypatch.setattr(upload, "_CONSTANTS", {})
    monkeypatch.setattr(upload, "_MOST_CONSTANTS", 2)
    monkeypatch.setattr(Upload, "use", lambda self: self.arrays)
    cpu = torch.device("cpu")

    def constant(*words: int) -> torch.Tensor | None:
        return upload.constant(np.array(words, np.int32), cpu)

    first = constant(0, 1)
    assert first is not None
    assert first.tolist() == [0, 1]
    assert constant(0, 1) is first
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert constant(0, 1) is first
    assert constant(0, 1, 2) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with torch.inference_mode():
        made = constant(0, 1, 2)
    assert made is not None
    assert not made.is_inference()
    assert len(threads) == 2
    assert all(kept._done for kept in upload._CONSTANTS.values()), "a capture would have to wait"
    constant(5)
    assert len(upload._CONSTANTS) == 1

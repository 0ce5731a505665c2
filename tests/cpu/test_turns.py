"""Rings take turns on a device: what is waited for, in which order, with CUDA's part faked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from dash_attn.backends.cuda import turns

DEVICE = torch.device("cuda", 0)


class Gpu:
    """Streams and events that write down what happens."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.streams: dict[int, SimpleNamespace] = {}
        self.capturing, self.events, self.current = False, 0, 1

    def stream(self, _device: object = None) -> SimpleNamespace:
        number = self.current
        wait = lambda event: self.log.append(f"{number} waits for {event.name}")  # noqa: E731
        if number not in self.streams:
            self.streams[number] = SimpleNamespace(cuda_stream=number, wait_event=wait)
        return self.streams[number]

    def event(self) -> SimpleNamespace:
        self.events += 1
        name = f"event {self.events}"
        record = lambda stream: self.log.append(f"{stream.cuda_stream} records {name}")  # noqa: E731
        return SimpleNamespace(name=name, record=record)

    def launch(self, stream: int, device: torch.device = DEVICE) -> None:
        self.current = stream
        with turns.in_turn(device):
            self.log.append(f"{stream} launches")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    fake = Gpu()
    monkeypatch.setattr(turns, "_LAST", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    return fake


def test_another_stream_waits_for_the_last_launch(gpu: Gpu) -> None:
    for stream in (1, 1, 2, 1):
        gpu.launch(stream)
    assert gpu.log == [
        "1 launches", "1 records event 1",
        "1 launches", "1 records event 1",
        "2 waits for event 1", "2 launches", "2 records event 2",
        "1 waits for event 2", "1 launches", "1 records event 3",
    ]  # fmt: skip


def test_devices_do_not_wait_for_one_another(gpu: Gpu) -> None:
    gpu.launch(1)
    gpu.launch(2, torch.device("cuda", 1))
    assert not any("waits" in line for line in gpu.log)


def test_a_launch_that_waits_keeps_no_other_device_waiting(gpu: Gpu) -> None:
    """A GPU's queue may be full until another GPU has done what another thread launches there."""
    other = threading.Thread(target=gpu.launch, args=(2, torch.device("cuda", 1)), daemon=True)
    with turns.in_turn(DEVICE):
        other.start()
        other.join(10)
        assert not other.is_alive()


def test_a_captured_launch_takes_no_turn(gpu: Gpu) -> None:
    gpu.launch(1)
    gpu.capturing = True
    gpu.launch(2)
    assert gpu.log[2:] == ["2 launches"]


def test_a_launch_that_fails_lets_the_next_one_go(gpu: Gpu) -> None:
    with pytest.raises(RuntimeError), turns.in_turn(DEVICE):
        raise RuntimeError
    gpu.launch(2)
    assert gpu.log == ["1 records event 1", "2 waits for event 1", "2 launches", "2 records event 2"]

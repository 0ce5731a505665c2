"""How many SMs a launch can count on, asked of a stand-in for the driver."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from dash_attn.backends.cuda import multiprocessors
from dash_attn.backends.cuda.multiprocessors import usable_multiprocessors
from dash_attn.errors import UnavailableError

DEVICE = torch.device("cuda", 0)
NEW_THREAD = 0
OWN = 132
REFUSED = -1


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    known = (multiprocessors._of_current_context, multiprocessors._own_context)
    for cached in known:
        cached.cache_clear()
    yield
    for cached in known:
        cached.cache_clear()


def ask(
    monkeypatch: pytest.MonkeyPatch, *, context: int, green: int = 0, stream: int = 77, old: bool = False
) -> int:
    """The answer where the current context and the stream's green context (0: none) have so many SMs."""

    def share(place: int) -> tuple[int, SimpleNamespace]:
        return (999 if place == REFUSED else 0), SimpleNamespace(sm=SimpleNamespace(smCount=place))

    def green_of(which: int) -> tuple[int, int]:
        assert which == stream != 0, "the default stream makes some drivers fail in a new thread"
        return 0, green

    driver = SimpleNamespace(
        CUdevResourceType=SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1),
        cuDeviceGet=lambda index: (0, index),
        cuDevicePrimaryCtxRetain=lambda index: (0, OWN),
        cuCtxGetCurrent=lambda: (0, context),
        cuCtxGetId=lambda which: (0, 1000 + which),
        cuCtxGetDevResource=lambda place, kind: share(place),
        cuStreamGetGreenCtx=green_of,
        cuGreenCtxGetDevResource=lambda place, kind: share(place),
    )
    monkeypatch.setattr(multiprocessors, "_driver", lambda: None if old else driver)
    monkeypatch.setattr(multiprocessors, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream, raising=False)
    return usable_multiprocessors(DEVICE)


def test_the_whole_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, context=OWN) == 132


@pytest.mark.parametrize("stream", [0, 77])
def test_a_green_context_that_is_current(monkeypatch: pytest.MonkeyPatch, stream: int) -> None:
    assert ask(monkeypatch, context=32, stream=stream) == 32
    assert ask(monkeypatch, context=OWN, stream=stream) == 132
    assert ask(monkeypatch, context=32, stream=stream) == 32


def test_a_stream_of_a_green_context(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, context=OWN, green=16) == 16


@pytest.mark.parametrize(("stream", "green", "usable"), [(0, 0, 132), (77, 0, 132), (77, 16, 16)])
def test_a_thread_without_a_context(
    monkeypatch: pytest.MonkeyPatch, stream: int, green: int, usable: int
) -> None:
    assert ask(monkeypatch, context=NEW_THREAD, stream=stream, green=green) == usable


def test_a_driver_from_before_green_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, context=REFUSED, old=True) == 132


def test_a_driver_that_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError, match="does not say which SMs the current stream can use: 999"):
        ask(monkeypatch, context=REFUSED)

"""How many SMs a launch can count on, asked of a stand-in for the driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from dash_attn.backends.cuda import multiprocessors
from dash_attn.backends.cuda.multiprocessors import usable_multiprocessors
from dash_attn.errors import UnavailableError

DEVICE = torch.device("cuda", 0)
NEW_THREAD = 0
REFUSED = -1


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    multiprocessors._of_context.cache_clear()
    yield
    multiprocessors._of_context.cache_clear()


def ask(
    monkeypatch: pytest.MonkeyPatch, *, context: int, green: int = 0, stream: int = 77, old: bool = False
) -> int:
    """The answer where the current context and the stream's green context (0: none) have so many SMs."""

    def share(place: int) -> tuple[int, SimpleNamespace]:
        return (999 if place == REFUSED else 0), SimpleNamespace(sm=SimpleNamespace(smCount=place))

    def green_of(which: int) -> tuple[int, int]:
        assert which == stream
        return (201 if context == NEW_THREAD and not stream else 0), green

    driver = SimpleNamespace(
        CUdevResourceType=SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1),
        cuCtxGetCurrent=lambda: (0, context),
        cuCtxGetId=lambda which: (0, 1000 + which),
        cuCtxGetDevResource=lambda place, kind: share(place),
        cuStreamGetGreenCtx=green_of,
        cuGreenCtxGetDevResource=lambda place, kind: share(place),
    )
    monkeypatch.setattr(multiprocessors, "_driver", lambda: None if old else driver)
    monkeypatch.setattr(multiprocessors, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=stream))
    return usable_multiprocessors(DEVICE)


def test_the_whole_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, context=132) == 132


def test_a_green_context_that_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, context=32) == 32
    assert ask(monkeypatch, context=132) == 132
    assert ask(monkeypatch, context=32) == 32


def test_a_stream_of_a_green_context(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, context=132, green=16) == 16


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

"""Kernels that no GPU has run yet are not chosen, unless the environment asks for them by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dash_attn.backends.sm90 import untried
from dash_attn.backends.sm90.tiles import TILES, Kernel, kernel_of
from dash_attn.errors import InputError


@pytest.fixture(autouse=True)
def _two_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(untried, "UNTRIED", ("head_dim_64", "head_dim_96", "other"))
    untried._asked.cache_clear()
    yield
    untried._asked.cache_clear()


@pytest.mark.parametrize(
    ("asked", "head_dim"), [("", 128), ("other", 128), ("head_dim_64", 64), ("head_dim_96", 96), ("all", 64)]
)
def test_the_environment_asks_by_name(monkeypatch: pytest.MonkeyPatch, asked: str, head_dim: int) -> None:
    monkeypatch.setenv("DASH_ATTN_UNTRIED", asked)
    assert list(TILES)[:3] == [(64, 64), (96, 96), (128, 128)]
    assert kernel_of(64, 64) == Kernel(head_dim, head_dim, padded=head_dim != 64)
    assert untried.runs("what a GPU has run")


@pytest.mark.parametrize("asked", ["1", "head_dim_64,none", "All"])
def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv("DASH_ATTN_UNTRIED", asked)
    wrong = asked.split(",")[-1]
    with pytest.raises(InputError, match=f"must be of all, head_dim_64, head_dim_96, other; got {wrong}"):
        untried.runs("other")

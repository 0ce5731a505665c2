"""Problems of the tests of the Triton kernels, in its interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from dash_attn.backends.triton import split
from dash_attn.backends.triton.backend import BACKEND
from dash_attn.problem import Problem
from dash_attn.testing import assert_same_bytes

NAMES = ("out", "lse", "dq", "dk", "dv")
GPU_BOUND = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 5e-6}
"""Of errors on a GPU."""


def triton_problem(
    *lengths: int | tuple[int, int], head_dim: int, head_dim_v: int = -1, **shape: Any
) -> Problem:
    """A packed problem with the tiles of the Triton kernels."""
    tile_m, tile_n = BACKEND.tiles(head_dim, head_dim_v)
    return Problem.varlen(
        lengths, head_dim=head_dim, head_dim_v=head_dim_v, tile_m=tile_m, tile_n=tile_n, **shape
    )


Results = tuple[Tensor, Tensor]


def noted_folds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many segments per row there are in every launch of the forward that is split, from now on."""
    found: list[int] = []
    fold = split.Launch._fold

    def noted(self: split.Launch, programs: int, parts: int, *rest: Any) -> None:
        found.append(parts)
        fold(self, programs, parts, *rest)

    monkeypatch.setattr(split.Launch, "_fold", noted)
    return found


def with_and_without_a_split(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Results]) -> Results:
    """out and lse of a call, which has the same bytes when its one launch is split, as if SMs were many."""
    with monkeypatch.context() as patch:
        folds = noted_folds(patch)
        patch.setattr(split, "processors", lambda device: 0)
        whole = call()
        assert not folds
        patch.setattr(split, "processors", lambda device: 10**6)
        for name, found, wanted in zip(("out", "lse"), call(), whole):
            assert_same_bytes(found, wanted, name)
        assert len(folds) == 1
        assert folds[0] > 1
    return whole


def fold_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on segments are folded in descending order."""
    fold = split.Launch._fold

    def backwards(
        self: split.Launch, programs: int, parts: int, sums: Tensor, stats: Tensor, *rest: Any
    ) -> None:
        whole = sums._base
        assert whole is not None
        whole.copy_(whole.flip(-2))
        stats.copy_(stats.flip(-2))
        fold(self, programs, parts, sums, stats, *rest)

    monkeypatch.setattr(split.Launch, "_fold", backwards)

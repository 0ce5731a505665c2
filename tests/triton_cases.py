"""Problems of the tests of the Triton kernels, in its interpreter and on a GPU."""

from __future__ import annotations

from typing import Any

from dash_attn.backends.triton.backend import BACKEND
from dash_attn.problem import Problem


def triton_problem(*lengths: int | tuple[int, int], head_dim: int, **shape: Any) -> Problem:
    """A packed problem with the tiles of the Triton kernels."""
    tile_m, tile_n = BACKEND.tiles(head_dim)
    return Problem.varlen(lengths, head_dim=head_dim, tile_m=tile_m, tile_n=tile_n, **shape)

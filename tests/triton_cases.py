"""Problems of the tests of the Triton kernels, in its interpreter and on a GPU."""

from __future__ import annotations

from typing import Any

from dash_attn.backends.triton.backend import BACKEND
from dash_attn.problem import Problem


def triton_problem(
    *lengths: int | tuple[int, int], head_dim: int, head_dim_v: int = -1, **shape: Any
) -> Problem:
    """A packed problem with the tiles of the Triton kernels."""
    tile_m, tile_n = BACKEND.tiles(head_dim, head_dim_v)
    return Problem.varlen(
        lengths, head_dim=head_dim, head_dim_v=head_dim_v, tile_m=tile_m, tile_n=tile_n, **shape
    )

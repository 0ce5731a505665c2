"""Random problems and the plans that policies make of them, shared by the property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from dash_attn.errors import UnsupportedMaskError
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import (
    COMMON_PLACEMENTS,
    FA3,
    SPT,
    ByLength,
    Descending,
    Plan,
    Shift,
    SymmetricShift,
    build_plan,
)

ALL_POLICIES = (
    FA3(),
    Descending(),
    Descending(by_head_from=0),
    Descending(by_head_from=40),
    SPT(),
    Shift(),
    Shift(ring=2),
    Shift(ring=3, stride=1),
    SymmetricShift(),
    ByLength(long_from=30),
)

sides = st.none() | st.integers(0, 60)
masks = st.just(Mask.full()) | st.just(Mask.causal()) | st.builds(Mask.window, sides, sides)
tiles = st.sampled_from([(8, 8), (8, 16), (16, 8), (4, 16), (6, 10)])
sequences = st.lists(
    st.tuples(st.integers(0, 90), st.integers(0, 90)) | st.integers(1, 90).map(lambda n: (n, n)),
    min_size=1,
    max_size=3,
)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    kv_heads = draw(st.integers(1, 2))
    tile_m, tile_n = draw(tiles)
    return Problem(
        tuple(draw(sequences)),
        kv_heads * draw(st.integers(1, 5)),
        kv_heads,
        16,
        draw(masks),
        "float32",
        tile_m,
        tile_n,
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A plan of a policy that covers the problem (FA3 covers all)."""
    problem, placement = draw(problems()), draw(st.sampled_from(COMMON_PLACEMENTS))
    groups = draw(st.none() | st.integers(1, problem.group))
    try:
        return build_plan(problem, draw(st.sampled_from(ALL_POLICIES)), placement, head_groups=groups)
    except UnsupportedMaskError:
        return build_plan(problem, FA3(), placement, head_groups=groups)

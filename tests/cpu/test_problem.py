"""The problem: masks, tile grids and which values are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from strategies import problems

from dash_attn.errors import ProblemError
from dash_attn.problem import Mask, Problem, SequenceGrid
from dash_attn.schedule import FA3, build_plan


def visible(grid: SequenceGrid) -> np.ndarray:
    """The mask element by element, straight from its definition."""
    i, j = np.arange(grid.seqlen_q)[:, None], np.arange(grid.seqlen_k)[None, :]
    offset = j - (i + grid.seqlen_k - grid.seqlen_q)
    left = -np.inf if grid.mask.left is None else -grid.mask.left
    right = np.inf if grid.mask.right is None else grid.mask.right
    return (offset >= left) & (offset <= right)


@given(problems())
def test_grid_agrees_with_the_mask_element_by_element(problem: Problem) -> None:
    for grid in problem.grids.values():
        seen = visible(grid)
        for q in range(grid.q_tiles):
            for kv in range(grid.kv_tiles):
                block = seen[
                    q * grid.tile_m : (q + 1) * grid.tile_m, kv * grid.tile_n : (kv + 1) * grid.tile_n
                ]
                expected = "whole" if block.all() else "cut" if block.any() else "empty"
                assert grid.cut(kv, q) == expected
                assert (grid.kv_first[q] <= kv <= grid.kv_last[q]) == block.any()
                assert (grid.q_first[kv] <= q <= grid.q_last[kv]) == block.any()
        assert grid.tasks == sum(grid.contributions)
        assert (np.diff(grid.kv_first) >= 0).all()
        assert (np.diff(grid.kv_last) >= 0).all()


@given(problems())
def test_flops_count_visible_elements(problem: Problem) -> None:
    elements = sum(int(visible(problem.grids[pair]).sum()) for pair in problem.sequences)
    assert problem.backward_flops == 10 * problem.head_dim * problem.heads * elements


def test_ragged_rectangular_causal() -> None:
    grid = SequenceGrid(130, 300, 64, 128, Mask.causal())
    assert (grid.q_tiles, grid.kv_tiles) == (3, 3)
    assert grid.kv_last.tolist() == [1, 2, 2]
    assert grid.q_first.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 0}, "heads must be an integer >= 1, got 0"),
        ({"heads": 6, "kv_heads": 4}, r"heads \(6\) must be a multiple of kv_heads \(4\)"),
        ({"batch": 0}, "batch must be an integer >= 1, got 0"),
        ({"seqlen": -1}, "seqlen_q of sequence 0 must be an integer >= 0, got -1"),
        ({"seqlen": 2.5}, "got 2.5"),
        ({"seqlen": 2**31}, "must fit in int32"),
        ({"seqlen": 2**30 + 1}, r"seqlen_q of sequence 0 must be at most 2\*\*30, got 1073741825"),
        ({"seqlen": None}, "give seqlen"),
        ({"head_dim": 0}, "head_dim must be an integer >= 1, got 0"),
        ({"dtype": "int8"}, "dtype must be one of .*, got 'int8'"),
        ({"tile_m": 0, "tile_n": 64}, "tile_m must be an integer >= 1, got 0"),
        ({"heads": True}, "heads must be an integer >= 1, got True"),
        ({"mask": "causal"}, r"mask must be a Mask, such as Mask.causal\(\), got 'causal'"),
    ],
)
def test_bad_values_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        Problem.dense(**{"seqlen": 128, **change})  # type: ignore[arg-type]


def test_a_batch_of_pairs_of_any_kind() -> None:
    assert Problem.varlen([5, (3, 4), [6, 7]], heads=1).sequences == ((5, 5), (3, 4), (6, 7))


@pytest.mark.parametrize("side", [2**30, 2**31 - 1, 2**40])
def test_a_window_longer_than_every_sequence_is_none(side: int) -> None:
    """In int32 arithmetic it would hide the wrong scores."""
    assert Mask.window(side, 0) == Mask.causal()
    assert Mask.window(None, side) == Mask.full()
    assert Mask.window(2**30 - 1, 0) != Mask.causal()


@pytest.mark.parametrize("side", [-1, 1.5, True])
def test_bad_mask_sides(side: float) -> None:
    with pytest.raises(ProblemError, match=f"mask left must be None or an integer >= 0, got {side}"):
        Mask.window(side, 0)  # type: ignore[arg-type]


def test_numpy_integers_make_the_same_problem() -> None:
    """Lengths often come from numpy.diff of cumulative lengths; their type must not reach a fingerprint."""
    plain = Problem.varlen([300, (200, 100)], heads=2, mask=Mask.window(5, 0), tile_m=64, tile_n=64)
    n = np.int64
    mixed = Problem.varlen(
        [n(300), (n(200), np.int32(100))],
        heads=n(2),
        mask=Mask.window(n(5), n(0)),
        tile_m=n(64),
        tile_n=n(64),
    )
    assert build_plan(plain, FA3()).fingerprint == build_plan(mixed, FA3()).fingerprint
    assert plain == mixed


@pytest.mark.parametrize("pair", [(1, 2, 3), (5,), 7.5])
def test_bad_sequences(pair: object) -> None:
    with pytest.raises(ProblemError, match=r"sequence 0"):
        Problem.varlen([pair], heads=1)  # type: ignore[list-item]


def test_no_sequences() -> None:
    with pytest.raises(ProblemError, match="at least one sequence"):
        Problem.varlen([], heads=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": "512"}, "head_dim must be an integer >= 1, got '512'"),
        ({"head_dim": None}, "head_dim must be an integer >= 1, got None"),
        ({"head_dim_v": 2.0}, "head_dim_v must be an integer >= 1, got 2.0"),
        ({"sequences": np.array([[8, 8]])}, r"sequences must be pairs \(seqlen_q, seqlen_k\), got array"),
        ({"sequences": 5}, r"sequences must be pairs \(seqlen_q, seqlen_k\), got 5"),
    ],
)
def test_what_is_no_problem_is_named(change: dict[str, object], message: str) -> None:
    """Also where tiles follow from head dims."""
    given = {"sequences": ((8, 8),), "heads": 1, "kv_heads": 1, "head_dim": 8} | change
    with pytest.raises(ProblemError, match=message):
        Problem(**given)  # type: ignore[arg-type]

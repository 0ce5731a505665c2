"""Unusual numbers on the CPU executor; ``gpu/test_gpu_numerics.py`` is the same for the kernels."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from test_fuzz import executor, spoiled

from dash_attn.backends.cpu import oracle_backward, oracle_forward
from dash_attn.problem import Mask
from numerics import MASKS, POISONS, UNUSUAL, assert_as_plain_attention, assert_shows, errors, problem

EVERY_MASK = pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


@pytest.mark.parametrize("name", UNUSUAL)
@EVERY_MASK
@DTYPES
def test_unusual_inputs_have_the_errors_of_plain_attention(dtype, mask, name) -> None:
    assert_as_plain_attention(name, problem(mask, 64, dtype), executor())


@pytest.mark.parametrize(("name", "row", "value"), POISONS)
@EVERY_MASK
def test_what_is_not_finite_shows_where_it_must_and_nowhere_else(mask, name, row, value) -> None:
    assert_shows(problem(mask, 64, "bfloat16", 150, 420), name, value, row, executor())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["q", "dout"])
def test_what_is_not_finite_in_a_row_that_sees_nothing(name, value) -> None:
    """Rows 0 to 99 see no key: they may spoil what shares a tile with them, and need not."""
    assert_shows(problem(Mask.causal(), 64, "bfloat16", 250, 150), name, value, 20, executor())


# The checks can fail


def hide(grads) -> None:
    for grad in grads:
        grad.nan_to_num_(0.0, 0.0, 0.0)


def spread(grads) -> None:
    grads[0][..., -1, 1, :] = torch.nan


@pytest.mark.parametrize(("spoil", "message"), [(hide, "dq hides nan in q"), (spread, "dq spreads nan in q")])
def test_hiding_and_spreading_are_found(spoil, message) -> None:
    backend = spoiled(lambda plan, x, how: True, spoil)
    with pytest.raises(AssertionError, match=message):
        assert_shows(problem(Mask.full(), 64, "bfloat16", 150, 170), "q", float("nan"), 77, backend)


def test_what_the_kernels_may_spread_is_limited_to_tiles() -> None:
    """A NaN log-sum-exp may spoil dV in the tiles of its row, not in the kv tile of 128 keys before them."""
    window = MASKS[2]
    backend = spoiled(lambda plan, x, how: x.lse.isnan().any(), lambda grads: grads[2].fill_(torch.nan))
    with pytest.raises(AssertionError, match="dv spreads nan in q: 8192 places"):
        assert_shows(problem(window, 64, "bfloat16", 150, 420), "q", float("nan"), 77, backend, hides_p=False)


@pytest.mark.parametrize("name", UNUSUAL)
def test_the_allowed_error_is_not_a_bound_that_anything_passes(name) -> None:
    """Without dq, dk or dv the error is too large, unless there is next to nothing to miss."""
    p = problem(Mask.causal(), 64, "float16")
    zeroed = spoiled(lambda plan, x, how: True, lambda grads: [grad.zero_() for grad in grads])
    missed = [e > a for e, a in zip(errors(name, p, zeroed)[2].found, errors(name, p, zeroed)[2].allowed)]
    nothing = {"equal_values": (0, 1), "one_hot": (0, 1), "all_rows_equal": (0, 1), "equal_keys": (0,)}
    assert missed == [at not in nothing.get(name, ()) for at in range(3)]


@pytest.mark.parametrize("causal", [False, True])
def test_sampled_rows_of_the_error_growth_are_those_of_the_oracle(causal, monkeypatch) -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "error_growth.py"
    monkeypatch.syspath_prepend(path.parent)
    spec = spec_from_file_location("error_growth", path)
    growth = module_from_spec(spec)
    spec.loader.exec_module(growth)
    monkeypatch.setattr(growth, "SLICE", 1000)  # several slices
    x = growth.Inputs(*torch.randn(4, 100, 8, generator=torch.Generator().manual_seed(0)))
    rows = torch.tensor([99, 0, 7, 50, 51])
    found = growth.exact_rows(x, causal, 0.3, rows)
    dout, q, k, v = (t[None, :, None] for t in x)
    mask = Mask.causal() if causal else Mask.full()
    out, _ = oracle_forward(q, k, v, mask, 0.3)
    for mine, exact in zip(found, (out, *oracle_backward(dout, q, k, v, mask, 0.3))):
        torch.testing.assert_close(mine, exact[0, rows, 0], atol=1e-14, rtol=1e-12)

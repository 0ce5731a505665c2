"""The example that trains over several processes: the same weights for any number of them, or not."""

from __future__ import annotations

import pytest

from example_runs import weights


@pytest.mark.slow
def test_two_processes_have_the_weights_of_one():
    assert weights(2) == weights(1)


@pytest.mark.slow
def test_four_and_eight_processes_have_the_weights_of_one():
    assert weights(8) == weights(4) == weights(1)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--ring-order", "--fsdp-reductions"])
def test_other_orders_of_sums_have_other_weights(option):
    (one, losses), (two, other) = weights(1, option), weights(2, option)
    assert one != two
    if option == "--ring-order":
        assert losses[0] == other[0]  # the forward is the same


@pytest.mark.slow
def test_numbers_of_processes_that_units_do_not_fit_are_refused():
    with pytest.raises(AssertionError, match="with 3 processes: take 1, 2, 4 or 8"):
        weights(3)

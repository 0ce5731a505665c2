"""Tiny models of many families train on the CPU as with eager attention, and twice to the same bytes."""

from __future__ import annotations

from functools import partial

import pytest

from dash_attn.errors import InputError
from dash_attn.integrations import transformers as dash
from dash_attn.testing import assert_same_bytes, same_bytes

pytest.importorskip("transformers")

from model_cases import CASES, REFUSED, error_of, recorded_backends, same_dropout, train

__all__ = ["same_dropout"]  # a fixture

LENGTH = 40


@pytest.mark.usefixtures("same_dropout")
@pytest.mark.parametrize("name", CASES)
def test_training_is_as_in_eager_and_twice_alike(name, monkeypatch):
    case = CASES[name]
    with recorded_backends(monkeypatch) as ran:
        found = train(case, "dash", LENGTH)
        again = train(case, "dash", LENGTH)
    assert ran == {("cpu", "forward"), ("cpu", "backward")}
    ran.clear()
    expected = train(case, "eager", LENGTH)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert len(set(found.losses)) == len(found.losses)
    assert again.losses == found.losses
    others, seconds = dict(expected.tensors()), dict(again.tensors())
    assert others.keys() == seconds.keys() == dict(found.tensors()).keys()
    for tensor, error in error_of(found, expected).items():
        assert error < 1e-4, (tensor, error)
    for tensor, x in found.tensors():
        assert_same_bytes(x, seconds[tensor], tensor)
    # The control: another attention gives other bytes.
    assert not all(same_bytes(x, others[tensor]) for tensor, x in found.tensors())


def test_t5_is_refused_for_its_bias():
    message = r"position_bias .* \(1, 2, 40, 40\).*: 'dash' attention adds no bias .* T5"
    with pytest.raises(InputError, match=message):
        train(REFUSED, "dash", LENGTH)


def test_another_order_of_sums_ends_in_other_bytes(monkeypatch):
    """The control: order matters to these models, where there are several tiles to add."""
    found = train(CASES["llama"], "dash", 400)
    monkeypatch.setattr(dash, "flash_attn_func", partial(dash.flash_attn_func, policy="fa3"))
    other = dict(train(CASES["llama"], "dash", 400).tensors())
    assert not all(same_bytes(x, other[tensor]) for tensor, x in found.tensors())

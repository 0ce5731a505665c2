"""Tiny models of many families train on a Hopper GPU in bf16 as with eager attention, and twice alike.

``auto`` takes the backend, and Triton is forced. Most of the time goes to compiling kernels, which
``pytest -n 6 tests/gpu/test_gpu_models.py`` does on several cores.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from dash_attn.errors import InputError
from dash_attn.testing import assert_same_bytes, same_bytes

pytest.importorskip("transformers")

from dash_attn.integrations import transformers as dash
from model_cases import (
    CASES,
    REFUSED,
    Trained,
    error_of,
    force,
    recorded_backends,
    same_dropout,
    total_error,
    train,
)

__all__ = ["same_dropout"]  # a fixture

LENGTH = 300
"""Three tiles of keys, so that the order of sums matters."""

on_gpu = partial(train, length=LENGTH, dtype=torch.bfloat16, device="cuda")


@pytest.mark.usefixtures("same_dropout")
@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_training_is_as_in_eager_and_twice_alike(name, backend, monkeypatch):
    case = CASES[name]
    taken = case.backend if backend == "auto" else backend
    with monkeypatch.context() as patch:
        force(patch, backend)
        with recorded_backends(patch) as ran:
            found, again = (on_gpu(case, "dash") for _ in range(2))
    assert ran == {(taken, "forward"), (taken, "backward")}
    assert again.losses == found.losses
    seconds = dict(again.tensors())
    for tensor, x in found.tensors():
        assert_same_bytes(x, seconds[tensor], tensor)
    assert_as_accurate(found, on_gpu(case, "eager"), on_gpu(case, "eager", dtype=torch.float32))


def assert_as_accurate(found: Trained, eager: Trained, exact: Trained) -> None:
    """Errors in bf16 are those of eager attention in bf16. Some gradients are differences of sums that nearly
    cancel, so single ones are compared loosely."""

    def farthest(x: Trained) -> float:
        return max(abs(a - b) / b for a, b in zip(x.losses, exact.losses))

    assert farthest(found) <= 2 * farthest(eager) + 0.01
    assert total_error(found, exact) <= 1.5 * total_error(eager, exact) + 0.005
    errors, theirs = error_of(found, exact), error_of(eager, exact)
    assert errors.keys() == theirs.keys()
    for tensor, error in errors.items():
        assert error <= 3 * theirs[tensor] + 0.03, (tensor, error, theirs[tensor])


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_another_order_of_sums_ends_in_other_bytes(name, monkeypatch):
    """The control: one model of each backend."""
    found = on_gpu(CASES[name], "dash")
    monkeypatch.setattr(dash, "flash_attn_func", partial(dash.flash_attn_func, policy="fa3"))
    other = dict(on_gpu(CASES[name], "dash").tensors())
    assert not all(same_bytes(x, other[tensor]) for tensor, x in found.tensors())


def test_t5_is_refused_for_its_bias():
    with pytest.raises(InputError, match="position_bias .*: 'dash' attention adds no bias .* T5"):
        on_gpu(REFUSED, "dash")

"""Tiny models, ``dash-attn verify`` and random problems of all features by the Triton kernels, interpreted.

``test_triton.py`` starts this file in processes, see ``triton_interpreted.py``. By hand:

    TRITON_INTERPRET=1 .venv/bin/pytest tests/cpu/triton_models.py
"""

from __future__ import annotations

import pytest
import torch

from dash_attn.testing import assert_same_bytes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, in rows that see nothing
]

torch.set_num_threads(1)

pytest.importorskip("transformers")

from model_cases import CASES, drop_alike, error_of, force, recorded_backends, train  # noqa: E402

LENGTH = 20
"""More than the window of 16; ViT has 197 tokens."""


@pytest.mark.parametrize("name", CASES)
def test_models_train_as_in_eager_and_twice_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer, three steps."""
    drop_alike(monkeypatch)
    with monkeypatch.context() as patch:
        force(patch, "triton")
        with recorded_backends(patch) as ran:
            found, again = (train(CASES[name], "dash", LENGTH, layers=1) for _ in range(2))
    assert ran == {("triton", "forward"), ("triton", "backward")}
    assert again.losses == found.losses
    seconds = dict(again.tensors())
    for tensor, x in found.tensors():
        assert_same_bytes(x, seconds[tensor], tensor)
    expected = train(CASES[name], "eager", LENGTH, layers=1)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert len(set(found.losses)) == len(found.losses)
    for tensor, error in error_of(found, expected).items():
        assert error < 1e-4, (tensor, error)

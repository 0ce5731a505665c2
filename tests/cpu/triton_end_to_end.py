"""Tiny models, ``dash-attn verify`` and random problems of all features by the Triton kernels, interpreted.

``test_triton.py`` starts this file in processes, see ``triton_interpreted.py``. By hand:

    TRITON_INTERPRET=1 OPENBLAS_CORETYPE=SANDYBRIDGE .venv/bin/pytest tests/cpu/triton_end_to_end.py
"""

from __future__ import annotations

import json

import pytest
import torch

from dash_attn.testing import assert_same_bytes
from dash_attn.tools.cli import main
from feature_cases import FIRST, Variant, bound_of, drawn, run, shares

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, in rows that see nothing
]

torch.set_num_threads(1)


@pytest.mark.parametrize("features", FIRST, ids=lambda features: "-".join(features) or "plain")
def test_errors_and_bytes_of_random_problems(features: tuple[str, ...]) -> None:
    """Within the bounds of ``test_gpu_features.py``."""
    seed = list(FIRST).index(features)
    dtype, head_dim = (torch.float16, torch.float32)[seed % 2], (8, 24, 40, 72)[seed // 2 % 4]
    one = drawn(features, Variant(head_dim, (head_dim, 16)[seed % 3 == 0], dtype), seed, "cpu", 64)
    found = run(one, "triton")
    for name, share in shares(found, bound_of(one)).items():
        assert share <= 1, (name, share)
    for got, again in zip(found, run(one, "triton")):
        assert_same_bytes(got, again)


def test_verify(capsys: pytest.CaptureFixture[str]) -> None:
    """Every check but that of a CUDA graph. Of three kv tiles, or the control would take a longer shape."""
    line = (
        "--seqlens 300 0 17 --heads 1 --head-dim 16 --head-dim-v 24 --mask causal --dtype float16 --replays 1"
    )
    code = main(["verify", "--device", "cpu", "--backend", "triton", "--json", *line.split()])
    (shape,) = json.loads(capsys.readouterr().out)["shapes"]
    found = {check["name"]: (check["status"], check["detail"]) for check in shape["checks"]}
    assert code == 0, found
    assert found.pop("CUDA graph") == ("skipped", "no GPU")
    assert {status for status, _ in found.values()} == {"passed"}
    assert len(found) == 5
    assert shape["facts"]["backend"] == "triton"


# Models

LENGTH = 20
"""More than the window of 16. ViT has 197 tokens."""

NAMES = (
    "llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt-oss", "phi3", "deepseek-v3", "gpt2", "bert", "bart",
    "vit", "sd3",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_models_train_as_in_eager_and_twice_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer, three steps."""
    pytest.importorskip("transformers")
    from model_cases import CASES, drop_alike, error_of, force, recorded_backends, train

    assert set(CASES) == set(NAMES)
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

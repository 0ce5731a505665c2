"""What of the launcher needs no GPU: which tensors are copied first, and the order of dQ tiles."""

from __future__ import annotations

import pytest
import torch

from dash_attn.backends.cuda.upload import loadable
from dash_attn.backends.sm90 import forward
from dash_attn.backends.sm90.launch import _accumulator_order
from dash_attn.problem import Mask, Problem


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


@pytest.mark.parametrize(
    "x",
    [
        bf16(2, 5, 3, 64),
        bf16(2, 3, 5, 64).transpose(1, 2),
        bf16(2, 5, 3, 3, 64)[:, :, 1],
        bf16(4, 5, 3, 128)[::2, 1:, :, :64],
        bf16(1, 5, 3, 64),
        bf16(7, 3, 64),
        bf16(7, 3, 3, 64)[:, 1],
    ],
    ids=[
        "contiguous",
        "heads first",
        "one of packed q, k, v",
        "slices",
        "batch of one",
        "packed batch",
        "packed batch of packed q, k, v",
    ],
)
def test_read_in_place(x: torch.Tensor) -> None:
    assert loadable(x) is x


@pytest.mark.parametrize(
    "x",
    [
        bf16(2, 5, 64, 3).transpose(2, 3),
        bf16(2, 5, 3, 65)[..., :64],
        bf16(2, 5, 3, 72)[..., 4:68],
        bf16(2 * 5 * 3 * 64 + 1)[1:].view(2, 5, 3, 64),
        bf16(2, 5, 1, 64).expand(2, 5, 3, 64),
    ],
    ids=["head_dim strided", "odd rows", "odd start", "misaligned base", "expanded"],
)
def test_copied_first(x: torch.Tensor) -> None:
    copy = loadable(x)
    assert copy.is_contiguous()
    assert torch.equal(copy, x)
    assert copy.data_ptr() % 16 == 0


@pytest.mark.parametrize(("tile_m", "head_dim"), [(64, 128), (128, 64)])
def test_every_value_of_a_dq_tile_has_one_place(tile_m: int, head_dim: int) -> None:
    order = _accumulator_order(tile_m, head_dim)
    assert order.shape == (tile_m, head_dim)
    assert torch.equal(order.flatten().sort().values, torch.arange(tile_m * head_dim))


@pytest.mark.parametrize(
    ("mask", "lengths", "covered"),
    [
        (Mask.full(), (100, 300), True),
        (Mask.causal(), (300, 300), True),
        (Mask.causal(), (100, 300), False),
        (Mask.window(5, 0), (300, 300), False),
    ],
)
def test_what_cudnn_covers(
    monkeypatch: pytest.MonkeyPatch, mask: Mask, lengths: tuple[int, int], covered: bool
) -> None:
    monkeypatch.setattr(forward, "_has_fa4", lambda: False)
    reason = forward.why_no_forward(Problem((lengths,), 2, 2, 64, mask))
    assert (reason == "") == covered
    assert covered or "needs FlashAttention-4: pip install flash-attn-4" in reason


def test_packed_tensors_need_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.varlen([300, 300], heads=2, head_dim=64)
    assert forward.why_no_forward(problem) == ""
    monkeypatch.setattr(forward, "_has_fa4", lambda: False)
    assert forward.why_no_forward(problem) == ""
    reason = forward.why_no_forward(problem, packed=True)
    assert reason == "the forward of packed tensors on a GPU needs FlashAttention-4: pip install flash-attn-4"
    monkeypatch.setattr(forward, "_has_fa4", lambda: True)
    assert forward.why_no_forward(problem, packed=True) == ""

"""Softcap: scores s become cap * tanh(s / cap), in the public functions on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from score_cases import MASKS
from torch import Tensor

from dash_attn import attention, flash_attn_func, flash_attn_varlen_func, is_supported, plan_for
from dash_attn.api import apply_plan
from dash_attn.backends.cpu import oracle_forward, plain_attention
from dash_attn.backends.cpu.oracle import Inputs
from dash_attn.errors import InputError
from dash_attn.problem import Mask
from dash_attn.scores import Scores
from dash_attn.testing import assert_same_bytes, same_bytes


def drawn(
    rows: int = 200, dtype: torch.dtype = torch.float64, heads: tuple[int, ...] = (4, 2, 2)
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = [3 * torch.randn(2, rows, h, 16, generator=generator, dtype=torch.float64) for h in heads]
    return [x.to(dtype).requires_grad_() for x in tensors]


def plain(q: Tensor, k: Tensor, v: Tensor, cap: float, causal: bool = False, window: Any = None) -> Tensor:
    """By PyTorch, for autograd."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    scores = cap * torch.tanh(scores / cap)
    rows, columns = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    hidden = (columns > rows) if causal else torch.zeros(q.shape[1], k.shape[1], dtype=torch.bool)
    if window:
        hidden = hidden | (columns < rows - window[0])
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("how", MASKS, ids=str)
def test_values_and_gradients_are_those_of_pytorch(how: dict[str, Any]) -> None:
    tensors = drawn()
    out, expected = attention(*tensors, softcap=5.0, **how), plain(*tensors, 5.0, **how)
    dout = torch.randn_like(expected)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    for got, exact in zip(
        torch.autograd.grad(out, tensors, dout), torch.autograd.grad(expected, tensors, dout)
    ):
        torch.testing.assert_close(got, exact, rtol=1e-9, atol=1e-9)
    assert (out - attention(*tensors, **how)).abs().max() > 0.01


def test_gradients_by_finite_differences() -> None:
    tensors = [x[:1, :6, :, :4].detach().requires_grad_() for x in drawn()]
    assert torch.autograd.gradcheck(lambda *x: attention(*x, causal=True, softcap=2.0), tensors)


def test_the_oracle_agrees() -> None:
    q, k, v = (x.detach() for x in drawn())
    found = plain_attention(Inputs(q[0], q[0], k[0], v[0]), Mask.causal(), Scores(0.25, 5.0))
    torch.testing.assert_close(found.out, plain(q, k, v, 5.0, causal=True)[0])
    uncapped, _ = oracle_forward(q, k, v, Mask.causal(), 0.25)
    assert (found.out - uncapped[0]).abs().max() > 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes(dtype: torch.dtype) -> None:
    """None is 0; a sequence has the bytes that it has alone; dq follows the order of its sums."""
    tensors = drawn(dtype=dtype)
    how: dict[str, Any] = {"causal": True, "softcap": 10.0}
    out = flash_attn_func(*tensors, **how)
    grads = torch.autograd.grad(out, tensors, torch.ones_like(out))
    assert_same_bytes(flash_attn_func(*tensors, causal=True, softcap=0), attention(*tensors, causal=True))
    ends = torch.tensor([0, 200, 400], dtype=torch.int32)
    packed = flash_attn_varlen_func(*(x.flatten(0, 1) for x in tensors), ends, ends, **how)
    assert_same_bytes(packed.view(out.shape), out)
    plan = plan_for(*tensors, causal=True, softcap=10.0)
    again, _ = apply_plan(plan, *tensors, 16**-0.5, softcap=10.0)
    assert_same_bytes(again, out)
    for got, expected in zip(torch.autograd.grad(again, tensors, torch.ones_like(out)), grads):
        assert_same_bytes(got, expected)
    assert not same_bytes(attention(*tensors, causal=True, softcap=11.0), out)


def test_compiled_calls_have_the_same_bytes() -> None:
    tensors = drawn(rows=40, dtype=torch.float32)
    compiled = torch.compile(lambda *x: attention(*x, softcap=4.0), fullgraph=True, backend="aot_eager")
    assert_same_bytes(compiled(*tensors), attention(*tensors, softcap=4.0))


@pytest.mark.parametrize("softcap", [1e30, 1e-30])
def test_the_largest_and_the_least_softcap_make_numbers(softcap: float) -> None:
    tensors = [x.detach() for x in drawn(rows=40, dtype=torch.float32)]
    tensors[0][:, 0] = 0  # scores of 0
    out = attention(*tensors, softcap=softcap)
    same = softcap == 1e30
    expected = attention(*tensors) if same else attention(*tensors, softmax_scale=0.0)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), 10**400, 3e38, 1e-40, "30", True, None])
def test_what_is_no_softcap_is_named(wrong: object) -> None:
    tensors = drawn(rows=10)
    message = f"softcap must be 0 or in 1e-30 .. 1e+30, got {wrong!r:.40}"
    assert is_supported(*tensors, softcap=wrong).reason == message
    with pytest.raises(InputError) as raised:
        attention(*tensors, softcap=wrong)
    assert str(raised.value) == message


@pytest.mark.parametrize(("scale", "softcap"), [(3.5e8, 1e-30), (1e30, 1e-10), (-1e30, 1e-10), (1e-9, 1e30)])
def test_a_quotient_that_float32_does_not_hold_is_named(scale: float, softcap: float) -> None:
    """It would be infinite, and scores of 0 not a number; or 0, and there would be no scores."""
    tensors = [x.detach() for x in drawn(rows=40, dtype=torch.float32)]
    tensors[0][:, 0] = 0
    message = f"softmax_scale / softcap must be 0 or a normal float32, got {scale!r} / {softcap!r}"
    how = {"softmax_scale": scale, "softcap": softcap}
    assert is_supported(*tensors, **how).reason == message
    plan = plan_for(*tensors)
    for function in (attention, partial(apply_plan, plan)):
        with pytest.raises(InputError) as raised:
            function(*tensors, **how)
        assert str(raised.value) == message
    for good in (0.0, 0.25 * softcap):
        assert attention(*tensors, softmax_scale=good, softcap=softcap).isfinite().all()

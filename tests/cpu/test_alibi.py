"""ALiBi: a bias by distance, -slope * |i + seqlen_k - seqlen_q - j|; public functions on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from score_cases import MASKS, drawn, gradients
from torch import Tensor

from dash_attn import attention, flash_attn_func, flash_attn_varlen_func, is_supported, plan_for
from dash_attn.api import apply_plan
from dash_attn.backends.base import AuxTensors
from dash_attn.backends.cpu import plain_attention
from dash_attn.backends.cpu.oracle import Inputs
from dash_attn.backends.sm90 import backend as sm90
from dash_attn.errors import InputError
from dash_attn.problem import Mask, Problem
from dash_attn.scores import Scores
from dash_attn.testing import assert_same_bytes, same_bytes

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0])
BY_BATCH = torch.stack([SLOPES, SLOPES.flip(0)])


def biased(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, **how: Any) -> Any:
    return attention(q, k, v, alibi_slopes=slopes, **how)


def plain(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, causal: bool = False, window: Any = None
) -> Tensor:
    """By PyTorch, for autograd."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    distance = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
    slopes = slopes if slopes.ndim == 2 else slopes[None]
    scores = scores - (slopes[..., None, None] * distance.abs()).to(scores.dtype)
    hidden = (distance < 0) if causal else torch.zeros(distance.shape, dtype=torch.bool)
    if window:
        hidden = hidden | (distance > window[0])
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("how", MASKS, ids=str)
@pytest.mark.parametrize("slopes", [SLOPES, BY_BATCH], ids=["heads", "batch and heads"])
def test_values_and_gradients_are_those_of_pytorch(how: dict[str, Any], slopes: Tensor) -> None:
    """With more keys than rows: distances are counted from the bottom-right corner."""
    tensors = drawn()
    found = gradients(biased, tensors, slopes, **how)
    for got, exact in zip(found, gradients(plain, tensors, slopes, **how)):
        torch.testing.assert_close(got, exact, rtol=1e-9, atol=1e-9)
    assert (found[0] - attention(*tensors, **how)).abs().max() > 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_errors_are_those_of_plain_attention(dtype: torch.dtype) -> None:
    narrow = drawn(dtype=dtype)
    exact = gradients(plain, [x.double() for x in narrow], SLOPES, causal=True)
    theirs = gradients(plain, narrow, SLOPES, causal=True)
    for got, other, wanted in zip(gradients(biased, narrow, SLOPES, causal=True), theirs, exact):
        assert (got - wanted).norm() <= 2 * (other - wanted).norm() + 1e-6 * wanted.norm()


def test_gradients_by_finite_differences() -> None:
    tensors = [x[:1, :4, :, :2].detach().requires_grad_() for x in drawn()]
    assert torch.autograd.gradcheck(lambda *x: biased(*x, SLOPES, causal=True, softcap=2.0), tensors)


def test_the_oracle_agrees() -> None:
    """With a softcap, which comes before the bias, and a sink, which has none."""
    q, k, v = (x.detach() for x in drawn())
    sink = torch.tensor([1.0, 2.0, -1.0, 0.0])
    out, lse = biased(q, k, v, BY_BATCH, causal=True, softcap=1.5, learnable_sink=sink, return_lse=True)
    for at in range(2):
        one, aux = Inputs(q[at], q[at], k[at], v[at]), AuxTensors(sink, BY_BATCH[at])
        found = plain_attention(one, Mask.causal(), Scores(0.25, 1.5), aux=aux)
        torch.testing.assert_close(out[at], found.out)
        torch.testing.assert_close(lse[at], found.lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes(dtype: torch.dtype) -> None:
    """Two runs; packed, alone, a chunk of rows, by a plan of one's own; slopes of 0 change nothing."""
    tensors = drawn(200, 200, dtype)
    found = gradients(biased, tensors, BY_BATCH, causal=True)
    for got, again in zip(found, gradients(biased, tensors, BY_BATCH, causal=True)):
        assert_same_bytes(got, again)
    ends = torch.tensor([0, 200, 400], dtype=torch.int32)

    def packed(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Any:
        rows = (x.flatten(0, 1) for x in (q, k, v))
        out = flash_attn_varlen_func(*rows, ends, ends, causal=True, alibi_slopes=slopes)
        return out.view(q.shape)

    def planned(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        plan = plan_for(q, k, v, causal=True, alibi_slopes=slopes)
        return apply_plan(plan, q, k, v, 0.25, alibi_slopes=slopes)[0]

    for function in (packed, planned):
        for got, wanted in zip(gradients(function, tensors, BY_BATCH), found):
            assert_same_bytes(got, wanted)
    q, k, v = (x.detach() for x in tensors)
    alone = biased(q[1:], k[1:], v[1:], BY_BATCH[1], causal=True)
    assert_same_bytes(alone, found[0][1:])
    chunk = biased(q[:, 150:180], k[:, :180], v[:, :180], BY_BATCH, causal=True)
    assert_same_bytes(chunk, found[0][:, 150:180])
    cached = flash_attn_varlen_func(
        q[:, 150:180], k, v, seqused_k=torch.tensor([180, 180], dtype=torch.int32), causal=True,
        alibi_slopes=BY_BATCH,
    )  # fmt: skip
    assert_same_bytes(cached, chunk)
    assert_same_bytes(biased(q, k, v, torch.zeros(4)), attention(q, k, v))
    assert not same_bytes(biased(q, k, v, SLOPES, causal=True), found[0])


def test_compiled_calls_have_the_same_bytes() -> None:
    tensors = drawn(40, 40, torch.float32)
    torch.compiler.reset()
    compiled = torch.compile(biased, fullgraph=True, backend="aot_eager")
    wanted = gradients(biased, tensors, SLOPES, causal=True)
    for got, exact in zip(gradients(compiled, tensors, SLOPES, causal=True), wanted):
        assert_same_bytes(got, exact)
    inputs = [x.detach() for x in tensors]
    grads = torch.func.grad(lambda *x: biased(*x, SLOPES, causal=True).square().sum(), argnums=(0, 1, 2))(
        *inputs
    )
    out = biased(*tensors, SLOPES, causal=True)
    for got, exact in zip(grads, torch.autograd.grad(out.square().sum(), tensors)):
        assert_same_bytes(got, exact)


WRONG: dict[str, tuple[Any, str]] = {
    "type": (0.5, "alibi_slopes must be a torch.Tensor, got float"),
    "shape": (
        torch.zeros(3, 4),
        r"alibi_slopes must have shape \(heads,\) = \(4,\) or .* = \(2, 4\), got shape \(3, 4\)",
    ),
    "dtype": (torch.zeros(4).double(), "alibi_slopes must be torch.float32, got torch.float64"),
    "device": (torch.zeros(4, device="meta"), "alibi_slopes is on meta, q is on cpu"),
    "gradient": (
        torch.zeros(4, requires_grad=True),
        "alibi_slopes require a gradient, .*: give them detached",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_are_no_slopes_is_named(case: str) -> None:
    wrong, message = WRONG[case]
    q, k, v = drawn(10, 10, torch.bfloat16)
    ends = torch.tensor([0, 10, 20], dtype=torch.int32)
    for call in (attention, flash_attn_func, plan_for):
        with pytest.raises(InputError, match=message) as raised:
            call(q, k, v, alibi_slopes=wrong)
    with pytest.raises(InputError, match=message):
        flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), ends, ends, alibi_slopes=wrong)
    assert is_supported(q, k, v, alibi_slopes=wrong).reason == str(raised.value)


def test_tensors_of_inference_mode_may_be_used_in_training() -> None:
    """Autograd saves no such tensor: it saves a copy."""
    q, k, v = (x.requires_grad_() for x in drawn(10, 10, torch.float32))
    with torch.inference_mode():
        slopes, seed = SLOPES.clone(), torch.tensor(3)
    how: dict[str, Any] = {"dropout_p": 0.5, "alibi_slopes": slopes, "dropout_seed": seed}
    found = torch.autograd.grad(attention(q, k, v, **how).sum(), (q, k, v))
    how |= {"alibi_slopes": SLOPES, "dropout_seed": 3}
    for a, b in zip(found, torch.autograd.grad(attention(q, k, v, **how).sum(), (q, k, v))):
        assert_same_bytes(a, b)


def test_slopes_that_need_a_gradient_are_refused_after_ones_that_do_not() -> None:
    """Calls that were accepted are not checked again; this one is not like them."""
    q, k, v = drawn(10, 10, torch.float32)
    biased(q, k, v, SLOPES)
    with pytest.raises(InputError, match="require a gradient"):
        biased(q, k, v, SLOPES.clone().requires_grad_())
    with pytest.raises(InputError, match="require a gradient"):
        torch.func.grad(lambda slopes: biased(q, k, v, slopes).sum())(SLOPES)


def test_sm90_does_not_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90, "_capability", lambda device: (9, 0))
    problem, device = Problem.dense(seqlen=256, head_dim=64), torch.device("cuda", 0)
    reason = sm90.BACKEND.why_not(problem, device, False, Scores(0.125, alibi=True))
    assert reason == "alibi_slopes is not supported by sm90"

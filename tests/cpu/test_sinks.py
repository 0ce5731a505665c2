"""Learnable sinks: one score more per q head, of a key without a value; public functions on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from score_cases import MASKS, gradients
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dash_attn import attention, flash_attn_func, flash_attn_varlen_func, is_supported, plan_for
from dash_attn.api import apply_plan
from dash_attn.backends.base import AuxTensors, Tensors
from dash_attn.backends.cpu import oracle, plain_attention
from dash_attn.backends.cpu.oracle import Inputs
from dash_attn.backends.cpu.sinks import sink_gradient
from dash_attn.backends.sm90 import backend as sm90
from dash_attn.errors import InputError
from dash_attn.problem import Mask, Problem
from dash_attn.scores import Scores
from dash_attn.testing import assert_same_bytes, same_bytes

ENDS = torch.tensor([0, 200, 400], dtype=torch.int32)


def drawn(
    rows: int = 200, dtype: torch.dtype = torch.float64, heads: tuple[int, ...] = (4, 2, 2)
) -> list[Tensor]:
    """q, k, v and the sink."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, rows, h, 16) for h in heads] + [(heads[0],)]
    tensors = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    tensors[3] += 2.0
    return [x.to(dtype).requires_grad_() for x in tensors]


def with_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, **how: Any) -> Any:
    return attention(q, k, v, learnable_sink=sink, **how)


def plain(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor, causal: bool = False, window: Any = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) by PyTorch, for autograd: a column more, without a value."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    rows, columns = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    hidden = (columns > rows) if causal else torch.zeros(q.shape[1], k.shape[1], dtype=torch.bool)
    if window:
        hidden = hidden | (columns < rows - window[0])
    column = sink[None, :, None, None].expand(*scores.shape[:3], 1).to(scores.dtype)
    scores = torch.cat([scores.masked_fill(hidden, -torch.inf), column], 3)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., :-1], v)
    return out, scores.logsumexp(-1)


@pytest.mark.parametrize("how", MASKS, ids=str)
@pytest.mark.parametrize("heads", [(4, 2, 2), (3, 1, 1), (2, 2, 2)])
def test_values_and_gradients_are_those_of_pytorch(how: dict[str, Any], heads: tuple[int, ...]) -> None:
    tensors = drawn(heads=heads)
    wanted = gradients(lambda *x, **how: plain(*x, **how)[0], tensors, **how)
    for got, exact in zip(gradients(with_sink, tensors, **how), wanted):
        torch.testing.assert_close(got, exact, rtol=1e-9, atol=1e-9)
    _, lse = with_sink(*tensors, return_lse=True, **how)
    torch.testing.assert_close(lse, plain(*tensors, **how)[1], rtol=1e-12, atol=1e-12)
    assert (wanted[0] - attention(*tensors[:3], **how)).abs().max() > 0.01


def test_gradients_by_finite_differences() -> None:
    q, k, v, sink = (x.detach() for x in drawn())
    tensors = [*(x[:1, :4, :, :2] for x in (q, k, v)), sink]
    leaves = [x.clone().requires_grad_() for x in tensors]
    assert torch.autograd.gradcheck(lambda *x: with_sink(*x, causal=True), leaves)
    assert torch.autograd.gradcheck(lambda *x: with_sink(*x, softcap=2.0, window=(2, 1)), leaves)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_the_oracle_agrees(softcap: float) -> None:
    tensors = drawn()
    q, k, v, sink = (x.detach() for x in tensors)
    dout = torch.randn(q.shape, dtype=torch.float64)
    out, lse = with_sink(*tensors, causal=True, return_lse=True, softcap=softcap)
    grads = torch.autograd.grad(out, tensors, dout)
    total = torch.zeros(4, dtype=torch.float64)
    for at in range(2):
        one = Inputs(dout[at], q[at], k[at], v[at])
        found = plain_attention(one, Mask.causal(), Scores(0.25, softcap), aux=AuxTensors(sink))
        total += oracle.sink_gradient(dout[at], found, sink)
        for got, exact in zip((out, lse, *grads), found):
            torch.testing.assert_close(got[at], exact, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(grads[3], total, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("how", MASKS, ids=str)
def test_errors_are_those_of_plain_attention(how: dict[str, Any], dtype: torch.dtype) -> None:
    narrow = drawn(dtype=dtype)
    exact = gradients(lambda *x, **how: plain(*x, **how)[0], [x.double() for x in narrow], **how)
    theirs = gradients(lambda *x, **how: plain(*x, **how)[0], narrow, **how)
    for got, other, wanted in zip(gradients(with_sink, narrow, **how), theirs, exact):
        assert (got - wanted).norm() <= 2 * (other - wanted).norm() + 1e-6 * wanted.norm()


# Bytes


def test_the_layout_of_dout_leaves_every_byte_alone() -> None:
    tensors = drawn(dtype=torch.float32)
    out = with_sink(*tensors, causal=True)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    turned = dout.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    assert turned.stride() != dout.stride()
    grads = [torch.autograd.grad(out, tensors, x, retain_graph=True) for x in (dout, turned)]
    for a, b in zip(*grads):
        assert_same_bytes(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes(dtype: torch.dtype) -> None:
    """Two runs; packed and dense; by a plan of one's own. Another sink gives others."""
    tensors = drawn(dtype=dtype)
    found = gradients(with_sink, tensors, causal=True)
    for got, again in zip(found, gradients(with_sink, tensors, causal=True)):
        assert_same_bytes(got, again)

    def packed(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Any:
        rows = (x.flatten(0, 1) for x in (q, k, v))
        out = flash_attn_varlen_func(*rows, ENDS, ENDS, causal=True, learnable_sink=sink)
        return out.view(q.shape)

    def planned(*x: Tensor) -> Tensor:
        plan = plan_for(*x[:3], causal=True, learnable_sink=x[3])
        return apply_plan(plan, *x[:3], 0.25, learnable_sink=x[3])[0]

    def flash(*x: Tensor) -> Any:
        return flash_attn_func(*x[:3], causal=True, learnable_sink=x[3])

    for function in (packed, planned, flash):
        for got, wanted in zip(gradients(function, tensors), found):
            assert_same_bytes(got, wanted)
    other = with_sink(*tensors[:3], tensors[3] + 0.5, causal=True)
    assert not same_bytes(other, found[0])


def test_without_weight_a_sink_changes_no_byte() -> None:
    """Where a whole tile of rows sees no key, too; its own gradient is 0."""
    q, k, v, sink = drawn(dtype=torch.float32)
    nothing = torch.full_like(sink, -torch.inf).requires_grad_()
    for keys in (200, 4):
        out, lse = with_sink(q, k[:, :keys], v[:, :keys], nothing, causal=True, return_lse=True)
        wanted = attention(q, k[:, :keys], v[:, :keys], causal=True, return_lse=True)
        assert_same_bytes(out, wanted[0])
        assert_same_bytes(lse, wanted[1])
        (dsink,) = torch.autograd.grad(out, nothing, torch.ones_like(out))
        assert_same_bytes(dsink.abs(), torch.zeros_like(dsink))


def test_the_gradient_of_a_sink_is_that_of_each_sequence_added_in_the_order_of_the_batch() -> None:
    """To the byte. In another order, or row by row, it has other bytes."""
    tensors = drawn(300, torch.float32)
    whole = gradients(with_sink, tensors, causal=True)[4]
    dout = torch.randn((2, 300, 4, 16), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parts = []
    for at in range(2):
        out = with_sink(*(x[at : at + 1] for x in tensors[:3]), tensors[3], causal=True)
        parts.append(torch.autograd.grad(out, tensors[3], dout[at : at + 1].float())[0])
    assert_same_bytes(whole, parts[0] + parts[1])
    q, k, v, sink = (x.detach() for x in tensors)
    problem = Problem.varlen([300], heads=4, kv_heads=2, head_dim=16, mask=Mask.causal(), dtype="float32")
    out, lse = with_sink(*(x[:1] for x in (q, k, v)), sink, causal=True, return_lse=True)
    saved = Tensors(dout[0].float(), q[0], k[0], v[0], out[0], lse[0])
    found = sink_gradient(problem, saved, AuxTensors(sink))
    assert found is not None
    assert_same_bytes(found, parts[0])
    terms = (sink[:, None] - saved.lse).exp() * (saved.dout * saved.out).sum(2).T
    row_by_row = torch.zeros(4)
    for term in terms.unbind(1):
        row_by_row += term
    torch.testing.assert_close(-row_by_row, found, rtol=1e-4, atol=1e-5)
    assert not same_bytes(-row_by_row, found)


LARGE = [1.1e11, 2.3e11, 7.7e15, 2.3e18, 3.7e19, 1e30]
"""At some of these lse is rounded to so much less than the sink that exp would overflow."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_sink_that_takes_all_weight_has_a_gradient_of_0(dtype: torch.dtype) -> None:
    q, k, v, sink = drawn(dtype=dtype, heads=(len(LARGE), 1, 1))
    sink = torch.tensor(LARGE, dtype=dtype).requires_grad_()
    out = with_sink(q, k, v, sink, causal=True)
    assert not out.any()
    for grad in torch.autograd.grad(out, (q, k, v, sink), torch.ones_like(out)):
        assert not grad.any()
    nothing = torch.full_like(sink, torch.nan).requires_grad_()
    out = with_sink(q, k, v, nothing, causal=True)
    assert torch.autograd.grad(out, nothing, torch.ones_like(out))[0].isnan().all()


def test_rows_that_see_no_key() -> None:
    q, k, v, sink = drawn(dtype=torch.float32)
    out, lse = with_sink(q, k[:, :150], v[:, :150], sink, causal=True, return_lse=True)
    assert not out[:, :50].any()
    wanted = sink[None, :, None].expand(2, 4, 50)
    torch.testing.assert_close(lse[..., :50], wanted, rtol=1e-6, atol=0)
    assert torch.autograd.grad(out, sink, torch.ones_like(out))[0].isfinite().all()
    nothing, of_sink = with_sink(q, k[:, :0], v[:, :0], sink, return_lse=True)
    assert not nothing.any()
    assert_same_bytes(of_sink[..., :50], lse[..., :50].contiguous())
    empty = with_sink(q[:0], k[:0], v[:0], sink)
    assert not torch.autograd.grad(empty.sum(), sink)[0].any()


def test_used_keys_of_a_cache() -> None:
    q, k, v, sink = (x.detach() for x in drawn(dtype=torch.float32))
    used = torch.tensor([150, 40], dtype=torch.int32)
    how: dict[str, Any] = {"causal": True, "learnable_sink": sink}
    out = flash_attn_varlen_func(q[:, :30], k, v, seqused_k=used, **how)
    for at, length in enumerate(used.tolist()):
        one = slice(at, at + 1)
        assert_same_bytes(out[one], attention(q[one, :30], k[one, :length], v[one, :length], **how))
    with pytest.raises(InputError, match="the backward does not have seqused_k"):
        flash_attn_varlen_func(q, k, v, seqused_k=used, learnable_sink=sink.clone().requires_grad_())


def test_a_sink_of_float32_and_gradients_of_some_inputs() -> None:
    """The gradient has the sink's dtype. Whoever needs none gets none."""
    q, k, v, sink = (x.detach() for x in drawn(dtype=torch.bfloat16))
    sink = sink.float().requires_grad_()
    out = attention(q, k, v, learnable_sink=sink)
    assert out.dtype == torch.bfloat16
    (dsink,) = torch.autograd.grad(out.float().sum(), sink)
    assert dsink.dtype == torch.float32
    assert dsink.all()
    q.requires_grad_()
    out = attention(q, k, v, learnable_sink=sink.detach())
    assert torch.autograd.grad(out.float().sum(), q)[0].any()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = attention(q.float(), k.float(), v.float(), learnable_sink=sink)
    assert_same_bytes(cast, out)


# Operators


def test_compiled_and_checkpointed_calls_have_the_same_bytes() -> None:
    tensors = drawn(40, torch.float32)
    torch.compiler.reset()
    compiled = torch.compile(with_sink, fullgraph=True, backend="aot_eager")
    wanted = gradients(with_sink, tensors, causal=True)

    def checkpointed(*x: Tensor, **how: Any) -> Any:
        return checkpoint(with_sink, *x, use_reentrant=False, **how)

    for function in (compiled, checkpointed):
        for got, exact in zip(gradients(function, tensors, causal=True), wanted):
            assert_same_bytes(got, exact)


def test_packed_calls_compile() -> None:
    q, k, v, sink = drawn(40, torch.float32)
    ends = torch.tensor([0, 40, 80], dtype=torch.int32)

    def run(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Any:
        return flash_attn_varlen_func(q, k, v, ends, ends, learnable_sink=sink)

    torch.compiler.reset()
    leaves = [*(x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v)), sink]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for got, exact in zip(gradients(compiled, leaves), gradients(run, leaves)):
        assert_same_bytes(got, exact)


def test_transforms_of_torch_func() -> None:
    tensors = [x.detach() for x in drawn(20, torch.float32)]

    def loss(*x: Tensor) -> Tensor:
        return with_sink(*x).square().sum()  # type: ignore[no-any-return]

    leaves = [x.requires_grad_() for x in (y.clone() for y in tensors)]
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    for got, exact in zip(torch.func.grad(loss, argnums=(0, 1, 2, 3))(*tensors), wanted):
        assert_same_bytes(got, exact)
    alone = torch.func.grad(lambda sink: loss(*tensors[:3], sink))(tensors[3])
    assert_same_bytes(alone, wanted[3])
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.func.grad(lambda sink: torch.func.grad(loss, argnums=3)(*tensors[:3], sink).sum())(tensors[3])
    out = with_sink(*leaves)
    (dsink,) = torch.autograd.grad(out.square().sum(), leaves[3], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dsink.sum().backward()


# Refused

WRONG: dict[str, tuple[Any, str]] = {
    "type": (1.0, "learnable_sink must be a torch.Tensor, got float"),
    "shape": (torch.zeros(2), r"learnable_sink must have shape \(heads,\) = \(4,\), got shape \(2,\)"),
    "dimensions": (torch.zeros(4, 1), r"learnable_sink must have shape \(heads,\) .* got shape \(4, 1\)"),
    "dtype": (
        torch.zeros(4, dtype=torch.float16),
        r"learnable_sink must be torch.bfloat16 or torch.float32, got torch.float16",
    ),
    "device": (torch.zeros(4, device="meta"), "learnable_sink is on meta, q is on cpu"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_sink_is_named(case: str) -> None:
    wrong, message = WRONG[case]
    q, k, v, _ = drawn(10, torch.bfloat16)
    ends = torch.tensor([0, 10, 20], dtype=torch.int32)
    for call in (attention, flash_attn_func, plan_for):
        with pytest.raises(InputError, match=message) as raised:
            call(q, k, v, learnable_sink=wrong)
    with pytest.raises(InputError, match=message):
        flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), ends, ends, learnable_sink=wrong)
    assert is_supported(q, k, v, learnable_sink=wrong).reason == str(raised.value)


def test_sm90_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(sm90, "_why_no_compiler", lambda: "")
    problem, device = Problem.dense(seqlen=256, head_dim=64), torch.device("cuda", 0)
    assert sm90.BACKEND.why_not(problem, device, False, Scores(0.125, sink=True)) == ""
    assert sm90.BACKEND.why_not(problem, device, False, Scores(0.125, softcap=2.0, sink=True)) == ""
    reason = sm90.BACKEND.why_not(problem, device, False, Scores(0.125, alibi=True, sink=True))
    assert reason == "alibi_slopes is not supported by sm90"

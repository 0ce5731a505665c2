"""V with another head dim than Q and K, as in DeepSeek's MLA, in the public functions on the CPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from attention_cases import SCALE, executed, expected, packed_tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from score_cases import MASKS
from strategies import masks, sequences, tiles
from torch import Tensor
from torch.nn import functional as F

from dash_attn import (
    attention,
    fingerprints,
    flash_attn_func,
    flash_attn_varlen_func,
    is_supported,
    plan_for,
)
from dash_attn.api import apply_plan
from dash_attn.backends.base import NO_AUX, AuxTensors, backend_named
from dash_attn.backends.cpu import oracle_backward, oracle_forward, plain_attention
from dash_attn.backends.cpu.oracle import Inputs, sink_gradient
from dash_attn.backends.sm90.forward.launch import Forward
from dash_attn.errors import InputError, PlanMismatchError, ProblemError
from dash_attn.integrations import sdpa
from dash_attn.integrations.aten import _sdpa_forward
from dash_attn.integrations.kernels import Band, run_backward, run_forward
from dash_attn.problem import Mask, Problem, default_tiles
from dash_attn.schedule import FA3, SPT, Descending, ForwardNumerics, build_plan
from dash_attn.scores import Scores
from dash_attn.spec import AttentionSpec
from dash_attn.testing import assert_same_bytes

PAIRS = [(192, 128), (24, 16), (8, 40)]


def drawn(
    head_dim: int = 24, head_dim_v: int = 16, rows: int = 150, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """q, k and v of two sequences; leaves."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, rows, 4, head_dim), (2, rows, 2, head_dim), (2, rows, 2, head_dim_v))
    return [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window: Any = None) -> Tensor:
    """By PyTorch, for autograd."""
    rows, columns = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    if causal:
        seen &= columns <= rows
    if window:
        seen &= columns >= rows - window[0]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("how", MASKS, ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_values_and_gradients_are_those_of_pytorch(pair: tuple[int, int], how: dict[str, Any]) -> None:
    tensors = drawn(*pair)
    out, wanted = attention(*tensors, **how), plain(*tensors, **how)
    assert out.shape == (2, 150, 4, pair[1])
    torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-10)
    dout = torch.randn_like(wanted)
    both = (torch.autograd.grad(x, tensors, dout) for x in (out, wanted))
    for got, exact in zip(*both):
        torch.testing.assert_close(got, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_errors_are_those_of_plain_attention(dtype: torch.dtype) -> None:
    """Beside float64, at most twice as large as PyTorch's in the same dtype."""
    tensors = drawn(192, 128, dtype=dtype)
    out, in_dtype = attention(*tensors, causal=True), plain(*tensors, causal=True)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    q, k, v = (x.detach().double() for x in tensors)
    exact, _ = oracle_forward(q, k, v, Mask.causal(), 192**-0.5)
    grads = oracle_backward(dout.double(), q, k, v, Mask.causal(), 192**-0.5)
    mine = (out, *torch.autograd.grad(out, tensors, dout))
    theirs = (in_dtype, *torch.autograd.grad(in_dtype, tensors, dout))
    for name, got, other, wanted in zip(("out", "dq", "dk", "dv"), mine, theirs, (exact, *grads)):
        error, allowed = ((x.double() - wanted).norm() for x in (got, other))
        assert error <= 2 * allowed + 1e-6 * wanted.norm(), name


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    tile_m, tile_n = draw(tiles)
    kv_heads = draw(st.integers(1, 2))
    dims = draw(st.tuples(*[st.integers(1, 20)] * 2))
    heads = kv_heads * draw(st.integers(1, 3))
    return Problem(
        tuple(draw(sequences)), heads, kv_heads, dims[0], draw(masks), "float32", tile_m, tile_n,
        head_dim_v=dims[1],
    )  # fmt: skip


@settings(max_examples=40)
@given(problems())
def test_the_executor_agrees_with_the_oracle(problem: Problem) -> None:
    tensors = packed_tensors(problem)
    found, exact = executed(build_plan(problem, Descending()), tensors), expected(problem, tensors)
    for name, wanted in exact.items():
        torch.testing.assert_close(found[name].double(), wanted, rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes(dtype: torch.dtype) -> None:
    """Packed and dense alike, by a plan of one's own, in another placement, and of a cache of keys."""
    tensors = drawn(dtype=dtype)
    out = flash_attn_func(*tensors, causal=True)
    grads = torch.autograd.grad(out, tensors, torch.ones_like(out))
    ends = torch.tensor([0, 150, 300], dtype=torch.int32)
    packed = flash_attn_varlen_func(*(x.flatten(0, 1) for x in tensors), ends, ends, causal=True)
    assert_same_bytes(packed.view(out.shape), out)
    again, _ = apply_plan(plan_for(*tensors, causal=True), *tensors, 24**-0.5)
    assert_same_bytes(again, out)
    for got, wanted in zip(torch.autograd.grad(again, tensors, torch.ones_like(out)), grads):
        assert_same_bytes(got, wanted)
    q, k, v = (x.detach() for x in tensors)
    caches = [torch.cat([x, torch.full_like(x, torch.nan)], 1) for x in (k, v)]
    used = torch.tensor([150, 150], dtype=torch.int32)
    assert_same_bytes(flash_attn_varlen_func(q, *caches, seqused_k=used, causal=True), out)


def test_equal_columns_of_v_have_equal_values() -> None:
    """A column of out depends on no other column of v. Some CPUs' matrix products round by their shape."""
    q, k, v = (x.detach() for x in drawn(24, 16, dtype=torch.float32))
    whole = attention(q, k, v, causal=True)
    torch.testing.assert_close(attention(q, k, v[..., :8], causal=True), whole[..., :8], rtol=1e-5, atol=1e-6)


def test_compiled_calls_have_the_same_bytes() -> None:
    tensors = drawn(rows=40, dtype=torch.float32)
    flat = [x.detach().flatten(0, 1).requires_grad_() for x in tensors]
    ends = torch.tensor([0, 40, 80], dtype=torch.int32)
    for call, leaves in (
        (lambda *x: attention(*x, causal=True), tensors),
        (lambda *x: flash_attn_varlen_func(*x, ends, ends, causal=True), flat),
    ):
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        found, wanted = compiled(*leaves), call(*leaves)
        assert_same_bytes(found, wanted)
        both = (torch.autograd.grad(x.square().sum(), leaves) for x in (found, wanted))
        for got, expected_ in zip(*both):
            assert_same_bytes(got, expected_)


def test_operators() -> None:
    q, k, v = (x.detach().float().requires_grad_() for x in drawn(rows=20))
    for aux in (NO_AUX, AuxTensors(SINK, SLOPES[0])):
        spec = AttentionSpec(0.2, -1, 0, sink=aux.learnable_sink is not None, alibi=aux is not NO_AUX)
        torch.library.opcheck(torch.ops.dash_attn.forward.default, (q, k, v, *aux, *spec))
    out, lse = run_forward(q, k, v, Band(True), None)
    grads = run_backward((out, q, k, v, out, lse), Band(True), None)
    assert [x.shape for x in grads[:3]] == [x.shape for x in (q, k, v)]


def test_no_sequences_and_no_rows() -> None:
    q, k, v = (x[:0].detach().requires_grad_() for x in drawn())
    out, lse = attention(q, k, v, return_lse=True)
    assert (out.shape, lse.shape) == ((0, 150, 4, 16), (0, 4, 150))
    out.sum().backward()
    assert [x.grad.shape for x in (q, k, v)] == [x.shape for x in (q, k, v)]
    q, k, v = drawn()
    blind = attention(q, k[:, :0], v[:, :0])
    assert blind.shape == (2, 150, 4, 16)
    assert not blind.any()


def test_the_sdpa_hook() -> None:
    """Also under GQA. PyTorch's flash operators themselves take equal head dims only."""
    tensors = drawn()
    wanted = attention(*tensors, causal=True)
    turned = [x.transpose(1, 2) for x in tensors]
    with sdpa.enabled():
        out = F.scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=True)
    assert_same_bytes(out.transpose(1, 2), wanted)
    with pytest.raises(InputError, match="value has head_dim 16, query 24"):
        _sdpa_forward(*turned)


# With a sink, ALiBi, dropout and a softcap


SEED, SINK = 2**40 + 7, torch.tensor([0.5, 3.0, -1.0, 2.0])
SLOPES = torch.tensor([[0.5, 0.25, 0.125, 0.0], [0.0, 0.1, 0.2, 0.3]])
EXTRAS = [(True, False, 0.0), (False, True, 0.0), (False, False, 0.3), (True, True, 0.3)]


def extras(sink: bool, alibi: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """Arguments of a public function; the sink is a leaf."""
    made = {"learnable_sink": SINK.to(dtype).requires_grad_()} if sink else {}
    return made | {"alibi_slopes": SLOPES} if alibi else made


def with_gradients(
    function: Any, tensors: list[Tensor], more: dict[str, Tensor], **how: Any
) -> dict[str, Tensor]:
    """out, dq, dk, dv, and dsink if there is a sink."""
    out = function(*tensors, **more, **how)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    leaves = [*tensors, *(x for x in more.values() if x.requires_grad)]
    names = ("dq", "dk", "dv", "dsink")
    return {"out": out.detach(), **dict(zip(names, torch.autograd.grad(out, leaves, dout)))}


def by_oracle(
    tensors: list[Tensor], more: dict[str, Tensor], mask: Mask, scores: Scores
) -> dict[str, Tensor]:
    """The same, one sequence after the other."""
    sink, slopes = more.get("learnable_sink"), more.get("alibi_slopes")
    dout = torch.randn(
        (*tensors[0].shape[:-1], tensors[2].shape[-1]), generator=torch.Generator().manual_seed(1)
    )
    parts, dsink = [], torch.zeros(4, dtype=torch.float64)
    for at in range(2):
        one = Inputs(dout[at], *(x[at].detach() for x in tensors))
        aux = AuxTensors(sink, None if slopes is None else slopes[at], torch.tensor(SEED))
        found = plain_attention(one, mask, scores, aux=aux, sequence=at)
        parts.append(found)
        if sink is not None:
            dsink += sink_gradient(one.dout, found, sink.detach())
    wanted = {name: torch.stack([getattr(x, name) for x in parts]) for name in ("out", "dq", "dk", "dv")}
    return wanted if sink is None else wanted | {"dsink": dsink}


@pytest.mark.parametrize(("sink", "alibi", "dropout_p"), EXTRAS)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_sinks_alibi_and_dropout(pair: tuple[int, int], sink: bool, alibi: bool, dropout_p: float) -> None:
    """Delta, and with it the gradient of the sink, is a sum over the columns of v."""
    tensors, more = drawn(*pair), extras(sink, alibi, torch.float64)
    scores = Scores(pair[0] ** -0.5, 5.0, dropout_p=dropout_p)
    wanted = by_oracle(tensors, more, Mask.causal(), scores)
    dropout: dict[str, Any] = {"dropout_p": dropout_p, "dropout_seed": SEED}
    found = with_gradients(attention, tensors, more, causal=True, softcap=5.0, **dropout)
    assert list(found) == list(wanted)
    for name, exact in wanted.items():
        torch.testing.assert_close(found[name], exact, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_with_a_sink_and_alibi(dtype: torch.dtype) -> None:
    """Packed, by a plan of one's own, compiled, and of a cache of keys."""
    tensors, more = drawn(dtype=dtype), extras(True, True, dtype)
    wanted = with_gradients(attention, tensors, more, causal=True)
    ends = torch.tensor([0, 150, 300], dtype=torch.int32)

    def packed(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Any:
        rows = [x.flatten(0, 1) for x in (q, k, v)]
        out: Any = flash_attn_varlen_func(*rows, ends, ends, causal=True, **how)
        return out.unflatten(0, (2, 150))

    def planned(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        return apply_plan(plan_for(q, k, v, causal=True, **how), q, k, v, 24**-0.5, **how)[0]

    def compiled(*qkv: Tensor, **how: Any) -> Any:
        torch.compiler.reset()
        call = torch.compile(attention, fullgraph=True, backend="aot_eager")
        return call(*qkv, causal=True, **how)

    for function in (packed, planned, compiled):
        found = with_gradients(function, tensors, more)
        for name, exact in wanted.items():
            assert_same_bytes(found[name], exact, name)
    q, k, v = (x.detach() for x in tensors)
    caches = [torch.cat([x, torch.full_like(x, torch.nan)], 1) for x in (k, v)]
    used = torch.tensor([150, 150], dtype=torch.int32)
    more = {name: x.detach() for name, x in more.items()}
    cached = flash_attn_varlen_func(q, *caches, seqused_k=used, causal=True, **more)
    assert_same_bytes(cached, wanted["out"])


def test_no_sequences_and_no_rows_with_a_sink() -> None:
    more = extras(True, False, torch.float64)
    q, k, v = (x[:0].detach().requires_grad_() for x in drawn())
    found = with_gradients(attention, [q, k, v], more)
    assert found["out"].shape == (0, 150, 4, 16)
    assert not found["dsink"].any()
    q, k, v = drawn()
    found = with_gradients(attention, [q, k[:, :0], v[:, :0]], more)
    assert found["out"].shape == (2, 150, 4, 16)
    assert not found["out"].any()
    assert not found["dsink"].any()


# Numerics


def test_equal_head_dims_are_what_they_were() -> None:
    """Naming the same head dim changes no problem, no fingerprint and no tile."""
    named = Problem.dense(seqlen=300, head_dim=64, head_dim_v=64)
    other = Problem.dense(seqlen=300, head_dim=64)
    assert named == other
    assert hash(named) == hash(other)
    assert build_plan(named, SPT()).fingerprint == build_plan(other, SPT()).fingerprint
    assert ForwardNumerics(64, "bfloat16", head_dim_v=64).fingerprint == (
        ForwardNumerics(64, "bfloat16").fingerprint
    )


def test_other_head_dims_have_other_fingerprints() -> None:
    q, k, v = (x.detach().float() for x in drawn(24, 16))
    names = [fingerprints(q, k, x, causal=True) for x in (v, torch.cat([v, v[..., :8]], -1))]
    assert names[0].forward != names[1].forward
    assert names[0].backward != names[1].backward


@pytest.mark.parametrize("pair", [(192, 128), (64, 128), (128, 64), (64, 8), (128, 192)])
def test_tiles_are_those_of_both(pair: tuple[int, int]) -> None:
    problem = Problem.dense(seqlen=300, head_dim=pair[0], head_dim_v=pair[1])
    assert (problem.tile_m, problem.tile_n) == default_tiles(*pair)
    assert problem.backward_flops == (6 * pair[0] + 4 * pair[1]) * 300 * 300


def test_the_order_of_sums_is_that_of_the_plan() -> None:
    tensors = drawn(24, 16, rows=400, dtype=torch.float32)
    out = attention(*tensors)
    wanted = torch.autograd.grad(out, tensors[0], torch.ones_like(out))[0]
    plan = build_plan(plan_for(*tensors).problem, FA3())
    found, _ = apply_plan(plan, *tensors, 24**-0.5, disorder=random.Random(1))
    assert not torch.equal(torch.autograd.grad(found, tensors[0], torch.ones_like(found))[0], wanted)


def test_plans_of_the_hopper_forward_have_the_numerics_of_the_problem() -> None:
    for head_dim, head_dim_v in ((128, 64), (128, 128), (192, 128)):
        problem = Problem.dense(seqlen=300, head_dim=head_dim, head_dim_v=head_dim_v)
        plan = Forward(problem, torch.device("cuda", 0), blocks=2).plan()
        assert plan.numerics.fingerprint == ForwardNumerics.of(problem).fingerprint


# What is refused


def test_sm90_refuses_with_a_reason() -> None:
    sm90 = backend_named("sm90")
    for pair in ((264, 136), (200, 20), (16, 32)):
        problem = Problem.dense(seqlen=10, head_dim=pair[0], head_dim_v=pair[1])
        with pytest.raises(InputError, match=f"head_dim_v {pair[1]} beside head_dim {pair[0]} is not supp"):
            sm90.prepare(problem, torch.device("cuda", 0), packed=False)
    for pair in ((192, 128), (136, 8), (128, 8)):
        problem = Problem.dense(seqlen=10, head_dim=pair[0], head_dim_v=pair[1])
        assert sm90.prepare(problem, torch.device("cuda", 0), packed=False)


def test_sm90_has_no_softcap_where_v_has_a_kernel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dash_attn.backends.sm90.backend._capability", lambda device: (9, 0))
    monkeypatch.setattr("dash_attn.backends.sm90.backend._why_no_compiler", lambda: "")
    sm90, device = backend_named("sm90"), torch.device("cuda", 0)
    reason = "softcap 30.0 is not supported by sm90 at head_dim 192 (V: 128)"
    for head_dim, said in ((192, reason), (128, ""), (200, "")):
        problem = Problem.dense(seqlen=10, head_dim=head_dim, head_dim_v=128)
        assert sm90.why_not(problem, device, False, Scores(0.1, softcap=30.0)) == said
        assert sm90.why_not(problem, device, False, Scores(0.1)) == ""


def test_triton_refuses_what_8_does_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = backend_named("triton")
    monkeypatch.setattr("dash_attn.backends.triton.backend._why_unavailable", lambda device: "")
    for head_dim_v in (12, 264):
        problem = Problem.dense(seqlen=10, head_dim=64, head_dim_v=head_dim_v)
        reason = triton.why_not(problem, torch.device("cpu"), packed=False)
        assert reason.startswith(f"head_dim_v {head_dim_v} is not supported by triton")


def test_wrong_shapes_are_named() -> None:
    q, k, v = drawn()
    assert is_supported(q, k, v)
    for wrong, reason in (
        ((q, k[..., :8], v), "k has batch 2 and head_dim 8, q has 2 and 24"),
        ((q, k, v[:, 1:]), "k has shape (2, 150, 2, 24), v has (2, 149, 2, 16): only head_dim may differ"),
        ((q, k, v[..., :0]), "head_dim_v must be an integer >= 1, got 0"),
    ):
        assert is_supported(*wrong).reason == reason
    with pytest.raises(ProblemError, match="head_dim_v must be an integer >= 1, got -2"):
        Problem.dense(seqlen=10, head_dim_v=-2)
    plan = plan_for(q, k, v)
    with pytest.raises(PlanMismatchError, match=r"v has shape \(2, 150, 2, 24\)"):
        apply_plan(plan, q, k, k, SCALE)

"""Intervals of rows that see each key, beside the mask, in the public functions on the CPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from attention_cases import SCALE, expected, packed_tensors, shuffled_placement
from hypothesis import given, settings
from hypothesis import strategies as st
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
from dash_attn.backends.base import AuxTensors, RowIntervals, Tensors, backend_named
from dash_attn.backends.cpu import backward, forward, plain_attention
from dash_attn.backends.cpu.oracle import Inputs
from dash_attn.errors import InputError
from dash_attn.ops.operators import DENSE, VARLEN
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import ForwardNumerics, Plan, build_plan, prove
from dash_attn.scores import Scores
from dash_attn.spec import AttentionSpec
from dash_attn.testing import assert_same_bytes, same_bytes
from interval_cases import (
    beside,
    ends_of_documents,
    random_intervals,
    random_tree,
    seen_elements,
    starts_of_prefix,
)

NAMES = ("out", "dq", "dk", "dv")


def drawn(rows: int = 300, dtype: torch.dtype = torch.float64, batch: int = 2) -> list[Tensor]:
    """q, k and v; leaves."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(batch, rows, heads, 16) for heads in (4, 2, 2)]
    return [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]


def by_pytorch(tensors: list[Tensor], seen: Tensor) -> Tensor:
    """Attention under a mask of elements."""
    q, k, v = (x.transpose(1, 2) for x in tensors)
    return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True).transpose(1, 2)


def with_gradients(out: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """out, dq, dk, dv for a gradient that is the same for all."""
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, dout, retain_graph=True)]


def assert_close(found: Tensor, wanted: Tensor, tensors: list[Tensor]) -> None:
    both = with_gradients(found, tensors), with_gradients(wanted, tensors)
    for name, got, exact in zip(NAMES, *both):
        torch.testing.assert_close(got, exact, rtol=1e-9, atol=1e-9, msg=name)


# What they are for

LENGTHS = (70, 1, 128, 101)


def test_documents_are_packed_sequences() -> None:
    tensors = drawn(batch=1)
    found = attention(*tensors, causal=True, row_ends=ends_of_documents(*LENGTHS)[None])
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    flat = [x.flatten(0, 1) for x in tensors]
    packed = flash_attn_varlen_func(*flat, ends, ends, causal=True)
    assert isinstance(packed, Tensor)
    assert_close(found, packed[None], tensors)


def test_documents_that_see_all_of_themselves() -> None:
    """Both sides of the interval, without a mask: encoders."""
    tensors = drawn(batch=1)
    last = ends_of_documents(*LENGTHS)
    first = last - torch.tensor(LENGTHS).repeat_interleave(torch.tensor(LENGTHS)).int()
    found = attention(*tensors, row_starts=first[None], row_ends=last[None])
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    packed = flash_attn_varlen_func(*(x.flatten(0, 1) for x in tensors), ends, ends)
    assert isinstance(packed, Tensor)
    assert_close(found, packed[None], tensors)


def test_prefix_lm() -> None:
    tensors, starts = drawn(), starts_of_prefix(77, 300)
    seen = torch.ones(300, 300, dtype=torch.bool).tril()
    seen[:, :77] = True
    found = attention(*tensors, row_starts=torch.stack([starts, starts]))
    assert_close(found, by_pytorch(tensors, seen), tensors)


def test_a_prefix_that_continuations_share() -> None:
    """Each continuation has the results that it has behind the prefix alone."""
    tensors, parts = drawn(batch=1), (140, 60, 100)
    ends = ends_of_documents(*parts)
    ends[:140] = 300
    found = with_gradients(attention(*tensors, causal=True, row_ends=ends[None]), tensors)[0]
    for begin, end in ((140, 200), (200, 300)):
        alone = [torch.cat([x[:, :140], x[:, begin:end]], 1) for x in tensors]
        wanted = attention(*alone, causal=True)
        torch.testing.assert_close(found[:, begin:end], wanted[:, 140:], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("seed", range(3))
def test_trees_in_depth_first_order(seed: int) -> None:
    """A row sees its ancestors and itself."""
    tensors = drawn(batch=1)
    ends, seen = random_tree(300, seed)
    found = attention(*tensors, causal=True, row_ends=ends[None])
    assert_close(found, by_pytorch(tensors, seen), tensors)


@pytest.mark.parametrize("how", [{}, {"causal": True}, {"window": (50, 20)}], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_any_intervals_beside_any_mask(how: dict[str, Any], seed: int) -> None:
    """Every sequence of a batch has its own; only rows that see something can be compared with PyTorch."""
    tensors = drawn(rows=150)
    each = [random_intervals(150, 150, 2 * seed + index) for index in range(2)]
    left, right = how.get("window", (-1, -1))
    mask = Mask.of_sides(left, 0 if how.get("causal") else right)
    seen = torch.stack([seen_elements(rows, mask, 150) for rows in each])
    starts, ends = (torch.stack(side) for side in zip(*each))
    out = attention(*tensors, row_starts=starts, row_ends=ends, **how)
    blind = ~seen.any(-1)
    wanted = by_pytorch(tensors, (seen | blind[..., None])[:, None])
    shown = ~blind[..., None, None]
    assert not out.masked_fill(shown, 0).any()
    assert_close(out * shown, wanted * shown, tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_errors_are_those_of_plain_attention(dtype: torch.dtype) -> None:
    """Beside float64, at most twice as large as PyTorch's in the same dtype."""
    tensors = drawn(dtype=dtype, batch=1)
    ends, seen = random_tree(300, 5)
    mine = with_gradients(attention(*tensors, causal=True, row_ends=ends[None]), tensors)
    theirs = with_gradients(by_pytorch(tensors, seen), tensors)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    exact = with_gradients(by_pytorch(wide, seen), wide)
    dout_as_rounded = torch.randn(mine[0].shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact[1:] = torch.autograd.grad(by_pytorch(wide, seen), wide, dout_as_rounded.double())
    for name, got, other, wanted in zip(NAMES, mine, theirs, exact):
        error, allowed = ((x.double() - wanted).norm() for x in (got, other))
        assert error <= 2 * allowed + 1e-6 * wanted.norm(), name


def test_gradients_by_finite_differences() -> None:
    tensors = [x[:1, :6, :, :4].detach().requires_grad_() for x in drawn()]
    ends = torch.tensor([[6, 2, 2, 6, 5, 6]], dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda *x: attention(*x, causal=True, row_ends=ends), tensors)


# Against the oracle


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, RowIntervals]:
    tile_m, tile_n = draw(tiles)
    kv_heads = draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 3))
    pairs = tuple(draw(sequences))
    problem = Problem(pairs, heads, kv_heads, 8, draw(masks), "float32", tile_m, tile_n)
    seed = draw(st.integers(0, 2**16))
    parts = [random_intervals(n, m, seed + at) for at, (m, n) in enumerate(pairs)]
    rows = RowIntervals(*(torch.cat(side) for side in zip(*parts)))
    return build_plan(problem, draw(st.sampled_from(["fa3", "descending", "spt"]))), rows


@settings(max_examples=60)
@given(plans())
def test_packed_sequences_agree_with_the_oracle(case: tuple[Plan, RowIntervals]) -> None:
    plan, rows = case
    problem = plan.problem
    tensors = packed_tensors(problem)
    dout, q, k, v = tensors
    numerics = ForwardNumerics(8, "float32", tile=16, segment=32)  # short, so that there are several
    aux = beside(rows)
    out, lse = forward(plan, q, k, v, SCALE, aux, numerics=numerics)
    found = (out, lse, *backward(plan, Tensors(dout, q, k, v, out, lse), SCALE, aux))
    exact = expected(problem, tensors, aux)
    for name, got in zip(("out", "lse", "dq", "dk", "dv"), found):
        torch.testing.assert_close(got.double(), exact[name], rtol=1e-4, atol=3e-5, msg=name)
    blind = lse[0] == -torch.inf
    for x in (out, found[2]):
        assert not x[blind].any()


@pytest.mark.parametrize(("head_dim_v", "dropout_p"), [(8, 0.0), (24, 0.0), (24, 0.3)])
@pytest.mark.parametrize("mask", [Mask.full(), Mask.causal(), Mask.window(40, 9)], ids=lambda mask: mask.name)
def test_with_all_that_scores_take(mask: Mask, head_dim_v: int, dropout_p: float) -> None:
    """A sink, ALiBi, a softcap and dropout, and V with a head dim of its own. Rows that see nothing have the
    sink for their log-sum-exp."""
    pairs = ((70, 90), (40, 0), (120, 33))
    problem = Problem(pairs, 4, 2, 16, mask, "float64", 16, 32, head_dim_v=head_dim_v)
    dout, *qkv = packed_tensors(problem)
    leaves = [x.requires_grad_() for x in qkv]
    parts = [random_intervals(n, m, 7 + at) for at, (m, n) in enumerate(pairs)]
    rows = RowIntervals(*(torch.cat(side) for side in zip(*parts)))
    rows.starts[:90].clamp_(min=5)  # the first rows see nothing
    sink = torch.tensor([0.5, 3.0, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    slopes = torch.linspace(0.0, 0.5, 12).view(3, 4)
    ends = [torch.tensor([0, *side]).cumsum(0).int() for side in zip(*pairs)]
    how: dict[str, Any] = {"window_size": mask.sides, "softmax_scale": SCALE, "softcap": 5.0}
    how |= {"dropout_p": dropout_p, "dropout_seed": 7, "learnable_sink": sink, "alibi_slopes": slopes}
    how |= {"row_starts": rows.starts, "row_ends": rows.ends}
    out, lse = flash_attn_varlen_func(*leaves, *ends, return_lse=True, **how)
    found = (out, lse, *torch.autograd.grad(out, [*leaves, sink], dout))
    aux = beside(rows, AuxTensors(sink.detach(), slopes, torch.tensor(7)))
    detached = [dout, *(x.detach() for x in leaves)]
    wanted = expected(problem, detached, aux, scores=Scores(SCALE, 5.0, True, True, dropout_p, True))
    for name, got in zip(("out", "lse", "dq", "dk", "dv", "dsink"), found):
        torch.testing.assert_close(got, wanted[name], rtol=1e-9, atol=1e-9, msg=name)
    blind = torch.cat([torch.arange(5), torch.arange(70, 110)])
    assert not out[blind].any()
    torch.testing.assert_close(lse[:, blind], sink[:, None].expand(-1, 45))


def test_bytes_with_all_that_scores_take() -> None:
    """Two runs; packed; by a plan of one's own; compiled. Intervals that hide nothing change nothing."""
    tensors, rows = drawn(rows=100, dtype=torch.float32), random_intervals(200, 100, 3)
    sink = torch.tensor([0.5, 3.0, -1.0, 2.0], requires_grad=True)
    more: dict[str, Any] = {"learnable_sink": sink, "alibi_slopes": torch.linspace(0.0, 0.5, 8).view(2, 4)}
    more |= {"dropout_p": 0.3, "dropout_seed": torch.tensor(7)}
    dense = more | {"row_starts": rows.starts.view(2, 100), "row_ends": rows.ends.view(2, 100)}
    ends = torch.tensor([0, 100, 200], dtype=torch.int32)

    def packed(*qkv: Tensor, row_starts: Tensor, row_ends: Tensor, **how: Any) -> Any:
        flat = [x.flatten(0, 1) for x in qkv]
        how |= {"row_starts": row_starts.flatten(), "row_ends": row_ends.flatten()}
        return flash_attn_varlen_func(*flat, ends, ends, causal=True, **how).unflatten(0, (2, 100))

    def planned(*qkv: Tensor, **how: Any) -> Tensor:
        plan = plan_for(*qkv, causal=True, row_ends=how["row_ends"])
        return apply_plan(plan, *qkv, 0.25, **how)[0]

    def compiled(*qkv: Tensor, **how: Any) -> Any:
        torch.compiler.reset()
        return torch.compile(attention, fullgraph=True, backend="aot_eager")(*qkv, causal=True, **how)

    leaves = [*tensors, sink]
    wanted = with_gradients(attention(*tensors, causal=True, **dense), leaves)
    for function in (packed, planned, compiled, lambda *x, **how: attention(*x, causal=True, **how)):
        for got, same in zip(with_gradients(function(*tensors, **dense), leaves), wanted, strict=True):
            assert_same_bytes(got, same)
    everything = torch.full((2, 100), 100, dtype=torch.int32)
    plain = with_gradients(attention(*tensors, causal=True, **more), leaves)
    shown = attention(*tensors, causal=True, row_ends=everything, **more)
    for got, same in zip(with_gradients(shown, leaves), plain, strict=True):
        assert_same_bytes(got, same)


def test_the_oracle_sees_what_it_should() -> None:
    q, k, v = (x[0].detach() for x in drawn(rows=40))
    q, k = q[:, :2], k
    rows = random_intervals(40, 40, 1)
    seen = seen_elements(rows, Mask.causal(), 40)
    found = plain_attention(Inputs(q, q, k, v), Mask.causal(), 0.25, aux=beside(rows))
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.25
    p = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(found.out, torch.einsum("hqk,khd->qhd", p, v))


# Bytes


def test_the_first_document_has_the_bytes_that_it_has_alone() -> None:
    """And so has one that begins where a tile of keys does: what it does not see changes nothing."""
    tensors = [x.detach() for x in drawn(dtype=torch.bfloat16, batch=1)]
    out = attention(*tensors, causal=True, row_ends=ends_of_documents(128, 130, 42)[None])
    for begin, end in ((0, 128), (128, 258)):
        alone = attention(*(x[:, begin:end] for x in tensors), causal=True)
        assert_same_bytes(out[:, begin:end].contiguous(), alone)


def test_intervals_that_hide_nothing_change_no_byte() -> None:
    tensors = drawn(dtype=torch.bfloat16)
    wanted = with_gradients(attention(*tensors, causal=True), tensors)
    everything = torch.full((2, 300), 300, dtype=torch.int32)
    own = torch.arange(300, dtype=torch.int32).expand(2, -1)
    for rows in ({"row_ends": everything}, {"row_starts": own}, {"row_starts": own, "row_ends": everything}):
        found = with_gradients(attention(*tensors, causal=True, **rows), tensors)
        for name, got, same in zip(NAMES, found, wanted):
            assert_same_bytes(got, same, name)
    assert_same_bytes(  # they say as much as the mask
        attention(*tensors, row_starts=own), attention(*tensors, causal=True)
    )


def test_dense_packed_and_by_a_plan_of_ones_own() -> None:
    tensors, rows = drawn(dtype=torch.float32), random_intervals(600, 300, 3)
    dense = {"row_starts": rows.starts.view(2, -1), "row_ends": rows.ends.view(2, -1)}
    wanted = with_gradients(flash_attn_func(*tensors, causal=True, **dense), tensors)
    flat = [x.detach().flatten(0, 1).requires_grad_() for x in tensors]
    ends = torch.tensor([0, 300, 600], dtype=torch.int32)
    how: dict[str, Any] = {"row_starts": rows.starts, "row_ends": rows.ends}
    packed = flash_attn_varlen_func(*flat, ends, ends, causal=True, **how)
    for name, got, same in zip(NAMES, with_gradients(packed, flat), wanted):
        assert_same_bytes(got.view(same.shape), same, name)
    plan = plan_for(*tensors, causal=True, **dense)
    assert plan.fingerprint == plan_for(*tensors, causal=True).fingerprint
    shuffled = prove(shuffled_placement(plan, 1))
    again, _ = apply_plan(shuffled, *tensors, 0.25, **dense)
    for name, got, same in zip(NAMES, with_gradients(again, tensors), wanted):
        assert_same_bytes(got, same, name)
    disordered, _ = apply_plan(plan, *tensors, 0.25, disorder=random.Random(1), **dense)
    assert not same_bytes(with_gradients(disordered, tensors)[1], wanted[1])


def test_a_call_like_an_earlier_one_reads_its_own_intervals() -> None:
    tensors = [x.detach() for x in drawn(dtype=torch.float32, batch=1)]
    ends = torch.tensor([0, 300], dtype=torch.int32)
    flat = [x[0] for x in tensors]
    for lengths in ((300,), (100, 200), (299, 1)):
        rows = ends_of_documents(*lengths)
        found = attention(*tensors, causal=True, row_ends=rows[None])
        packed = flash_attn_varlen_func(*flat, ends, ends, causal=True, row_ends=rows)
        bounds = torch.tensor([0, *lengths]).cumsum(0).int()
        wanted = flash_attn_varlen_func(*flat, bounds, bounds, causal=True)
        torch.testing.assert_close(found[0], wanted)
        assert_same_bytes(packed, found[0])
    assert_same_bytes(attention(*tensors, causal=True), flash_attn_func(*tensors, causal=True))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_a_row_does_not_see_may_be_anything(bad: float) -> None:
    """In k and v of another document, and in keys that no row sees."""
    tensors = [x.detach() for x in drawn(dtype=torch.float32, batch=1)]
    ends = ends_of_documents(100, 150, 50)[None]
    ends[:, 120] = 0
    out, lse = attention(*tensors, causal=True, row_ends=ends, return_lse=True)
    q, k, v = (x.clone() for x in tensors)
    k[:, :100] = v[:, :100] = k[:, 120] = v[:, 120] = bad
    found, other = attention(q, k, v, causal=True, row_ends=ends, return_lse=True)
    assert_same_bytes(found[:, 100:].contiguous(), out[:, 100:].contiguous())
    assert_same_bytes(other[..., 100:].contiguous(), lse[..., 100:].contiguous())


def test_compiled_calls_have_the_same_bytes() -> None:
    rows = random_intervals(80, 40, 3)
    tensors = drawn(rows=40, dtype=torch.float32)
    flat = [x.detach().flatten(0, 1).requires_grad_() for x in tensors]
    ends = torch.tensor([0, 40, 80], dtype=torch.int32)

    def dense(q: Tensor, k: Tensor, v: Tensor, row_ends: Tensor) -> Any:
        return attention(q, k, v, causal=True, row_ends=row_ends.view(2, 40))

    def packed(q: Tensor, k: Tensor, v: Tensor, row_ends: Tensor) -> Any:
        return flash_attn_varlen_func(q, k, v, ends, ends, row_starts=rows.starts, row_ends=row_ends)

    for call, leaves in ((dense, tensors), (packed, flat)):
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for row_ends in (rows.ends, rows.ends // 2):
            found, wanted = (with_gradients(f(*leaves, row_ends), leaves) for f in (compiled, call))
            for name, got, same in zip(NAMES, found, wanted):
                assert_same_bytes(got, same, name)


def test_operators_and_transforms() -> None:
    tensors = drawn(rows=20, dtype=torch.float32)
    rows = random_intervals(40, 20, 1)
    dense = tuple(x.view(2, 20) for x in rows)
    spec = AttentionSpec(0.2, -1, 0, row_intervals=True)
    torch.library.opcheck(DENSE.forward, (*tensors, *beside(RowIntervals(*dense)), *spec))
    flat = [x.detach().flatten(0, 1).requires_grad_() for x in tensors]
    ends = torch.tensor([0, 20, 40], dtype=torch.int32)
    torch.library.opcheck(VARLEN.forward, (*flat, *beside(rows), ends, ends, *spec, -1, -1))

    def loss(q: Tensor) -> Tensor:
        found = attention(q, *tensors[1:], causal=True, row_starts=dense[0], row_ends=dense[1])
        assert isinstance(found, Tensor)
        return found.square().sum()

    q = tensors[0].detach().requires_grad_()
    assert_same_bytes(torch.func.grad(loss)(tensors[0].detach()), torch.autograd.grad(loss(q), q)[0])


def test_what_was_changed_before_the_backward_is_an_error() -> None:
    tensors, ends = drawn(), ends_of_documents(300).expand(2, -1).contiguous()
    out = attention(*tensors, causal=True, row_ends=ends)
    ends[0, 0] = 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    with torch.inference_mode():
        made = torch.full((2, 300), 300, dtype=torch.int32)
    out = attention(*tensors, causal=True, row_ends=made)
    out.sum().backward()


def test_no_sequences() -> None:
    q, k, v = (x[:0].detach() for x in drawn())
    assert attention(q, k, v, row_ends=torch.zeros(0, 300, dtype=torch.int32)).shape == q.shape


# What is refused

ENDS = torch.full((2, 30), 30, dtype=torch.int32)


@pytest.mark.parametrize("name", ["row_starts", "row_ends"])
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ([1, 2], "{} must be a torch.Tensor, got list"),
        (ENDS.long(), "{} must be torch.int32, got torch.int64"),
        (ENDS[:, 1:], "{} must have shape (2, 30), a row per key, got (2, 29)"),
        (ENDS[0], "{} must have shape (2, 30), a row per key, got (30,)"),
        (ENDS.to("meta"), "{} is on meta, q is on cpu; it may be there or on the cpu"),
    ],
    ids=lambda wrong: "" if isinstance(wrong, str) else None,
)
def test_what_they_cannot_be_is_named(name: str, wrong: object, reason: str) -> None:
    tensors, rows = drawn(rows=30), {name: wrong}
    message = reason.format(name)
    assert is_supported(*tensors, **rows).reason == message
    for function in (attention, flash_attn_func, plan_for, fingerprints):
        with pytest.raises(InputError) as raised:
            function(*tensors, **rows)
        assert str(raised.value) == message


def test_of_packed_keys_and_of_a_cache() -> None:
    flat = [x.flatten(0, 1) for x in drawn(rows=30)]
    ends = torch.tensor([0, 30, 60], dtype=torch.int32)
    assert is_supported(*flat, ends, ends, row_ends=ENDS.flatten())
    reason = is_supported(*flat, ends, ends, row_ends=ENDS).reason
    assert reason == "row_ends must have shape (60,), a row per key, got (2, 30)"
    used = torch.tensor([3, 4], dtype=torch.int32)
    with pytest.raises(InputError, match="row_ends is not supported with seqused_k"):
        flash_attn_varlen_func(*(x.detach() for x in drawn(rows=30)), seqused_k=used, row_ends=ENDS)


def test_a_backend_is_asked_whether_it_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = drawn(rows=31)  # a shape that no other test has called with
    cpu, asked = type(backend_named("cpu")), []

    def why_not(*given: Any) -> str:
        asked.append(given[-1].row_intervals)
        return "not intervals" if asked[-1] else ""

    monkeypatch.setattr(cpu, "why_not", why_not)
    rows = torch.full((2, 31), 31, dtype=torch.int32)
    assert is_supported(*tensors)
    assert is_supported(*tensors, row_starts=rows).reason == "not intervals"
    with pytest.raises(InputError, match="not intervals"):
        apply_plan(plan_for(*tensors), *tensors, 0.25, row_ends=rows)
    assert asked == [False, True, True]


def test_sm90_refuses_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    sm90 = backend_named("sm90")
    monkeypatch.setattr("dash_attn.backends.sm90.backend._capability", lambda device: (9, 0))
    monkeypatch.setattr("dash_attn.backends.sm90.backend._why_no_compiler", lambda: "")
    problem, device = Problem.dense(seqlen=10, head_dim=64), torch.device("cuda", 0)
    scores = Scores(0.125, row_intervals=True)
    assert sm90.why_not(problem, device, packed=False, scores=scores) == ""
    reason = sm90.why_not(problem, device, packed=False, scores=scores._replace(softcap=2.0))
    assert reason == "row_starts and row_ends beside softcap 2.0 are not supported by sm90"
    large = Problem.dense(seqlen=10, head_dim=192)
    reason = sm90.why_not(large, device, packed=False, scores=scores)
    assert reason == "row_starts and row_ends are not supported by sm90 at head_dim 192"

"""The SDPA hook, end to end on the CPU: what runs here, what raises, and what is left behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from threading import Barrier

import pytest
import torch
from sdpa_cases import leaves, needs_registry, nothing_left_behind, ours, run
from torch.nn import attention as registry
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dash_attn import attention
from dash_attn.errors import InputError, UnavailableError
from dash_attn.integrations import aten, sdpa
from dash_attn.ops.spread import current_spread, spread_by
from dash_attn.testing import assert_same_bytes, same_bytes


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    with nothing_left_behind():
        yield


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_calls_inside_give_the_bytes_of_attention(is_causal, dtype):
    tensors = leaves(dtype=dtype)
    expected = run(ours, tensors, causal=is_causal)
    with sdpa.enabled():
        found = run(F.scaled_dot_product_attention, tensors, is_causal=is_causal, enable_gqa=True)
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected):
        assert_same_bytes(a, b, name)
    outside = run(F.scaled_dot_product_attention, tensors, is_causal=is_causal, enable_gqa=True)
    for a, b in zip(found, outside):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
    # Other bytes outside: the calls inside did not run on PyTorch's own kernels.
    assert not all(same_bytes(a, b) for a, b in zip(found, outside))


def test_scale_and_strides():
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in leaves())
    with sdpa.enabled():
        found = F.scaled_dot_product_attention(q, k, v, scale=0.5, enable_gqa=True)
    assert found.stride() == q.stride()
    assert_same_bytes(found, ours(q, k, v, softmax_scale=0.5))


def test_output_under_autocast_has_its_dtype_whatever_the_layout():
    x = torch.randn(1, 2, 40, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for q in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
            wanted = F.scaled_dot_product_attention(q, q, q)
            with sdpa.enabled():
                found = F.scaled_dot_product_attention(q, q, q)
            assert (found.dtype, found.stride()) == (wanted.dtype, q.stride())


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"attn_mask": torch.ones(300, 300)}, InputError, r"attn_mask of shape \(300, 300\) holds 1.0"),
        ({"dropout_p": 1.0}, InputError, "dropout_p must be at least 0 and less than 1, got 1.0"),
    ],
)
def test_what_cannot_be_honoured_raises(how, error, message):
    tensors = leaves(kv_heads=4)
    with sdpa.enabled(), pytest.raises(error, match=message):
        F.scaled_dot_product_attention(*tensors, **how)


def test_dropout_is_that_of_attention():
    tensors = leaves(kv_heads=4)
    torch.manual_seed(2)
    with sdpa.enabled():
        found = run(F.scaled_dot_product_attention, tensors, dropout_p=0.2)
    torch.manual_seed(2)
    for a, b in zip(found, run(ours, tensors, dropout_p=0.2)):
        assert_same_bytes(a, b)
    assert not same_bytes(found[0], run(ours, tensors)[0])


def test_causal_of_unequal_lengths_raises():
    q, k, v = leaves(kv_heads=4, seqlen_k=310)
    with sdpa.enabled(), pytest.raises(InputError, match="seqlen_q 300 and seqlen_k 310"):
        F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_heads_and_dimensions_that_cannot_be_honoured_raise():
    q, k, v = (x.detach() for x in leaves())
    with sdpa.enabled():
        with pytest.raises(InputError, match="query has 4 heads, key 2, and enable_gqa is False"):
            F.scaled_dot_product_attention(q, k, v)
        with pytest.raises(InputError, match=r"query must have 4 dimensions .*, got \(4, 300, 16\)"):
            F.scaled_dot_product_attention(q[0], q[0], q[0])
        x, weight, bias = torch.zeros(2, 3, 16), torch.zeros(48, 16), torch.zeros(48)
        with pytest.raises(InputError, match="_native_multi_head_attention hides an attention"):
            torch._native_multi_head_attention(x, x, x, 16, 4, weight, bias, weight[:16], bias[:16])


def test_a_backward_after_the_block_is_ours():
    tensors = leaves()
    expected = run(ours, tensors, causal=True)
    with sdpa.enabled():
        out = F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    found = [out.detach(), *torch.autograd.grad(out, tensors, torch.ones_like(out) * 0.1)]
    for a, b in zip(found, expected):
        assert_same_bytes(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_runs_again_as_it_ran_wherever_the_backward_is(reentrant):
    """Also one within another. Other threads' checkpoints stay PyTorch's, and all do behind the block."""
    tensors = leaves()

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def once(q, k, v):
        return checkpoint(attend, q, k, v, use_reentrant=reentrant)

    def twice(q, k, v):
        return checkpoint(once, q, k, v, use_reentrant=reentrant)

    plain = run(once, tensors)
    expected = run(ours, tensors, causal=True)
    assert not same_bytes(plain[0], expected[0])
    for function in (once, twice):
        with sdpa.enabled():
            found = [run(function, tensors)]
            out = function(*tensors)
            with ThreadPoolExecutor(1) as other:
                others = other.submit(run, once, tensors).result()
        found.append(run(lambda *_: out, tensors))  # noqa: B023 - at once
        for results, wanted in ((found[0], expected), (found[1], expected), (others, plain)):
            for a, b in zip(results, wanted, strict=True):
                assert_same_bytes(a, b)
    for a, b in zip(run(twice, tensors), plain, strict=True):
        assert_same_bytes(a, b)


def test_a_composable_checkpoint_runs_again_as_it_ran():
    module = pytest.importorskip("torch.distributed._composable")
    tensors = leaves()

    class Attend(torch.nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    attend = Attend()
    module.checkpoint(attend)
    with sdpa.enabled():
        out = attend(*tensors)
    for a, b in zip(run(lambda *_: out, tensors), run(ours, tensors, causal=True), strict=True):
        assert_same_bytes(a, b)


def test_of_two_contexts_of_ranks_the_inner_one_counts(monkeypatch):
    """A backward takes the one around it to another thread; what is run again there may open its own."""
    seen, outer, inner = [], object(), object()
    ours = lambda *_, **__: seen.append(current_spread())  # noqa: E731
    monkeypatch.setitem(sdpa._OURS, torch._C._nn.scaled_dot_product_attention, ours)
    with sdpa._Mode(outer):
        F.scaled_dot_product_attention(*leaves())
        with spread_by(inner):
            F.scaled_dot_product_attention(*leaves())
    assert seen == [outer, inner]


def test_threads_do_not_meet():
    q, k, v = leaves(kv_heads=4)
    theirs = F.scaled_dot_product_attention(q, k, v)
    mine = ours(q, k, v)
    assert not same_bytes(mine, theirs)
    inside, outside = Barrier(2), Barrier(2)

    def other():
        with sdpa.enabled():
            inside.wait()
            found = F.scaled_dot_product_attention(q, k, v)
            outside.wait()
        return found

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(other)
        inside.wait()
        assert_same_bytes(F.scaled_dot_product_attention(q, k, v), theirs)
        with sdpa.enabled():
            assert_same_bytes(F.scaled_dot_product_attention(q, k, v), mine)
        outside.wait()
        assert_same_bytes(future.result(), mine)


@pytest.mark.parametrize("gradients", [False, True])
def test_multihead_attention_runs_here(gradients, monkeypatch):
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(64, 4, batch_first=True).eval()
    x = torch.randn(2, 30, 64, requires_grad=gradients)
    with torch.set_grad_enabled(gradients):
        expected, _ = layer(x, x, x, need_weights=False)
        with sdpa.enabled():
            found, _ = layer(x, x, x, need_weights=False)
            calls = []
            run_here = sdpa._multi_head_attention.__globals__
            monkeypatch.setitem(run_here, "scaled_dot_product_attention", lambda *a: calls.append(a) or a[0])
            layer(x, x, x, need_weights=False)
    torch.testing.assert_close(found, expected)
    assert len(calls) == 1


@pytest.mark.parametrize("gradients", [False, True])
def test_multihead_attention_with_weights_raises(gradients):
    """PyTorch computes the weights, and the output with them, without SDPA."""
    layer = torch.nn.MultiheadAttention(64, 4, batch_first=True).eval()
    x = torch.randn(2, 30, 64, requires_grad=gradients)
    with torch.set_grad_enabled(gradients), sdpa.enabled():
        for how in ({}, {"need_weights": True}, {"average_attn_weights": False}):
            with pytest.raises(
                InputError, match="need_weights=True, .* call the layer with need_weights=False"
            ):
                layer(x, x, x, **how)
        weights = layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0, layer.out_proj.weight
        with pytest.raises(InputError, match="need_weights=True"):
            F.multi_head_attention_forward(x, x, x, 64, 4, *weights, layer.out_proj.bias, False, None, True)
        out, nothing = F.multi_head_attention_forward(
            x, x, x, 64, 4, *weights, layer.out_proj.bias, False, None, False
        )
    assert nothing is None
    assert out.shape == x.shape


class AnyMode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class AnyTensor(torch.Tensor):
    pass


@pytest.mark.parametrize("around", [AnyMode, partial(torch.device, "cpu"), AnyTensor])
def test_multihead_attention_runs_here_whatever_else_is_asked(around):
    """`torch.set_default_device` opens a mode, too."""
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    x = torch.randn(2, 300, 64, requires_grad=True)
    theirs, _ = layer(x, x, x, need_weights=False)
    with sdpa.enabled():
        mine, _ = layer(x, x, x, need_weights=False)
        (expected,) = torch.autograd.grad(mine.sum(), x)
    assert not same_bytes(mine, theirs)
    given, mode = (x.as_subclass(AnyTensor), nullcontext()) if around is AnyTensor else (x, around())
    with mode, sdpa.enabled():
        out, _ = layer(given, given, given, need_weights=False)
        (found,) = torch.autograd.grad(out.sum(), x)
        with pytest.raises(InputError, match="attn_mask"):
            layer(given, given, given, need_weights=False, attn_mask=torch.randn(300, 300))
    assert_same_bytes(out.as_subclass(torch.Tensor), mine)
    assert_same_bytes(found.as_subclass(torch.Tensor), expected)


@pytest.mark.parametrize("seqlen_k", [300, 310, 290])
@pytest.mark.filterwarnings("ignore:Lower right causal bias:UserWarning")  # of rows that see nothing
def test_lower_right_masks_run_here(seqlen_k):
    tensors = leaves(seqlen_k=seqlen_k)
    expected = run(ours, tensors, causal=True)
    mask = causal_lower_right(300, seqlen_k)
    with sdpa.enabled():
        found = run(F.scaled_dot_product_attention, tensors, attn_mask=mask, enable_gqa=True)
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected):
        assert_same_bytes(a, b, name)
    rows = slice(max(0, 300 - seqlen_k), None)  # PyTorch's rows that see nothing are no numbers
    q, k, v = (x.detach() for x in tensors)
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(found[0][:, :, rows], theirs[:, :, rows], atol=2e-2, rtol=2e-2)


def test_upper_left_masks_run_for_equal_lengths_only():
    q, k, v = leaves(kv_heads=4)
    with sdpa.enabled():
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_upper_left(300, 300))
        assert_same_bytes(found, ours(q, k, v, causal=True))
        message = r"attn_mask is causal_upper_left\(200, 300\): .* as causal_lower_right\(200, 300\) does"
        with pytest.raises(InputError, match=message):
            F.scaled_dot_product_attention(q[:, :, :200], k, v, attn_mask=causal_upper_left(200, 300))
        with pytest.raises(
            InputError, match="attn_mask is for 200 queries and 300 keys, there are 300 and 300"
        ):
            F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(200, 300))
        with pytest.raises(InputError, match="is_causal=True beside an attn_mask that is causal itself"):
            F.scaled_dot_product_attention(q, k, v, causal_lower_right(300, 300), is_causal=True)
        with pytest.raises(InputError, match=r"attn_mask of shape \(300, 300\) needs a gradient"):
            F.scaled_dot_product_attention(q, k, v, attn_mask=torch.nn.Parameter(torch.ones(300, 300)))


def test_the_flash_operator_of_cuda_devices_is_lower_right():
    """PyTorch calls it with unequal lengths for ``causal_lower_right`` only; the CPU's means upper-left."""
    q, k, v = (x.detach() for x in leaves(seqlen_k=310))
    leaf = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = run(ours, leaf, causal=True)
    out, lse, *_ = aten._sdpa_forward(q, k, v, is_causal=True)
    seed = torch.zeros(())
    grad_out = torch.ones_like(out) * 0.1
    grads = aten._sdpa_backward(
        grad_out, q, k, v, out, lse, None, None, 300, 310, 0.0, True, seed, seed
    )  # fmt: skip
    for a, b in zip((out, *grads), expected):
        assert_same_bytes(a, b)
    with pytest.raises(InputError, match="SDPA aligns the mask top-left"):
        aten._sdpa_forward_cpu(q, k, v, is_causal=True)


def test_calls_by_the_operator_run_here():
    q, k, v = (x.detach() for x in leaves(kv_heads=4))
    operator = torch.ops.aten.scaled_dot_product_attention
    with sdpa.enabled():
        for call in (operator, operator.default):
            assert_same_bytes(call(q, k, v, is_causal=True), ours(q, k, v, causal=True))


@needs_registry
def test_activation_is_explicit_and_taken_back():
    assert sdpa.NAME not in (registry.current_flash_attention_impl(),)
    sdpa.restore()  # nothing to do
    sdpa.activate()
    try:
        assert registry.current_flash_attention_impl() == sdpa.NAME
        tensors = leaves()
        expected = run(ours, tensors)
        for a, b in zip(run(F.scaled_dot_product_attention, tensors, enable_gqa=True), expected):
            assert_same_bytes(a, b)
        with sdpa.enabled():
            pass
        assert registry.current_flash_attention_impl() == sdpa.NAME  # as before
    finally:
        sdpa.restore()


def test_an_error_inside_takes_it_back_too():
    with pytest.raises(ZeroDivisionError), sdpa.enabled():
        _ = 1 / 0


def test_the_flash_entry_points_behind_varlen_and_nested_tensors():
    q, k, v = (x.detach().transpose(1, 2) for x in leaves())
    out, lse, *_ = aten._flash_forward(
        q, k, v, None, None, 300, 300, 0.0, True, False, window_size_left=50, window_size_right=-1
    )
    expected, expected_lse = attention(q, k, v, causal=True, window=(50, -1), return_lse=True)
    assert_same_bytes(out, expected)
    assert_same_bytes(lse, expected_lse)
    leaf = [x.clone().requires_grad_() for x in (q, k, v)]
    attention(*leaf, causal=True, window=(50, -1)).backward(out)
    grads = aten._flash_backward(
        out, q, k, v, out, lse, None, None, 300, 300, 0.0, True, lse, lse,
        window_size_left=50, window_size_right=-1,
    )  # fmt: skip
    for found, x in zip(grads, leaf):
        assert_same_bytes(found, x.grad)
    bounds = torch.tensor([0, 300, 600], dtype=torch.int32)
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    packed, packed_lse, *_ = aten._flash_forward(*rows, bounds, bounds, 300, 300, 0.0, True, False)
    assert_same_bytes(packed.view(q.shape), attention(q, k, v, causal=True))
    packed_grads = aten._flash_backward(
        packed, *rows, packed, packed_lse, bounds, bounds, 300, 300, 0.0, True, lse, lse
    )
    for x in leaf:
        x.grad = None
    attention(*leaf, causal=True).backward(packed.view(q.shape))
    for found, x in zip(packed_grads, leaf):
        assert_same_bytes(found.view(x.shape), x.grad)
    slopes = torch.ones(4)
    with pytest.raises(InputError, match="alibi_slopes is not supported by dash-attn, got a tensor"):
        aten._flash_forward(q, k, v, None, None, 300, 300, 0.0, True, False, alibi_slopes=slopes)


def test_a_torch_without_the_registry(monkeypatch):
    monkeypatch.delattr(registry, "register_flash_attention_impl", raising=False)
    with pytest.raises(UnavailableError, match="has no torch.nn.attention.register_flash_attention_impl"):
        sdpa.activate()


@pytest.mark.parametrize("saved", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_a_selective_checkpoint_may_save_everything(saved):
    """What it saves is not written to: contiguous tensors have another layout than outputs."""
    tensors = leaves()
    policy = partial(create_selective_checkpoint_contexts, lambda *_, **__: saved)

    def kept(*qkv):
        how = {"use_reentrant": False, "context_fn": policy}
        return checkpoint(lambda q, k, v: attend(2 * q, k, v).sin(), *qkv, **how)

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    with sdpa.enabled():
        found = run(kept, tensors)
        expected = run(lambda q, k, v: attend(2 * q, k, v).sin(), tensors)
    for a, b in zip(found, expected):
        assert_same_bytes(a, b)


@pytest.mark.parametrize("shape", [(2, 4, 17, 16), (1, 4, 17, 16), (2, 1, 5, 8), (1, 1, 1, 8), (2, 4, 0, 8)])
def test_outputs_have_the_strides_of_queries(shape):
    batch, heads, rows, columns = shape
    x = torch.randn(batch, rows, heads, columns).transpose(1, 2)
    wide = torch.randn(batch, heads, rows, 2 * columns)
    for like in (torch.randn(shape), torch.randn_like(x), wide[..., ::2], wide[:, :1, :, ::2].expand(shape)):
        found = aten.in_layout_of(like, x)
        assert_same_bytes(found, x)
        assert found.stride() == torch.empty_like(like).stride()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_with_strides_are_named():
    nested = torch.nested.nested_tensor([torch.randn(2, 3, 8), torch.randn(2, 5, 8)])
    with sdpa.enabled(), pytest.raises(InputError, match="query is a nested tensor: flash_attn_varlen_func"):
        F.scaled_dot_product_attention(nested, nested, nested)

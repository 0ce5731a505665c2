"""Head dims that are no kernel's own: the bytes of tensors padded with zeros, and the values of Triton."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dash_attn
from dash_attn import attention, flash_attn_varlen_func
from dash_attn.backends.base import backend_for
from dash_attn.backends.cpu.oracle import Inputs, plain_attention
from dash_attn.backends.sm90.tiles import TILES, kernel_of
from dash_attn.ops.policies import forget
from dash_attn.problem import Mask
from dash_attn.scores import Scores
from dash_attn.testing import assert_same_bytes, same_bytes
from gpu_cases import relative_error
from kvcache_cases import History, random_history

ALL = pytest.mark.parametrize("head_dim", [40, 48, 72, 80, 88, 96, 104, 120, 136, 160, 208])
MASKS: dict[str, dict[str, Any]] = {
    "full": {"policy": "shift(ring=16, min_stride=2, max_stride=4)"},
    "causal": {"causal": True, "policy": "descending"},
    "window": {"causal": True, "window": (100, 0), "policy": "descending"},
}


def drawn(head_dim: int, *, rows: int = 500, keys: int = 700, kv_heads: int = 1) -> list[Tensor]:
    """q, k, v and the gradient of out."""
    generator = torch.Generator("cuda").manual_seed(head_dim)
    sizes = [(2, n, h, head_dim) for n, h in ((rows, 4), (keys, kv_heads), (keys, kv_heads), (rows, 4))]
    dtype = torch.float16 if head_dim % 16 else torch.bfloat16
    return [torch.randn(s, generator=generator, device="cuda").to(dtype) for s in sizes]


def whole_of(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Head dims with the same bytes. Kernels of 80 and 96 columns make those of 128."""
    widest = max(head_dim, head_dim_v)
    if widest > 128:
        return (192, 128) if head_dim <= 192 and head_dim_v <= 128 else (256, 256)
    return (64, 64) if widest <= 64 else (128, 128)


def padded(x: Tensor, whole: int = 0) -> Tensor:
    """With zeros behind its columns, by default as many as head dims have that are all equal."""
    return F.pad(x, (0, (whole or whole_of(x.shape[-1], x.shape[-1])[0]) - x.shape[-1]))


def run(tensors: list[Tensor], **how: Any) -> list[Tensor]:
    """lse, out, dq, dk, dv."""
    *leaves, dout = tensors
    leaves = [x.detach().requires_grad_() for x in leaves]
    out, lse = attention(*leaves, return_lse=True, **how)
    return [lse, out, *torch.autograd.grad(out, leaves, dout)]


def assert_like_padded(found: list[Tensor], tensors: list[Tensor], **how: Any) -> None:
    head_dim = tensors[0].shape[-1]
    wanted = run([padded(x) for x in tensors], softmax_scale=head_dim**-0.5, **how)
    assert_same_bytes(found[0], wanted[0], "lse")
    for got, whole in zip(found[1:], wanted[1:]):
        assert_same_bytes(got, whole[..., :head_dim].contiguous())
        assert not whole[..., head_dim:].any()


@pytest.mark.parametrize("mask", MASKS)
@ALL
def test_the_bytes_are_those_of_padded_tensors(head_dim: int, mask: str) -> None:
    """Grouped heads, so that sums of head groups are added, too. And the values are those of Triton."""
    tensors, how = drawn(head_dim), MASKS[mask]
    assert dash_attn.is_supported(*tensors[:3], **how).backend == "sm90"
    found = run(tensors, **how)
    assert_like_padded(found, tensors, **how)
    for got, again in zip(found, run(tensors, **how)):
        assert_same_bytes(got, again)
    rest = {name: value for name, value in how.items() if name != "policy"}
    for got, other in zip(found, run(tensors, backend="triton", **rest)):
        assert relative_error(got, other.double()) < 0.01


@ALL
def test_rows_without_keys_and_keys_without_rows(head_dim: int) -> None:
    """Kernels write these zeros by other ways."""
    for rows, keys in ((500, 200), (100, 700)):
        tensors = drawn(head_dim, rows=rows, keys=keys, kv_heads=4)
        how: dict[str, Any] = {"causal": True, "window": (30, 0), "policy": "descending"}
        assert_like_padded(run(tensors, **how), tensors, **how)


@ALL
def test_packed_split_and_transposed(head_dim: int) -> None:
    q, k, v, dout = drawn(head_dim, kv_heads=2, keys=500)
    found = run([q, k, v, dout], causal=True)
    ends = torch.tensor([0, 500, 1000], dtype=torch.int32)
    leaves = [x.flatten(0, 1).requires_grad_() for x in (q, k, v)]
    out = flash_attn_varlen_func(*leaves, ends, ends, causal=True)
    for got, wanted in zip([out, *torch.autograd.grad(out, leaves, dout.flatten(0, 1))], found[1:]):
        assert_same_bytes(got, wanted.flatten(0, 1))
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout)]
    for got, wanted in zip(run(turned, causal=True), found):
        assert_same_bytes(got.contiguous(), wanted)
    _, k, v, _ = drawn(head_dim, rows=1, keys=20_000)
    one = attention(q[:, :1], k, v, softmax_scale=1.0)
    whole = attention(*(padded(x) for x in (q[:, :1], k, v)), softmax_scale=1.0)
    assert_same_bytes(one, whole[..., :head_dim].contiguous())


@pytest.mark.parametrize("head_dim", [48, 96, 160])
def test_with_a_sink_and_without_order(head_dim: int) -> None:
    q, k, v, dout = drawn(head_dim, kv_heads=2)
    sink = torch.tensor([-1.0, 0.5, 2.0, 4.0], device="cuda")
    how: dict[str, Any] = {"causal": True, "policy": "descending", "learnable_sink": sink}
    assert_like_padded(run([q, k, v, dout], **how), [q, k, v, dout], **how)
    assert not same_bytes(attention(q, k, v, **how), attention(q, k, v, causal=True))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    loose = dash_attn.flash_attn_func(*leaves, causal=True, deterministic=False)
    ordered = dash_attn.flash_attn_func(*leaves, causal=True)
    both = (torch.autograd.grad(out, leaves, dout) for out in (loose, ordered))
    for got, wanted in zip(*both):
        assert relative_error(got, wanted.double()) < 0.01


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [
        (128, 64),
        (64, 128),
        (96, 48),
        (72, 96),
        (8, 88),
        (40, 16),
        (8, 120),
        (192, 128),
        (136, 40),
        (256, 96),
        (24, 200),
    ],
)
@pytest.mark.parametrize("mask", MASKS)
def test_v_may_have_another_one(head_dim: int, head_dim_v: int, mask: str) -> None:
    """The bytes of padded tensors; rows without keys, too."""
    of_qk, of_v = whole_of(head_dim, head_dim_v)
    for rows, keys in ((500, 700), (300, 100)):
        q, k, _, _ = drawn(head_dim, rows=rows, keys=keys)
        _, _, v, dout = (x.to(q.dtype) for x in drawn(head_dim_v, rows=rows, keys=keys))
        how = MASKS[mask] | {"softmax_scale": 0.125}
        assert dash_attn.is_supported(q, k, v, **how).backend == "sm90"
        found = run([q, k, v, dout], **how)
        wholes = zip((q, k, v, dout), (of_qk, of_qk, of_v, of_v))
        wanted = run([padded(x, whole) for x, whole in wholes], **how)
        for got, other in zip(found, wanted):
            columns = slice(None) if got is found[0] else slice(got.shape[-1])
            assert_same_bytes(got, other[..., columns].contiguous())
        assert [x.shape[-1] for x in found[1:]] == [head_dim_v, head_dim, head_dim, head_dim_v]


@pytest.mark.parametrize(
    "how",
    [{"softcap": 15.0}, {"q_segment": 256}, {"q_segment": 256, "softcap": 30.0}],
    ids=["softcap", "segments", "segments-softcap"],
)
@pytest.mark.parametrize("head_dim", [72, 80, 88, 96])
def test_softcap_and_segments(head_dim: int, how: dict[str, Any]) -> None:
    """Segments leave sums of dK and dV to another kernel."""
    tensors, common = drawn(head_dim, kv_heads=2, keys=500), {"causal": True, "policy": "descending"}
    found = run(tensors, **common, **how)
    assert_like_padded(found, tensors, **common, **how)
    assert not same_bytes(found[3], run(tensors, **common)[3]), "the control: dK of a call without them"


@pytest.mark.parametrize("head_dim", [96, 160])
def test_errors_are_those_of_the_dtype(head_dim: int) -> None:
    q, k, v, dout = (x[:1, :200, :1] for x in drawn(head_dim, keys=500))
    found = run([q, k, v, dout], causal=True)
    one = Inputs(*(x[0].cpu() for x in (dout, q, k, v)))
    exact = plain_attention(one, Mask.causal(), Scores(head_dim**-0.5), torch.float64)
    usual = plain_attention(one, Mask.causal(), Scores(head_dim**-0.5), q.dtype)
    for x, name in zip(found[1:], ("out", "dq", "dk", "dv")):
        wanted, other = getattr(exact, name), getattr(usual, name)
        assert relative_error(x[0].detach().cpu(), wanted) <= 2.2 * relative_error(other, wanted)


@pytest.mark.parametrize("number", range(4))
def test_histories_of_a_cache_of_96_columns(number: int) -> None:
    """Every row of every call over a cache has the bytes of one forward, and of one by the kernels of 128."""

    def history() -> History:
        dims = (96, 80, (96, 48))
        return random_history(number, "cuda", torch.bfloat16, 700, head_dims=dims, backend="sm90")

    with mock.patch.dict(TILES):
        del TILES[80, 80], TILES[96, 96]
        forget()
        assert kernel_of(96, 96).head_dim == 128
        wanted = history().wanted
    forget()
    narrow = history()
    for found, other in zip(narrow.wanted, wanted):
        for x, y in zip(found, other):
            assert_same_bytes(x, y)
    narrow.run()


def test_what_is_too_small_or_too_large_goes_to_triton() -> None:
    for head_dim, name in ((32, "triton"), (40, "sm90"), (256, "sm90"), (264, None)):
        q, k, v, _ = drawn(head_dim)
        assert dash_attn.is_supported(q, k, v).backend == name
    assert backend_for(q.device).name == "sm90"

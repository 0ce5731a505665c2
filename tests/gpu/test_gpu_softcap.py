"""Softcap in the Hopper kernels: accuracy, bytes, caches, segments, and the kernels beside Triton's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dash_attn
from dash_attn import attention, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from dash_attn.backends.base import AuxTensors
from dash_attn.backends.cpu import plain_attention
from dash_attn.backends.cpu.oracle import Inputs, Results
from dash_attn.problem import Mask
from dash_attn.scores import Scores
from dash_attn.testing import assert_same_bytes, same_bytes
from gpu_cases import relative_error

NAMES = ("out", "dq", "dk", "dv")
MASKS: dict[str, tuple[Mask, dict[str, Any]]] = {
    "full": (Mask.full(), {}),
    "causal": (Mask.causal(), {"causal": True}),
    "window": (Mask.window(100, 0), {"causal": True, "window": (100, 0)}),
}
HERE = {"backend": "sm90"}


def drawn(
    rows: int,
    keys: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    spread: float = 1.0,
    batch: int = 2,
) -> tuple[list[Tensor], Tensor]:
    """q, k and v, and the gradient of out; ``spread``: of scores."""
    generator = torch.Generator("cuda").manual_seed(rows)
    sizes = [(batch, n, h, head_dim) for n, h in ((rows, 4), (keys, 2), (keys, 2), (rows, 4))]
    q, k, v, dout = (torch.randn(s, generator=generator, device="cuda") for s in sizes)
    tensors = [x.to(dtype).requires_grad_() for x in (q * spread, k, v)]
    return tensors, dout.to(dtype)


def run(tensors: list[Tensor], dout: Tensor, **how: Any) -> list[Tensor]:
    """out, lse, dq, dk, dv."""
    out, lse = attention(*tensors, return_lse=True, **(HERE | how))
    return [out, lse, *torch.autograd.grad(out, tensors, dout)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("softcap", "spread"), [(1.0, 1.0), (15.0, 10.0), (50.0, 100.0), (1e4, 3.0)])
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        (64, torch.bfloat16),
        (64, torch.float16),
        (128, torch.bfloat16),
        (128, torch.float16),
        (40, torch.bfloat16),
        (80, torch.bfloat16),
        (88, torch.bfloat16),
        (96, torch.float16),
        (160, torch.float16),
        (256, torch.bfloat16),
    ],
)
@pytest.mark.parametrize(("rows", "keys"), [(500, 500), (130, 700), (300, 100)])
def test_accuracy(
    rows: int, keys: int, head_dim: int, dtype: torch.dtype, softcap: float, spread: float, mask: str
) -> None:
    """Beside float64, errors are at most twice those of plain PyTorch in the same dtype."""
    tensors, dout = drawn(rows, keys, head_dim, dtype, spread)
    which, how = MASKS[mask]
    out, lse, dq, dk, dv = run(tensors, dout, softcap=softcap, **how)
    scores = Scores(head_dim**-0.5, softcap)
    both: list[list[Results]] = [
        [
            plain_attention(Inputs(*one), which, scores, kind)
            for one in zip(dout, *(x.detach() for x in tensors))
        ]
        for kind in (torch.float64, dtype)
    ]
    for name, got in zip(NAMES, (out, dq, dk, dv)):
        exact, plain = (torch.stack([getattr(x, name) for x in found]) for found in both)
        assert relative_error(got, exact) <= 2 * relative_error(plain.to(dtype), exact) + 1e-5, name
    torch.testing.assert_close(lse.double(), torch.stack([x.lse for x in both[0]]), atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 128, 256])
def test_a_row_of_the_forward_depends_on_its_position_only(head_dim: int, sink: bool) -> None:
    """Run by run, packed, chunk by chunk, with NaN behind its keys, and a query whose keys blocks share."""
    q, k, v = (x.detach() for x in drawn(20_000, 20_000, head_dim, spread=4.0, batch=1)[0])
    how: dict[str, Any] = {"causal": True, "softcap": 20.0, "return_lse": True, **HERE}
    if sink:
        how["learnable_sink"] = torch.tensor([-1.0, 0.5, 2.0, 4.0], device="cuda")
    whole = attention(q, k, v, **how)
    for got, again in zip(whole, attention(q, k, v, **how)):
        assert_same_bytes(got, again)
    for first, last in ((0, 8_300), (16_300, 16_301), (19_999, 20_000)):
        part = attention(q[:, first:last], k[:, :last], v[:, :last], **how)
        assert_same_bytes(part[0], whole[0][:, first:last].contiguous())
        assert_same_bytes(part[1], whole[1][..., first:last].contiguous())
    spoilt = k.clone()
    spoilt[:, 5_000:] = torch.nan
    assert_same_bytes(attention(q, spoilt, v, **how)[0][:, :5_000], whole[0][:, :5_000].contiguous())
    ends = torch.tensor([0, 700, 1_000], dtype=torch.int32)
    packed = flash_attn_varlen_func(*(x[0, :1_000] for x in (q, k, v)), ends, ends, **how)
    assert_same_bytes(packed[0][:700], whole[0][0, :700].contiguous())
    for other in (0.0, 20.001):
        assert not same_bytes(attention(q, k, v, **(how | {"softcap": other}))[0], whole[0])


@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("rows", [700, 3])
def test_scores_near_the_cap_change_no_other_row(head_dim: int, rows: int) -> None:
    """tanh has a shorter way where a warp sees no such score; a row's bits do not tell which was taken."""
    softcap = 30.0
    tensors, dout = drawn(rows, 700, head_dim)
    q, k, v = tensors
    large = torch.zeros(rows, dtype=torch.bool, device="cuda")
    large[1::16] = True
    scores = torch.einsum("bihd,bjhd->bhij", q[:, :, ::2].float(), k.float()) * head_dim**-0.5
    assert scores.abs().max() < softcap / 4
    spoilt = torch.where(large[:, None, None], 40 * q, q).detach().requires_grad_()
    how = {"causal": True, "softcap": softcap}
    found, others = run(tensors, dout, **how), run([spoilt, k, v], dout, **how)
    for got, other in ((found[0], others[0]), (found[1].mT, others[1].mT), (found[2], others[2])):
        assert_same_bytes(got[:, ~large].contiguous(), other[:, ~large].contiguous())
        assert not same_bytes(got[:, large].contiguous(), other[:, large].contiguous())


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_repeat_and_only_in_order(head_dim: int) -> None:
    """Byte by byte beside a busy stream; without order dq differs: the negative control."""
    tensors, dout = drawn(4_096, 4_096, head_dim, spread=4.0)
    how = {"causal": True, "softcap": 20.0}
    first, busy = run(tensors, dout, **how), torch.cuda.Stream()
    noise = torch.randn(4096, 4096, device="cuda")
    for _ in range(10):
        with torch.cuda.stream(busy):
            noise = (noise @ noise).clamp_(-1, 1)
        for got, again in zip(first, run(tensors, dout, **how)):
            assert_same_bytes(got, again)
    free = []
    for _ in range(10):
        out = flash_attn_func(*tensors, deterministic=False, **HERE, **how)
        free += torch.autograd.grad(out, tensors[0], dout)
    assert not all(same_bytes(x, free[0]) for x in free)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mask", MASKS)
def test_segments_and_head_groups(head_dim: int, mask: str) -> None:
    """Sums of dK and dV in memory: of segments of rows, and of head groups."""
    _, how = MASKS[mask]
    tensors, dout = drawn(1_000, 1_000, head_dim, spread=3.0)
    how = how | {"softcap": 10.0}
    whole, cut = run(tensors, dout, **how), run(tensors, dout, q_segment=256, **how)
    for got, other in zip(cut[:2], whole[:2]):
        assert_same_bytes(got, other)
    for got, other in zip(cut[2:], whole[2:]):
        assert relative_error(got, other.double()) < 5e-3
    q, k, v = (x.detach() for x in tensors)
    one = [x.requires_grad_() for x in (q.repeat(1, 1, 4, 1), k[:, :, :1].clone(), v[:, :, :1].clone())]
    many = dout.repeat(1, 1, 4, 1)
    ours, theirs = (run(one, many, backend=name, **how) for name in ("sm90", "triton"))
    for got, other in zip(ours, theirs):
        assert relative_error(got, other.double()) < 0.01


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_it_is_like_tritons(head_dim: int) -> None:
    """By rounding only, and not the same: other programs."""
    tensors, dout = drawn(700, 700, head_dim, spread=5.0)
    how = {"causal": True, "softcap": 15.0}
    ours, theirs = (run(tensors, dout, backend=name, **how) for name in ("sm90", "triton"))
    for got, other in zip(ours, theirs):
        assert relative_error(got, other.double()) < 0.01
    torch.testing.assert_close(ours[1], theirs[1], atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("head_dim", [64, 72, 128, 200, 256])
@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("page_size", [16, 256])
def test_a_cache_has_the_bytes_of_training(head_dim: int, rows: int, page_size: int) -> None:
    """Few and many rows, copies of 16 and of 128 rows, one segment and several."""
    lengths, pages = (9_000, rows, 700 + rows), -(-9_000 // page_size)
    q, k, v = (x.detach() for x in drawn(rows, pages * page_size, head_dim, spread=4.0, batch=3)[0])
    table = torch.randperm(3 * pages, generator=torch.Generator().manual_seed(1)).view(3, pages).int().cuda()
    caches = []
    for x in (k, v):
        cache = torch.full((3 * pages, page_size, 2, head_dim), torch.nan, dtype=x.dtype, device="cuda")
        for at, length in enumerate(lengths):
            one = x[at].clone()
            one[length:] = torch.nan
            cache[table[at].long()] = one.view(pages, page_size, 2, head_dim)
        caches.append(cache)
    how: dict[str, Any] = {"causal": True, "softcap": 20.0, **HERE}
    used = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    out = flash_attn_with_kvcache(q, *caches, cache_seqlens=used, page_table=table, **how)
    for at, length in enumerate(lengths):
        alone = attention(q[at : at + 1], k[at : at + 1, :length], v[at : at + 1, :length], **how)
        assert_same_bytes(out[at : at + 1], alone)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_what_is_not_finite_shows(head_dim: int) -> None:
    """tanh of NaN is NaN, not a bound."""
    tensors, dout = drawn(300, 300, head_dim)
    q, k, v = (x.detach().clone() for x in tensors)
    q[0, 20, 0, 0] = torch.nan
    out, lse, dq, *_ = run([x.requires_grad_() for x in (q, k, v)], dout, causal=True, softcap=5.0)
    assert out[0, 20, 0].isnan().all()
    assert lse[0, 0, 20].isnan()
    assert dq[0, 20, 0].isnan().any()
    assert out[1].isfinite().all()
    assert out[0, :20].isfinite().all()


def test_rows_without_keys() -> None:
    for head_dim in (64, 128, 256):
        tensors, dout = drawn(300, 100, head_dim)
        out, lse, *grads = run(tensors, dout, causal=True, softcap=5.0)
        assert not out[:, :200].any()
        assert (lse[..., :200] == -torch.inf).all()
        assert not grads[0][:, :200].any()
        assert all(x.isfinite().all() for x in grads)


def test_with_a_sink_and_its_gradient() -> None:
    tensors, dout = drawn(500, 500, 64, spread=3.0)
    sink = torch.tensor([-1.0, 0.5, 2.0, 4.0], device="cuda").requires_grad_()
    found = []
    for backend in ("sm90", "triton"):
        out = attention(*tensors, learnable_sink=sink, causal=True, softcap=5.0, backend=backend)
        found.append([out, *torch.autograd.grad(out, [*tensors, sink], dout)])
    for got, other in zip(*found):
        assert relative_error(got, other.double()) < 0.01
    exact = plain_attention(
        Inputs(dout[0], *(x.detach()[0] for x in tensors)), Mask.causal(), Scores(0.125, 5.0),
        aux=AuxTensors(sink.detach()),
    )  # fmt: skip
    assert relative_error(found[0][0][0], exact.out) < 0.005


def test_auto_takes_it() -> None:
    tensors, _ = drawn(100, 100, 64)
    assert dash_attn.is_supported(*tensors, softcap=30.0).backend == "sm90"
    refused = dash_attn.is_supported(*tensors, softcap=1e-30, softmax_scale=1e12)
    assert "softmax_scale / softcap must be 0 or a normal float32" in refused.reason

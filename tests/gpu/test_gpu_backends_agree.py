"""Where sm90 covers a problem, its results and Triton's differ by rounding only; ``auto`` takes sm90."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, is_supported
from dash_attn.testing import assert_same_bytes, same_bytes

NAMES = ("out", "lse", "dq", "dk", "dv")
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (100, -1)},
}
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
NORM, ELEMENT = 1.0, 4.0
"""Epsilons of the dtype that norms, and single elements beside the largest one, may be apart. On the CPU they
are 0.3 and up to 0.7 from float64."""


def drawn(dims: tuple[int, int], dtype: torch.dtype, device: str, *rows: int) -> tuple[list[Tensor], Tensor]:
    """q, k and v with 4 heads on 2, and the gradient of out."""
    generator = torch.Generator(device).manual_seed(sum(dims))
    sizes = [(*rows, heads, dims[of_v]) for heads, of_v in ((4, 0), (2, 0), (2, 1), (4, 1))]
    *leaves, dout = (torch.randn(size, generator=generator, device=device).to(dtype) for size in sizes)
    return [x.requires_grad_() for x in leaves], dout


def assert_near(found: list[Tensor], others: list[Tensor], dtype: torch.dtype) -> None:
    """Within what two ways to round leave between them; lse is of float32 sums."""
    for name, x, y in zip(NAMES, found, others):
        assert x.isfinite().all(), name
        unit = torch.finfo(dtype).eps if name != "lse" else 2e-5
        gap, size = (x.double() - y.double()).abs(), y.double().abs()
        assert gap.norm() <= NORM * unit * size.norm(), (name, float(gap.norm() / size.norm()) / unit)
        assert gap.max() <= ELEMENT * unit * size.max(), (name, float(gap.max() / size.max()) / unit)


def trained(leaves: list[Tensor], dout: Tensor, *bounds: Tensor, **how: Any) -> list[Tensor]:
    """In the order of ``NAMES``."""
    call = flash_attn_varlen_func if bounds else flash_attn_func
    out, lse = call(*leaves, *bounds, return_lse=True, **how)
    return [out.detach(), lse, *torch.autograd.grad(out, leaves, dout)]


def compare(leaves: list[Tensor], dout: Tensor, *bounds: Tensor, **how: Any) -> None:
    assert is_supported(*leaves, *bounds, **how).backend == "sm90"
    mine, other, auto = (trained(leaves, dout, *bounds, backend=x, **how) for x in ("sm90", "triton", "auto"))
    assert_near(mine, other, dout.dtype)
    for name, a, b in zip(NAMES, auto, mine):
        assert_same_bytes(a, b, name)
    assert not same_bytes(mine[2], other[2]), "one backend ran twice"


@DTYPES
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 96), (192, 128), (256, 256)], ids=str)
def test_dense(dims: tuple[int, int], mask: str, dtype: torch.dtype) -> None:
    compare(*drawn(dims, dtype, "cuda", 2, 700), **MASKS[mask])


@DTYPES
def test_packed(dtype: torch.dtype) -> None:
    bounds = torch.tensor([0, 300, 300, 301, 700, 1500], dtype=torch.int32, device="cuda")
    compare(*drawn((128, 128), dtype, "cuda", 1500), bounds, bounds, causal=True)


@DTYPES
def test_a_cache_of_keys(dtype: torch.dtype) -> None:
    """NaN is behind the used keys; a prompt's chunk, and steps of decoding."""
    (_, k, v), _ = drawn((128, 128), dtype, "cuda", 3, 900)
    lengths = torch.tensor([700, 33, 900], dtype=torch.int32, device="cuda")
    caches = [x.detach().clone() for x in (k, v)]
    for cache in caches:
        for keys, length in zip(cache, lengths.tolist()):
            keys[length:] = torch.nan
    for rows in (1, 20):
        (q, *_), _ = drawn((128, 128), dtype, "cuda", 3, rows)
        mine, other = (
            flash_attn_with_kvcache(
                q.detach(), *caches, cache_seqlens=lengths, causal=True, return_lse=True, backend=backend
            )
            for backend in ("sm90", "triton")
        )
        assert_near(list(mine), list(other), dtype)

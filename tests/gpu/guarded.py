"""Attention on tensors that have no memory before them and none behind them.

PyTorch's tensors lie among others, and an access beside one finds memory. Here it ends the process:

    python tests/gpu/guarded.py sm90      # calls of a backend; prints a line each
    python tests/gpu/guarded.py triton
    python tests/gpu/guarded.py control   # reads one element behind a tensor
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from cuda.bindings import driver
from torch import Tensor

from dash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

GRANULE = 2 << 20
"""Bytes: what can be mapped. Tensors of so many, or a multiple, fill what is mapped for them."""

BATCH, ROWS, HEADS = 2, 8192, 16
HEAD_DIMS = {
    "sm90": (
        (40, 40), (64, 64), (72, 72), (72, 40), (80, 80), (88, 88), (96, 40), (112, 112), (128, 128),
        (64, 128), (128, 56), (136, 40), (136, 136), (192, 192), (192, 128), (192, 64), (256, 256), (40, 256),
    ),
    "triton": ((24, 16), (64, 64), (72, 40), (96, 96), (128, 128), (136, 40), (256, 256)),
}  # fmt: skip
CALLS = 8
"""Per pair of head dims."""

_kept: list[Any] = []
_plain_like = torch.empty_like


def guarded(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor with unmapped addresses before and behind it."""
    size = math.prod(shape) * dtype.itemsize
    assert size % GRANULE == 0, f"{shape} is no multiple of {GRANULE} bytes"
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = torch.cuda.current_device()
    access = driver.CUmemAccessDesc()
    access.location = properties.location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    address = int(_checked(driver.cuMemAddressReserve(size + 64 * GRANULE, GRANULE, 0, 0))) + 32 * GRANULE
    memory = _checked(driver.cuMemCreate(size, properties, 0))
    _checked(driver.cuMemMap(address, size, 0, memory, 0))
    _checked(driver.cuMemSetAccess(address, size, [access], 1))
    return _at(address, shape, dtype)


def _checked(result: tuple[Any, ...]) -> Any:
    error, *found = result
    assert int(error) == 0, error
    return found[0] if found else None


def _at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    described = {"data": (address, False), "shape": shape, "typestr": f"<i{dtype.itemsize}", "version": 2}
    _kept.append(SimpleNamespace(__cuda_array_interface__=described))
    return torch.as_tensor(_kept[-1], device="cuda").view(dtype)


def like(x: Tensor, **how: Any) -> Tensor:
    """In place of ``torch.empty_like``: what a call returns is guarded, too, but for a sink's gradient."""
    return _plain_like(x, **how) if x.dim() == 1 else guarded(tuple(x.shape), x.dtype)


def drawn(*shape: int) -> Tensor:
    return guarded(shape).copy_(torch.randn(shape, device="cuda"))


def calls(backend: str, head_dim: int, head_dim_v: int) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Every way to the kernels of a head dim; all tensors but lse are guarded."""
    how = {"causal": True, "backend": backend}
    for batch, rows in ((BATCH, ROWS), (1, BATCH * ROWS)):
        q, k, v = (drawn(batch, rows, HEADS, n) for n in (head_dim, head_dim, head_dim_v))
        yield f"{batch} x {rows}", partial(_trained, flash_attn_func, q, k, v, **how)
    yield "segments", partial(_trained, flash_attn_func, q, k, v, q_segment=ROWS, **how)
    sink = torch.zeros(HEADS, device="cuda")
    yield "sink", partial(_trained, flash_attn_func, q, k, v, learnable_sink=sink, **how)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    ends = torch.tensor([0, 3000, BATCH * ROWS], dtype=torch.int32, device="cuda")
    longest = BATCH * ROWS - 3000
    yield "packed", partial(_trained, flash_attn_varlen_func, *packed, ends, ends, longest, longest, **how)
    caches = [x.view(BATCH, ROWS, HEADS, -1) for x in (k, v)]
    rows = torch.randn(BATCH, 3, HEADS, head_dim, device="cuda", dtype=torch.bfloat16)
    used = torch.tensor([5, ROWS], dtype=torch.int32)
    yield "used keys", partial(flash_attn_varlen_func, rows, *caches, seqused_k=used, **how)
    for name, few in (("cache", rows), ("cache, one row", rows[:, :1])):
        yield name, partial(flash_attn_with_kvcache, few, *caches, cache_seqlens=used.cuda(), **how)


def _trained(function: Callable[..., Tensor], *given: Any, **how: Any) -> Tensor:
    tensors, rest = [x.detach().requires_grad_() for x in given[:3]], given[3:]
    with mock.patch("torch.empty_like", like):
        out = function(*tensors, *rest, **how)
        out.backward(drawn(*out.shape))
    return torch.stack([x.grad.float().sum() for x in tensors if x.grad is not None])


def main(what: str) -> None:
    torch.zeros(1, device="cuda")
    if what == "control":
        x = guarded((GRANULE // 2,))
        print("reads", float(_at(x.data_ptr(), (GRANULE // 2 + 1,), x.dtype).float().sum()))
        return
    for pair in HEAD_DIMS[what]:
        for name, call in calls(what, *pair):
            finite = bool(call().isfinite().all())
            torch.cuda.synchronize()
            print(*pair, name, "finite" if finite else "not finite", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

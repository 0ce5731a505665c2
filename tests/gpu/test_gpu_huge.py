"""Tensors of more than 2^31 elements: what lies beyond has the bytes that it has alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dash_attn import attention, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from dash_attn.testing import assert_same_bytes

BATCH, ROWS, HEADS, HEAD_DIM = 17, 8192, 128, 128
PAGE, KV_HEADS, KEYS = 16, 8, 500
BACKENDS = pytest.mark.parametrize("backend", ["sm90", "triton"])


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < 72 << 30:
        pytest.skip(f"needs 72 GiB of GPU memory, {free >> 30} are free")
    yield
    torch.cuda.empty_cache()


def drawn(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()


@BACKENDS
@pytest.mark.parametrize("packed", [False, True])
def test_training(backend: str, packed: bool) -> None:
    """The last sequence begins at element 2^31."""
    inputs = [drawn(BATCH, ROWS, HEADS, HEAD_DIM) for _ in range(4)]
    assert inputs[0][:-1].numel() == 2**31
    alone = trained([x[-1:] for x in inputs], backend, packed=False)
    for x, expected in zip(trained(inputs, backend, packed), alone):
        assert_same_bytes(x, expected)


def trained(inputs: list[Tensor], backend: str, packed: bool) -> list[Tensor]:
    """out, dq, dk and dv of the last sequence."""
    *leaves, dout = (x.flatten(0, 1) if packed else x for x in inputs)
    leaves = [x.detach().requires_grad_() for x in leaves]
    if packed:
        ends = torch.arange(0, len(leaves[0]) + 1, ROWS, dtype=torch.int32)
        out = flash_attn_varlen_func(*leaves, ends, ends, ROWS, ROWS, causal=True, backend=backend)
    else:
        out = flash_attn_func(*leaves, causal=True, backend=backend)
    found = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    return [x.view(-1, ROWS, HEADS, HEAD_DIM)[-1].clone() for x in found]


@BACKENDS
@pytest.mark.parametrize("rows", [1, 40])
def test_pages(backend: str, rows: int) -> None:
    pages = 2**31 // (PAGE * KV_HEADS * HEAD_DIM) + 128
    pool = [drawn(pages, PAGE, KV_HEADS, HEAD_DIM) for _ in range(2)]
    q = drawn(4, rows, 4 * KV_HEADS, HEAD_DIM)
    table = torch.arange(pages - 128, pages, dtype=torch.int32, device="cuda").view(4, 32)
    how = {"causal": True, "backend": backend}
    how["cache_seqlens"] = torch.full((4,), KEYS, dtype=torch.int32, device="cuda")
    found = flash_attn_with_kvcache(q, *pool, page_table=table, **how)
    few = [x[-128:].clone() for x in pool]
    assert_same_bytes(found, flash_attn_with_kvcache(q, *few, page_table=table - (pages - 128), **how))
    before = [x[:128].clone() for x in pool]
    other = flash_attn_with_kvcache(q, *before, page_table=table - (pages - 128), **how)
    assert not torch.equal(found, other)


@BACKENDS
def test_more_cut_sequences_than_a_grid_has_rows_of_blocks(backend: str) -> None:
    """65,535 blocks: the most in all dimensions of a grid but the first."""
    *qkv, dout = (drawn(65_537, 256, 1, 64) for _ in range(4))
    found = []
    for at in (slice(None), slice(-1, None)):
        leaves = [x[at].requires_grad_() for x in qkv]
        out = attention(*leaves, causal=True, q_segment=128, backend=backend)
        assert isinstance(out, Tensor)
        grads = torch.autograd.grad(out, leaves, dout[at])
        found.append([x[-1].detach().clone() for x in (out, *grads)])
    for x, alone in zip(*found):
        assert_same_bytes(x, alone)

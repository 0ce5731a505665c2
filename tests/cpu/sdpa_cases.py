"""Tensors and calls of the tests of the SDPA hook."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.nn import attention as registry
from torch.nn import functional as F

from dash_attn import attention
from dash_attn.integrations import sdpa
from dash_attn.testing import same_bytes

needs_registry = pytest.mark.skipif(
    not all(hasattr(registry, hook) for hook in sdpa._HOOKS),
    reason=f"the registry of torch {torch.__version__} cannot take an implementation back",
)


def leaves(heads=4, kv_heads=2, seqlen_q=300, seqlen_k=300, dtype=torch.bfloat16, seed=0):
    """q, k, v: (batch, heads, seqlen, head_dim), as SDPA takes them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(2, heads, seqlen_q, 16), *[(2, kv_heads, seqlen_k, 16)] * 2]
    return [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]


def run(function, tensors, **how):
    """out, dq, dk, dv."""
    for x in tensors:
        x.grad = None
    out = function(*tensors, **how)
    out.backward(torch.ones_like(out) * 0.1)
    return [out.detach(), *(x.grad for x in tensors)]


def ours(q, k, v, **how):
    return attention(*(x.transpose(1, 2) for x in (q, k, v)), **how).transpose(1, 2)


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Behind it, PyTorch's attention is what it was."""
    q, k, v = leaves(kv_heads=4)
    before = F.scaled_dot_product_attention(q, k, v)
    yield
    assert getattr(registry, "current_flash_attention_impl", lambda: None)() is None
    assert same_bytes(F.scaled_dot_product_attention(q, k, v), before)

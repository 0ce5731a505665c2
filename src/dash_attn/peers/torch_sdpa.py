"""PyTorch's scaled_dot_product_attention: the kernels of FlashAttention-2 and of cuDNN behind it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .base import Backward, Inputs

__all__ = ["backward", "flash_deterministic_backward", "strict", "why_not"]


def why_not(x: Inputs) -> str:
    """What scaled_dot_product_attention has no argument for."""
    mask = x.problem.mask
    if x.packed:
        return "PyTorch's attention takes packed sequences as nested tensors only"
    if not (mask.is_full or mask.is_causal):
        return f"PyTorch's fused attention has no mask {mask.name}"
    if mask.is_causal and x.q.shape[1] != x.k.shape[1]:
        return "PyTorch aligns the causal mask top-left where seqlen_q != seqlen_k"
    return ""


def backward(x: Inputs, *, backend: SDPBackend) -> Backward:
    """The backward of one of PyTorch's kernels; its forward runs here, once."""
    q, k, v = leaves = [t.detach().transpose(1, 2).requires_grad_() for t in (x.q, x.k, x.v)]
    how: dict[str, Any] = {"is_causal": x.problem.mask.is_causal, "enable_gqa": x.problem.group > 1}
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(q, k, v, scale=x.scale, **how)
    dout = x.dout.transpose(1, 2)

    def run() -> tuple[Tensor, ...]:
        grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        return tuple(grad.transpose(1, 2) for grad in grads)

    return run


def flash_deterministic_backward(x: Inputs) -> Backward:
    """FlashAttention-2 as PyTorch calls it under strict deterministic algorithms."""
    call = backward(x, backend=SDPBackend.FLASH_ATTENTION)

    def run() -> tuple[Tensor, ...]:
        with strict():
            return call()

    return run


@contextmanager
def strict() -> Iterator[None]:
    """Strict deterministic algorithms inside."""
    settings: Any = torch.utils.deterministic
    fill, mode = settings.fill_uninitialized_memory, torch.get_deterministic_debug_mode()
    settings.fill_uninitialized_memory = False  # filling fresh memory is no part of the kernel's work
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        settings.fill_uninitialized_memory = fill

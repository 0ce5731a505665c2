"""Masks, tensors and gradients for tests of the public functions with what scores take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MASKS: list[dict[str, Any]] = [{}, {"causal": True}, {"causal": True, "window": (40, 0)}]


def drawn(
    rows: int = 150, keys: int = 200, dtype: torch.dtype = torch.float64, heads: tuple[int, ...] = (4, 2, 2)
) -> list[Tensor]:
    """q, k and v of two sequences; leaves."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, rows, heads[0], 16), (2, keys, heads[1], 16), (2, keys, heads[2], 16)]
    tensors = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    return [x.to(dtype).requires_grad_() for x in tensors]


def gradients(function: Any, tensors: list[Tensor], *more: Tensor, **how: Any) -> list[Tensor]:
    """out, and the gradients of ``tensors``."""
    out = function(*tensors, *more, **how)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad(out, tensors, dout.to(out.dtype))]

"""The forward on a GPU, for now: another library's kernel behind one function.

FlashAttention-4's where it is installed, cuDNN's through PyTorch otherwise. Both are deterministic and
neither splits a row's keys, so a sequence's bytes do not depend on its batch.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..problem import Mask, Problem

__all__ = ["forward", "forward_name", "why_no_forward"]


def forward_name(problem: Problem) -> str:
    """Which kernel runs the forward of a problem: "fa4" or "cudnn".

    Raises:
        InputError: neither can.
    """
    if _has_fa4():
        return "fa4"
    if reason := why_no_forward(problem):
        raise InputError(reason)
    return "cudnn"


def why_no_forward(problem: Problem) -> str:
    """Why no installed forward covers a problem; empty if one does."""
    mask = problem.mask
    square = all(seqlen_q == seqlen_k for seqlen_q, seqlen_k in problem.sequences)
    if _has_fa4() or mask.name == "full" or (mask.name == "causal" and square):
        return ""
    return f"the forward of mask {mask.name} on a GPU needs FlashAttention-4: pip install flash-attn-4"


@cache
def _has_fa4() -> bool:
    try:
        return find_spec("flash_attn.cute") is not None
    except ImportError:
        return False


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """out (batch, seqlen_q, heads, head_dim) and lse (batch, heads, seqlen_q) fp32, natural logarithm."""
    if forward_name(problem) == "fa4":
        return _fa4(problem.mask, q, k, v, softmax_scale)
    return _cudnn(problem, q, k, v, softmax_scale)


def _fa4(mask: Mask, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    interface: Any = import_module("flash_attn.cute.interface")
    causal = mask.name == "causal"
    window: dict[str, int | None] = {}
    if mask.name not in ("full", "causal"):
        window = {"window_size_left": mask.left, "window_size_right": mask.right}
    out, lse, *_ = interface._flash_attn_fwd(
        q, k, v, softmax_scale=softmax_scale, causal=causal, return_lse=True, **window
    )
    return out, lse


def _cudnn(problem: Problem, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    by_head = [x.transpose(1, 2) for x in (q, k, v)]
    by_head[1:] = [x.repeat_interleave(problem.group, dim=1) if problem.group > 1 else x for x in by_head[1:]]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *by_head, None, True, 0.0, problem.mask.name == "causal", False, scale=softmax_scale
    )
    # cuDNN's log-sum-exp may come with a trailing dimension of one.
    return out.transpose(1, 2).contiguous(), lse.reshape(lse.shape[:3]).contiguous()

"""The forward on a GPU, for now: another library's kernel behind one function.

FlashAttention-4's where it is installed, cuDNN's through PyTorch otherwise. Both are deterministic and
neither splits a row's keys, so a sequence's bytes do not depend on its batch.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import InputError
from ...problem import Mask, Problem

__all__ = ["PackedLengths", "forward", "forward_name", "why_no_forward"]


class PackedLengths(NamedTuple):
    """Where the sequences of packed tensors begin, in the form in which FlashAttention wants it.

    cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32 on the device; the others the longest lengths.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def forward_name(problem: Problem, packed: bool = False) -> str:
    """Which kernel runs the forward of a problem, given as packed or dense tensors: "fa4" or "cudnn".

    Raises:
        InputError: neither can.
    """
    if _has_fa4():
        return "fa4"
    if reason := why_no_forward(problem, packed):
        raise InputError(reason)
    return "cudnn"


def why_no_forward(problem: Problem, packed: bool = False) -> str:
    """Why no installed forward covers a problem, given as packed or dense tensors; empty if one does."""
    mask = problem.mask
    square = all(seqlen_q == seqlen_k for seqlen_q, seqlen_k in problem.sequences)
    if _has_fa4() or (not packed and (mask.name == "full" or (mask.name == "causal" and square))):
        return ""
    what = "packed tensors" if packed else f"mask {mask.name}"
    return f"the forward of {what} on a GPU needs FlashAttention-4: pip install flash-attn-4"


@cache
def _has_fa4() -> bool:
    try:
        return find_spec("flash_attn.cute") is not None
    except ImportError:
        return False


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    lengths: PackedLengths | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse (fp32, natural logarithm) of dense tensors, or with ``lengths`` of packed ones.

    Shapes: q and out (batch, seqlen_q, heads, head_dim), lse (batch, heads, seqlen_q); packed: q and out
    (total_q, heads, head_dim), lse (heads, total_q).

    Raises:
        InputError: no installed forward covers the problem.
    """
    if forward_name(problem, lengths is not None) == "fa4":
        return _fa4(problem.mask, q, k, v, softmax_scale, lengths)
    return _cudnn(problem, q, k, v, softmax_scale)


def _fa4(
    mask: Mask, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, lengths: PackedLengths | None
) -> tuple[Tensor, Tensor]:
    interface: Any = import_module("flash_attn.cute.interface")
    causal = mask.name == "causal"
    options: dict[str, Any] = {} if lengths is None else lengths._asdict()
    if mask.name not in ("full", "causal"):
        options |= {"window_size_left": mask.left, "window_size_right": mask.right}
    out, lse, *_ = interface._flash_attn_fwd(
        q, k, v, softmax_scale=softmax_scale, causal=causal, return_lse=True, **options
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

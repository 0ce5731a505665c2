"""The attentions that ``blocks.py`` puts into a block: ours, and those of peers, as functions of q, k and v.

All go through one function of autograd, so that host time is about the same, and so that a profile tells
their forward and backward from the rest of a block.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from block_models import Attend, Case
from block_values import PARTS
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import record_function

import dash_attn
from dash_attn.peers import cudnn, fa4
from dash_attn.peers.registry import Inputs
from dash_attn.peers.torch_sdpa import strict
from dash_attn.problem import Mask, Problem

__all__ = ["Kind", "attentions"]

FORWARD, BACKWARD, *_ = PARTS
Kind = tuple[str, bool]
"""Short name of a library; whether its order is fixed."""


class Way(NamedTuple):
    """How a library does it.

    Attributes:
        forward: (q, k, v) to out and what the backward needs.
        backward: that and the gradient of out to those of q, k and v.
    """

    forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Any]]
    backward: Callable[[Any, Tensor], tuple[Tensor, ...]]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, way: Way) -> Tensor:
        with record_function(FORWARD):
            out, ctx.kept = way.forward(q, k, v)
        ctx.way = way
        return out.view_as(out)  # what is kept must not hold its own node

    @staticmethod
    def backward(ctx: Any, *dout: Tensor) -> Any:
        with record_function(BACKWARD):
            grads = ctx.way.backward(ctx.kept, dout[0].contiguous())
        ctx.kept = None
        return *grads, None


def attentions(case: Case, device: torch.device) -> dict[Kind, Attend]:
    """By library and order. One that is not installed is left out, with a line."""
    problem = problem_of(case)
    ours = dash_attn.flash_attn_func
    ways = {
        ("dash_attn", order): _by_autograd(partial(ours, causal=case.model.causal, deterministic=order))
        for order in (True, False)
    }
    if device.type == "cuda":
        flash, free = (partial(_sdpa, case, backend) for backend in _BACKENDS)
        ways["fa2", True], ways["fa2", False] = _by_autograd(flash, strict), _by_autograd(flash)
        ways["cudnn", False] = _by_autograd(free)
        if problem.group == 1:
            ways["cudnn", True] = _cudnn(problem)
        if why := fa4.why_not():
            print(f"fa4 is left out: {why}", file=sys.stderr)
        else:
            ways |= {("fa4", order): _fa4(problem, order) for order in (True, False)}
    return {kind: partial(_attend, way) for kind, way in ways.items()}


_BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)


def problem_of(case: Case) -> Problem:
    """The attention of a block."""
    model = case.model
    return Problem.dense(
        batch=case.batch, heads=model.heads, kv_heads=model.kv_heads, seqlen=case.tokens,
        head_dim=model.head_dim, mask=Mask.causal() if model.causal else Mask.full(),
    )  # fmt: skip


def _attend(way: Way, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = _Attention.apply(q, k, v, way)  # type: ignore[no-untyped-call]
    return out


def _by_autograd(
    function: Attend, around_backward: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Way:
    """A function that has its own gradient."""

    def forward(*tensors: Tensor) -> tuple[Tensor, Any]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in tensors]
            out = function(*leaves)
        return out.detach(), (out, leaves)

    def backward(kept: Any, dout: Tensor) -> tuple[Tensor, ...]:
        with around_backward():
            return torch.autograd.grad(kept[0], kept[1], dout)

    return Way(forward, backward)


def _sdpa(case: Case, backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    how = {"is_causal": case.model.causal, "enable_gqa": case.model.heads != case.model.kv_heads}
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **how).transpose(1, 2)


def _fa4(problem: Problem, order: bool) -> Way:
    scale = float(problem.head_dim) ** -0.5

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
        out, lse = fa4.forward(q, k, v, scale, problem.mask)
        return out, (q, k, v, out, lse)

    def backward(kept: Any, dout: Tensor) -> tuple[Tensor, ...]:
        return fa4.backward(Inputs(problem, dout, *kept, (), scale), deterministic=order)()

    return Way(forward, backward)


def _cudnn(problem: Problem) -> Way:
    """cuDNN in a fixed order, which only its frontend offers; for as many kv heads as q heads.

    Its gradients have the strides of q, k and v, so these are copied where they are parts of one product.
    """
    scale, graphs = float(problem.head_dim) ** -0.5, []

    def forward(*tensors: Tensor) -> tuple[Tensor, Any]:
        q, k, v = (x.contiguous() for x in tensors)
        out, lse = cudnn.forward(problem, q, k, v, scale)
        return out, (q, k, v, out, lse)

    def backward(kept: Any, dout: Tensor) -> tuple[Tensor, ...]:
        x = Inputs(problem, dout, *kept, (), scale)
        if not graphs:
            if why := cudnn.why_not(x):
                raise RuntimeError(why)
            graphs.append(cudnn.deterministic_graph(x))
        found: tuple[Tensor, ...] = graphs[0](x)
        return found

    return Way(forward, backward)

"""The operators ``dash_attn::forward``, ``backward``, ``varlen_forward`` and ``varlen_backward``.

They are what PyTorch sees of this package: shapes and strides for ``torch.compile`` (fake kernels), and
gradients. Arguments are checked by the public functions (:mod:`dash_attn.arguments`) before they come here.

Schemas are defined and autograd is attached by hand: through ``torch.library.custom_op`` or
``register_autograd`` a call costs the host about three times as much.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..schedule import Plan
from .backends import Backend, backend_for
from .lengths import Lengths, host_lengths
from .plans import find_plan, keep_plan

__all__ = ["apply_plan", "dense_plan", "forward", "varlen_forward", "varlen_plan"]

Gradients = tuple[Tensor, Tensor, Tensor]

_OPTIONS = "float softmax_scale, int left, int right, str policy, bool ordered"
_LENGTHS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k"
_LONGEST = "SymInt max_seqlen_q, SymInt max_seqlen_k"
_INPUTS = "Tensor q, Tensor k, Tensor v"
_SAVED = f"Tensor dout, {_INPUTS}, Tensor out, Tensor lse"
_SCHEMAS = {
    "forward": f"({_INPUTS}, {_OPTIONS}) -> (Tensor out, Tensor lse)",
    "backward": f"({_SAVED}, {_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)",
    "varlen_forward": f"({_INPUTS}, {_LENGTHS}, {_OPTIONS}, {_LONGEST}) -> (Tensor out, Tensor lse)",
    "varlen_backward": f"({_SAVED}, {_LENGTHS}, {_OPTIONS}, {_LONGEST}) -> (Tensor dq, Tensor dk, Tensor dv)",
}

_library: Any = torch.library.Library("dash_attn", "DEF")  # type: ignore[no-untyped-call]
for _name, _schema in _SCHEMAS.items():
    _tags = [torch.Tag.pt2_compliant_tag]
    if _name.startswith("varlen"):
        # A graph that torch.compile captures by itself would replay the plan of other lengths.
        _tags.append(torch.Tag.cudagraph_unsafe)
    _library.define(_name + _schema, tags=_tags)

forward = torch.ops.dash_attn.forward.default
_backward = torch.ops.dash_attn.backward.default
varlen_forward = torch.ops.dash_attn.varlen_forward.default
_varlen_backward = torch.ops.dash_attn.varlen_backward.default


# Kernels


def dense_plan(q: Tensor, k: Tensor, left: int, right: int, policy: str) -> Plan:
    batch, seqlen_q, heads, head_dim = q.shape
    _, seqlen_k, kv_heads, _ = k.shape
    seqlens_q, seqlens_k = (seqlen_q,) * batch, (seqlen_k,) * batch
    return find_plan(q.device, q.dtype, seqlens_q, seqlens_k, heads, kv_heads, head_dim, left, right, policy)


def varlen_plan(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    left: int,
    right: int,
    policy: str,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Plan:
    """The plan of a packed call; a longest length of -1 was not given.

    Raises:
        InputError: the lengths do not fit the tensors, or are longer than the caller says.
    """
    lengths_q = _lengths("q", q, cu_seqlens_q, max_seqlen_q)
    lengths_k = _lengths("k", k, cu_seqlens_k, max_seqlen_k)
    _, heads, head_dim = q.shape
    return find_plan(
        q.device, q.dtype, lengths_q.seqlens, lengths_k.seqlens, heads, k.shape[1], head_dim, left, right,
        policy,
    )  # fmt: skip


def _lengths(side: str, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Lengths:
    lengths = host_lengths(f"cu_seqlens_{side}", cu_seqlens)
    if lengths.total != x.shape[0]:
        raise InputError(f"cu_seqlens_{side} ends at {lengths.total}, {side} has {x.shape[0]} rows")
    if 0 <= max_seqlen < lengths.longest:
        raise InputError(f"max_seqlen_{side} is {max_seqlen}, the longest sequence has {lengths.longest}")
    return lengths


def _run_forward(plan: Plan, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    with _on(q, plan):
        out, lse = backend_for(q.device).forward(plan, q, k, v, softmax_scale)
    return out.contiguous(), lse


def _run_backward(plan: Plan, saved: tuple[Tensor, ...], softmax_scale: float, ordered: bool) -> Gradients:
    dout, q, k, v, out, lse = saved
    backend = backend_for(q.device)
    run = backend.backward if ordered or _order_is_required() else backend.fast_backward
    with _on(q, plan):
        dq, dk, dv = run(plan, dout, q, k, v, out, lse, softmax_scale)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _on(q: Tensor, plan: Plan) -> Any:
    """The tensors' GPU as the current one. A plan that is captured into a CUDA graph is kept."""
    if not q.is_cuda:
        return nullcontext()
    if torch.cuda.is_current_stream_capturing():
        keep_plan(plan)
    return nullcontext() if q.device.index == torch.cuda.current_device() else torch.cuda.device(q.device)


def _order_is_required() -> bool:
    """Whether this process forbids what ``deterministic=False`` would allow."""
    return (
        torch.are_deterministic_algorithms_enabled()
        or os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"
        or os.environ.get("FLASH_ATTENTION_DETERMINISTIC") == "1"
    )


def _forward_kernel(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, left: int, right: int, policy: str, ordered: bool
) -> tuple[Tensor, Tensor]:
    return _run_forward(dense_plan(q, k, left, right, policy), q, k, v, softmax_scale)


def _backward_kernel(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    softmax_scale: float, left: int, right: int, policy: str, ordered: bool,
) -> Gradients:  # fmt: skip
    plan = dense_plan(q, k, left, right, policy)
    return _run_backward(plan, (dout, q, k, v, out, lse), softmax_scale, ordered)


def _varlen_forward_kernel(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    softmax_scale: float, left: int, right: int, policy: str, ordered: bool,
    max_seqlen_q: int, max_seqlen_k: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    plan = varlen_plan(
        q, k, cu_seqlens_q, cu_seqlens_k, left, right, policy, max_seqlen_q, max_seqlen_k
    )  # fmt: skip
    return _run_forward(plan, q, k, v, softmax_scale)


def _varlen_backward_kernel(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    softmax_scale: float, left: int, right: int, policy: str, ordered: bool,
    max_seqlen_q: int, max_seqlen_k: int,
) -> Gradients:  # fmt: skip
    plan = varlen_plan(
        q, k, cu_seqlens_q, cu_seqlens_k, left, right, policy, max_seqlen_q, max_seqlen_k
    )  # fmt: skip
    return _run_backward(plan, (dout, q, k, v, out, lse), softmax_scale, ordered)


# Fake kernels


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    *batch, rows, heads, _d = q.shape
    return q.new_empty(q.shape), q.new_empty((*batch, heads, rows), dtype=wide)


def _fake_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Gradients:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


# Autograd


class _Functions(NamedTuple):
    """forward: (q, k, v, *lengths, *options); backward: (dout, q, k, v, out, lse, *lengths, *options)."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Gradients]


class _Attention(torch.autograd.Function):
    """Autograd around a forward and a backward."""

    @staticmethod
    def forward(
        ctx: Any,
        functions: _Functions,
        lengths: tuple[Tensor, ...],
        options: tuple[Any, ...],
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = functions.forward(q, k, v, *lengths, *options)
        ctx.save_for_backward(q, k, v, out, lse, *lengths)
        ctx.mark_non_differentiable(lse)
        ctx.backward_of, ctx.options = functions.backward, options
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.backward_of(dout, *ctx.saved_tensors, *ctx.options)
        wanted = [grad if need else None for grad, need in zip(grads, ctx.needs_input_grad[3:])]
        return (None, None, None, *wanted)


class _Gradients(torch.autograd.Function):
    """dq, dk and dv. A node of its own, so that a second derivative is an error and not a missing term:
    ``once_differentiable`` says nothing when the gradient of the output is a constant."""

    @staticmethod
    def forward(ctx: Any, backward: Callable[..., Gradients], *arguments: Any) -> Gradients:
        with torch._C._AutoDispatchBelowAutograd():
            return backward(*arguments)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError("dash_attn.attention has no second derivative")


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _with_autograd(functions: _Functions, lengths: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """A forward with gradients; the operator takes so many tensors of lengths after q, k and v."""

    def run(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        if _needs_grad(q, k, v):
            out, lse = _Attention.apply(  # type: ignore[no-untyped-call]
                functions, rest[:lengths], rest[lengths:], q, k, v
            )
            return out, lse
        with torch._C._AutoDispatchBelowAutograd():
            return functions.forward(q, k, v, *rest)

    return run


def _without_second_derivative(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    def run(*arguments: Any) -> Gradients:
        if _needs_grad(*arguments[:6]):
            dq, dk, dv = _Gradients.apply(backward, *arguments)  # type: ignore[no-untyped-call]
            return dq, dk, dv
        with torch._C._AutoDispatchBelowAutograd():
            return backward(*arguments)

    return run


for _device in ("CPU", "CUDA"):
    _library.impl("forward", _forward_kernel, _device)
    _library.impl("backward", _backward_kernel, _device)
    _library.impl("varlen_forward", _varlen_forward_kernel, _device)
    _library.impl("varlen_backward", _varlen_backward_kernel, _device)

_library.impl("forward", _with_autograd(_Functions(forward, _backward), 0), "Autograd")
_library.impl("backward", _without_second_derivative(_backward), "Autograd")
_library.impl("varlen_forward", _with_autograd(_Functions(varlen_forward, _varlen_backward), 2), "Autograd")
_library.impl("varlen_backward", _without_second_derivative(_varlen_backward), "Autograd")

for _prefix in ("", "varlen_"):
    torch.library.register_fake(f"dash_attn::{_prefix}forward", _fake_forward, lib=_library)
    torch.library.register_fake(f"dash_attn::{_prefix}backward", _fake_backward, lib=_library)


def apply_plan(
    backend: Backend, plan: Plan, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """(out, lse) of checked arguments by one plan on one backend, with autograd and without operators."""

    def run_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return backend.forward(plan, q, k, v, softmax_scale)

    def run_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        return backend.backward(plan, dout, q, k, v, out, lse, softmax_scale)

    return _with_autograd(_Functions(run_forward, run_backward), 0)(q, k, v)

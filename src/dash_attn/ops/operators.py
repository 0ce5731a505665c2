"""The operators ``dash_attn::forward``, ``backward``, ``varlen_forward`` and ``varlen_backward``.

They are what PyTorch sees of this package: shapes and strides for ``torch.compile`` (fake kernels), and
gradients. Arguments are checked by the public functions (:mod:`dash_attn.arguments`) before they come here.

Schemas are defined and autograd is attached by hand: through ``torch.library.custom_op`` or
``register_autograd`` a call costs the host about three times as much.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..backends.base import backend_for
from ..errors import InputError
from ..schedule import Plan
from .autograd import Differentiable, Gradients, with_gradients, without_second_derivative
from .lengths import Lengths, host_lengths
from .plans import find_plan

__all__ = ["DENSE", "VARLEN", "dense_plan", "varlen_plan"]

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


# Kernels


def dense_plan(q: Tensor, k: Tensor, left: int, right: int, policy: str) -> Plan:
    batch, seqlen_q, heads, head_dim = q.shape
    _, seqlen_k, kv_heads, _ = k.shape
    seqlens_q, seqlens_k = (seqlen_q,) * batch, (seqlen_k,) * batch
    return find_plan(
        q.device, False, q.dtype, seqlens_q, seqlens_k, heads, kv_heads, head_dim, left, right, policy
    )


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
    *,
    check: bool = True,
) -> Plan:
    """The plan of a packed call; a longest length of -1 was not given. ``check``: see :func:`host_lengths`.

    Raises:
        InputError: the lengths do not fit the tensors, or are longer than the caller says.
    """
    lengths_q = _lengths("q", q, cu_seqlens_q, max_seqlen_q, check)
    lengths_k = _lengths("k", k, cu_seqlens_k, max_seqlen_k, check and cu_seqlens_k is not cu_seqlens_q)
    _, heads, head_dim = q.shape
    seqlens_q, seqlens_k = lengths_q.seqlens, lengths_k.seqlens
    return find_plan(
        q.device, True, q.dtype, seqlens_q, seqlens_k, heads, k.shape[1], head_dim, left, right, policy
    )


def _lengths(side: str, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, check: bool) -> Lengths:
    lengths = host_lengths(f"cu_seqlens_{side}", cu_seqlens, check=check)
    if lengths.total != x.shape[0]:
        raise InputError(f"cu_seqlens_{side} ends at {lengths.total}, {side} has {x.shape[0]} rows")
    if 0 <= max_seqlen < lengths.longest:
        raise InputError(f"max_seqlen_{side} is {max_seqlen}, the longest sequence has {lengths.longest}")
    return lengths


def _run_forward(plan: Plan, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    with _on(q.device):
        out, lse = backend_for(q.device).forward(plan, q, k, v, softmax_scale)
    return out.contiguous(), lse


def _run_backward(plan: Plan, saved: tuple[Tensor, ...], softmax_scale: float, ordered: bool) -> Gradients:
    dout, q, k, v, out, lse = saved
    backend = backend_for(q.device)
    run = backend.backward if ordered or _order_is_required() else backend.fast_backward
    with _on(q.device):
        dq, dk, dv = run(plan, dout, q, k, v, out, lse, softmax_scale)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _on(device: torch.device) -> Any:
    """The tensors' GPU as the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


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
        q, k, cu_seqlens_q, cu_seqlens_k, left, right, policy, max_seqlen_q, max_seqlen_k, check=False
    )  # fmt: skip
    return _run_backward(plan, (dout, q, k, v, out, lse), softmax_scale, ordered)


DENSE = Differentiable(
    torch.ops.dash_attn.forward.default,
    torch.ops.dash_attn.backward.default,
    lengths=0,
    direct=Differentiable(_forward_kernel, _backward_kernel, lengths=0),
)
"""(q, k, v, softmax_scale, left, right, policy, ordered), (batch, seqlen, heads, head_dim)."""

VARLEN = Differentiable(
    torch.ops.dash_attn.varlen_forward.default,
    torch.ops.dash_attn.varlen_backward.default,
    lengths=2,
    direct=Differentiable(_varlen_forward_kernel, _varlen_backward_kernel, lengths=2),
)
"""(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, ..., ordered, max_seqlen_q, max_seqlen_k)."""


# Fake kernels


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    *batch, rows, heads, _d = q.shape
    return q.new_empty(q.shape), q.new_empty((*batch, heads, rows), dtype=wide)


def _fake_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Gradients:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


for _device in ("CPU", "CUDA"):
    _library.impl("forward", _forward_kernel, _device)
    _library.impl("backward", _backward_kernel, _device)
    _library.impl("varlen_forward", _varlen_forward_kernel, _device)
    _library.impl("varlen_backward", _varlen_backward_kernel, _device)

_library.impl("forward", partial(with_gradients, DENSE), "Autograd")
_library.impl("backward", partial(without_second_derivative, DENSE.backward), "Autograd")
_library.impl("varlen_forward", partial(with_gradients, VARLEN), "Autograd")
_library.impl("varlen_backward", partial(without_second_derivative, VARLEN.backward), "Autograd")

for _prefix in ("", "varlen_"):
    torch.library.register_fake(f"dash_attn::{_prefix}forward", _fake_forward, lib=_library)
    torch.library.register_fake(f"dash_attn::{_prefix}backward", _fake_backward, lib=_library)

"""The operators ``dash_attn::forward``, ``backward``, ``varlen_forward`` and ``varlen_backward``; without a
backward, ``varlen_used_forward`` and ``cached_forward``; and ``append``, which writes into a cache.

They are what PyTorch sees of this package: shapes and strides for ``torch.compile`` (fake kernels), and
gradients. Arguments are checked by the public functions (:mod:`dash_attn.arguments`) before they come here.

Schemas are defined and autograd is attached by hand: through ``torch.library.custom_op`` or
``register_autograd`` a call costs the host about three times as much.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from ..backends.base import AuxTensors, Gradients, Tensors
from ..backends.cached import CachedTensors
from ..backends.shapes import lse_shape
from ..backends.sums import accumulator
from ..spec import AttentionSpec
from .autograd import Differentiable, with_gradients, without_gradients, without_second_derivative
from .cached import append, cached_call
from .calls import dense_call, packed_call, used_call
from .lengths import Packing, Used, check_no_rows

__all__ = ["APPEND", "CACHED", "DENSE", "USED", "VARLEN"]

_SPEC = AttentionSpec.schema()
_LENGTHS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k"
_USED = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor seqused_k"
_PLACES = "Tensor lengths, Tensor table, Tensor? cu_seqlens_q"
_LONGEST = "SymInt max_seqlen_q, SymInt max_seqlen_k"
_AUX = ", ".join(f"Tensor? {name}" for name in AuxTensors._fields)
_INPUTS = f"Tensor q, Tensor k, Tensor v, {_AUX}"
_SAVED = ", ".join(f"Tensor {name}" for name in Tensors._fields) + f", {_AUX}"
_GRADIENTS = ", ".join(f"Tensor {name}" for name in Gradients._fields)
_SCHEMAS = {
    "forward": f"({_INPUTS}, {_SPEC}) -> (Tensor out, Tensor lse)",
    "backward": f"({_SAVED}, {_SPEC}) -> ({_GRADIENTS})",
    "varlen_forward": f"({_INPUTS}, {_LENGTHS}, {_SPEC}, {_LONGEST}) -> (Tensor out, Tensor lse)",
    "varlen_backward": f"({_SAVED}, {_LENGTHS}, {_SPEC}, {_LONGEST}) -> ({_GRADIENTS})",
    "varlen_used_forward": f"({_INPUTS}, {_USED}, {_SPEC}, {_LONGEST}) -> (Tensor out, Tensor lse)",
    "cached_forward": f"({_INPUTS}, {_PLACES}, {_SPEC}, SymInt max_seqlen_q) -> (Tensor out, Tensor lse)",
    "append": "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor at, Tensor table) -> ()",
}

_library: Any = torch.library.Library("dash_attn", "DEF")  # type: ignore[no-untyped-call]
for _name, _schema in _SCHEMAS.items():
    _tags = [torch.Tag.pt2_compliant_tag]
    if _name.startswith("varlen"):
        # A graph that torch.compile captures by itself would replay the plan of other lengths.
        _tags.append(torch.Tag.cudagraph_unsafe)
    _library.define(_name + _schema, tags=_tags)


# Kernels. What follows the tensors is in the order of the schemas.

_TENSORS = len(Tensors._fields)
_FIELDS = len(AuxTensors._fields)


def _split(rest: tuple[Any, ...]) -> tuple[AuxTensors, tuple[Any, ...]]:
    return AuxTensors(*rest[:_FIELDS]), rest[_FIELDS:]


def _forward_kernel(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    aux, spec = _split(rest)
    if q.shape[0] == 0:  # a compiled call may find this out here
        return _fake_forward(q, k, v)
    out, lse = dense_call(q, k, v, AttentionSpec(*spec)).forward(q, k, v, aux)
    return out.contiguous(), lse


def _backward_kernel(*arguments: Any) -> Gradients:
    tensors, (aux, spec) = Tensors(*arguments[:_TENSORS]), _split(arguments[_TENSORS:])
    if tensors.q.shape[0] == 0:
        return _of_nothing(tensors, aux)
    call = dense_call(tensors.q, tensors.k, tensors.v, AttentionSpec(*spec))
    return _results(call.backward(tensors, aux))


def _results(grads: Gradients) -> Gradients:
    """As operators return them: nothing is None."""
    dq, dk, dv, dsink = grads
    dsink = dq.new_empty(0) if dsink is None else dsink
    return Gradients(*(x.contiguous() for x in (dq, dk, dv, dsink)))


def _is_nothing(packing: Packing | Used, q: Tensor, k: Tensor) -> bool:
    """Whether there is no sequence: a compiled call may find this out here."""
    if packing.sequences:
        return False
    check_no_rows(q, k)
    return True


def _of_nothing(tensors: Tensors, aux: AuxTensors) -> Gradients:
    """Gradients where there is no sequence: without rows, and of a sink 0."""
    dq, dk, dv = (torch.empty_like(x) for x in (tensors.q, tensors.k, tensors.v))
    sink = aux.learnable_sink
    return _results(Gradients(dq, dk, dv, None if sink is None else torch.zeros_like(sink)))


def _varlen_forward_kernel(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    aux, (cu_seqlens_q, cu_seqlens_k, *spec, longest_q, longest_k) = _split(rest)
    packing, longest = Packing(cu_seqlens_q, cu_seqlens_k), (longest_q, longest_k)
    if _is_nothing(packing, q, k):
        return _fake_forward(q, k, v)
    out, lse = packed_call(q, k, v, packing, longest, AttentionSpec(*spec)).forward(q, k, v, aux)
    return out.contiguous(), lse


def _varlen_backward_kernel(*arguments: Any) -> Gradients:
    tensors, (aux, rest) = Tensors(*arguments[:_TENSORS]), _split(arguments[_TENSORS:])
    cu_seqlens_q, cu_seqlens_k, *spec, longest_q, longest_k = rest
    packing, longest = Packing(cu_seqlens_q, cu_seqlens_k), (longest_q, longest_k)
    if packing.sequences == 0:
        return _of_nothing(tensors, aux)
    # The forward has seen that the lengths were not changed behind PyTorch's back.
    q, k, v = tensors.q, tensors.k, tensors.v
    call = packed_call(q, k, v, packing, longest, AttentionSpec(*spec), check=False)
    return _results(call.backward(tensors, aux))


def _used_forward_kernel(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    aux, (cu_seqlens_q, cu_seqlens_k, seqused_k, *spec, longest_q, longest_k) = _split(rest)
    used, longest = Used(cu_seqlens_q, cu_seqlens_k, seqused_k), (longest_q, longest_k)
    if _is_nothing(used, q, k):
        return _fake_forward(q, k, v)
    out, lse = used_call(q, k, v, used, longest, AttentionSpec(*spec)).forward(q, k, v, aux)
    return out.contiguous(), lse


def _cached_kernel(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    aux, (lengths, table, cu_seqlens_q, *spec, longest_q) = _split(rest)
    tensors = CachedTensors(q, k, v, lengths, table, cu_seqlens_q)
    out, lse = cached_call(tensors, AttentionSpec(*spec), longest_q).forward(tensors, aux)
    return out.contiguous(), lse


def _append_kernel(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, at: Tensor, table: Tensor) -> None:
    append((k_cache, v_cache), (k, v), at, table)


DENSE = Differentiable(torch.ops.dash_attn.forward.default, torch.ops.dash_attn.backward.default, lengths=0)
"""(q, k, v, *aux, *spec), (batch, seqlen, heads, head_dim)."""

VARLEN = Differentiable(
    torch.ops.dash_attn.varlen_forward.default, torch.ops.dash_attn.varlen_backward.default, lengths=2
)
"""(q, k, v, *aux, cu_seqlens_q, cu_seqlens_k, *spec, max_seqlen_q, max_seqlen_k)."""

USED = torch.ops.dash_attn.varlen_used_forward.default
"""(q, k, v, *aux, cu_seqlens_q, cu_seqlens_k, seqused_k, *spec, max_seqlen_q, max_seqlen_k): no backward."""

CACHED = torch.ops.dash_attn.cached_forward.default
"""(q, k, v, *aux, lengths, table, cu_seqlens_q, *spec, max_seqlen_q): no backward."""

APPEND = torch.ops.dash_attn.append.default
"""(k_cache, v_cache, k, v, at, table): see :func:`.cached.append`."""


# Fake kernels


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(lse_shape(q), dtype=accumulator(q.dtype))
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse


def _fake_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Gradients:
    sink = rest[_TENSORS - 4]
    dsink = q.new_empty(0) if sink is None else sink.new_empty(sink.shape)
    return Gradients(q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink)


_KERNELS: dict[str, Callable[..., Any]] = {
    "forward": _forward_kernel, "backward": _backward_kernel, "varlen_forward": _varlen_forward_kernel,
    "varlen_backward": _varlen_backward_kernel, "varlen_used_forward": _used_forward_kernel,
    "cached_forward": _cached_kernel, "append": _append_kernel,
}  # fmt: skip
for _name, _kernel in _KERNELS.items():
    for _device in ("CPU", "CUDA"):
        # torch.compile would trace a kernel that is called between its graphs. `torch.compiler.disable` does
        # the same, but imports the compiler now and not at the first call.
        _library.impl(_name, _disable_dynamo(_kernel), _device)

_library.impl("forward", partial(with_gradients, DENSE), "Autograd")
_library.impl("backward", partial(without_second_derivative, DENSE.backward), "Autograd")
_library.impl("varlen_forward", partial(with_gradients, VARLEN), "Autograd")
_library.impl("varlen_backward", partial(without_second_derivative, VARLEN.backward), "Autograd")
_library.impl("varlen_used_forward", partial(without_gradients, USED), "Autograd")
_library.impl("cached_forward", partial(without_gradients, CACHED), "Autograd")

for _prefix in ("", "varlen_"):
    torch.library.register_fake(f"dash_attn::{_prefix}forward", _fake_forward, lib=_library)
    torch.library.register_fake(f"dash_attn::{_prefix}backward", _fake_backward, lib=_library)
torch.library.register_fake("dash_attn::varlen_used_forward", _fake_forward, lib=_library)
torch.library.register_fake("dash_attn::cached_forward", _fake_forward, lib=_library)
torch.library.register_fake("dash_attn::append", lambda *_: None, lib=_library)

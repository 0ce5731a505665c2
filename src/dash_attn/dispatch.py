"""How a call runs: at once if a call like it was accepted before, else checked first."""

from __future__ import annotations

import torch
from torch import Tensor

from .arguments import Asked, CheckedCall, Packing, Used, check_call, completed
from .backends.base import NO_AUX, AuxTensors
from .ops.autograd import attend, call_directly, empty_results, refuse_gradients, with_gradients
from .ops.calls import Call, dense_call, packed_call, shaped_call, used_call
from .ops.known import KnownCalls
from .ops.lengths import check_no_rows
from .ops.operators import DENSE, USED, VARLEN
from .spec import AttentionSpec
from .values import check_flag, known

__all__ = ["QKV", "backend_of_nothing", "find_call", "is_empty", "run_dense", "run_packed"]

QKV = tuple[Tensor, Tensor, Tensor]

_KNOWN: KnownCalls[Call] = KnownCalls()
_KNOWN_PACKED: KnownCalls[tuple[AttentionSpec, tuple[int, int]]] = KnownCalls()


def run_dense(
    q: Tensor, k: Tensor, v: Tensor, aux: AuxTensors, asked: Asked, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """A dense call. One that is like an earlier one is neither checked nor looked up again."""
    check_flag("return_lse", return_lse)
    direct = call_directly(q, k, v, aux)
    more = () if not direct or aux is NO_AUX else aux
    if direct and (call := _KNOWN.find(q, k, v, asked, more)) is not None:
        out, lse = attend(call, q, k, v, completed(aux, asked.dropout_p, q))
        return (out, lse) if return_lse else out
    call, out, lse = _run(check_call(q, k, v, None, asked, aux))
    if call is not None:
        _KNOWN.add(call, q, k, v, asked, more)
    return (out, lse) if return_lse else out


def run_packed(
    qkv: QKV, packing: Packing | Used, aux: AuxTensors, asked: Asked, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """A packed call. One that is like an earlier one is not checked again, but for its lengths."""
    check_flag("return_lse", return_lse)
    q, k, v = qkv
    direct = call_directly(q, k, v, aux)
    more = packing if not direct or aux is NO_AUX else (*packing, *aux)
    if direct and (known := _KNOWN_PACKED.find(q, k, v, asked, more)) is not None:
        spec, longest = known
        aux = completed(aux, asked.dropout_p, q)
        if isinstance(packing, Used):
            refuse_gradients(q, k, v, *aux)
            out, lse = used_call(q, k, v, packing, longest, spec).forward(q, k, v, aux)
        else:
            call = packed_call(q, k, v, packing, longest, spec)
            out, lse = attend(call, q, k, v, aux)
        return (out, lse) if return_lse else out
    checked = check_call(q, k, v, packing, asked, aux)
    made, out, lse = _run(checked)
    if made is not None and checked.packing is not None:
        _KNOWN_PACKED.add((checked.spec, checked.packing.longest), q, k, v, asked, more)
    return (out, lse) if return_lse else out


def _run(checked: CheckedCall) -> tuple[Call | None, Tensor, Tensor]:
    """(call, out, lse); the call of those that need no operator."""
    q, k, v, aux, _, packing = checked
    if is_empty(checked):
        if not torch.compiler.is_compiling():  # it would trace the search, and the batch may grow
            backend_of_nothing(checked)
        return None, *empty_results(q, k, v, aux)
    aux = completed(aux, checked.spec.dropout_p, q)
    checked = checked._replace(aux=aux)
    if call_directly(q, k, v, aux):
        call = find_call(checked)
        return call, *attend(call, q, k, v, aux)
    if isinstance(packing, Used):
        out, lse = USED(q, k, v, *checked.rest)
        return None, out, lse
    functions = DENSE if packing is None else VARLEN
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return None, *functions.forward(q, k, v, *checked.rest)
    return None, *with_gradients(functions, q, k, v, *checked.rest)


def find_call(checked: CheckedCall) -> Call:
    q, k, v, _, spec, packing = checked
    if isinstance(packing, Used):
        return used_call(q, k, v, packing, packing.longest, spec)
    if packing is None:
        return dense_call(q, k, v, spec)
    return packed_call(q, k, v, packing, packing.longest, spec)


def backend_of_nothing(checked: CheckedCall) -> str:
    """Name of the backend of a call without a sequence: the one that would run a sequence. In a packed call
    that one has no rows.

    Raises:
        InputError: none covers it, or the one that is asked for does not.
        UnsupportedMaskError: the policy does not cover the mask of a dense call.
    """
    q, k, v, _, spec, packing = checked
    lengths = (q.shape[1], k.shape[1]) if packing is None else (0, 0)
    sizes = (q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1])
    return shaped_call((lengths,), sizes, q.dtype, q.device, packing is not None, spec).backend.name


def is_empty(checked: CheckedCall) -> bool:
    """Whether there is no sequence at all, as far as a compiler knows."""
    packing = checked.packing
    if packing is None:
        return known(checked.q.shape[0] == 0)
    if not known(packing.sequences == 0):
        return False
    check_no_rows(checked.q, checked.k)
    return True

"""Gradients around a forward and a backward: first derivatives, and errors for all others.

An operator's own autograd is ``torch.autograd.Function`` in its quickest form. The transforms of
torch.func need another form, and need it in place of the operator: see :func:`attend`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..backends.base import NO_AUX, NO_BACKWARD, AuxTensors, Gradients, Tensors
from ..backends.shapes import lse_shape
from ..backends.sums import accumulator
from ..errors import InputError

__all__ = [
    "Attending",
    "Differentiable",
    "attend",
    "call_directly",
    "empty_results",
    "gradients_once",
    "is_wrapped",
    "needs_grad",
    "refuse_gradients",
    "refuse_tracing",
    "refuse_transforms",
    "savable",
    "untraced",
    "with_gradients",
    "with_memory",
    "without_gradients",
    "without_second_derivative",
]

_PLAIN = (Tensor, torch.nn.Parameter)

_KEYS = torch._C._TorchDispatchModeKey
_TRACING = (_KEYS.FAKE, _KEYS.PROXY, _KEYS.FUNCTIONAL)

_SAVED, _AUX = len(Tensors._fields), len(AuxTensors._fields)


class Attending(Protocol):
    """A forward and its backward whose options are decided, such as :class:`dash_attn.ops.calls.Call`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, aux: AuxTensors = NO_AUX) -> tuple[Tensor, Tensor]: ...

    def backward(self, tensors: Tensors, aux: AuxTensors = NO_AUX) -> Gradients: ...


class Differentiable(NamedTuple):
    """A forward and its backward as operators.

    Attributes:
        forward: (q, k, v, *aux, *lengths, *options) to (out, lse).
        backward: (dout, q, k, v, out, lse, *aux, *lengths, *options) to (dq, dk, dv, dsink).
        lengths: how many tensors of lengths there are.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Gradients]
    lengths: int


def call_directly(q: Tensor, k: Tensor, v: Tensor, aux: AuxTensors = NO_AUX) -> bool:
    """Whether a public function may call what is under the operators, which saves host time.

    torch.compile must see the operator, and so must dispatch modes, subclasses of tensors, and transforms of
    torch.func.
    """
    return (
        not torch.compiler.is_compiling()
        and type(q) in _PLAIN
        and type(k) in _PLAIN
        and type(v) in _PLAIN
        and (aux is NO_AUX or all(x is None or type(x) in _PLAIN for x in aux))
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
    )


def attend(
    call: Attending, q: Tensor, k: Tensor, v: Tensor, aux: AuxTensors = NO_AUX
) -> tuple[Tensor, Tensor]:
    """The forward with autograd, without operators."""
    if aux is not NO_AUX:
        if needs_grad(q, k, v, *aux):
            out, lse = untraced(_Attention).apply(call, q, k, v, *aux)  # type: ignore[no-untyped-call]
            return out, lse
        return call.forward(q, k, v, aux)
    if needs_grad(q, k, v):
        out, lse = untraced(_Attention).apply(call, q, k, v)  # type: ignore[no-untyped-call]
        return out, lse
    return call.forward(q, k, v)


def with_gradients(
    functions: Differentiable, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """The autograd of a forward operator.

    A transform of torch.func nests levels of autograd: ``Function.apply`` knows them all, where the autograd
    of an operator would see the innermost one and silently cut the others.
    """
    if torch._C._are_functorch_transforms_active():
        return _attended(_TransformedAttention, functions, q, k, v, rest)
    if needs_grad(q, k, v, *rest[:_AUX]):
        return _attended(untraced(_OperatorAttention), functions, q, k, v, rest)
    with torch._C._AutoDispatchBelowAutograd():
        return functions.forward(q, k, v, *rest)


def without_second_derivative(backward: Callable[..., Gradients], *arguments: Any) -> Gradients:
    """The autograd of a backward operator."""
    if needs_grad(*arguments[: len(Tensors._fields) + _AUX]):
        return _once(_Gradients, backward, arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return backward(*arguments)


def gradients_once(backward: Callable[..., Gradients], dout: Tensor, *saved: Tensor | None) -> Gradients:
    """What ``backward(dout, *saved)`` makes; a second derivative is an error where one of these needs it."""
    if torch._C._functorch.is_batchedtensor(dout) or torch._C._functorch.is_legacy_batchedtensor(dout):
        _no_vmap()  # is_grads_batched=True: what follows would read it as one gradient
    arguments = (dout, *saved)
    return _once(_Gradients, backward, arguments) if needs_grad(*arguments) else backward(*arguments)


def without_gradients(
    forward: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """The autograd of a forward operator that has no backward."""
    refuse_gradients(q, k, v, *rest[:_AUX])
    with torch._C._AutoDispatchBelowAutograd():
        return forward(q, k, v, *rest)


def refuse_gradients(*tensors: Tensor | None) -> None:
    """Raise InputError where a gradient is wanted of a forward with ``seqused_k``, or a transform of it."""
    if needs_grad(*tensors):
        raise InputError(NO_BACKWARD)
    refuse_transforms("seqused_k")


def refuse_transforms(what: str) -> None:
    """Raise InputError under a transform of torch.func."""
    if torch._C._are_functorch_transforms_active():
        raise InputError(f"{what} is not supported under the transforms of torch.func")


def refuse_tracing(what: str) -> None:
    """Raise InputError where calls are recorded or tensors are fake, as by make_fx and torch.export."""
    if any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING):
        raise InputError(
            f"{what} cannot be traced (make_fx, torch.export), and takes no fake tensors: what ranks "
            "exchange would be of this one run"
        )


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether a derivative of what is made of these is wanted."""
    if forward_ad._current_level >= 0 and any(map(_is_dual, tensors)):
        return True  # the functions below have no forward derivative and say so
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _is_dual(x: Tensor | None) -> bool:
    return x is not None and forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


def empty_results(q: Tensor, k: Tensor, v: Tensor, aux: AuxTensors) -> tuple[Tensor, Tensor]:
    """Results without rows, with gradients without rows, or of 0."""
    out = q.sum(-1, keepdim=True).expand(*q.shape[:-1], v.shape[-1]) + 0 * (k.sum() + v.sum())
    if aux.learnable_sink is not None:
        out = out + 0 * aux.learnable_sink.sum()
    return out.to(q.dtype), q.new_empty(lse_shape(q), dtype=accumulator(q.dtype))


def _attended(
    form: type[torch.autograd.Function],
    functions: Differentiable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rest: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:
    aux, rest = rest[:_AUX], rest[_AUX:]
    lengths, options = rest[: functions.lengths], rest[functions.lengths :]
    out, lse = form.apply(functions, lengths, options, q, k, v, *aux)  # type: ignore[no-untyped-call]
    return out, lse


def _once(
    form: type[_Gradients], backward: Callable[..., Gradients], arguments: tuple[Any, ...]
) -> Gradients:
    return Gradients(*form.apply(backward, *arguments))  # type: ignore[no-untyped-call]


def untraced(form: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """A form of autograd whose backward torch.compile calls as it is. Autograd may call a backward from what
    is being compiled, and the compiler would trace the plan and the sums in it.

    That takes the compiler's import, which takes seconds: as long as nobody has imported it, ``form`` itself.
    """
    return form if "torch._dynamo" not in sys.modules else _untraced(form)


@cache
def _untraced(form: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    backward = torch.compiler.disable(form.backward)  # type: ignore[no-untyped-call]
    return type(form.__name__, (form,), {"backward": staticmethod(backward)})


class _Attention(torch.autograd.Function):
    """Autograd around a call."""

    @staticmethod
    def forward(
        ctx: Any, call: Attending, q: Tensor, k: Tensor, v: Tensor, *aux: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = call.forward(q, k, v, AuxTensors(*aux) if aux else NO_AUX)
        ctx.save_for_backward(q, k, v, out, lse, *savable(aux))
        _only_out(ctx, lse)
        ctx.call = call
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * len(ctx.needs_input_grad)
        saved = (None if x is None else with_memory(x) for x in ctx.saved_tensors)
        grads = gradients_once(_backward_of(ctx.call), with_memory(dout), *saved)
        return None, *_wanted(ctx.needs_input_grad[1:], grads)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        raise RuntimeError("dash_attn.attention has no forward derivative")


def is_wrapped(x: Tensor) -> bool:
    """Whether a tensor has no memory of its own, but other tensors in it, as a DTensor has."""
    return bool(is_traceable_wrapper_subclass(x))


def with_memory(x: Tensor) -> Tensor:
    """A tensor that a kernel can read: one that a collective has not finished is waited for.

    Raises:
        InputError: it is a tensor of other tensors.
    """
    if type(x) in _PLAIN or not is_wrapped(x):
        return x
    plain = x.clone()
    if is_wrapped(plain):
        raise InputError(
            f"attention of plain tensors got a gradient, or a saved tensor, that is a {type(x).__name__}"
        )
    return plain


def _backward_of(call: Attending) -> Callable[..., Gradients]:
    """The backward, of the fields of ``Tensors`` and then those of ``AuxTensors``, if there are any."""

    def backward(*saved: Tensor) -> Gradients:
        tensors, aux = Tensors(*saved[:_SAVED]), saved[_SAVED:]
        return call.backward(tensors, AuxTensors(*aux) if aux else NO_AUX)

    return backward


class _OperatorAttention(torch.autograd.Function):
    """Autograd around a forward operator and its backward."""

    @staticmethod
    def forward(
        ctx: Any,
        functions: Differentiable,
        lengths: tuple[Tensor, ...],
        options: tuple[Any, ...],
        *inputs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """``inputs``: q, k, v and the fields of ``AuxTensors``."""
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = functions.forward(*inputs, *lengths, *options)
        ctx.save_for_backward(*inputs[:3], out, lse, *savable(inputs[3:]), *_own(lengths))
        _only_out(ctx, lse)
        ctx.backward_of, ctx.options = functions.backward, options
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * len(ctx.needs_input_grad)
        arguments = (dout, *ctx.saved_tensors, *ctx.options)
        grads = without_second_derivative(ctx.backward_of, *arguments)
        return None, None, None, *_wanted(ctx.needs_input_grad[3:], grads)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        raise RuntimeError("dash_attn.attention has no forward derivative")


def _only_out(ctx: Any, lse: Tensor) -> None:
    """lse has no gradient, and no zeros are made in place of one: that would be a launch per backward. A
    gradient of out that nobody has made is None then, too."""
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def savable(aux: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Copies of tensors that were made in inference mode: autograd saves none of those."""
    return [x.clone() if x is not None and x.is_inference() else x for x in aux]


def _own(lengths: tuple[Tensor, ...]) -> list[Tensor]:
    """The lengths that the backward will read: the forward's, whoever writes to a buffer on the CPU."""
    return [x if x.is_cuda else x.clone() for x in lengths]


def _wanted(needed: Sequence[bool], grads: Gradients) -> list[Tensor | None]:
    """A gradient for each of q, k, v and the fields of ``AuxTensors``, or None."""
    return [grad if need else None for grad, need in zip_longest(grads[: len(needed)], needed)]


class _Gradients(torch.autograd.Function):
    """The gradients. A node of its own, so that a second derivative is an error and not a missing term:
    ``once_differentiable`` says nothing when the gradient of the output is a constant."""

    @staticmethod
    def forward(ctx: Any, backward: Callable[..., Gradients], *arguments: Any) -> Gradients:
        with torch._C._AutoDispatchBelowAutograd():
            return backward(*arguments)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError("dash_attn.attention has no second derivative")


def _no_vmap(*_: Any) -> None:
    raise RuntimeError("dash_attn.attention has no rule for torch.vmap; use its batch dimension")


class _TransformedAttention(_OperatorAttention):
    """The form that torch.func asks for. Its ``apply`` takes several times as long."""

    vmap = staticmethod(_no_vmap)

    @staticmethod
    def forward(  # type: ignore[override]
        functions: Differentiable, lengths: tuple[Tensor, ...], options: tuple[Any, ...], *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return functions.forward(*inputs, *lengths, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        functions, lengths, options, *tensors = inputs
        ctx.save_for_backward(*tensors[:3], *output, *savable(tensors[3:]), *_own(lengths))
        _only_out(ctx, output[1])
        ctx.backward_of, ctx.options = functions.backward, options

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * len(ctx.needs_input_grad)
        arguments = (dout, *ctx.saved_tensors, *ctx.options)
        grads = _once(_TransformedGradients, ctx.backward_of, arguments)
        return None, None, None, *_wanted(ctx.needs_input_grad[3:], grads)


class _TransformedGradients(_Gradients):
    """The form that torch.func asks for."""

    vmap = staticmethod(_no_vmap)

    @staticmethod
    def forward(backward: Callable[..., Gradients], *arguments: Any) -> Gradients:  # type: ignore[override]
        with torch._C._AutoDispatchBelowAutograd():
            return backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
        pass

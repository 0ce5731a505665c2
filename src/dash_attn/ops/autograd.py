"""Gradients around a forward and a backward: first derivatives, and errors for all others.

An operator's own autograd is ``torch.autograd.Function`` in its quickest form. The transforms of
torch.func need another form, and need it in place of the operator: see :func:`attend`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..backends.base import NO_BACKWARD, Gradients, Tensors
from ..errors import InputError

__all__ = [
    "Attending",
    "Differentiable",
    "attend",
    "call_directly",
    "needs_grad",
    "refuse_gradients",
    "with_gradients",
    "without_gradients",
    "without_second_derivative",
]

_PLAIN = (Tensor, torch.nn.Parameter)


class Attending(Protocol):
    """A forward and its backward whose options are decided, such as :class:`dash_attn.ops.calls.Call`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...

    def backward(self, tensors: Tensors) -> Gradients: ...


class Differentiable(NamedTuple):
    """A forward and its backward as operators.

    Attributes:
        forward: (q, k, v, *lengths, *options) to (out, lse).
        backward: (dout, q, k, v, out, lse, *lengths, *options) to (dq, dk, dv).
        lengths: how many tensors of lengths and rows there are, those that are None included.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Gradients]
    lengths: int


def call_directly(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a public function may call what is under the operators, which saves host time.

    torch.compile must see the operator, and so must dispatch modes, subclasses of tensors, and transforms of
    torch.func.
    """
    return (
        type(q) in _PLAIN
        and type(k) in _PLAIN
        and type(v) in _PLAIN
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
    )


def attend(call: Attending, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The forward with autograd, without operators."""
    if needs_grad(q, k, v):
        out, lse = _Attention.apply(call, q, k, v)  # type: ignore[no-untyped-call]
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
    if needs_grad(q, k, v):
        return _attended(_OperatorAttention, functions, q, k, v, rest)
    with torch._C._AutoDispatchBelowAutograd():
        return functions.forward(q, k, v, *rest)


def without_second_derivative(backward: Callable[..., Gradients], *arguments: Any) -> Gradients:
    """The autograd of a backward operator."""
    if needs_grad(*arguments[:6]):
        return _once(_Gradients, backward, arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return backward(*arguments)


def without_gradients(
    forward: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """The autograd of a forward operator that has no backward."""
    refuse_gradients(q, k, v)
    with torch._C._AutoDispatchBelowAutograd():
        return forward(q, k, v, *rest)


def refuse_gradients(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise InputError where a gradient is wanted of a forward with ``seqused_k``, or a transform of it."""
    if needs_grad(q, k, v):
        raise InputError(NO_BACKWARD)
    if torch._C._are_functorch_transforms_active():
        raise InputError("seqused_k is not supported under the transforms of torch.func")


def needs_grad(*tensors: Tensor) -> bool:
    """Whether a derivative of what is made of these is wanted."""
    if forward_ad._current_level >= 0:
        return True  # the functions below have no forward derivative and say so
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _attended(
    form: type[_OperatorAttention],
    functions: Differentiable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rest: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:
    lengths, options = rest[: functions.lengths], rest[functions.lengths :]
    out, lse = form.apply(functions, lengths, options, q, k, v)  # type: ignore[no-untyped-call]
    return out, lse


def _once(
    form: type[_Gradients], backward: Callable[..., Gradients], arguments: tuple[Any, ...]
) -> Gradients:
    return Gradients(*form.apply(backward, *arguments))  # type: ignore[no-untyped-call]


class _Attention(torch.autograd.Function):
    """Autograd around a call."""

    @staticmethod
    def forward(ctx: Any, call: Attending, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = call.forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.call = call
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if torch._C._functorch.is_batchedtensor(dout) or torch._C._functorch.is_legacy_batchedtensor(dout):
            _no_vmap()  # is_grads_batched=True: what follows would read it as one gradient
        tensors = Tensors(dout, *ctx.saved_tensors)
        if needs_grad(*tensors):
            grads = _once(_Gradients, lambda *six: ctx.call.backward(Tensors(*six)), tensors)
        else:
            grads = ctx.call.backward(tensors)
        _, *needed = ctx.needs_input_grad
        return None, *(grad if need else None for grad, need in zip(grads, needed))

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        raise RuntimeError("dash_attn.attention has no forward derivative")


class _OperatorAttention(torch.autograd.Function):
    """Autograd around a forward operator and its backward."""

    @staticmethod
    def forward(
        ctx: Any,
        functions: Differentiable,
        lengths: tuple[Tensor | None, ...],
        options: tuple[Any, ...],
        *qkv: Tensor,
    ) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = functions.forward(*qkv, *lengths, *options)
        ctx.save_for_backward(*qkv, out, lse, *_own(lengths))
        ctx.mark_non_differentiable(lse)
        ctx.backward_of, ctx.options = functions.backward, options
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        arguments = (dout, *ctx.saved_tensors, *ctx.options)
        return _wanted(ctx, without_second_derivative(ctx.backward_of, *arguments))

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        raise RuntimeError("dash_attn.attention has no forward derivative")


def _own(lengths: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """The lengths that the backward will read: the forward's, whoever writes to a buffer on the CPU."""
    return [x if x is None or x.is_cuda else x.clone() for x in lengths]


def _wanted(ctx: Any, grads: Gradients) -> tuple[Tensor | None, ...]:
    need = ctx.needs_input_grad[3:]
    return (None, None, None, *(grad if needed else None for grad, needed in zip(grads, need)))


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


def _no_vmap(*_: Any) -> None:
    raise RuntimeError("dash_attn.attention has no rule for torch.vmap; use its batch dimension")


class _TransformedAttention(_OperatorAttention):
    """The form that torch.func asks for. Its ``apply`` takes several times as long."""

    vmap = staticmethod(_no_vmap)

    @staticmethod
    def forward(  # type: ignore[override]
        functions: Differentiable, lengths: tuple[Tensor | None, ...], options: tuple[Any, ...], *qkv: Tensor
    ) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return functions.forward(*qkv, *lengths, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        functions, lengths, options, *qkv = inputs
        ctx.save_for_backward(*qkv, *output, *_own(lengths))
        ctx.mark_non_differentiable(output[1])
        ctx.backward_of, ctx.options = functions.backward, options

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        arguments = (dout, *ctx.saved_tensors, *ctx.options)
        return _wanted(ctx, _once(_TransformedGradients, ctx.backward_of, arguments))


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

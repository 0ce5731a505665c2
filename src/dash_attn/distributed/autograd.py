"""Autograd around a shared call: first derivatives, and errors for all others."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..backends.base import AuxTensors, Gradients
from ..ops.autograd import gradients_once, needs_grad, savable, untraced, with_memory
from .meeting import Meeting
from .passes import Saved, backward, forward
from .shared import Shared
from .team import backing_out, exchanging

__all__ = ["attend"]

_SAVED = len(Saved._fields)


def attend(
    shared: Shared, meeting: Meeting, q: Tensor, k: Tensor, v: Tensor, aux: AuxTensors
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the rows that lie on this rank, with gradients; ``meeting``: for the forward. Packed
    q, k and v have no batch, out and lse have one."""
    wanted = (q, k, v, aux.learnable_sink)
    tie = _Tie.apply(*wanted) if needs_grad(*wanted) else None  # type: ignore[no-untyped-call]
    form = untraced(_Attention)
    out, lse = form.apply((shared, meeting), tie, q, k, v, *aux)  # type: ignore[no-untyped-call]
    return out, lse


class _Tie(torch.autograd.Function):
    """Nothing, but made of the inputs.

    The backward saves what came from other ranks in place of the inputs. A second derivative leads to the
    inputs nevertheless: by this, which holds none of their memory.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, *_: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        return q.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[None, ...]:
        return None, None, None, None


class _Attention(torch.autograd.Function):
    """A shared call. One node from q, k and v as they are given: where two of them are one tensor, its
    gradient is their sum in an order that further nodes, such as views, would change."""

    @staticmethod
    def forward(
        ctx: Any,
        what: tuple[Shared, Meeting],
        tie: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *aux: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        shared, meeting = what
        if shared.given.packed:
            q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        # Modes of dispatch, such as that of a selective checkpoint, see what computes as little as elsewhere.
        with exchanging(shared.team), _disable_current_modes():
            q, k, v = map(with_memory, (q, k, v))
            aux = tuple(None if x is None else with_memory(x) for x in aux)
            out, lse, saved = forward(shared, meeting, q, k, v, AuxTensors(*aux))
            ctx.save_for_backward(tie, *saved, *savable(aux))
        ctx.mark_non_differentiable(lse)
        ctx.shared, ctx.step = shared, meeting.at._replace(backward=True)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        shared, step = ctx.shared, ctx.step

        def made(dout: Tensor, _: Tensor | None, *saved: Tensor) -> Gradients:
            with exchanging(shared.team), _disable_current_modes():
                meeting = Meeting(shared.team, step, dout.device)
                return backward(shared, meeting, dout, Saved(*saved[:_SAVED]), AuxTensors(*saved[_SAVED:]))

        with backing_out(shared.team):  # what was saved may have been changed, or be gone
            dout, saved = with_memory(dout), ctx.saved_tensors
        grads = gradients_once(made, dout, *saved)
        if shared.given.packed:
            dq, dk, dv = (x.squeeze(0) for x in grads[:3])
            grads = grads._replace(dq=dq, dk=dk, dv=dv)
        wanted = ctx.needs_input_grad[2:]
        return None, None, *(x if want else None for x, want in zip_longest(grads, wanted))

"""Whether the tensors of attention calls are spread over ranks: what ``dash_attn.distributed.context`` says.

It stands below :mod:`dash_attn.distributed`, so that those who ask need not import torch.distributed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

__all__ = ["Spread", "current_spread", "spread_by", "told"]

Door = TypeVar("Door", bound=Callable[..., Any])


class Spread(Protocol):
    """How sequences are spread over the ranks of a group.

    Attributes:
        ranks: how many there are.
    """

    @property
    def ranks(self) -> int: ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        """:func:`dash_attn.distributed.attention` over the group; ``how`` names its other arguments."""

    def positions(self, rows: int) -> Tensor:
        """(rows,) int64 on the CPU: the positions of the rows of this rank, which has so many."""

    def telling(self) -> AbstractContextManager[None]:
        """Inside, what a call is refused for is told to the other ranks."""

    def local(self, x: Tensor, dim: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The rows of this rank as a plain tensor, and what makes of another such tensor one like x.

        Raises:
            InputError: x is a DTensor that is not sharded in dimension ``dim`` over this group.
        """


class _Context:
    """A context of this thread, or task. Generators may close one before those that were opened in it."""

    def __init__(self, spread: Spread) -> None:
        self.spread, self.outer, self.is_open = spread, _CONTEXT.get(), True


_CONTEXT: ContextVar[_Context | None] = ContextVar("dash_attn_context", default=None)
_LOCK = threading.Lock()
_count = 0
_any = False
"""Whether a context is open anywhere. Compiled code is guarded by it, which it cannot be by a ContextVar."""


def current_spread() -> Spread | None:
    """What the innermost context of this thread, or of this asynchronous task, says; None without one."""
    if not _any:
        return None
    found: Spread | None = _innermost()
    return found


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _innermost() -> Spread | None:
    context = _CONTEXT.get()
    while context is not None and not context.is_open:
        context = context.outer
    return None if context is None else context.spread


def told(function: Door) -> Door:
    """Of what takes calls of other libraries: inside a context, the other ranks are told what it raises."""

    @wraps(function)
    def door(*args: Any, **kwargs: Any) -> Any:
        spread = current_spread()
        return function(*args, **kwargs) if spread is None else _telling(spread, function, args, kwargs)

    return door  # type: ignore[return-value]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _telling(spread: Spread, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with spread.telling():
        return function(*args, **kwargs)


@contextmanager
def spread_by(spread: Spread) -> Iterator[None]:
    """Inside, :func:`current_spread` is this one."""
    _opened(1)
    try:
        context = _Context(spread)
        _CONTEXT.set(context)
        try:
            yield
        finally:
            context.is_open = False
            if _CONTEXT.get() is context:
                _CONTEXT.set(context.outer)
    finally:
        _opened(-1)


def _opened(step: int) -> None:
    global _count, _any
    with _LOCK:
        _count += step
        _any = _count > 0

"""Calls that were accepted before, found by what a caller passes, without checking it again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from .policies import forget_with

__all__ = ["KnownCalls"]

T = TypeVar("T")

_MOST = 256

_NO_KEY = (TypeError, RuntimeError)
"""Of what has no hash, and of nested tensors, which have no shape."""


class _Asked(Protocol):
    """What a caller asks for besides the tensors: a tuple of all of it, such as ``arguments.Asked``."""

    @property
    def window(self) -> Any: ...

    @property
    def policy(self) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...


class KnownCalls(Generic[T]):
    """What was made of calls, by shapes, dtypes, devices and arguments. 1 and True are two arguments."""

    def __init__(self) -> None:
        self._calls: dict[object, T] = {}
        forget_with(self._calls.clear)

    def find(self, q: Tensor, k: Tensor, v: Tensor, asked: _Asked, packing: Iterable[Any] = ()) -> T | None:
        """What was added for a call of plain tensors like these; None under autocast."""
        try:
            key = _key(q, k, v, asked, packing)
            return None if key is None else self._calls.get(key)
        except _NO_KEY:
            return None

    def add(
        self, made: T, q: Tensor, k: Tensor, v: Tensor, asked: _Asked, packing: Iterable[Any] = ()
    ) -> None:
        """Remember what was made of an accepted call."""
        with suppress(*_NO_KEY):
            key = _key(q, k, v, asked, packing)
            if key is not None:
                if len(self._calls) >= _MOST:
                    self._calls.clear()
                self._calls[key] = made


def _key(q: Tensor, k: Tensor, v: Tensor, asked: _Asked, packing: Iterable[Any]) -> object:
    """What decides whether a call is accepted; None where that cannot be said by a look at it.

    ``packing``: what else there is; of tensors what can be said without reading them.
    """
    window, policy = asked.window, asked.policy
    if type(policy) is not str or (window is not None and type(window) is not tuple):
        return None
    device = q.device
    if q.is_nested or k.is_nested or v.is_nested or (kind := device.type) not in ("cuda", "cpu"):
        return None
    if torch.is_autocast_enabled(kind):
        return None
    return (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, device, k.device, v.device,
        q.layout, k.layout, v.layout, asked, *map(type, asked), *map(type, window or ()),
        *[(x.shape, x.dtype, x.device, x.layout, x.requires_grad) if isinstance(x, Tensor)
          else (type(x), x) for x in packing],
    )  # fmt: skip

"""Dense calls that were accepted before, found by what a caller passes, without checking it again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .calls import Call
from .policies import forget_with

__all__ = ["KnownCalls"]

_MOST = 256


class KnownCalls:
    """Calls by shapes, dtypes, devices and arguments. 1 and True, which are equal, are two arguments."""

    def __init__(self) -> None:
        self._calls: dict[object, Call] = {}
        forget_with(self._calls.clear)

    def find(self, q: Tensor, k: Tensor, v: Tensor, asked: Any) -> Call | None:
        """The call of these plain tensors, if one like it was added; None under autocast."""
        key = _key(q, k, v, asked)
        return None if key is None else self._calls.get(key)

    def add(self, q: Tensor, k: Tensor, v: Tensor, asked: Any, call: Call) -> None:
        """Remember an accepted call."""
        key = _key(q, k, v, asked)
        if key is not None:
            if len(self._calls) >= _MOST:
                self._calls.clear()
            self._calls[key] = call


def _key(q: Tensor, k: Tensor, v: Tensor, asked: Any) -> object:
    """What decides whether a call is accepted; None where that cannot be said by a look at it."""
    window, policy = asked[1], asked[3]
    if type(policy) is not str or (window is not None and type(window) is not tuple):
        return None
    if q.is_nested or k.is_nested or v.is_nested or q.device.type not in ("cuda", "cpu"):
        return None
    if torch.is_autocast_enabled(q.device.type):
        return None
    key = (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        q.layout, k.layout, v.layout, asked, *map(type, asked), *map(type, window or ()),
    )  # fmt: skip
    try:
        hash(key)
    except TypeError:
        return None
    return key

"""PyTorch's activation checkpoints, which run a function once more in the backward."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import CheckpointFunction

__all__ = ["Wrapping"]

_GENERATOR = "_checkpoint_without_reentrant_generator"
_USERS = "torch.utils.checkpoint", "torch.distributed._composable.checkpoint_activation"
"""Modules that look it up under this name when a checkpoint is made. A PyTorch of another version may have
others."""


class Wrapping:
    """While it is on, checkpoints that are made run a wrapped function again, whenever that may be.

    With ``use_reentrant=True`` ``CheckpointFunction.forward`` does the work, otherwise a generator.

    Args:
        wrap: makes the function that is run again, of the one that a checkpoint is given.
    """

    def __init__(self, wrap: Callable[[Any], Any]) -> None:
        self._wrap = wrap
        self._before: list[tuple[Any, str, Any]] = []

    def begin(self) -> None:
        """Checkpoints are wrapped from now on."""
        forward: Any = CheckpointFunction.forward
        wrap = self._wrap
        again = staticmethod(lambda ctx, function, *rest: forward(ctx, wrap(function), *rest))
        self._put(CheckpointFunction, "forward", again, staticmethod(forward))
        for module in filter(None, map(sys.modules.get, _USERS)):
            if generator := getattr(module, _GENERATOR, None):
                self._put(module, _GENERATOR, _wrapped(generator, wrap), generator)

    def _put(self, where: Any, name: str, value: Any, before: Any) -> None:
        setattr(where, name, value)
        self._before.append((where, name, before))

    def end(self) -> None:
        """Checkpoints are what they were."""
        while self._before:
            setattr(*self._before.pop())


def _wrapped(generator: Any, wrap: Callable[[Any], Any]) -> Any:
    return lambda function, *rest, **more: generator(wrap(function), *rest, **more)

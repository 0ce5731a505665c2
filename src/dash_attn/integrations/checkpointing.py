"""PyTorch's activation checkpoints, which run a function once more in the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as module

__all__ = ["Wrapping"]

_GENERATOR = "_checkpoint_without_reentrant_generator"


class Wrapping:
    """While it is on, checkpoints that are made run a wrapped function again, whenever that may be.

    ``checkpoint`` looks up what does the work when it is called: with ``use_reentrant=True``
    ``CheckpointFunction.forward``, otherwise a generator, which a PyTorch of another version may not have.

    Args:
        wrap: makes the function that is run again, of the one that a checkpoint is given.
    """

    def __init__(self, wrap: Callable[[Any], Any]) -> None:
        self._wrap = wrap
        self._before: tuple[Any, Any] = (None, None)

    def begin(self) -> None:
        """Checkpoints are wrapped from now on."""
        reentrant: Any = module.CheckpointFunction
        forward, generator, wrap = reentrant.forward, getattr(module, _GENERATOR, None), self._wrap
        self._before = forward, generator
        reentrant.forward = staticmethod(lambda ctx, function, *rest: forward(ctx, wrap(function), *rest))
        if generator is not None:
            wrapped = lambda function, *rest, **more: generator(wrap(function), *rest, **more)  # noqa: E731
            setattr(module, _GENERATOR, wrapped)

    def end(self) -> None:
        """Checkpoints are what they were."""
        reentrant: Any = module.CheckpointFunction
        forward, generator = self._before
        reentrant.forward = staticmethod(forward)
        if generator is not None:
            setattr(module, _GENERATOR, generator)

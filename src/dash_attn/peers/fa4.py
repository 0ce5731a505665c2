"""FlashAttention-4's kernels as peers.

Its kernels are compiled at the first call of each kind, by a compiler that warns about FlashAttention's own
source. Nobody who calls this package can do anything about that, so these warnings are dropped.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from typing import Any

from torch import Tensor

from ..problem import Mask
from .base import Backward, Inputs, PackedLengths

__all__ = ["backward", "forward", "function", "gradients", "why_not"]

COMPILER_WARNINGS = (DeprecationWarning, UserWarning)
"""What the kernel compiler warns with."""

_CALLED: set[tuple[Any, ...]] = set()
"""Kinds of calls whose kernels are compiled."""

_FIRST_CALL = Lock()
"""Filters of warnings belong to the process: one thread at a time may change them."""


@cache
def why_not() -> str:
    """Why FlashAttention-4 cannot be used here; empty if it is installed."""
    try:
        installed = find_spec("flash_attn.cute") is not None
    except ImportError:
        installed = False
    return "" if installed else "not installed: pip install flash-attn-4"


def forward(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, mask: Mask, lengths: PackedLengths | None = None
) -> tuple[Tensor, Tensor]:
    """out and lse (fp32, natural logarithm) of dense tensors, or with ``lengths`` of packed ones.

    The copy engine must be able to read the tensors: contiguous rows, everything 16-byte aligned.

    Shapes: q and out (batch, seqlen_q, heads, head_dim), lse (batch, heads, seqlen_q); packed: q and out
    (total_q, heads, head_dim), lse (heads, total_q).
    """
    options = _options(mask, lengths) | {"softmax_scale": softmax_scale, "return_lse": True}
    out, lse, *_ = _call("_flash_attn_fwd", (q, k, v), options)
    return out, lse


def function(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, deterministic: bool) -> Tensor:
    """out of dense tensors, by what its users call: the public function, with autograd."""
    found = _call("flash_attn_func", (q, k, v), {"causal": causal, "deterministic": deterministic})
    out: Tensor = found[0] if isinstance(found, tuple) else found  # some versions return lse, too
    return out


def backward(x: Inputs, *, deterministic: bool) -> Backward:
    """The backward of some inputs; its order is fixed if ``deterministic``."""
    options = _options(x.problem.mask, x.lengths)
    options |= {"softmax_scale": x.scale, "deterministic": deterministic}
    return lambda: gradients((x.q, x.k, x.v, x.out, x.dout, x.lse), options)


def gradients(tensors: tuple[Tensor, ...], options: dict[str, Any]) -> tuple[Tensor, ...]:
    """(dq, dk, dv) of q, k, v, out, dout and lse, under FlashAttention-4's own keywords."""
    grads: tuple[Tensor, ...] = _call("_flash_attn_bwd", tensors, options)
    return grads[:3]


def _options(mask: Mask, lengths: PackedLengths | None) -> dict[str, Any]:
    """Keywords that the forward and the backward share."""
    options: dict[str, Any] = {"causal": mask.is_causal}
    if not (mask.is_full or mask.is_causal):
        options |= {"window_size_left": mask.left, "window_size_right": mask.right}
    return options if lengths is None else options | lengths._asdict()


def _call(name: str, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> Any:
    """A function of FlashAttention-4, without the compiler's warnings if it is the first call of its kind."""
    # The import stays outside: it installs filters of the compiler, which later compilations need.
    function = getattr(import_module("flash_attn.cute.interface"), name)
    kind = (name, *_kind(tensors, options))
    if kind in _CALLED:
        return function(*tensors, **options)
    with _FIRST_CALL, _without_compiler_warnings():
        result = function(*tensors, **options)
    _CALLED.add(kind)
    return result


def _kind(tensors: tuple[Tensor, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """What decides which kernels a call needs, as far as it differs among our calls."""
    q, k = tensors[:2]
    window = tuple(options.get(f"window_size_{side}") is None for side in ("left", "right"))
    flags = (options["causal"], options.get("deterministic"), "cu_seqlens_q" in options)
    return (q.dtype, q.shape[-1], q.shape[-2] // k.shape[-2], *window, *flags)


@contextmanager
def _without_compiler_warnings() -> Iterator[None]:
    """Drops warnings of the compiler's categories; all others are shown when it ends.

    An "ignore" filter would not do: the compiler puts an "always" filter before it.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for w in caught:
        if not issubclass(w.category, COMPILER_WARNINGS):
            warnings.warn_explicit(w.message, w.category, w.filename, w.lineno, source=w.source)

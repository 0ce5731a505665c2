"""FlashAttention-4's kernels: the forward that GPU users run, and the backward as a peer.

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
from threading import Lock, get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..problem import Mask
from .base import Backward, Inputs, PackedLengths

__all__ = ["Forward", "backward", "why_not"]

COMPILER_WARNINGS = (DeprecationWarning, UserWarning)
"""What the kernel compiler warns with."""

_CALLED: set[tuple[Any, ...]] = set()
"""Kinds of calls whose kernels are compiled."""

_OBSERVING = Lock()
"""One thread at a time may look at how the kernels are called."""

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


class Forward:
    """The forward of tensors of one shape and mask.

    Its first call goes through FlashAttention-4's own function and remembers how that calls the compiled
    kernel. Later calls do the same at once: they spare the host what the function decides anew every time.
    """

    def __init__(self, mask: Mask) -> None:
        self._mask = mask

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, lengths: PackedLengths | None = None
    ) -> tuple[Tensor, Tensor]:
        """out and lse (fp32, natural logarithm) of dense tensors, or with ``lengths`` of packed ones.

        The copy engine must be able to read the tensors: contiguous rows, everything 16-byte aligned.

        Shapes: q and out (batch, seqlen_q, heads, head_dim), lse (batch, heads, seqlen_q); packed: q and out
        (total_q, heads, head_dim), lse (heads, total_q).
        """
        bounds = () if lengths is None else lengths[:2]
        # What decides FlashAttention-4's choice of a kernel on Hopper. Lengths do not. Packed batches of more
        # than 256 sequences have another one.
        many = lengths is not None and len(lengths.cu_seqlens_q) > 257
        group = q.shape[-2] // k.shape[-2]
        kind = (q.device, q.dtype, q.shape[-1], group, self._mask, lengths is None, many)
        if (kernel := _KERNELS.get(kind)) is not None:
            *rows, heads, _ = q.shape
            shape = (heads, *rows) if lengths is not None else (rows[0], heads, rows[1])
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            lse = torch.empty(shape, dtype=torch.float32, device=q.device)
            kernel(softmax_scale, (q, k, v, out, lse, *bounds))
            return out, lse
        options = _options(self._mask, lengths) | {"softmax_scale": softmax_scale, "return_lse": True}
        with _observed() as seen:
            out, lse, *_ = _call("_flash_attn_fwd", (q, k, v), options)
        kernel = _KernelCall.like(seen, softmax_scale, (q, k, v, out, lse, *bounds))
        if kernel is not None:
            _KERNELS[kind] = kernel
        return out, lse


class _KernelCall(NamedTuple):
    """A compiled kernel with its arguments; numbers of tensors, and of the scale, stand in their places."""

    function: Any
    arguments: list[Any]
    places: dict[int, int]  # of arguments that are tensors
    scale: int

    @classmethod
    def like(
        cls, seen: list[tuple[Any, Any]], scale: float, tensors: tuple[Tensor, ...]
    ) -> _KernelCall | None:
        """The one call that was seen, if it has no tensor but these, and each in one place."""
        if len(seen) != 1:
            return None
        function, arguments = seen[0]
        known = [(x.data_ptr(), x.shape) for x in tensors]
        places, scales = {}, [at for at, x in enumerate(arguments) if type(x) is float and x == scale]
        for at, x in enumerate(arguments):
            if isinstance(x, Tensor):
                matches = [i for i, one in enumerate(known) if one == (x.data_ptr(), x.shape)]
                if len(matches) != 1:
                    return None
                places[at] = matches[0]
            elif not _is_plain(x):
                return None
        if sorted(places.values()) != list(range(len(tensors))) or len(scales) != 1:
            return None
        return cls(function, list(arguments), places, scales[0])

    def __call__(self, scale: float, tensors: tuple[Tensor, ...]) -> None:
        arguments = self.arguments.copy()
        arguments[self.scale] = scale
        for at, place in self.places.items():
            arguments[at] = tensors[place]
        self.function(*arguments)


def _is_plain(x: Any) -> bool:
    """Nothing that belongs to one call."""
    if isinstance(x, tuple):
        return all(map(_is_plain, x))
    return x is None or isinstance(x, (bool, int, float, str))


_KERNELS: dict[tuple[Any, ...], _KernelCall] = {}
"""How kernels of forwards are called, by what decides which one it is."""


@contextmanager
def _observed() -> Iterator[list[tuple[Any, Any]]]:
    """The calls of compiled forward kernels that this thread makes meanwhile: (function, arguments)."""
    seen: list[tuple[Any, Any]] = []
    function = import_module("flash_attn.cute.interface")._flash_attn_fwd
    with _OBSERVING:
        cache = getattr(function, "compile_cache", None)
        if cache is None:  # another version keeps its kernels elsewhere
            yield seen
            return
        function.compile_cache = _Observer(cache, seen)
        try:
            yield seen
        finally:
            function.compile_cache = cache


class _Observer:
    """A cache of kernels that notes how the thread which made it calls them."""

    def __init__(self, cache: Any, seen: list[tuple[Any, Any]]) -> None:
        self._cache, self._seen, self._thread = cache, seen, get_ident()

    def __contains__(self, key: object) -> bool:
        return key in self._cache

    def __setitem__(self, key: object, kernel: Any) -> None:
        self._cache[key] = kernel

    def __getitem__(self, key: object) -> Any:
        kernel = self._cache[key]
        if get_ident() != self._thread:
            return kernel

        def call(*arguments: Any) -> Any:
            self._seen.append((kernel, arguments))
            return kernel(*arguments)

        return call


def backward(x: Inputs, *, deterministic: bool) -> Backward:
    """The backward of some inputs; its order is fixed if ``deterministic``."""
    options = _options(x.problem.mask, x.lengths)
    options |= {"softmax_scale": x.scale, "deterministic": deterministic}

    def run() -> tuple[Tensor, ...]:
        grads: tuple[Tensor, ...] = _call("_flash_attn_bwd", (x.q, x.k, x.v, x.out, x.dout, x.lse), options)
        return grads[:3]

    return run


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

"""From a call's shapes to everything that they decide: the checked problem, its backend and its plan.

A :class:`Call` is found by one look-up in the forward and kept for the backward. Making one costs little: the
plan is made when a gradient is asked for, for the forward has none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends.base import (
    NO_AUX,
    AuxTensors,
    Backend,
    Gradients,
    Prepared,
    Tensors,
    as_current,
    backends_for,
)
from ..backends.shapes import Keys
from ..errors import InputError, ProblemError
from ..problem import DTYPES, Problem
from ..schedule import Plan, build_plan, choose_policy
from ..scores import ORIGIN, Origin
from ..spec import AttentionSpec
from .lengths import Packing, Used, check_longest, host_used, packed_lengths
from .policies import forget_with, schedule_named
from .segments import Part, check_covered_parts, fingerprint_of_parts, parts_of, run_parts

__all__ = [
    "DTYPE_NAMES",
    "Call",
    "dense_call",
    "first_that_covers",
    "packed_call",
    "prepared_once",
    "shaped_call",
    "used_call",
]

_CALLS = 64
"""Calls kept for reuse; a model uses one for each of its attention shapes."""

DTYPE_NAMES = {getattr(torch, name): name for name in DTYPES}

_Longest = tuple[int, int]
"""max_seqlen_q, max_seqlen_k, checked; -1: not given."""

_Sizes = tuple[int, int, int, int]


class _Shapes(NamedTuple):
    """What the tensors of a call say.

    Attributes:
        sequences: (seqlen_q, seqlen_k) of each.
        sizes: q heads, kv heads, head dim, head dim of v.
        dtype: of q, k and v.
    """

    sequences: tuple[tuple[int, int], ...]
    sizes: _Sizes
    dtype: torch.dtype


class Call:
    """What shapes, dtypes, device and spec decide.

    Attributes:
        spec: what is asked.
        scores: what it says of scores.
        backend: the first one that covers it.
        problem: the shapes, checked, with the tiles of the backend.
        prepared: the problem on the backend.

    With ``keys`` it has a forward only.

    Raises:
        InputError: no backend covers it, or the one that is asked for does not.
        UnsupportedMaskError: the policy does not cover the mask.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        shapes: _Shapes,
        device: torch.device,
        packed: bool,
        keys: Keys | None = None,
    ) -> None:
        self.scores = spec.scores
        problems: dict[str, Problem] = {}

        def why_not(backend: Backend) -> str:
            problem = problems[backend.name] = _problem(spec, shapes, backend)
            return backend.why_not(problem, device, packed, self.scores)

        self.backend = first_that_covers(spec.backend, device, why_not)
        self.problem = problems[self.backend.name]
        self.spec, self.device = spec, device
        self.prepared: Prepared = self.backend.prepare(self.problem, device, packed, keys)
        self._plan: Plan | None = None
        self._packed = packed
        self._parts: tuple[Part, ...] | None = None
        if spec.policy != "auto" and keys is None:  # a policy that does not cover the mask fails the forward
            check_covered_parts(self.parts, spec.policy)
            if not self.parts:
                _ = self.plan

    @property
    def plan(self) -> Plan:
        """The plan, made when it is first asked for.

        Raises:
            UnsupportedMaskError: the policy does not cover the mask.
        """
        if self._plan is None:
            self._plan = _plan(self.problem, self.spec.policy)
        return self._plan

    @property
    def parts(self) -> tuple[Part, ...]:
        """What the backward runs one after the other where sequences are cut into segments; else ()."""
        if self._parts is None:
            self._parts = parts_of(self.problem, self.spec, self.backend, self.device, self._packed)
        return self._parts

    @property
    def fingerprint(self) -> str:
        """What names the numerics of the backward."""
        numerics = fingerprint_of_parts(self.parts) if self.parts else self.plan.fingerprint
        return self.backend.fingerprint_of(numerics)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, aux: AuxTensors = NO_AUX, origin: Origin = ORIGIN
    ) -> tuple[Tensor, Tensor]:
        """(out, lse). ``origin``: where the call begins in another one that it is a part of."""
        with as_current(self.device):
            return self.prepared.forward(q, k, v, self.scores.at(origin), aux)

    def backward(
        self,
        tensors: Tensors,
        aux: AuxTensors = NO_AUX,
        origin: Origin = ORIGIN,
        sink_sums: Tensor | None = None,
    ) -> Gradients:
        """The gradients; in the plan's order unless the spec and the process permit others. ``origin``: as in
        the forward, ``sink_sums``: as in :meth:`.Prepared.backward`."""
        ordered, scores = self.spec.ordered or _order_is_required(), self.scores.at(origin)
        with as_current(self.device):
            if ordered and self.parts:
                return run_parts(self.parts, self.backend, tensors, scores, aux, sink_sums)
            return self.prepared.backward(
                self.plan, tensors, scores, aux, ordered=ordered, sink_sums=sink_sums
            )


def _order_is_required() -> bool:
    """Whether this process forbids what ``deterministic=False`` would allow."""
    return (
        torch.are_deterministic_algorithms_enabled()
        or os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"
        or os.environ.get("FLASH_ATTENTION_DETERMINISTIC") == "1"
    )


def dense_call(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Call:
    """The call of dense tensors, (batch, seqlen, heads, head_dim).

    Raises:
        InputError: the device's backend does not cover it, or a size is out of range.
        UnsupportedMaskError: the policy does not cover the mask.
    """
    return _dense(q.shape, k.shape, v.shape[3], q.dtype, q.device, spec)


@lru_cache(_CALLS)
def _dense(
    shape_q: torch.Size,
    shape_k: torch.Size,
    head_dim_v: int,
    dtype: torch.dtype,
    device: torch.device,
    spec: AttentionSpec,
) -> Call:
    batch, seqlen_q, heads, head_dim = shape_q
    sizes = (heads, shape_k[2], head_dim, head_dim_v)
    return Call(spec, _Shapes(((seqlen_q, shape_k[1]),) * batch, sizes, dtype), device, packed=False)


def shaped_call(
    sequences: tuple[tuple[int, int], ...],
    sizes: _Sizes,
    dtype: torch.dtype,
    device: torch.device,
    packed: bool,
    spec: AttentionSpec,
) -> Call:
    """The call of tensors that are not there yet.

    Args:
        sequences: (seqlen_q, seqlen_k) of each.
        sizes: q heads, kv heads, head dim, head dim of v.
        dtype, device: of the tensors.
        packed: they are.
        spec: what is asked.
    """
    return _shaped(sequences, sizes, dtype, device, packed, spec)


def _made(
    sequences: tuple[tuple[int, int], ...],
    sizes: _Sizes,
    dtype: torch.dtype,
    device: torch.device,
    packed: bool,
    spec: AttentionSpec,
    keys: Keys | None = None,
) -> Call:
    return Call(spec, _Shapes(sequences, sizes, dtype), device, packed, keys)


_shaped, _used = lru_cache(_CALLS)(_made), lru_cache(_CALLS)(_made)
"""Two caches: new lengths of used keys, as every step of decoding has them, push out no other calls."""


def packed_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    longest: _Longest,
    spec: AttentionSpec,
    *,
    check: bool = True,
) -> Call:
    """The call of packed tensors, (total, heads, head_dim).

    Args:
        q, k, v: the tensors.
        packing: where their sequences lie. Its longest lengths may be as the caller gave them.
        longest: these lengths, checked.
        spec: what is asked.
        check: see :func:`.host_lengths`.

    Raises:
        InputError: the lengths do not fit the tensors, or are longer than the caller says.
    """
    bounds_q, bounds_k = packing.cu_seqlens_q, packing.cu_seqlens_k
    longest_q, longest_k = longest
    lengths_q = lengths_k = packed_lengths("q", q, bounds_q, longest_q, check=check)
    if bounds_k is not bounds_q or longest_k != longest_q or k.shape[0] != q.shape[0]:
        check = check and bounds_k is not bounds_q
        lengths_k = packed_lengths("k", k, bounds_k, longest_k, check=check)
    sizes = (q.shape[1], k.shape[1], q.shape[2], v.shape[2])
    return _packed(lengths_q.seqlens, lengths_k.seqlens, sizes, q.dtype, q.device, spec)


@lru_cache(_CALLS)
def _packed(
    seqlens_q: tuple[int, ...],
    seqlens_k: tuple[int, ...],
    sizes: _Sizes,
    dtype: torch.dtype,
    device: torch.device,
    spec: AttentionSpec,
) -> Call:
    return Call(spec, _Shapes(tuple(zip(seqlens_q, seqlens_k)), sizes, dtype), device, packed=True)


def used_call(q: Tensor, k: Tensor, v: Tensor, used: Used, longest: _Longest, spec: AttentionSpec) -> Call:
    """The call of q and of the first ``seqused_k`` keys per sequence. It has no backward.

    q is packed where there are cu_seqlens_q, otherwise dense; k likewise. ``longest``: as in
    :func:`packed_call`.

    Raises:
        InputError: the lengths do not fit the tensors, or are longer than the caller says.
    """
    bounds_q, bounds_k = used.cu_seqlens_q, used.cu_seqlens_k
    longest_q, longest_k = longest
    if bounds_q is None:
        seqlens_q = (q.shape[1],) * q.shape[0]
        check_longest("q", longest_q, q.shape[1])
    else:
        seqlens_q = packed_lengths("q", q, bounds_q, longest_q).seqlens
    starts: tuple[int, ...] | None = None
    if bounds_k is None:
        places = (k.shape[1],) * k.shape[0]
    else:
        places = packed_lengths("k", k, bounds_k, check=bounds_k is not bounds_q).seqlens
        starts = tuple(accumulate(places, initial=0))[:-1]
    found = host_used("seqused_k", used.seqused_k)
    for at, (length, rows) in enumerate(zip(found.seqlens, places)):
        if length > rows:
            raise InputError(f"seqused_k has {length} at {at}, but sequence {at} has {rows} keys")
    check_longest("k", longest_k, found.longest)
    keys = Keys(tuple(k.shape), starts)
    sequences = tuple(zip(seqlens_q, found.seqlens))
    sizes = (q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1])
    return _used(sequences, sizes, q.dtype, q.device, bounds_q is not None, spec, keys)


def _problem(spec: AttentionSpec, shapes: _Shapes, backend: Backend) -> Problem:
    """The problem of a call, with the tiles of a backend."""
    heads, kv_heads, head_dim, of_v = shapes.sizes
    tiles = backend.tiles(head_dim, of_v)
    rest = spec.mask, DTYPE_NAMES[shapes.dtype], *tiles
    try:
        return Problem(shapes.sequences, heads, kv_heads, head_dim, *rest, head_dim_v=of_v)
    except ProblemError as error:
        raise InputError(str(error)) from error


def first_that_covers(asked: str, device: torch.device, why_not: Callable[[Backend], str]) -> Backend:
    """The first backend that covers a problem.

    Args:
        asked: "auto", or the name of a backend.
        device: of the tensors.
        why_not: why a backend does not cover it; empty if it does.

    Raises:
        InputError: none does, or the one that is asked for does not; the message says why.
    """
    reasons = {}
    for backend in backends_for(device, asked):
        reason = why_not(backend)
        if not reason:
            return backend
        reasons[backend.name] = reason
    if len(reasons) == 1:
        raise InputError(*reasons.values())
    raise InputError("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))


@lru_cache(_CALLS)
def prepared_once(backend: Backend, problem: Problem, device: torch.device, packed: bool) -> Prepared:
    """A problem on a backend, kept: a later call finds what the first one has put on the device."""
    return backend.prepare(problem, device, packed)


@lru_cache(_CALLS)
def _plan(problem: Problem, policy: str) -> Plan:
    return build_plan(problem, choose_policy(problem) if policy == "auto" else schedule_named(policy))


for _cache in (_dense, _packed, _shaped, _used, _plan):
    forget_with(_cache.cache_clear)

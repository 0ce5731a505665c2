"""Sequence lengths of packed batches on the host, where plans are made from them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import InputError
from .host_reads import HostReads

__all__ = [
    "Lengths",
    "Packing",
    "Used",
    "check_longest",
    "check_no_rows",
    "host_lengths",
    "host_used",
    "packed_lengths",
]


class Packing(NamedTuple):
    """Where the sequences of a packed batch lie.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32.
        max_seqlen_q, max_seqlen_k: as the caller gave them; checked ones are integers, -1: not given.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.cu_seqlens_q, self.cu_seqlens_k

    @property
    def sequences(self) -> int:
        """How many there are."""
        return self.cu_seqlens_q.shape[0] - 1

    @property
    def longest(self) -> tuple[Any, Any]:
        return self.max_seqlen_q, self.max_seqlen_k


class Used(NamedTuple):
    """Where the sequences of a batch lie whose keys are not all used.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32; None: dense tensors, a batch is a sequence.
        seqused_k: (batch,) int32, how many keys of every sequence are used.
        max_seqlen_q, max_seqlen_k: as in :class:`Packing`.
    """

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None

    @property
    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor]:
        return self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_k

    @property
    def sequences(self) -> int:
        """How many there are."""
        return self.seqused_k.shape[0]

    @property
    def longest(self) -> tuple[Any, Any]:
        return self.max_seqlen_q, self.max_seqlen_k


class Lengths(NamedTuple):
    """Lengths of the sequences of a batch, their sum and the longest of them."""

    seqlens: tuple[int, ...]
    total: int
    longest: int


def host_lengths(name: str, cu_seqlens: Tensor, *, check: bool = True) -> Lengths:
    """The lengths of a ``cu_seqlens``, (batch + 1,) int32 on any device.

    :meth:`.host_reads.HostReads.of` says when it is read, and what ``check`` is for.

    Raises:
        InputError: it does not start at 0, decreases, or would have to be read while a CUDA graph is
            being captured.
    """
    return _READS.of(name, cu_seqlens, check=check)


def host_used(name: str, seqused: Tensor) -> Lengths:
    """The lengths of a ``seqused``, (batch,) int32 on any device; read and checked like a ``cu_seqlens``.

    Raises:
        InputError: one is negative, or it would have to be read while a CUDA graph is being captured.
    """
    return _USED_READS.of(name, seqused)


def packed_lengths(
    side: str, x: Tensor, cu_seqlens: Tensor, max_seqlen: int = -1, *, check: bool = True
) -> Lengths:
    """The lengths of the sequences of packed q or k, (total, heads, head_dim).

    Args:
        side: "q" or "k".
        x: the tensor.
        cu_seqlens: (batch + 1,) int32 on any device.
        max_seqlen: no sequence may be longer; -1: any may.
        check: as of :func:`host_lengths`.

    Raises:
        InputError: the lengths do not fit the tensor, or one is longer than the caller says.
    """
    lengths = host_lengths(f"cu_seqlens_{side}", cu_seqlens, check=check)
    if lengths.total != x.shape[0]:
        raise InputError(f"cu_seqlens_{side} ends at {lengths.total}, {side} has {x.shape[0]} rows")
    check_longest(side, max_seqlen, lengths.longest)
    return lengths


def check_no_rows(q: Tensor, k: Tensor) -> None:
    """Raise InputError where there is no sequence, and q or k has rows nevertheless."""
    for name, x in (("q", q), ("k", k)):
        if x.shape[0]:
            raise InputError(f"cu_seqlens_{name} has no sequence, {name} has {x.shape[0]} rows")


def check_longest(side: str, max_seqlen: int, longest: int) -> None:
    """Raise InputError where the longest sequence is longer than the caller says; -1: nothing is said."""
    if 0 <= max_seqlen < longest:
        raise InputError(f"max_seqlen_{side} is {max_seqlen}, the longest sequence has {longest}")


def _used(name: str, seqused: Tensor) -> Lengths:
    seqlens = tuple(seqused.tolist())
    for at, length in enumerate(seqlens):
        if length < 0:
            raise InputError(f"{name} must not be negative, got {length} at {at}")
    return Lengths(seqlens, sum(seqlens), max(seqlens, default=0))


def _lengths(name: str, cu_seqlens: Tensor) -> Lengths:
    ends = cu_seqlens.tolist()
    if ends[0] != 0:
        raise InputError(f"{name} must start at 0, got {ends[0]}")
    seqlens = tuple(end - start for start, end in pairwise(ends))
    if min(seqlens, default=0) < 0:
        at = next(i for i, length in enumerate(seqlens) if length < 0)
        raise InputError(f"{name} must not decrease, got {ends[at]}, {ends[at + 1]} at {at}, {at + 1}")
    return Lengths(seqlens, ends[-1], max(seqlens, default=0))


_READS = HostReads(_lengths)
_USED_READS = HostReads(_used)

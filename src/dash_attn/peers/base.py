"""What all peers have in common: the tensors of one backward, and what a peer says of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..problem import Problem

__all__ = ["Backward", "Inputs", "PackedLengths", "Peer"]

Backward = Callable[[], tuple[Tensor, ...]]
"""One whole backward; returns (dq, dk, dv) in the layout of q, k and v."""


class PackedLengths(NamedTuple):
    """Where the sequences of packed tensors begin, in the form in which FlashAttention wants it.

    cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32 on the device; the others the longest lengths.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True)
class Inputs:
    """Tensors of one backward on a GPU.

    Attributes:
        problem: sequences, heads, mask and dtype of the tensors.
        dout, q, k, v, out: dense (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim).
        lse: fp32, natural logarithm; dense (batch, heads, seqlen_q), packed (heads, total_q).
        bounds: int32 cu_seqlens of q and of k on the device, of packed tensors; else empty.
        scale: factor on Q K^T.
    """

    problem: Problem
    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    bounds: tuple[Tensor, ...]
    scale: float

    @property
    def packed(self) -> bool:
        """Sequences are packed, not a dense batch."""
        return bool(self.bounds)

    @property
    def lengths(self) -> PackedLengths | None:
        """Where packed sequences begin; None for a dense batch."""
        if not self.bounds:
            return None
        longest_q, longest_k = (max(lengths) for lengths in zip(*self.problem.sequences))
        cu_seqlens_q, cu_seqlens_k = self.bounds
        return PackedLengths(cu_seqlens_q, cu_seqlens_k, longest_q, longest_k)


@dataclass(frozen=True)
class Peer:
    """One mode of another library.

    Attributes:
        impl: short name of the library.
        deterministic: what the mode promises.
        make: the backward of some inputs.
        why_not: why it cannot run them as far as that is known without trying, empty if it may.
    """

    impl: str
    deterministic: bool
    make: Callable[[Inputs], Backward]
    why_not: Callable[[Inputs], str]

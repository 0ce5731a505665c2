"""Tensors as numbers, which is how the kernels' launches are given most of them. No cutlass here.

An address and strides cost the host less than a view with a batch of one, and than an argument that is a
tensor. A launch has one tensor at least: from it the compiled function takes the device and the stream.
Whoever passes an address keeps the tensor until the launch is on its stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Buffer", "Place", "Sizes", "address_of", "place_of", "sizes_of"]


class Place(NamedTuple):
    """A tensor (batch, rows, heads, columns), or packed (rows, heads, columns): its address, and how many
    elements apart batches, rows and heads are. Addresses are multiples of 16 bytes, and so are strides."""

    address: Any
    batch: Any
    row: Any
    head: Any


class Sizes(NamedTuple):
    """Extents of tensors: of q, and of what is like it; and of k and v. Packed tensors are a batch of one."""

    batch: Any
    rows: Any
    heads: Any
    columns: Any
    k_batch: Any
    k_rows: Any
    k_heads: Any
    v_columns: Any

    @property
    def of_q(self) -> tuple[Any, ...]:
        return self.batch, self.rows, self.heads, self.columns

    @property
    def of_out(self) -> tuple[Any, ...]:
        return self.batch, self.rows, self.heads, self.v_columns

    @property
    def of_k(self) -> tuple[Any, ...]:
        return self.k_batch, self.k_rows, self.k_heads, self.columns

    @property
    def of_v(self) -> tuple[Any, ...]:
        return self.k_batch, self.k_rows, self.k_heads, self.v_columns


class Buffer:
    """Memory of one call, in parts. ``words``: how many fp32 words each part has.

    Attributes:
        whole: what a launch is given as a tensor.
        addresses: of the parts.
    """

    def __init__(self, words: Sequence[int], device: torch.device) -> None:
        self._words = words
        self.whole = torch.empty(sum(words), dtype=torch.float32, device=device)
        sizes = [4 * n for n in words[:-1]]
        self.addresses = [*accumulate(sizes, initial=self.whole.data_ptr())]

    def part(self, index: int) -> Tensor:
        """One of the parts as a tensor."""
        return self.whole.split_with_sizes([*self._words])[index]


def place_of(x: Tensor) -> tuple[int, int, int, int]:
    """:class:`Place` of a tensor.

    >>> import torch
    >>> place_of(torch.zeros(2, 3, 4, 8))[1:], place_of(torch.zeros(3, 4, 8))[1:]
    ((96, 32, 8), (0, 32, 8))
    """
    strides = x.stride()
    if len(strides) == 3:
        return x.data_ptr(), 0, strides[0], strides[1]
    return x.data_ptr(), strides[0], strides[1], strides[2]


def address_of(x: Tensor) -> int:
    """Of a contiguous tensor. A function, so that an emulator can put the tensor in its place."""
    return x.data_ptr()


def sizes_of(q: Tensor, k: Tensor, v: Tensor) -> Sizes:
    """Extents of q, k and v, each dense or packed."""
    of_q, of_k = ((1, *x.shape)[-4:] for x in (q, k))
    return Sizes._make((*of_q, *of_k[:3], v.shape[-1]))

"""Which weights dropout keeps, by a counter-based generator: the pattern depends on no tile and no packing.

Philox-4x32-10 (Salmon et al., SC 2011) with the key (low word, high word of the seed) and the counter
(column // 4, row, q head, sequence) gives four words, one per column. A weight is kept where the upper 24
bits of its word are at least ``Scores.dropout_threshold``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...scores import Scores
from ..base import AuxTensors

__all__ = ["Dropout", "dropout_of", "philox"]

_LOW = 0xFFFFFFFF


class Dropout(NamedTuple):
    """Of a q head of a sequence.

    Attributes:
        seed: 64 bits.
        place: the q head, and the number of the sequence in its batch.
        threshold: of :class:`.Scores`.
        rescale: factor on what is kept.
        corner: the row and the column that stand for the first row and the first column.
    """

    seed: int
    place: tuple[int, int]
    threshold: int
    rescale: float
    corner: tuple[int, int] = (0, 0)

    def kept(self, top: int, left: int, rows: int, columns: int) -> Tensor:
        """(rows, columns) bool on the CPU, of the rows from ``top`` and the columns from ``left`` on."""
        top, left = top + self.corner[0], left + self.corner[1]
        first = left // 4
        quarter = torch.arange(first, (left + columns + 3) // 4, device="cpu")
        row = torch.arange(top, top + rows, device="cpu")[:, None]
        words = torch.stack(philox((quarter, row, *self.place), self.seed), -1).flatten(1)
        return (words >> 8 >= self.threshold)[:, left - 4 * first :][:, :columns]


def dropout_of(scores: Scores, aux: AuxTensors, sequence: int, head: int) -> Dropout | None:
    """The dropout of a q head, None if there is none; both are counted in the call."""
    if not scores.dropout_p:
        return None
    assert aux.dropout_seed is not None, "callers draw one where none is given"
    first = scores.origin
    place, corner = (first.head + head, first.sequence + sequence), (first.row, first.column)
    return Dropout(int(aux.dropout_seed), place, scores.dropout_threshold, scores.dropout_rescale, corner)


def philox(counter: tuple[Tensor | int, ...], seed: int) -> tuple[Tensor, ...]:
    """The four words of each counter, as int64; the counter's words are broadcast against one another.

    >>> [hex(int(word)) for word in philox((torch.tensor(0), 0, 0, 0), 0)]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    words = [torch.as_tensor(word, device="cpu") for word in counter]
    c0, c1, c2, c3 = torch.broadcast_tensors(*words)  # type: ignore[no-untyped-call]
    k0, k1 = seed & _LOW, seed >> 32 & _LOW
    for _ in range(10):
        # Products have 64 bits. As int64 they may be negative, but have the same bits.
        even, odd = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (odd >> 32 & _LOW) ^ c1 ^ k0, odd & _LOW
        c2, c3 = (even >> 32 & _LOW) ^ c3 ^ k1, even & _LOW
        k0, k1 = k0 + 0x9E3779B9 & _LOW, k1 + 0xBB67AE85 & _LOW
    return c0, c1, c2, c3

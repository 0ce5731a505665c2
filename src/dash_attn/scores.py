"""What becomes of scores between Q K^T and the softmax: one value, which every backend is given."""

from __future__ import annotations

from operator import add
from typing import NamedTuple

__all__ = ["ORIGIN", "PLAIN", "Origin", "Scores", "scores_of"]


class Origin(NamedTuple):
    """Where the first score of a call lies in a larger call that it is a part of.

    Attributes:
        sequence: the number of the first sequence in the whole batch.
        head: the number of the first q head.
        row, column: of the first score, in every sequence; ``column`` is a multiple of 4.
    """

    sequence: int = 0
    head: int = 0
    row: int = 0
    column: int = 0


ORIGIN = Origin()
"""Of a call that is the whole."""


class Scores(NamedTuple):
    """From a product of q and k to a score. A field that asks for nothing has its default.

    Attributes:
        softmax_scale: factor on Q K^T.
        softcap: scores s become ``softcap * tanh(s / softcap)``; 0: they stay.
        sink: each q head has one score more, of a key without a value. It is a tensor beside this value.
        alibi: -slope times the distance of row and column is added, behind the cap. Slopes are a tensor, too.
        dropout_p: the share of softmax's weights that is dropped, by a seed, which is a tensor, too.
        row_intervals: of the rows that the mask leaves to a key, an interval sees it, which two tensors say.
        origin: what dropout counts from. Only parts of calls have one that is not 0.
    """

    softmax_scale: float
    softcap: float = 0.0
    sink: bool = False
    alibi: bool = False
    dropout_p: float = 0.0
    row_intervals: bool = False
    origin: Origin = ORIGIN

    @property
    def dropout_threshold(self) -> int:
        """Numbers of 24 bits below it drop their weight."""
        return round(self.dropout_p * 2**24)

    @property
    def dropout_rescale(self) -> float:
        """Factor on weights that are kept."""
        return 1.0 / (1.0 - self.dropout_p)

    def at(self, origin: Origin) -> Scores:
        """Those of a part that begins there, counted from where this call begins.

        >>> Scores(1.0, dropout_p=0.1).at(Origin(head=4)).at(Origin(head=2, row=128)).origin
        Origin(sequence=0, head=6, row=128, column=0)
        """
        if not self.dropout_p or origin == ORIGIN:  # nothing else counts
            return self
        return self._replace(origin=Origin(*map(add, self.origin, origin)))


PLAIN = Scores(1.0)
"""Scores that are the products."""


def scores_of(value: Scores | float) -> Scores:
    """The value; a number is a softmax scale that stands alone.

    >>> scores_of(0.5) == Scores(softmax_scale=0.5)
    True
    """
    return value if isinstance(value, Scores) else Scores(value)

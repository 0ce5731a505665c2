"""What becomes of scores between Q K^T and the softmax: one value, which every backend is given."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["PLAIN", "Scores", "scores_of"]


class Scores(NamedTuple):
    """From a product of q and k to a score. A field that asks for nothing has its default.

    Attributes:
        softmax_scale: factor on Q K^T.
        softcap: scores s become ``softcap * tanh(s / softcap)``; 0: they stay.
        sink: each q head has one score more, of a key without a value. It is a tensor beside this value.
        alibi: -slope times the distance of row and column is added, behind the cap. Slopes are a tensor, too.
        dropout_p: the share of softmax's weights that is dropped, by a seed, which is a tensor, too.
        row_intervals: of the rows that the mask leaves to a key, an interval sees it, which two tensors say.
    """

    softmax_scale: float
    softcap: float = 0.0
    sink: bool = False
    alibi: bool = False
    dropout_p: float = 0.0
    row_intervals: bool = False

    @property
    def dropout_threshold(self) -> int:
        """Numbers of 24 bits below it drop their weight."""
        return round(self.dropout_p * 2**24)

    @property
    def dropout_rescale(self) -> float:
        """Factor on weights that are kept."""
        return 1.0 / (1.0 - self.dropout_p)


PLAIN = Scores(1.0)
"""Scores that are the products."""


def scores_of(value: Scores | float) -> Scores:
    """The value; a number is a softmax scale that stands alone.

    >>> scores_of(0.5)
    Scores(softmax_scale=0.5, softcap=0.0, sink=False, alibi=False, dropout_p=0.0, row_intervals=False)
    """
    return value if isinstance(value, Scores) else Scores(value)

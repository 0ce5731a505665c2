"""Softcap: which numbers the kernels are given for it, and how they make tanh. No cutlass here.

Scores are mostly far below the cap. With u = `STRETCH` x:

* |u| < `FAR`, which is |x| < 0.75: tanh x = u `NEAR`(u^2), of degree 4. Seven instructions.
* Beyond: tanh |x| = 1 - 2 / (e^2|x| + 1), and the sign of x. One exponential and one reciprocal. All that
  `NEAR` takes stands beside them, and one of the results is chosen: 16 instructions.

Both are off by 7e-7 of the result at most. A value alone decides which of the two it gets, so no score's bits
depend on its neighbours. Where a warp sees none that is far, it takes the short way for all. `FAR` is 2,
since one bit of a float32 tells whether it is as large. (The polynomial was fitted here by least squares,
reweighted to the least maximum.)

Why not ``tanh.approx``: its error is 5e-4 of a score, 0.02 for scores near a cap of 50. Why not the second
way for all: near 0 it has few digits, which counts where the cap is large, and the unit that makes
exponentials and reciprocals has an eighth of the speed of products. Why not one reciprocal for two scores, of
a product: bits of a score must not depend on its neighbour, which a row may not see.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ...scores import Scores

__all__ = ["FAR", "HUGE", "NEAR", "STRETCH", "Cap", "cap_of", "why_no_cap"]

STRETCH = 8 / 3
FAR = 2.0
NEAR = (1.8961277e-06, -5.2200859e-05, 0.00098325592, -0.017575445, 0.37499979)
"""From the highest power down to the constant."""

HUGE = 3.4e38
"""The negative of it, times a softcap, is in place of a score that is masked. Times the least softcap it is
more than every score."""


class Cap(NamedTuple):
    """What a variant with a softcap is given, fp32.

    A score in base 2 is outer tanh(inner Q K^T / STRETCH).
    """

    inner: Any
    outer: Any


def cap_of(scores: Scores) -> Cap | tuple[()]:
    """The numbers of a softcap; none if there is none.

    >>> cap_of(Scores(0.125)), round(cap_of(Scores(0.125, softcap=50.0))[1], 6)
    ((), 72.134752)
    """
    if not scores.softcap:
        return ()
    return Cap(STRETCH * scores.softmax_scale / scores.softcap, scores.softcap * math.log2(math.e))


@lru_cache
def why_no_cap(scores: Scores) -> str:
    """Why the kernels cannot use a softcap: float32 does not hold what is made of it."""
    if not scores.softcap:
        return ""
    with np.errstate(over="ignore", under="ignore"):
        inner = np.float32(STRETCH * scores.softmax_scale / scores.softcap)
    if np.finfo(np.float32).tiny <= inner < np.inf:
        return ""
    both = f"{scores.softmax_scale} / {scores.softcap}"
    return f"for sm90 softmax_scale / softcap must be a normal float32, got {both}"

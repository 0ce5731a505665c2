"""``policy="auto"``: from the problem to a schedule.

The numerics look at the problem and never at the machine, the batch size or a clock: any of those would
let bits depend on it. They are chosen from the mask, the head dim and the q heads per kv head, so they are
the same for every sequence of a batch; a policy may look at the length of each.
"""

from __future__ import annotations

from functools import lru_cache

from ..problem import Mask, Problem
from .constants import (
    AUTO_RING,
    AUTO_STRIDE,
    AUTO_WIDE_ABOVE,
    AUTO_WIDE_KEYS,
    BY_HEAD_WINDOWS,
    LONG_ABOVE,
    SHIFT_FROM,
    SHIFT_FROM_GROUPED,
    SHIFT_FROM_NARROW,
    SHIFT_KEYS,
)
from .numerics import SPT, ByLength, Descending, Shift
from .placement import LongFirst
from .schedule import Schedule

__all__ = ["AUTO_SHIFT", "choose_policy", "choose_policy_of_segment"]

AUTO_SHIFT = Shift(ring=AUTO_RING, min_stride=AUTO_STRIDE, max_stride=AUTO_STRIDE)
"""What "auto" chooses under the full mask."""


def choose_policy(problem: Problem) -> Schedule:
    """The schedule that ``policy="auto"`` stands for.

    * Full mask: shift, with rings of at most ``AUTO_RING`` kv tiles that start ``AUTO_STRIDE`` q tiles apart.
    * Causal mask, one q head per kv head: SPT, head after head, which keeps few heads in L2 at a time. At
      head dims 72 to 128 long sequences are descending, longest items first, and squares of 2,048, 4,096,
      8,192 and 16,384 keys are summed by symmetric shift: as many of their heads as fill a GPU come together.
      Above 128, with kv tiles of 64 keys, all are descending.
    * Causal mask, several q heads per kv head: descending. Under SPT, items would start a whole group of
      tasks apart. The longest items first, of some heads at a time; at head dims above 128 of as many as fit
      L2. Squares of 4,096 keys or more, at head dims 72 to 128 of 8,192 or more, by symmetric shift.
    * Windows: descending, some heads in turns. Their items are equally long but for the ones at the edges,
      and putting those last would make all others wait for them. In sequences of at least two windows an
      item takes its q heads one after the other.

    What each choice gains and loses, by measurement and by the model: docs/experiments/choices.md.

    >>> from dash_attn.problem import Mask
    >>> [str(choose_policy(Problem.dense(seqlen=1024, mask=m))) for m in (Mask.full(), Mask.causal())]
    ['shift(ring=16, min_stride=2, max_stride=2)', 'by_length(long_from=2048, shift_from=2048)']
    >>> of_256 = [Problem.dense(seqlen=1024, mask=m, head_dim=256) for m in (Mask.full(), Mask.causal())]
    >>> [str(choose_policy(problem)) for problem in of_256]
    ['shift(ring=16, min_stride=2, max_stride=2)', 'by_length(long_from=0)']
    """
    halved = problem.tile_n == AUTO_WIDE_KEYS and problem.widest > AUTO_WIDE_ABOVE
    wide = LONG_ABOVE < problem.widest <= AUTO_WIDE_ABOVE
    tiles_fit = problem.tile_n == SHIFT_KEYS and SHIFT_KEYS % problem.tile_m == 0
    shifts = tiles_fit and problem.widest <= AUTO_WIDE_ABOVE
    return _chosen(problem.mask, problem.group > 1, wide, halved, shifts)


def choose_policy_of_segment(problem: Problem) -> Schedule:
    """The schedule of a segment of q rows under ``policy="auto"``.

    It is that of any problem, but for causal rows behind many keys. There items that begin on the diagonal
    would all queue for the same dQ tiles: descending, longest items first
    (docs/experiments/segments.md).

    >>> from dash_attn.problem import Mask
    >>> rows = Problem.dense(seqlen_q=1024, seqlen_k=4096, head_dim=64, mask=Mask.causal())
    >>> str(choose_policy(rows)), str(choose_policy_of_segment(rows))
    ('spt', 'descending + lpt')
    """
    seqlen_q, seqlen_k = problem.sequences[0]
    if problem.mask.is_causal and seqlen_q < seqlen_k:
        return Schedule.of(Descending(), "lpt")
    return choose_policy(problem)


@lru_cache(256)
def _chosen(mask: Mask, grouped: bool, wide: bool, halved: bool, shifts: bool) -> Schedule:
    if mask.is_full:
        return Schedule.of(AUTO_SHIFT)
    if not mask.is_causal:
        bounded = grouped and min(mask.sides) >= 0
        return Schedule.of(Descending(BY_HEAD_WINDOWS * sum(mask.sides) if bounded else None))
    if grouped:
        if shifts:
            return Schedule.of(ByLength(0, SHIFT_FROM_GROUPED if wide else SHIFT_FROM_NARROW))
        return Schedule.of(Descending(), LongFirst(long_from=0) if wide else "lpt")
    if halved:
        return Schedule.of(ByLength(long_from=0))
    if wide:
        return Schedule.of(ByLength(shift_from=SHIFT_FROM if shifts else None))
    return Schedule.of(SPT())

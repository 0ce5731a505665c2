"""Whether a policy covers what the ranks of a group compute: every rank asks for all of them."""

from __future__ import annotations

from dataclasses import replace

from ..ops.policies import schedule_named
from ..schedule.build import check_covered
from .shared import Shared

__all__ = ["check_policy"]


def check_policy(shared: Shared) -> None:
    """Raise on every rank, before anything moves, what one of them would raise when it computes.

    Raises:
        InputError: no backend covers the call.
        UnsupportedMaskError: the policy does not cover a mask.
    """
    if shared.whole:
        first, last = shared.steps(shared.team.rank)[0]
        shared.whole_call(last - first)
    elif shared.spec.policy != "auto":  # that has an order for every mask
        shapes = sorted(_shapes(shared))
        if shapes:
            problem = replace(shared.dense_call(1, 1, 1).problem, sequences=tuple(shapes))
            check_covered(problem, schedule_named(shared.spec.policy).numerics)


def _shapes(shared: Shared) -> set[tuple[int, int]]:
    """(rows, keys) of all that some rank has a plan for: segments, and in the forward rows that are no more
    than one."""
    found = set()
    for length in set(shared.given.lengths):
        for (first, last), (begin, end) in shared.cut.segments(length):
            found.add((last - first, end - begin))
    for work in shared.work:
        for rows in work.rows:
            begin, end = shared.seen(rows)
            if rows.last - rows.first <= (shared.cut.q_segment or rows.last):
                found.add((rows.last - rows.first, end - begin))
    return {shape for shape in found if min(shape)}

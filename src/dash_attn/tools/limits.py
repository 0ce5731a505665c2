"""How large a problem the commands take, and what they say before they work for long.

Beyond these limits a command would need minutes or many gigabytes. It refuses, and names number and limit.
"""

from __future__ import annotations

import sys

from ..errors import ProblemError
from ..model.cost import MOST_WORKERS
from ..model.render import plan_workers
from ..problem import Problem
from ..schedule import Plan

__all__ = [
    "announce",
    "is_long",
    "require_batch",
    "require_plannable",
    "require_simulable",
    "why_no_simulation",
]

MOST_TILES = 2**21
"""q tiles, and kv tiles, of all heads and sequences: each kv tile is an item of a plan. About a minute."""

MOST_HEAD_TASKS = 2**30
"""Tasks of one head: a proof visits each of them once. A head of four million tokens has so many."""

MOST_SIMULATED_TASKS = 20_000_000
"""Tasks of a simulation: about twenty seconds and four gigabytes."""

LONG_TILES, LONG_HEAD_TASKS, LONG_SIMULATED_TASKS = 2**16, 2**27, 1_000_000
"""Tiles and tasks of a plan, and tasks of a simulation, from which on it takes about a second or more."""


def require_batch(batch: int, heads: int) -> None:
    """Refuse more heads than there may be tiles, before a problem lists the sequences.

    Raises:
        ProblemError: there are too many.
    """
    if batch > 0 and heads > 0:
        _at_most("heads of all sequences", batch * heads, MOST_TILES)


def require_plannable(problem: Problem) -> None:
    """Refuse a problem too large to plan.

    Args:
        problem: all its sequences have one shape.

    Raises:
        ProblemError: it has too many tiles or tasks.
    """
    (grid,), heads = problem.tile_grids.values(), len(problem.sequences) * problem.heads
    _at_most("q tiles of all heads", grid.q_tiles * heads, MOST_TILES)
    _at_most("kv tiles of all heads", grid.kv_tiles * heads, MOST_TILES)
    _at_most("tasks of one head", grid.tasks, MOST_HEAD_TASKS)
    if grid.tasks > LONG_HEAD_TASKS:
        announce(f"planning {grid.tasks:,} tasks per head ...")
    elif max(grid.q_tiles, grid.kv_tiles) * heads > LONG_TILES:
        announce(f"planning {grid.q_tiles * heads:,} q tiles and {grid.kv_tiles * heads:,} kv tiles ...")


def require_simulable(problem: Problem, workers: int = 0) -> None:
    """Refuse a problem too large to simulate.

    Args:
        problem: what would be simulated.
        workers: resident workers; 0 where they are not known yet.

    Raises:
        ProblemError: it has too many tasks, or there are too many workers.
    """
    _at_most("tasks to simulate", problem.tasks, MOST_SIMULATED_TASKS)
    _at_most("workers", workers, MOST_WORKERS)


def why_no_simulation(plan: Plan) -> str:
    """Why a plan is too large to be simulated and drawn; empty if it is not."""
    try:
        require_simulable(plan.problem, plan_workers(plan))
    except ProblemError as error:
        return str(error)
    return ""


def is_long(problem: Problem) -> bool:
    """A simulation of the problem takes a second or more."""
    return problem.tasks > LONG_SIMULATED_TASKS


def announce(text: str) -> None:
    """A line on standard error, so that nobody waits in silence and standard output stays clean."""
    print(text, file=sys.stderr, flush=True)


def _at_most(what: str, number: int, limit: int) -> None:
    if number > limit:
        raise ProblemError(f"too large: {number:,} {what}, the limit is {limit:,}")

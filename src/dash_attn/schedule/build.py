"""From a problem and a schedule to a proven plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal, cast

import numpy as np

from ..errors import InputError, PlacementError, ScheduleNameError, UnsupportedMaskError
from ..problem import IntArray, Problem, TileGrid
from .batch import Batch
from .head_groups import default_head_groups, most_heads
from .numerics import POLICIES
from .placement import Placement
from .plan import HeadPattern, Listed, Plan
from .policy import Numerics, Policy
from .proof import examine
from .schedule import Schedule
from .tickets import derive_runs

__all__ = ["COMMON_PLACEMENTS", "build_plan", "check_covered"]

COMMON_PLACEMENTS: tuple[Literal["policy", "lpt"], ...] = ("policy", "lpt")
"""Placements that go with every policy."""

_KEPT_PATTERNS, _KEPT_KV_TILES, _KEPT_SHAPES = 1024, 512, 4096
"""Patterns kept, kv tiles of the largest, and shapes by which they are found: the next packed batch has other
lengths, few other grids."""


def build_plan(
    problem: Problem,
    numerics: Numerics | Schedule | str,
    placement: Placement | str = "policy",
    *,
    head_groups: int | None = None,
) -> Plan:
    """Build and prove a plan.

    Args:
        problem: what to compute.
        numerics: a policy, which decides the bits; or a schedule or its name, which bring a placement along.
        placement: the order in which items are claimed: "policy" for the one that suits the policy, "lpt"
            for the longest items first in sections of heads that fit L2
            (:func:`~dash_attn.schedule.placement.lpt_placement`), another name, or a Placement.
        head_groups: head groups of each kv head, by default what
            :func:`~dash_attn.schedule.head_groups.default_head_groups` says for each sequence.

    Raises:
        ScheduleNameError: there is no policy or placement of that name, or it is none.
        InputError: ``head_groups`` is not in 1..q heads per kv head, or a name's parameter is out of range.
        PlacementError: the placement is not for this policy, or lists items wrongly.
        UnsupportedMaskError: the policy does not cover a sequence of the problem.
        PlanError: the proof fails (a defect of the policy).

    >>> from dash_attn.problem import Mask
    >>> from dash_attn.schedule.numerics import Shift, SymmetricShift
    >>> full = Problem.dense(batch=2, heads=8, seqlen=4096, head_dim=128)
    >>> plan = build_plan(full, Shift(ring=16))
    >>> plan, plan.min_workers
    (Plan(shift(ring=16), 512 items, 32768 tasks), 16)
    """
    schedule = _schedule(numerics, placement)
    if head_groups is not None and not (type(head_groups) is int and 1 <= head_groups <= problem.group):
        raise InputError(f"head_groups must be in 1..{problem.group}, got {head_groups}")
    patterns = _patterns(problem, schedule.numerics, head_groups)
    batch = Batch(problem, patterns)
    # Placed as if the longest sequences came first: what is claimed last should be short, for all others wait
    # for its end.
    order = _longest_first(batch)
    placed = batch if order is None else batch.reordered(order)
    codes = np.array(_claims(placed, schedule))  # our own: the proof is of these
    items = placed.items.take(codes, axis=0)
    if order is not None:
        items[:, 0] = order[items[:, 0]]
    items.setflags(write=False)
    plan = Plan(problem, str(schedule), patterns, items)
    plan.__dict__.update(batch=batch, listed=Listed(placed, codes))  # not to be made again
    object.__setattr__(plan, "verdict", examine(plan))
    return plan


def check_covered(problem: Problem, numerics: Numerics) -> None:
    """Raise UnsupportedMaskError if a policy does not cover a sequence of the problem; no plan is built."""
    for shape, grid in problem.tile_grids.items():
        with _named(problem, shape):
            numerics.for_lengths(shape[0], shape[1]).check(grid)


def _longest_first(batch: Batch) -> IntArray | None:
    """The sequences by how many tasks follow one another, in an item and in a dQ tile; None: as they are."""
    length = batch.q_tiles * batch.problem.group // batch.head_groups + batch.kv_tiles
    return None if (length[1:] <= length[:-1]).all() else np.argsort(-length, kind="stable")


def _claims(batch: Batch, schedule: Schedule) -> IntArray:
    codes = schedule.placement.place(batch, schedule.numerics)
    if len(codes) and not 0 <= codes.min() <= codes.max() < batch.item_count:
        code = codes[(codes < 0) | (codes >= batch.item_count)][0]
        raise PlacementError(
            f"placement {schedule.placement}: item {code} of {batch.item_count} does not exist"
        )
    return codes


def _schedule(numerics: Numerics | Schedule | str, placement: Placement | str) -> Schedule:
    if isinstance(numerics, Numerics):
        return Schedule.of(numerics, placement)
    if not isinstance(numerics, (Schedule, str)):
        raise ScheduleNameError(f"a policy is a name, a Numerics or a Schedule, got {numerics!r:.40}")
    whole = Schedule.parse(numerics) if isinstance(numerics, str) else numerics
    return whole if placement == "policy" else Schedule.of(whole.numerics, placement)


def _patterns(
    problem: Problem, numerics: Numerics, head_groups: int | None
) -> dict[tuple[int, ...], HeadPattern]:
    """The pattern of every shape; shapes that cut the same tiles, under the same policy, share it."""
    kept = type(numerics) in POLICIES.values()
    of_all = problem.group, head_groups, problem.tile_m, problem.tile_n, problem.mask
    known = _known_patterns(numerics, *of_all) if kept else {}
    found = {shape: known.get(shape) for shape in problem.tile_grids}
    if missing := [shape for shape, pattern in found.items() if pattern is None]:
        made = _made(problem, numerics, head_groups, missing)
        found.update(made)
        if len(known) + len(made) > _KEPT_SHAPES:
            known.clear()
        known.update((shape, p) for shape, p in made.items() if p.grid.kv_tiles <= _KEPT_KV_TILES)
    return cast("dict[tuple[int, ...], HeadPattern]", found)


def _made(
    problem: Problem, numerics: Numerics, head_groups: int | None, shapes: list[tuple[int, ...]]
) -> dict[tuple[int, ...], HeadPattern]:
    alike: dict[tuple[int, int], tuple[HeadPattern, Policy]] = {}
    made = {}
    for shape in shapes:
        policy, grid = numerics.for_lengths(shape[0], shape[1]), problem.tile_grids[shape]
        # Equal grids are one object. Equal policies may be several, which find the pattern in the cache.
        found = alike.get((id(policy), id(grid)))
        if found is None:
            pattern = _pattern_of(problem, policy, shape, grid, head_groups)
            found = alike[id(policy), id(grid)] = pattern, policy
        made[shape] = found[0]
    return made


@lru_cache(8)
def _known_patterns(*of: Any) -> dict[tuple[int, ...], HeadPattern]:
    """Patterns by the shapes of sequences. ``of``: what else decides them."""
    return {}


def _pattern_of(
    problem: Problem, policy: Policy, shape: tuple[int, ...], grid: TileGrid, head_groups: int | None
) -> HeadPattern:
    groups = head_groups or default_head_groups(problem.group, grid, by_head=policy.by_head)
    passes = most_heads(problem.group, groups) if policy.by_head and grid.kv_tiles else 1
    keep = type(policy) in POLICIES.values() and grid.kv_tiles <= _KEPT_KV_TILES
    with _named(problem, shape):
        return (_kept_pattern if keep else _pattern)(policy, grid, groups, passes)


@contextmanager
def _named(problem: Problem, shape: tuple[int, ...]) -> Iterator[None]:
    """A policy that refuses a sequence is told which one it is."""
    try:
        yield
    except UnsupportedMaskError as error:
        lengths = f"{shape[0]} x {shape[1]}"
        raise UnsupportedMaskError(f"{error}: {problem.mask.name} of {lengths}") from error


def _pattern(policy: Policy, grid: TileGrid, head_groups: int, passes: int) -> HeadPattern:
    policy.check(grid)
    runs = derive_runs(grid, policy.visits(grid), policy.summation(grid))
    return HeadPattern.from_runs(grid, runs, head_groups, passes)


_kept_pattern = lru_cache(_KEPT_PATTERNS)(_pattern)

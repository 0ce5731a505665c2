"""Model checking by numbers: thousands of random problems, small and large, under "auto" and a named policy.

Building a plan verifies it: every task once, tickets complete, no cycle, ``min_workers`` computed. On top of
that, "auto" must run on every Hopper GPU, and small plans are run with every number of workers they allow.
"""

from __future__ import annotations

import random

import pytest
from counts import CHUNKS, FAST_CHUNKS, FEWEST_SMS, PROBLEMS_PER_CHUNK

from dash_attn.errors import UnsupportedMaskError
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import COMMON_PLACEMENTS, FA3, POLICIES, Plan, Shift, build_plan, choose_policy
from dash_attn.schedule.interleave import task_order


def random_problem(rng: random.Random) -> Problem:
    longest = rng.choice((1, 200, 200, 1000, 1000, 5000))

    def length() -> int:
        return rng.randint(0, longest) if rng.random() < 0.1 else rng.randint(1, longest)

    pairs = []
    for _ in range(rng.choice((1, 1, 2, 4))):
        seqlen = length()
        pairs.append((seqlen, seqlen if rng.random() < 0.6 else length()))
    kv_heads = rng.randint(1, 3)
    left, right = (None if rng.random() < 0.3 else rng.randint(0, longest) for _ in range(2))
    mask = rng.choice((Mask.full(), Mask.causal(), Mask.causal(), Mask.window(left, right)))
    heads = kv_heads * rng.choice((1, 1, 2, 4, 7, 16))
    return Problem(tuple(pairs), heads, kv_heads, rng.choice((64, 128)), mask)


def named_plan(problem: Problem, rng: random.Random) -> Plan:
    """The plan of a random policy that covers the problem, in a random placement and deal of heads."""
    groups, placement = rng.choice((None, rng.randint(1, problem.group))), rng.choice(COMMON_PLACEMENTS)
    policy = rng.choice([*(policy() for policy in POLICIES.values()), Shift(ring=rng.randint(1, 40))])
    try:
        return build_plan(problem, policy, placement, head_groups=groups)
    except UnsupportedMaskError:
        return build_plan(problem, FA3(), placement, head_groups=groups)


def run_with_every_number_of_workers(plan: Plan, rng: random.Random) -> None:
    for workers in range(plan.min_workers, len(plan.items) + 1):
        order = [(task.item, task.q_head, task.q_tile) for task in task_order(plan, workers, rng)]
        assert len(set(order)) == len(order) == plan.problem.tasks


@pytest.mark.parametrize(
    "chunk",
    [pytest.param(at, marks=[pytest.mark.slow] if at >= FAST_CHUNKS else []) for at in range(CHUNKS)],
)
def test_random_plans(chunk: int) -> None:
    rng = random.Random(chunk)
    for _ in range(PROBLEMS_PER_CHUNK):
        problem = random_problem(rng)
        auto = build_plan(problem, *choose_policy(problem))
        assert auto.min_workers <= FEWEST_SMS, problem
        for plan in (auto, named_plan(problem, rng)):
            assert plan.verdict is not None
            assert plan.verdict.tasks == problem.tasks
            if problem.tasks <= 40:
                run_with_every_number_of_workers(plan, rng)

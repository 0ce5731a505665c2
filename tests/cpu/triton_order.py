"""The order of sums in Triton's backward, interpreted: that of the plan.

``test_triton.py`` starts this file in processes, see ``triton_interpreted.py``.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from attention_cases import SCALE, packed_tensors, shuffled_placement, split
from torch import Tensor
from triton_runs import assert_accurate, problem_of, run

from dash_attn.backends.base import Tensors
from dash_attn.backends.cpu import dq_partials, fold_partials
from dash_attn.backends.cpu import forward as reference
from dash_attn.backends.triton.tables import backward_tables
from dash_attn.backends.triton.tiles import TILES
from dash_attn.problem import Mask
from dash_attn.schedule import FA3, SPT, Descending, Plan, Shift, SymmetricShift, build_plan, prove
from dash_attn.testing import assert_same_bytes, same_bytes
from triton_cases import NAMES

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in rows that see nothing


LONG = problem_of(200, mask=Mask.causal(), head_dim=72, heads=2, kv_heads=1)
"""Four q tiles and four kv tiles."""


@pytest.fixture(scope="module")
def long_tensors() -> list[Tensor]:
    return packed_tensors(LONG)


@pytest.mark.slow
def test_the_order_of_sums_is_that_of_the_plan(long_tensors: list[Tensor]) -> None:
    """Another order gives other bytes of dQ; another placement and another run do not."""
    found = run(build_plan(LONG, SPT()), long_tensors)
    assert_accurate(LONG, long_tensors, found)
    shuffled = prove(shuffled_placement(build_plan(LONG, SPT()), 5))
    again = run(shuffled, long_tensors)
    for name in NAMES:
        assert_same_bytes(again[name], found[name], name)
    # fa3 visits the same q tiles in the same order, and sums dQ from the other end.
    other = run(build_plan(LONG, FA3()), long_tensors)
    assert not same_bytes(other["dq"], found["dq"])
    for name in ("dk", "dv"):
        assert_same_bytes(other[name], found[name], name)
    disordered = run(shuffled, long_tensors, disorder=random.Random(1))
    assert not same_bytes(disordered["dq"], found["dq"])
    assert_same_bytes(disordered["dk"], found["dk"], "dk")


def test_one_head_after_the_other(long_tensors: list[Tensor]) -> None:
    """dQ keeps its bytes; dK and dV are summed in another order than with all heads at every q tile."""
    together, by_head = (
        run(build_plan(LONG, Descending(by_head_from=n), head_groups=1), long_tensors) for n in (None, 0)
    )
    assert_accurate(LONG, long_tensors, by_head)
    assert_same_bytes(by_head["dq"], together["dq"], "dq")
    for name in ("dk", "dv"):
        assert not same_bytes(by_head[name], together[name]), name


@pytest.mark.slow
def test_dq_is_the_sum_of_contributions_in_ticket_order() -> None:
    """Contributions are so different in size that another order is far off."""
    problem = problem_of((1, 384), head_dim=8, heads=1, kv_heads=1)
    q, k, v, dout = (torch.zeros(n, 1, 8) for n in (1, 384, 384, 1))
    # All scores are 0, so P is 1/384, and dS is (dO V - delta) / 384. One key per tile has 3, 2^25, -2^25.
    dout[0, 0, 0] = 1
    for tile, size in enumerate((3.0, 2.0**25, -(2.0**25))):
        v[128 * tile, 0, 0] = size
        k[128 * tile, 0, 1] = 1.0
    tensors = [dout, q, k, v]
    results = {}
    for policy in (FA3(), SPT()):
        plan = build_plan(problem, policy)
        partials = executed_partials(plan, tensors)
        wanted = fold_partials(partials, SCALE, torch.float32)
        found = run(plan, tensors)["dq"]
        results[policy.name] = found[0, 0, 1]
        torch.testing.assert_close(found[:, 0], wanted, rtol=1e-6, atol=0)
    assert results["fa3"] != results["spt"]


def executed_partials(plan: Plan, tensors: list[Tensor]) -> list[Tensor]:
    dout, q, k, v = tensors
    out, lse = reference(plan, q, k, v, SCALE)
    return dq_partials(plan, Tensors(dout, q, k, v, out, lse), SCALE)[0, 0, 0]


@pytest.mark.slow
def test_a_sequence_has_the_same_bytes_alone() -> None:
    problem = problem_of(70, 150, mask=Mask.causal())
    tensors = packed_tensors(problem)
    found = run(build_plan(problem, SPT()), tensors)
    for index, (part, begin) in enumerate(zip(split(problem, tensors), (0, 70))):
        length = problem.sequences[index][0]
        alone = run(build_plan(problem_of(length, mask=Mask.causal()), SPT()), part)
        for name in ("out", "dq", "dk", "dv"):
            assert_same_bytes(found[name][begin : begin + length], alone[name], name)


TABLED = [Shift(2), SymmetricShift(), SPT(), FA3(), Descending(), Descending(by_head_from=300)]


@pytest.mark.parametrize("policy", TABLED, ids=str)
@pytest.mark.parametrize("head_dim", sorted(TILES))
def test_tables_say_what_the_plan_says(policy: Any, head_dim: int) -> None:
    mask = Mask.full() if isinstance(policy, Shift) else Mask.causal()
    problem = problem_of(700, 130, 0, mask=mask, head_dim=head_dim, heads=6, kv_heads=2)
    plan = build_plan(problem, policy, head_groups=2)
    tables = backward_tables(plan, packed=True)
    seen = set()
    for record in tables.items.tolist():
        sequence = [0, 700, 830].index(record[1]) if record[4] else 2
        stretch = tables.visits[record[8] : record[8] + record[9]].tolist()
        q_tiles = [first + step * k for first, step, count in stretch for k in range(count)]
        assert q_tiles == plan.pattern(sequence).tasks_of(record[7])[0].tolist()
        heads = range(record[10], record[10] + record[11])
        assert record[13] == (1 if plan.pattern(sequence).passes > 1 else len(heads))
        seen.add((sequence, heads, record[7]))
    wanted = {(s, plan.q_heads(s, group), kv) for s, group, kv in plan.items.tolist()}
    assert seen == wanted
    assert len({record[12] for record in tables.items.tolist()}) == len(plan.items)
    assert tables.sums == len(plan.items) == 2 * len(tables.folds)
    for record in tables.q_tiles.tolist():
        sequence = [0, 700].index(record[1])
        stretch = tables.stretches[record[8] : record[8] + record[9]].tolist()
        order = [first + step * k for first, step, count in stretch for k in range(count)]
        assert order == plan.pattern(sequence).summation_orders()[record[7]]

"""Golden numerics without a GPU: the plans are those whose gradients' hashes are checked in."""

from __future__ import annotations

import json

from golden_cases import GOLDEN, golden_inputs, golden_plans


def test_fingerprints_are_the_golden_ones() -> None:
    golden = json.loads(GOLDEN.read_text())
    assert {name: plan.fingerprint for name, plan in golden_plans().items()} == {
        name: case["fingerprint"] for name, case in golden.items()
    }


def test_inputs_fit_their_problems() -> None:
    for plan in golden_plans().values():
        dout, q, k, v, out, lse = golden_inputs(plan)
        assert dout.shape == q.shape == out.shape
        assert k.shape == v.shape
        assert lse.numel() * plan.problem.head_dim == q.numel()
        assert 0.5 < q.float().std() < 1.2

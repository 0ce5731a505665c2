"""Unusual numbers in the kernels: not finite, huge, tiny, all the same; ``cpu/test_numerics.py`` for the CPU.

out and lse are those of float64; what is tested is the backward.
"""

from __future__ import annotations

import pytest
import torch

import dash_attn
from dash_attn.backends.base import Tensors
from dash_attn.testing import assert_same_bytes
from fuzz_case import How, hopper
from gpu_cases import CAUSAL, FULL, auto_plan, dense, random_tensors
from numerics import MASKS, POISONS, UNUSUAL, assert_as_plain_attention, assert_shows, problem

BOTH_DIMS = pytest.mark.parametrize("head_dim", [64, 128])
EVERY_MASK = pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)


@pytest.mark.parametrize("name", UNUSUAL)
@EVERY_MASK
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@BOTH_DIMS
def test_unusual_inputs_have_the_errors_of_plain_attention(head_dim, dtype, mask, name):
    assert_as_plain_attention(name, problem(mask, head_dim, dtype), hopper())


@pytest.mark.parametrize(("name", "row", "value"), POISONS)
@EVERY_MASK
@BOTH_DIMS
def test_what_is_not_finite_shows_where_it_must_and_nowhere_else(head_dim, mask, name, row, value):
    assert_shows(
        problem(mask, head_dim, "bfloat16", 150, 420), name, value, row, hopper(), hides_p=head_dim == 128
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["q", "dout"])
@BOTH_DIMS
def test_what_is_not_finite_in_a_row_that_sees_nothing(head_dim, name, value):
    """Rows 0 to 99 see no key: they may spoil what shares a tile with them, and need not."""
    assert_shows(
        problem(CAUSAL, head_dim, "bfloat16", 250, 150), name, value, 20, hopper(), hides_p=head_dim == 128
    )


@BOTH_DIMS
def test_rows_that_see_nothing_through_the_public_function(head_dim):
    """Zero output and zero gradient, bit for bit +0, and finite everywhere."""
    shape = dense(CAUSAL, seqlen=None, seqlen_q=500, seqlen_k=200, head_dim=head_dim)
    dout, *leaves = random_tensors(shape)
    q, k, v = (x.requires_grad_() for x in leaves)
    out = dash_attn.attention(q, k, v, causal=True)
    out.backward(dout)
    for x in (out.detach(), q.grad):
        assert_same_bytes(x[:, :300], torch.zeros_like(x[:, :300]))
        assert x[:, 300:].isfinite().all()
        assert x[:, 301:].any(-1).all()
    for grad in (k.grad, v.grad):
        assert grad.isfinite().all()
        assert grad.any(-1).all()


@BOTH_DIMS
def test_lse_of_no_finite_row_is_no_row_of_nothing(head_dim):
    """A row whose log-sum-exp is NaN is not taken for one that sees nothing (-inf): its gradients are NaN."""
    shape = dense(FULL, batch=1, seqlen=100, head_dim=head_dim)
    dout, q, k, v = random_tensors(shape)
    backend, plan = hopper(), auto_plan(shape)
    lse = torch.zeros(1, 4, 100, device="cuda")
    lse[:, :, 10], lse[:, :, 20] = float("nan"), -torch.inf
    dq, _, dv = backend.launch(plan, Tensors(dout, q, k, v, torch.zeros_like(q), lse), 0.1, How())
    assert dq[:, 10].isnan().all()
    assert not dq[:, 20].any()
    assert dv.isnan().all()

"""The oracle: against autograd in float64, the definition, and rows that see nothing."""

from __future__ import annotations

import pytest
import torch

from dash_attn.backends.cpu import oracle, oracle_backward, oracle_forward, plain_attention
from dash_attn.backends.cpu.masks import hidden_elements
from dash_attn.problem import Mask

MASKS = (
    Mask.full(),
    Mask.causal(),
    Mask.window(3, 2),
    Mask.window(None, 4),
    Mask.window(5, None),
    Mask.window(0, 0),
)
SHAPES = ((9, 9, 2, 2), (7, 12, 4, 2), (12, 7, 3, 1), (1, 5, 2, 1), (6, 1, 2, 2))


def tensors(seqlen_q: int, seqlen_k: int, heads: int, kv_heads: int, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v, dout in float64, batch 2, head dim 3."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (2, seqlen_q, heads, 3), (2, seqlen_k, kv_heads, 3)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in (q, k, k, q)]


def by_rows(q, k, v, mask, scale, q_start=None):
    """Attention one row at a time, over the columns it sees: differentiable and free of masks."""
    group, shift = q.shape[2] // k.shape[2], k.shape[1] - q.shape[1] if q_start is None else q_start
    rows = []
    for b, i, h in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        first = 0 if mask.left is None else max(i + shift - mask.left, 0)
        end = k.shape[1] if mask.right is None else min(i + shift + mask.right + 1, k.shape[1])
        if first >= end:
            rows.append(q[b, i, h] * 0)
            continue
        p = torch.softmax(k[b, first:end, h // group] @ q[b, i, h] * scale, 0)
        rows.append(p @ v[b, first:end, h // group])
    return torch.stack(rows).view(q.shape)


@pytest.mark.parametrize("slice_elements", [oracle.SLICE, 20, 1], ids=["whole", "sliced", "row by row"])
@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_oracle_agrees_with_autograd_of_the_definition(mask, shape, slice_elements, monkeypatch):
    monkeypatch.setattr(oracle, "SLICE", slice_elements)
    q, k, v, dout = tensors(*shape)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    expected = by_rows(q, k, v, mask, 0.7)
    expected.backward(dout)
    out, lse = oracle_forward(q, k, v, mask, 0.7)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    grads = oracle_backward(dout, q, k, v, mask, 0.7)
    for grad, leaf in zip(grads, leaves):
        torch.testing.assert_close(grad, leaf.grad, rtol=1e-11, atol=1e-12)
    assert lse.shape == (2, shape[2], shape[0])


def test_lse_is_the_natural_logarithm_of_the_sum():
    q, k, v, _ = tensors(4, 6, 1, 1)
    _, lse = oracle_forward(q, k, v, Mask.full(), 0.5)
    expected = (q[:, :, 0] @ k[:, :, 0].mT * 0.5).exp().sum(-1).log()
    torch.testing.assert_close(lse[:, 0], expected)


def test_rows_that_see_nothing_are_zero():
    q, k, v, dout = tensors(8, 3, 2, 1)  # causal, bottom-right aligned: the first 5 rows see nothing
    out, lse = oracle_forward(q, k, v, Mask.causal(), 1.0)
    dq, _, _ = oracle_backward(dout, q, k, v, Mask.causal(), 1.0)
    assert (out[:, :5] == 0).all()
    assert (dq[:, :5] == 0).all()
    assert (lse[:, :, :5] == -torch.inf).all()
    assert lse[:, :, 5:].isfinite().all()
    assert (out[:, 5:] != 0).all()


@pytest.mark.parametrize("shape", [(0, 4, 2, 1), (4, 0, 2, 1), (0, 0, 1, 1)], ids=str)
def test_empty_sequences(shape):
    q, k, v, dout = tensors(*shape)
    out, lse = oracle_forward(q, k, v, Mask.causal(), 1.0)
    grads = oracle_backward(dout, q, k, v, Mask.causal(), 1.0)
    assert [x.shape for x in (out, *grads)] == [x.shape for x in (q, q, k, v)]
    assert all((x == 0).all() for x in (out, *grads))
    assert (lse == -torch.inf).all()


def test_memory_of_the_oracle_does_not_grow_with_the_square(monkeypatch):
    """No matrix of hidden elements, and so none of scores, has more elements than a slice."""
    made = []

    def counted(mask, positions, columns):
        made.append(len(positions) * columns)
        return hidden_elements(mask, positions, columns)

    monkeypatch.setattr(oracle, "hidden_elements", counted)
    monkeypatch.setattr(oracle, "SLICE", 1000)
    q, k, v, dout = (x[0] for x in tensors(90, 70, 2, 1))
    plain_attention(oracle.Inputs(dout, q, k, v), Mask.causal(), 1.0)
    assert sum(made) == 90 * 70
    assert max(made) <= 1000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_dtype_rounds_what_a_kernel_rounds(dtype):
    """Results fit the dtype, and they are further from float64 than float32 products alone would be."""
    inputs = oracle.Inputs(*(x[0].to(dtype) for x in tensors(40, 40, 2, 1)))
    exact, wide, narrow = (
        plain_attention(inputs, Mask.causal(), 0.7, t) for t in (torch.float64, torch.float32, dtype)
    )
    for name in ("out", "dq", "dk", "dv"):
        found = getattr(narrow, name)
        assert torch.equal(found, found.to(dtype).float())
        errors = [float((getattr(x, name) - getattr(exact, name)).norm()) for x in (wide, narrow)]
        assert 100 * errors[0] < errors[1] < 0.1 * float(getattr(exact, name).norm())


@pytest.mark.parametrize("q_start", [-2, 0, 5])
def test_rows_may_be_aligned_with_another_column(q_start):
    """Row 0 sees the columns around ``q_start``: as by autograd over the columns that each row sees."""
    q, k, v, dout = tensors(7, 9, 2, 1)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    expected = by_rows(q, k, v, Mask.window(3, 1), 0.7, q_start)
    expected.backward(dout)
    inputs = oracle.Inputs(dout[0], q[0], k[0], v[0])
    found = plain_attention(inputs, Mask.window(3, 1), 0.7, q_start=q_start)
    torch.testing.assert_close(found.out, expected[0], rtol=1e-12, atol=1e-12)
    for grad, leaf in zip((found.dq, found.dk, found.dv), leaves):
        torch.testing.assert_close(grad, leaf.grad[0], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.name)
@pytest.mark.parametrize(("start", "columns"), [(0, 6), (-4, 6), (3, 6), (5, 0)])
def test_hidden_elements_are_those_of_the_definition(mask, start, columns):
    left, right = (20 if side is None else side for side in (mask.left, mask.right))
    expected = [[not -left <= j - i <= right for j in range(columns)] for i in range(start, start + 5)]
    found = hidden_elements(mask, torch.arange(start, start + 5), columns)
    assert found.shape == (5, columns)
    assert found.tolist() == expected

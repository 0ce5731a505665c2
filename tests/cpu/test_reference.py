"""The oracle: against autograd in float64, the definition, and rows that see nothing."""

from __future__ import annotations

import pytest
import torch

from dash_attn.backends.cpu import oracle_backward, oracle_forward
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


def by_rows(q, k, v, mask, scale):
    """Attention one row at a time, over the columns it sees: differentiable and free of masks."""
    group, shift = q.shape[2] // k.shape[2], k.shape[1] - q.shape[1]
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


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_oracle_agrees_with_autograd_of_the_definition(mask, shape):
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

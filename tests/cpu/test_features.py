"""The bounds of ``test_gpu_features.py``: the CPU backend is within them, and larger errors are refused."""

from __future__ import annotations

import pytest
import torch

from dash_attn.backends.cpu import plain_attention
from dash_attn.testing import assert_same_bytes
from feature_cases import (
    FIRST,
    VARIANTS,
    WIDTHS,
    Variant,
    bound_of,
    drawn,
    effect_of_rounding_out,
    plain,
    plain_scores,
    run,
    shares,
    variants_of,
)

torch.set_num_threads(1)

ALL = max(FIRST, key=len)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])


@pytest.mark.parametrize("features", FIRST, ids=lambda features: "-".join(features) or "plain")
def test_errors_and_bytes(features: tuple[str, ...]) -> None:
    for seed, variant in enumerate(variants_of(features)):
        one = drawn(features, variant, seed, "cpu", 100)
        found = run(one, "cpu")
        for name, share in shares(found, bound_of(one)).items():
            assert share <= 1, (seed, variant, name, share)
        for got, again in zip(found, run(one, "cpu")):
            assert_same_bytes(got, again)


def test_variants_meet_all_that_there_is() -> None:
    """Every width of Triton's tiles and every dtype, V of another head dim, and not many to compile."""
    found = [variant for features in FIRST for variant in variants_of(features)]
    assert len(found) == len(FIRST) * VARIANTS == 64
    for width in WIDTHS:
        assert any(variant.head_dim in width for variant in found), width
    shares = [sum(v.dtype == dtype for v in found) / len(found) for dtype in (torch.float16, torch.float32)]
    assert all(0.1 < share < 0.3 for share in shares), shares
    assert sum(variant.head_dim != variant.head_dim_v for variant in found) >= 10


def test_exact_results_are_those_of_the_oracle() -> None:
    """Two ways to the same numbers, for all features at once and every mask that is drawn."""
    masks = set()
    for seed in range(12):
        one = drawn(ALL, Variant(24, 16, torch.float32), seed, "cpu", 60)
        exact, parts = plain(one, torch.float64), []
        for at, (sequence, aux) in enumerate(one.sequences(one.leaves)):
            aux = aux._replace(dropout_seed=torch.tensor(one.how["dropout_seed"]))
            parts.append(plain_attention(sequence, one.mask, one.scores, aux=aux, sequence=at))
            torch.testing.assert_close(parts[-1].lse, exact.lse[at], rtol=1e-9, atol=1e-9)
        for name, x in zip(("out", "dq", "dk", "dv"), exact.tensors):
            wanted = torch.cat([getattr(part, name) for part in parts])
            torch.testing.assert_close(x, wanted, rtol=1e-9, atol=1e-9)
        masks.add((one.mask.left is None, one.mask.right is None, one.packed))
    assert len(masks) > 4


@DTYPES
def test_the_effect_of_a_rounded_out_is_what_autograd_says(dtype: torch.dtype) -> None:
    """Of all features at once."""
    largest = 0.0
    for seed in range(6):
        one = drawn(ALL, Variant(24, 16, dtype), seed, "cpu", 60)
        exact = plain(one, torch.float64)
        leaves = [x.detach().double().requires_grad_() for x in one.leaves]
        total, row = torch.zeros((), dtype=torch.float64), 0
        for sequence, aux in one.sequences(leaves):
            out = exact.tensors[0][row : (row := row + len(sequence.q))]
            d = (sequence.dout.double() * (out.to(dtype).double() - out)).sum(-1).T
            s = plain_scores(one, sequence, aux, torch.float64)
            s = torch.cat([s, leaves[3][:, None, None].expand(-1, len(sequence.q), 1)], 2)
            total = total + (s * (s.softmax(2) * d[..., None]).detach()).nan_to_num(0.0, 0.0, 0.0).sum()
        dq, dk, _, dsink = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        wanted = [0.0, float(dq.norm()), float(dk.norm()), 0.0, float(dsink.norm())]
        assert effect_of_rounding_out(one, exact) == pytest.approx(wanted, rel=1e-9)
        largest = max(largest, wanted[1])
    assert largest > 0


@DTYPES
@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv", "dsink"])
def test_errors_of_a_few_times_those_of_plain_pytorch_are_refused(name: str, dtype: torch.dtype) -> None:
    """In float32 the rounding of sums is allowed besides, which is 64 epsilons of the gradient of out."""
    one = drawn(ALL, Variant(64, 64, dtype), 3, "cpu", 300)
    bound, rounded = bound_of(one), plain(one, dtype).tensors
    rounded = [*rounded[:4], rounded[4].sum(0)]
    at = ("out", "dq", "dk", "dv", "dsink").index(name)
    error = rounded[at].double() - bound.exact[at]
    if name == "dsink" or dtype == torch.float32:  # what is allowed is more than the error of this sum
        error = error * bound.allowed[at] / 2 / error.norm()
    for factor, refused in ((1.0, False), (3.0, True)):
        spoilt = list(bound.exact)
        spoilt[at] = bound.exact[at] + factor * error
        assert (shares(spoilt, bound)[name] > 1) == refused, factor
    spoilt[at] = torch.full_like(spoilt[at], torch.nan)
    assert shares(spoilt, bound)[name] == float("inf")

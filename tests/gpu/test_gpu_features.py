"""Random problems over all features by every backend that covers them, against float64, and twice.

``DASH_ATTN_PROBLEMS`` problems in all, dealt to the combinations of features. Of each some variants of the
kernels are compiled, when a problem first asks for one. Errors as shares of what is allowed are printed
(``pytest -rP``), and are properties of the tests in an XML.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from dash_attn import is_supported
from dash_attn.testing import assert_same_bytes
from feature_cases import FIRST, VARIANTS, bound_of, drawn, run, shares, variants_of

PROBLEMS = int(os.environ.get("DASH_ATTN_PROBLEMS", "60"))


@pytest.mark.parametrize("features", FIRST, ids=lambda features: "-".join(features) or "plain")
def test_errors_and_bytes(features: tuple[str, ...], record_property: Callable[[str, object], None]) -> None:
    """Forced Triton; sm90 where it covers a problem, which is what ``auto`` takes then."""
    variants, worst = variants_of(features), {}
    for seed in range(-(-PROBLEMS // len(FIRST))):
        variant = variants[seed % VARIANTS]
        one = drawn(features, variant, seed, "cuda")
        bound = bound_of(one)
        covered = _covered(one.call("sm90"))
        for backend in ("triton", *(("sm90",) if covered else ())):
            found = run(one, backend)
            for name, share in shares(found, bound).items():
                assert share <= 1, (backend, seed, variant, name, share, one.lengths, one.how)
                key = backend, str(variant.dtype).removeprefix("torch."), name
                worst[key] = max(worst.get(key, (0.0, 0)), (share, seed))
            for got, again in zip(found, run(one, backend)):
                assert_same_bytes(got, again)
        tensors, how = one.call("auto")
        assert is_supported(*tensors, **how).backend == ("sm90" if covered else "triton")
    for (backend, dtype, name), (share, seed) in sorted(worst.items()):
        line = f"{backend} {dtype} {name}: at most {share:.3f} of what is allowed (seed {seed})"
        print(line)
        record_property("worst", line)


def _covered(call: tuple) -> bool:
    tensors, how = call
    return bool(is_supported(*tensors, **how))


def test_sm90_is_among_them() -> None:
    """Features and head dims that it has, and others."""
    found = {
        (features, _covered(drawn(features, variant, 0, "cuda").call("sm90")))
        for features in FIRST
        for variant in variants_of(features)
    }
    assert {features for features, covered in found if covered} == {
        (), ("softcap",), ("sink",), ("softcap", "sink"), ("intervals",), ("sink", "intervals")
    }  # fmt: skip

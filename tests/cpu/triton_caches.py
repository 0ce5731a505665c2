"""The Triton forward over a cache of keys, interpreted.

``test_triton.py`` starts this file in processes, see ``triton_interpreted.py``.
"""

from __future__ import annotations

import pytest
import torch
from triton_runs import CPU, SCORES, forward

from dash_attn.backends.cached import CachedProblem, CachedTensors
from dash_attn.backends.triton.append import append
from dash_attn.backends.triton.backend import BACKEND
from dash_attn.problem import Mask
from dash_attn.testing import assert_same_bytes
from kvcache_cases import random_history

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in rows that see nothing


@pytest.mark.parametrize(("number", "longest"), [*((n, 150) for n in range(4)), (10, 300)])
def test_histories_over_a_cache(number: int, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths, bounds and pages are read by the programs, which also append new keys."""
    head_dims = ((16, 24), (72, 88))[number == 3]
    monkeypatch.setattr("dash_attn.backends.cpu.cached.append", append)
    dtype = (torch.float16, torch.float32)[number % 2]
    history = random_history(number, "cpu", dtype, longest, head_dims=head_dims, backend="triton")
    assert (history.shared > 0) == (number == 10)  # it has a prefix that two requests share
    history.run()


def test_lengths_pages_and_bounds_out_of_range_are_clamped() -> None:
    """As on a GPU, where nobody sees them before."""
    k = torch.randn(4, 16, 1, 16)
    q, table = torch.randn(3, 1, 2, 16), torch.tensor([[3, -9], [10**6, 1], [0, 2]]).int()
    lengths = torch.tensor([20, 10**9, -5]).int()
    problem = CachedProblem(3, 2, 1, 16, 16, "float32", (-1, 0), 1, 3, 1, 16, 4, 2)
    prepared = BACKEND.prepare_cached(problem, CPU)
    out, lse = prepared.forward(CachedTensors(q, k, k, lengths, table), SCORES)
    for i, (pages, length) in enumerate((((3, 0), 20), ((3, 1), 32))):
        keys = k[list(pages)].flatten(0, 1)[:length]
        wanted = forward(q[i], keys, keys, Mask.causal())
        assert_same_bytes(out[i], wanted[0])
        assert_same_bytes(lse[i], wanted[1])
    assert not out[2].any()
    packed = problem._replace(seqlen_q=-1, longest_q=3)
    bounds = torch.tensor([-7, 1, 2, 10**6]).int()
    tensors = CachedTensors(q.flatten(0, 1), k, k, lengths, table, bounds)
    found = BACKEND.prepare_cached(packed, CPU).forward(tensors, SCORES)
    assert_same_bytes(found[0], out.flatten(0, 1))
    cache, new = torch.zeros(4, 16, 1, 16), torch.ones(3, 2, 1, 16)
    append((cache, cache), (new, new), torch.tensor([15, 31, -1]).int(), table)
    assert cache[3, 15].all()  # the second token has no page
    assert cache[1, 15].all()  # the second one has no room
    assert cache[0, 0].all()  # the first one has no place
    assert cache.sum() == 3 * 16
    # Rows of no sequence, and a cache of no pages: there is nothing to read.
    nobody = CachedTensors(q.flatten(0, 1), k, k, lengths[:0], table[:0], bounds[:1] * 0)
    for none, given in (
        (packed._replace(batch=0), nobody),
        (problem._replace(pages=0), CachedTensors(q, k[:0], k[:0], lengths, table)),
    ):
        out, lse = BACKEND.prepare_cached(none, CPU).forward(given, SCORES)
        assert not out.any()
        assert (lse == -torch.inf).all()

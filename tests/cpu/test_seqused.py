"""``seqused_k``: a forward that uses the first keys of every sequence, in a cache with places for more."""

from __future__ import annotations

import pytest
import torch
from cache_cases import draw, int32
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from dash_attn import flash_attn_func, flash_attn_varlen_func, is_supported
from dash_attn.api import Support
from dash_attn.backends.base import NO_AUX
from dash_attn.backends.cpu.backend import BACKEND
from dash_attn.backends.shapes import Keys
from dash_attn.backends.sm90.forward.table import ENTRY_WORDS, forward_table
from dash_attn.errors import InputError, PlanMismatchError
from dash_attn.ops.operators import USED
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import FA3, build_forward_plan, build_plan
from dash_attn.spec import AttentionSpec
from dash_attn.testing import assert_same_bytes

BAD = (float("nan"), float("inf"), -float("inf"))
MASKS: list[dict[str, object]] = [{}, {"causal": True}, {"window_size": (40, 0)}, {"window_size": (9, 30)}]


def ends_of(lengths: list[int]) -> Tensor:
    return int32(0, *torch.tensor(lengths).cumsum(0).tolist())


def cache_of(packed: Tensor, lengths: list[int], rows: int, bad: float) -> Tensor:
    """(batch, rows, heads, head_dim) as transformers keeps it, transposed; ``bad`` behind the used keys."""
    _, heads, head_dim = packed.shape
    cache = packed.new_full((len(lengths), heads, rows, head_dim), bad).transpose(1, 2)
    for place, keys in zip(cache, packed.split(lengths)):
        place[: len(keys)] = keys
    return cache


@settings(max_examples=30)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 150)), min_size=1, max_size=4),
    spare=st.integers(0, 40),
    kv_heads=st.sampled_from([1, 2]),
    how=st.sampled_from(MASKS),
    bad=st.sampled_from(BAD),
)
def test_the_bytes_are_those_of_the_used_keys_alone(lengths, spare, kv_heads, how, bad):
    of_q, of_k = [q for q, _ in lengths], [k for _, k in lengths]
    q = draw(sum(of_q), 2, 16)
    k, v = (draw(sum(of_k), kv_heads, 16, seed=seed) for seed in (1, 2))
    ends_q, used, rows = ends_of(of_q), int32(*of_k), max(of_k) + spare
    wanted = flash_attn_varlen_func(q, k, v, ends_q, ends_of(of_k), return_lse=True, **how)
    caches = [cache_of(x, of_k, rows, bad) for x in (k, v)]
    found = flash_attn_varlen_func(q, *caches, ends_q, seqused_k=used, return_lse=True, **how)
    places = [length + spare for length in of_k]
    packed = [
        torch.cat([place[:length] for place, length in zip(cache_of(x, of_k, rows, bad), places)])
        for x in (k, v)
    ]
    again = flash_attn_varlen_func(
        q, *packed, ends_q, ends_of(places), seqused_k=used, return_lse=True, **how
    )
    for result in (found, again):
        for a, b in zip(result, wanted):
            assert_same_bytes(a, b)


@pytest.mark.parametrize("how", MASKS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("seqlen_q", [1, 70])
def test_dense_queries(seqlen_q, batch, how):
    """The first ones of a batch have other lengths than the last, and none has a length of 0."""
    of_k = [130, 0, 200][-batch:]
    q = draw(batch, seqlen_q, 4, 16)
    k, v = (draw(sum(of_k), 2, 16, seed=seed) for seed in (1, 2))
    caches = [cache_of(x, of_k, 220, BAD[0]) for x in (k, v)]
    out, lse = flash_attn_varlen_func(q, *caches, seqused_k=int32(*of_k), return_lse=True, **how)
    packed = flash_attn_varlen_func(
        q, k, v, cu_seqlens_k=ends_of(of_k), seqused_k=int32(*of_k), return_lse=True, **how
    )
    assert (out.shape, lse.shape) == (q.shape, (batch, 4, seqlen_q))
    for at, length in enumerate(of_k):
        mine = (x[at : at + 1, :length] for x in caches)
        wanted = flash_attn_func(q[at : at + 1], *mine, return_lse=True, **how)
        for a, b, c in zip((out, lse), wanted, packed):
            assert_same_bytes(a[at], b[0])
            assert_same_bytes(a[at], c[at])


def test_no_keys_at_all():
    q, cache = draw(2, 5, 4, 16), torch.full((2, 9, 2, 16), torch.nan)
    for k in (cache, cache[:, :0]):
        out, lse = flash_attn_varlen_func(q, k, k, seqused_k=int32(0, 0), causal=True, return_lse=True)
        assert not out.any()
        assert torch.equal(lse, torch.full((2, 4, 5), -torch.inf))


def test_no_sequence():
    none = torch.empty(0, dtype=torch.int32)
    out, lse = flash_attn_varlen_func(Q[:0], CACHE[:0], CACHE[:0], seqused_k=none, return_lse=True)
    assert (out.shape, lse.shape) == ((0, 5, 4, 8), (0, 4, 5))
    with pytest.raises(InputError, match="cu_seqlens_q has no sequence, q has 5 rows"):
        flash_attn_varlen_func(Q[0], CACHE[:0], CACHE[:0], int32(0), seqused_k=none)


@pytest.mark.parametrize("write", ["fill_", "numpy"])
def test_lengths_are_what_they_are_now(write):
    used = int32(3, 9)
    first = flash_attn_varlen_func(Q, CACHE, CACHE, seqused_k=used)
    used.fill_(5) if write == "fill_" else used.numpy().fill(5)
    second = flash_attn_varlen_func(Q, CACHE, CACHE, seqused_k=used)
    assert not torch.equal(first, second)
    assert_same_bytes(second, flash_attn_func(Q, CACHE[:, :5], CACHE[:, :5]))


# What is refused

Q, CACHE, LENGTHS = draw(2, 5, 4, 8), draw(2, 9, 2, 8, seed=1), int32(3, 9)
ENDS_Q, ENDS_K = int32(0, 5, 10), int32(0, 9, 18)


def call(q=Q, k=CACHE, v=None, cu_q=None, cu_k=None, max_q=None, max_k=None, **how):
    return (q, k, k if v is None else v, cu_q, cu_k, max_q, max_k), {"seqused_k": LENGTHS, **how}


FLAT_Q, FLAT_K = Q.flatten(0, 1), CACHE.flatten(0, 1)
REFUSED = {
    "sink type": (call(learnable_sink=1.0), "learnable_sink must be a torch.Tensor, got float"),
    "slopes type": (call(alibi_slopes=[0.1]), "alibi_slopes must be a torch.Tensor, got list"),
    "rows type": (call(row_ends=[9]), "row_ends is not supported with seqused_k"),
    "list": (call(seqused_k=[3, 9]), "seqused_k must be a torch.Tensor, got list"),
    "int64": (call(seqused_k=LENGTHS.long()), "seqused_k must be torch.int32, got torch.int64"),
    "2-D": (call(seqused_k=LENGTHS[None]), r"seqused_k must have shape \(batch,\), got \(1, 2\)"),
    "device": (call(seqused_k=LENGTHS.to("meta")), "seqused_k is on meta, q is on cpu; it may be there or"),
    "negative": (call(seqused_k=int32(3, -1)), "seqused_k must not be negative, got -1 at 1"),
    "too many": (call(seqused_k=int32(10, 9)), "seqused_k has 10 at 0, but sequence 0 has 9 keys"),
    "too many, packed": (
        call(k=FLAT_K, cu_k=int32(0, 2, 18)),
        "seqused_k has 3 at 0, but sequence 0 has 2 keys",
    ),
    "batch": (call(seqused_k=int32(3)), "seqused_k has 1 sequences, q has batch 2"),
    "batch of k": (call(k=CACHE[:1]), "seqused_k has 2 sequences, k has batch 1"),
    "batch of cu_q": (call(FLAT_Q, cu_q=int32(0, 10)), "seqused_k has 2 sequences, cu_seqlens_q has 1 seq"),
    "batch of cu_k": (call(k=FLAT_K, cu_k=int32(0, 18)), "seqused_k has 2 sequences, cu_seqlens_k has 1 seq"),
    "packed k alone": (
        call(k=FLAT_K),
        r"k must have 4 dimensions .* without cu_seqlens_k, got .*\(18, 2, 8\)",
    ),
    "dense k with ends": (call(cu_k=ENDS_K), r"k must have 3 .* with cu_seqlens_k, got shape \(2, 9, 2, 8\)"),
    "packed q alone": (call(FLAT_Q), r"q must have 4 dimensions .* without cu_seqlens_q, got shape \(10, 4"),
    "dense q with ends": (call(cu_q=ENDS_Q), r"q must have 3 .* with cu_seqlens_q, got shape \(2, 5, 4, 8\)"),
    "k and v": (call(v=CACHE[:, :8]), r"k has shape \(2, 9, 2, 8\), v has \(2, 8, 2, 8\)"),
    "head_dim": (call(k=CACHE[..., :4]), "k has head_dim 4, q has 8"),
    "heads": (call(Q[:, :, :3]), r"heads \(3\) must be a multiple of kv_heads \(2\)"),
    "ends": (call(FLAT_Q, cu_q=int32(0, 5, 11)), "cu_seqlens_q ends at 11, q has 10 rows"),
    "ends of k": (call(k=FLAT_K, cu_k=int32(0, 9, 17)), "cu_seqlens_k ends at 17, k has 18 rows"),
    "int64 ends": (call(FLAT_Q, cu_q=ENDS_Q.long()), "cu_seqlens_q must be torch.int32, got torch.int64"),
    "short": (call(max_q=4), "max_seqlen_q is 4, the longest sequence has 5"),
    "short k": (call(max_k=8), "max_seqlen_k is 8, the longest sequence has 9"),
    "gradient of q": (call(Q.clone().requires_grad_()), "the backward does not have seqused_k"),
    "gradient of v": (call(v=CACHE.clone().requires_grad_()), "the backward does not have seqused_k"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_calls_name_what_is_wrong(case):
    (arguments, options), message = REFUSED[case]
    with pytest.raises(InputError, match=message) as error:
        flash_attn_varlen_func(*arguments, **options)
    assert is_supported(*arguments, **options) == Support(False, str(error.value))


def test_what_is_accepted():
    for (arguments, options), _ in ((call(), ""), (call(FLAT_Q, FLAT_K, cu_q=ENDS_Q, cu_k=ENDS_K), "")):
        assert is_supported(*arguments, **options)
    assert is_supported(*call(max_k=9)[0], seqused_k=LENGTHS)
    assert flash_attn_varlen_func(FLAT_Q, FLAT_Q, FLAT_Q, ENDS_Q, ENDS_Q, seqused_k=None).shape == (10, 4, 8)


def test_gradients_are_refused_also_where_the_call_is_known():
    leaf = Q.clone().requires_grad_()
    flash_attn_varlen_func(Q, CACHE, CACHE, seqused_k=LENGTHS)
    with pytest.raises(InputError, match="does not have seqused_k: call it under torch.no_grad"):
        flash_attn_varlen_func(leaf, CACHE, CACHE, seqused_k=LENGTHS)
    with torch.no_grad():
        found = flash_attn_varlen_func(leaf, CACHE, CACHE, seqused_k=LENGTHS)
    assert_same_bytes(found, flash_attn_varlen_func(Q, CACHE, CACHE, seqused_k=LENGTHS))


def test_other_functions_say_who_has_it():
    with pytest.raises(InputError, match="seqused_k=a tensor .* only None; flash_attn_varlen_func has it"):
        flash_attn_func(Q, Q, Q, seqused_k=LENGTHS)
    with pytest.raises(InputError, match="without seqused_k give .* and cu_seqlens_k, got None and a Tensor"):
        flash_attn_varlen_func(FLAT_Q, FLAT_K, FLAT_K, cu_seqlens_k=ENDS_K)


def test_backends_refuse_other_tensors_and_backwards():
    problem = Problem(((5, 3), (5, 9)), 4, 2, 8, Mask.causal(), "float32")
    prepared = BACKEND.prepare(problem, torch.device("cpu"), False, Keys((2, 9, 2, 8), None))
    prepared.forward(Q, CACHE, CACHE, 0.3)
    for wrong in ((Q, CACHE[:, :8], CACHE), (Q, FLAT_K, FLAT_K), (FLAT_Q, CACHE, CACHE)):
        with pytest.raises(PlanMismatchError):
            prepared.forward(*wrong, 0.3)
    with pytest.raises(InputError, match="the backward does not have seqused_k"):
        prepared.backward(build_plan(problem, FA3()), None, 0.3)


# Operators


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed):
    ends = (ENDS_Q, ENDS_K) if packed else (None, None)
    tensors = (FLAT_Q, FLAT_K, FLAT_K) if packed else (Q, CACHE, CACHE)
    opcheck(USED, (*tensors, *NO_AUX, *ends, LENGTHS, *AttentionSpec(0.1, -1, 0), -1, -1))


def test_compiled_calls_have_the_same_bytes():
    def run(q, cache, used):
        return flash_attn_varlen_func(2 * q, cache, cache, seqused_k=used, causal=True)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for used in (int32(3, 9), int32(9, 0), int32(1, 2)):
        assert_same_bytes(compiled(Q, CACHE, used), run(Q, CACHE, used))
    with pytest.raises(Exception, match="the backward does not have seqused_k"):
        compiled(Q.clone().requires_grad_(), CACHE, LENGTHS)


def test_transforms_are_errors():
    def attend(q):
        return flash_attn_varlen_func(q, CACHE, CACHE, seqused_k=LENGTHS).sum()

    with pytest.raises(InputError, match="not supported under the transforms of torch.func"):
        torch.func.vmap(attend)(Q[None])
    with pytest.raises(InputError, match="the backward does not have seqused_k"):
        torch.func.grad(attend)(Q)


# What a GPU is told


def test_the_table_has_lengths_that_are_used_and_where_keys_begin():
    problem = Problem.varlen([(3, 5), (2, 4), (1, 0)], heads=2, head_dim=64, mask=Mask.causal())
    plan = build_forward_plan(problem, 128, 1)
    words = forward_table(plan, (0, 30, 34)).reshape(-1, ENTRY_WORDS)
    assert sorted(words[:, [0, 4, 5, 6, 7]].tolist()) == [[0, 3, 5, 0, 0], [1, 2, 4, 3, 30], [2, 1, 0, 5, 34]]
    before = forward_table(plan).reshape(-1, ENTRY_WORDS)
    assert sorted(before[:, 7].tolist()) == [0, 5, 9]

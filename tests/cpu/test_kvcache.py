"""Caches of keys, contiguous and in pages: serving histories have the bytes of one forward."""

from __future__ import annotations

import math
import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from cache_cases import CACHE, NEW, PAGES, TABLE, USED, Q, draw, int32
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

from dash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from dash_attn.backends.base import NO_AUX
from dash_attn.backends.cached import CachedProblem, CachedTensors
from dash_attn.backends.cpu import forward as reference
from dash_attn.backends.sm90.cached.config import CachedConfig, cached_config
from dash_attn.backends.sm90.cached.launch import config_of
from dash_attn.errors import InputError
from dash_attn.ops.cached import _problem
from dash_attn.ops.operators import APPEND, CACHED
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import ForwardNumerics
from dash_attn.spec import AttentionSpec
from dash_attn.testing import assert_same_bytes, same_bytes
from kvcache_cases import History, random_history

FAST = 24
"""Histories in `make test`. They have all sizes of pages, windows, sinks, and shared prefixes."""


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=() if n < FAST else pytest.mark.slow) for n in range(40)]
)
def test_histories(number: int) -> None:
    """Chunks, steps, changing batches, pages, shared prefixes; NaN or infinity behind the used keys."""
    dtype = (torch.float32, torch.bfloat16, torch.float64)[number % 3]
    assert random_history(number, "cpu", dtype, 300, head_dims=(8, 16), backend="cpu").run()


@pytest.mark.parametrize("page_size", [16, 64])
def test_shared_prefixes(page_size: int) -> None:
    """A request begins with tokens, and pages, of another one."""
    rng, how = random.Random(page_size), {"causal": True}
    history = History(rng, "cpu", torch.float32, [200, 150, 9], (4, 2), 16, page_size, how, shared=128)
    count = 128 // page_size
    assert history.table[0, :count].tolist() == history.table[1, :count].tolist()
    assert history.table[0, count] != history.table[1, count]
    history.run()


@pytest.mark.parametrize("page_size", [0, 16, 256])
def test_masks_sinks_and_caps(page_size: int) -> None:
    """No pages, parts of a kv tile, more than one. (Histories have all sizes.)"""
    for at, how in enumerate(({}, {"window_size": (40, 9)}, {"window_size": (-1, 3), "softcap": 2.0})):
        causal = {**how, "causal": at != 1, "softmax_scale": 0.3}
        if not causal["causal"]:  # a row must see no key that comes after it, or chunks would differ
            causal["window_size"] = (40, 0)
        sink = {"learnable_sink": torch.linspace(-1, 1, 4)}
        rng = random.Random(page_size + at)
        History(rng, "cpu", torch.float32, [150, 300, 7], (4, 2), 16, page_size, {**causal, **sink}).run()


def test_several_segments_and_a_negative_control() -> None:
    """A row behind 8,192 keys has two segments. Other segments, as a split by load makes them, differ."""
    length = 8300
    q, k, v = draw(1, 1, 1, 8), draw(1, length, 1, 8, seed=1), draw(1, length, 1, 8, seed=2)
    out, lse = flash_attn_with_kvcache(q, k, v, causal=True, return_lse=True)
    wanted = flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert_same_bytes(out, wanted[0])
    assert_same_bytes(lse, wanted[1])
    problem = Problem(((1, length),), 1, 1, 8, Mask.causal(), "float32")
    tensors = [x[0] for x in (q, k, v)]
    for segment in (2048, 4224):
        numerics = replace(ForwardNumerics.of(problem), segment=segment)
        other, _ = reference(problem, *tensors, 1 / math.sqrt(8), numerics=numerics)
        assert not same_bytes(other, out[0])


def test_new_keys_are_written_in_place_and_nothing_else_is() -> None:
    cache = torch.full((3, 20, 2, 8), torch.nan)
    k, v = draw(2, 4, 2, 8), draw(2, 4, 2, 8, seed=1)
    caches = cache.clone(), cache.clone()
    where = {"cache_seqlens": int32(0, 16), "cache_batch_idx": int32(2, 0)}
    flash_attn_with_kvcache(draw(2, 4, 4, 8), *caches, k, v, **where)
    for found, new in zip(caches, (k, v)):
        wanted = cache.clone()
        wanted[2, :4], wanted[0, 16:] = new[0], new[1]
        assert_same_bytes(found, wanted)


def test_caches_that_are_columns_of_one_another() -> None:
    """As MLA has them: V is the first columns of K. And K and V beside one another in one tensor."""
    q, new, rows = draw(2, 4, 4, 12), draw(2, 4, 1, 12, seed=1), torch.full((2, 20, 1, 12), torch.nan)
    wanted = flash_attn_func(q, new, new[..., 3:11], causal=True)
    for cache in (rows, rows.clone().expand(2, 20, 1, 12)):
        call = (q, cache, cache[..., 3:11], new, new[..., 3:11])
        assert_same_bytes(flash_attn_with_kvcache(*call, cache_seqlens=0, causal=True), wanted)
    for name, both in (("columns", torch.zeros(2, 20, 1, 24)), ("rows", torch.zeros(2, 20, 2, 12))):
        k, v = both.split(12, 3) if name == "columns" else both.unbind(2)
        caches = (k, v) if name == "columns" else (k.unsqueeze(2), v.unsqueeze(2))
        flash_attn_with_kvcache(q, *caches, new, -new, cache_seqlens=3, causal=True)
        assert_same_bytes(caches[0][:, 3:7], new)
        assert_same_bytes(caches[1][:, 3:7], -new)


def test_new_keys_that_lie_in_their_place_already() -> None:
    caches = CACHE.clone(), -CACHE
    new = [x[:, 5:8] for x in caches]
    flash_attn_with_kvcache(Q, *caches, *new, cache_seqlens=5)
    assert_same_bytes(caches[0], CACHE)
    assert_same_bytes(caches[1], -CACHE)


def test_queries_and_sinks_that_lie_where_new_keys_go() -> None:
    """They are those before the call."""
    k, v, new = torch.randn(1, 30, 2, 16), torch.randn(1, 30, 2, 16), torch.randn(1, 5, 2, 16)
    q, sink = k[:, 20:25], k[0, 20, :, 0]
    found = []
    for given in ((q.clone(), k.clone(), v.clone(), sink.clone()), (q, k, v, sink)):
        of_q, *caches, of_sink = given
        found.append(
            flash_attn_with_kvcache(
                of_q, *caches, new, new, cache_seqlens=20, causal=True, learnable_sink=of_sink
            )
        )
    assert_same_bytes(*found)
    assert torch.equal(k[:, 20:25], new)


@pytest.mark.parametrize("swapped", [False, True])
def test_new_keys_that_lie_elsewhere_in_the_caches(swapped: bool) -> None:
    """An append would write over what it has not read yet."""

    def appended(copied: bool) -> list[Tensor]:
        caches = [CACHE.clone(), -CACHE]
        new = [x[:, 2:5] for x in (reversed(caches) if swapped else caches)]
        flash_attn_with_kvcache(Q, *caches, *(x.clone() if copied else x for x in new), cache_seqlens=3)
        return caches

    for found, wanted in zip(appended(False), appended(True)):
        assert_same_bytes(found, wanted)


def test_caches_of_inference_mode() -> None:
    with torch.inference_mode():
        cache = torch.zeros(2, 20, 2, 8)
    mixed = CACHE[:, :20].clone(), cache
    with pytest.raises(InputError, match="was made in inference mode, and can be written to only there"):
        flash_attn_with_kvcache(Q, *mixed, NEW, NEW, cache_seqlens=3)
    assert_same_bytes(mixed[0], CACHE[:, :20])
    with torch.inference_mode():
        flash_attn_with_kvcache(Q, cache, cache, NEW, NEW, cache_seqlens=3)
    assert_same_bytes(cache[:, 3:6], NEW)


@pytest.mark.parametrize("hidden", [0, -1, 2**31 - 1], ids=["another's", "none", "beyond"])
def test_pages_before_a_window_are_free(hidden: int) -> None:
    """Sequence 0 has 60 keys and appends 3, of which rows see 16 back: its first two pages are others'."""
    own, given = (
        int32(0, 1, 2, 3, 4, -1, -1, -1).view(2, 4),
        int32(hidden, hidden, 2, 3, 0, 9, 9, 9).view(2, 4),
    )
    pages, how = draw(6, 16, 2, 8), {"cache_seqlens": int32(60, 3), "causal": True, "window_size": (16, 0)}
    moved = pages.clone()
    moved[0] = pages[4]  # sequence 1 has it now
    found, wanted = (
        flash_attn_with_kvcache(Q, x, x, NEW, NEW, page_table=table, **how)
        for x, table in ((moved, given), (pages, own))
    )
    assert_same_bytes(found, wanted)
    used = {"seqused_k": int32(63, 6), "causal": True, "window_size": (16, 0)}
    for q, bounds in ((Q, None), (Q.flatten(0, 1), int32(0, 3, 6))):
        found = flash_attn_varlen_func(q, moved, moved, bounds, page_table=given, **used)
        assert_same_bytes(found, flash_attn_varlen_func(q, pages, pages, bounds, page_table=own, **used))
    seen = given.clone()
    seen[0, 2] = hidden
    wide = {**how, "window_size": (31, 0)}  # 63 - 3 - 31 = 29: a key of the second page
    for table, asked in ((seen, how), (given, wide)):
        with pytest.raises(InputError, match="page_table has"):
            flash_attn_with_kvcache(Q, moved, moved, NEW, NEW, page_table=table, **asked)


def test_one_number_for_all_and_none() -> None:
    q, k, v = draw(2, 3, 4, 8), draw(2, 9, 2, 8, seed=1), draw(2, 9, 2, 8, seed=2)
    full = flash_attn_with_kvcache(q, k, v, causal=True)
    assert_same_bytes(full, flash_attn_func(q, k, v, causal=True))
    some = flash_attn_with_kvcache(q, k, v, cache_seqlens=5, return_softmax_lse=True)
    for a, b in zip(some, flash_attn_func(q, k[:, :5], v[:, :5], return_lse=True)):
        assert_same_bytes(a, b)
    assert not flash_attn_with_kvcache(q, k, v, cache_seqlens=0).any()


def test_a_cache_without_tokens() -> None:
    empty = CACHE[:, :0]
    out, lse = flash_attn_with_kvcache(Q, empty, empty, return_lse=True)
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert not flash_attn_with_kvcache(Q, empty, empty, cache_seqlens=int32(0, 0)).any()


def test_a_default_device_is_not_that_of_a_cache() -> None:
    cache = torch.zeros(2, 50, 2, 8)
    with torch.device("meta"):
        flash_attn_with_kvcache(Q, cache, cache, NEW, NEW, cache_seqlens=4, causal=True)
    assert_same_bytes(cache[:, 4:7], NEW)


def test_sides_of_masks_that_no_sequence_reaches_are_open() -> None:
    """2^31 - 1 would overflow where kernels add to it."""
    used = int32(32, 32)
    tensors = CachedTensors(Q, CACHE, CACHE, used, torch.arange(2, dtype=torch.int32)[:, None])
    assert _problem(tensors, AttentionSpec(0.1, 3, 2**31 - 1), -1).sides == (3, -1)
    window = [flash_attn_with_kvcache(Q, CACHE, CACHE, window_size=(3, n)) for n in (2**31 - 1, -1)]
    assert_same_bytes(*window)


@pytest.mark.parametrize(("at", "page"), [(3, -1), (3, 4), (31, 1), (-1, 1)])
def test_operators_write_nothing_out_of_place(at: int, page: int) -> None:
    """Compiled code calls them without the checks of the public function."""
    cache, table = torch.zeros(4, 16, 2, 8), int32(page, 2, 3, 0).view(2, 2)
    with pytest.raises(InputError, match=str(page if at == 3 else at)):
        APPEND(cache, cache, NEW, NEW, int32(0, at), table.flip(0))
    assert not cache.any()


def test_no_sequence() -> None:
    out, lse = flash_attn_with_kvcache(Q[:0], CACHE[:0], CACHE[:0], return_lse=True)
    assert (out.shape, lse.shape) == ((0, 3, 4, 8), (0, 4, 3))


def test_names_of_other_versions() -> None:
    """FlashAttention-2 says block_table, FlashAttention-3 page_table; what asks for nothing is accepted."""
    k, table = draw(4, 16, 2, 8, seed=1), int32(3, 1, 0, 2).view(2, 2)
    q, used = draw(2, 3, 4, 8), int32(20, 32)
    wanted = flash_attn_with_kvcache(q, k, k, cache_seqlens=used, page_table=table)
    plain = {"rotary_cos": None, "rotary_interleaved": True, "num_splits": 0, "cache_leftpad": None}
    plain |= dict.fromkeys(("alibi_slopes", "cu_seqlens_q", "max_seqlen_q", "scheduler_metadata"))
    found = flash_attn_with_kvcache(q, k, k, cache_seqlens=used, block_table=table, **plain)
    assert_same_bytes(found, wanted)
    packed = flash_attn_varlen_func(
        q.flatten(0, 1), k, k, int32(0, 3, 6), None, 3, 32, seqused_k=used, block_table=table
    )
    assert_same_bytes(packed, wanted.flatten(0, 1))
    dense = flash_attn_varlen_func(q, k, k, seqused_k=used, page_table=table)
    assert_same_bytes(dense, wanted)


def test_shared_pages_may_be_read_while_others_are_written() -> None:
    """A prefix of whole pages; without new tokens any place may be given twice."""
    table, pages = int32(3, 1, 3, 2).view(2, 2), (PAGES.clone(), PAGES.clone())
    flash_attn_with_kvcache(Q, *pages, NEW, NEW, cache_seqlens=16, page_table=table)
    assert_same_bytes(pages[0][1, :3], NEW[0])
    assert (
        flash_attn_with_kvcache(Q, CACHE, CACHE, cache_seqlens=3, cache_batch_idx=int32(1, 1)).shape
        == Q.shape
    )
    with pytest.raises(InputError, match=r"page_table has 3 at \(0, 0\) and at \(1, 0\)"):
        flash_attn_with_kvcache(Q, *pages, NEW, NEW, cache_seqlens=int32(15, 20), page_table=table)


def test_autocast_casts_what_is_not_a_cache() -> None:
    """The bytes are those of a row in training, under autocast as without."""
    q, k = draw(1, 20, 4, 16), draw(1, 20, 2, 16, seed=1)
    cache = torch.zeros(1, 32, 2, 16, dtype=torch.bfloat16)
    wide = cache.float()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = flash_attn_func(q, k, k, causal=True)
        found = flash_attn_with_kvcache(q, cache, cache, k, k, cache_seqlens=0, causal=True)
        assert_same_bytes(found, wanted)
        assert found.dtype == torch.bfloat16
        table, used, ends = int32(0)[None], int32(20), int32(0, 20)
        assert_same_bytes(
            flash_attn_varlen_func(q[0], cache, cache, ends, seqused_k=used, page_table=table, causal=True),
            wanted[0],
        )
        why = "has dtype torch.float32, q has torch.bfloat16 .under autocast to torch.bfloat16, which"
        with pytest.raises(InputError, match=f"k_cache {why}"):
            flash_attn_with_kvcache(q, wide, wide, k, k, cache_seqlens=0)
        with pytest.raises(InputError, match=f"k {why}"):
            flash_attn_varlen_func(q[0], wide, wide, ends, seqused_k=used, page_table=table)
    assert not wide.any()


def test_a_call_in_a_mode_leaves_nothing_behind() -> None:
    """No tensor of one call, fake or traced, reaches another one with the same batch."""
    q, cache = Q[:1].repeat(11, 1, 1, 1), CACHE[:1].repeat(11, 1, 1, 1)

    def call(q: Tensor) -> Tensor:
        found = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=3)
        assert isinstance(found, Tensor)
        return found

    with FakeTensorMode(allow_non_fake_inputs=True), suppress(Exception):
        call(q)
    with suppress(Exception):
        make_fx(call, tracing_mode="fake")(q)
    with suppress(Exception):
        torch.func.functionalize(call)(q)
    found = call(q)
    assert type(found) is Tensor
    assert_same_bytes(found, call(q))


def test_an_append_is_a_change_that_autograd_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel of a GPU writes: behind PyTorch's back."""

    def behind(cache: Any, new: Any, at: Tensor, table: Tensor) -> None:
        for where, what in zip(cache, new):
            where.numpy()[:, 3:6] = what.numpy()

    monkeypatch.setattr("dash_attn.backends.cpu.cached.append", behind)
    cache, q = CACHE.clone(), Q.clone().requires_grad_()
    out = flash_attn_func(q, cache[:, :8], cache[:, :8])
    flash_attn_with_kvcache(Q, cache, cache, NEW, NEW, cache_seqlens=3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    with torch.inference_mode():
        inside = CACHE.clone()
    flash_attn_with_kvcache(Q, inside, inside, NEW, NEW, cache_seqlens=3)
    assert_same_bytes(inside[:, 3:6], NEW)


# Operators


def test_opcheck() -> None:
    places = (USED, TABLE, None)
    opcheck(CACHED, (Q, PAGES, PAGES, *NO_AUX, *places, *AttentionSpec(0.1, -1, 0), -1))
    packed = (USED, TABLE, int32(0, 3, 6))
    opcheck(CACHED, (Q.flatten(0, 1), PAGES, PAGES, *NO_AUX, *packed, *AttentionSpec(0.1, -1, 0), -1))
    opcheck(APPEND, (PAGES.clone(), PAGES.clone(), NEW, NEW, USED, TABLE))


def test_compiled_calls_have_the_same_bytes() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        return flash_attn_with_kvcache(2 * q, k, v, NEW, NEW, cache_seqlens=at, causal=True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for at in (int32(3, 29), int32(0, 7)):
        one, other = ([CACHE.clone(), CACHE.clone()] for _ in range(2))
        assert_same_bytes(compiled(Q, *one, at), step(Q, *other, at))
        assert_same_bytes(one[0], other[0])


@pytest.mark.parametrize("form", ["contiguous", "pages", "packed"])
@pytest.mark.parametrize("dynamic", ["later", "at once", "lengths alone"])
def test_compiled_calls_of_any_batch(form: str, dynamic: str) -> None:
    """As a server has them: the next step has other sequences, and is not compiled anew for each."""

    def step(q: Tensor, k: Tensor, new: Tensor, at: Tensor, table: Tensor, bounds: Tensor) -> Tensor:
        if form == "packed":
            return flash_attn_varlen_func(q, k, k, bounds, seqused_k=at, page_table=table, causal=True)
        pages = {"page_table": table} if form == "pages" else {}
        return flash_attn_with_kvcache(q, k, k, new, new, cache_seqlens=at, causal=True, **pages)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=dynamic == "at once" or None)
    for batch in (2, 3, 4, 5):
        pages = form != "contiguous"
        k, at = draw(2 * batch if pages else batch, 16, 2, 8), torch.arange(batch, dtype=torch.int32)
        table = torch.arange(2 * batch, dtype=torch.int32).view(batch, 2)
        q, new, bounds = (
            draw(batch, 1, 4, 8),
            draw(batch, 1, 2, 8),
            torch.arange(batch + 1, dtype=torch.int32),
        )
        if form == "packed":
            q = q.flatten(0, 1)
        if dynamic == "lengths alone":
            for x in (at, table):
                torch._dynamo.maybe_mark_dynamic(x, 0)
        found = compiled(q, k.clone(), new, at, table, bounds)
        assert_same_bytes(found, step(q, k.clone(), new, at, table, bounds))
    assert counter.frame_count < 4


# What a GPU is told

PROBLEM = CachedProblem(3, 32, 8, 128, 128, "bfloat16", (-1, 0), -1, 300, 300, 64, 100, 20)


def test_tiles_are_counted_by_maxima() -> None:
    """Whatever the lengths: tiles of a sequence are numbered from bounds * group // rows + its number on."""
    rng = random.Random(0)
    for _ in range(200):
        lengths = [rng.choice((0, 1, rng.randint(0, 300))) for _ in range(rng.randint(1, 5))]
        group, rows, total = rng.randint(1, 9), rng.choice((64, 128)), sum(lengths)
        problem = PROBLEM._replace(batch=len(lengths), heads=8 * group, total_q=total)
        first = [sum(lengths[:i]) * group // rows + i for i in range(len(lengths) + 1)]
        first[-1] = problem.q_tiles(rows)
        for begin, end, length in zip(first, first[1:], lengths):
            assert begin + -(-length * group // rows) <= end
    assert PROBLEM._replace(seqlen_q=33).q_tiles(128) == 3 * 2


def test_variants() -> None:
    """Few rows, or many; pages that are whole tiles, or less. None of it decides bits."""
    assert config_of(PROBLEM) == cached_config(128, "bf16", False, 16)
    assert config_of(PROBLEM._replace(longest_q=16)) == cached_config(128, "bf16", True, 16)
    assert config_of(PROBLEM._replace(total_q=3, longest_q=3, page_size=256)).piece == 128
    assert config_of(PROBLEM._replace(most_pages=1)).piece == 128
    assert config_of(PROBLEM._replace(head_dim=72, head_dim_v=40)).head_dim == 128
    for changed in ({"piece": 24}, {"sink": False}, {"trace": True}):
        with pytest.raises(ValueError, match="piece|sink"):
            CachedConfig(**({"head_dim": 64} | changed))  # type: ignore[arg-type]

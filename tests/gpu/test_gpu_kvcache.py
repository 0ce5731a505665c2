"""Caches of keys on a GPU: lengths and pages that the host never reads, with the bytes of training."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from cuda_tensors import draw, int32
from torch import Tensor

from dash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from dash_attn.backends.cached import CachedProblem, CachedTensors
from dash_attn.backends.sm90 import backend as sm90_backend
from dash_attn.backends.sm90.cached import launch as cached_launch
from dash_attn.backends.sm90.cached.launch import Cached, config_of
from dash_attn.ops.policies import forget
from dash_attn.scores import Scores
from dash_attn.testing import assert_same_bytes, same_bytes
from kvcache_cases import History, random_history

PROBLEMS = int(os.environ.get("DASH_ATTN_PROBLEMS", "20"))
STEPS = int(os.environ.get("DASH_ATTN_STEPS", "40"))
BACKENDS = ("sm90", "triton")
BF16 = torch.bfloat16


@pytest.fixture
def as_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every call runs the kernel for many rows, those of few rows, too."""
    monkeypatch.setattr(cached_launch, "_fill_tiles", lambda *_: True)
    monkeypatch.setattr(sm90_backend, "spreads", lambda *_: False)
    forget()
    yield
    forget()


@pytest.mark.parametrize("number", range(PROBLEMS))
@pytest.mark.parametrize("backend", BACKENDS)
def test_histories(backend: str, number: int) -> None:
    """NaN or infinity lie behind the used keys; prefixes are shared; chunks and steps are mixed."""
    dtype = BF16 if number % 3 else torch.float16
    longest = 3000 if number % 4 else 400
    random_history(number, "cuda", dtype, longest, head_dims=(64, 72, 128), backend=backend).run()


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("backend", BACKENDS)
def test_histories_where_v_has_fewer_columns(backend: str, number: int) -> None:
    dtype = BF16 if number % 3 else torch.float16
    dims = ((192, 128), (136, 40))
    random_history(number, "cuda", dtype, 1000, head_dims=dims, backend=backend).run()


@pytest.mark.parametrize("number", range(8))
def test_histories_with_head_dims_to_256(number: int) -> None:
    dtype = BF16 if number % 3 else torch.float16
    dims = (256, 160, (200, 240), (256, 64))
    random_history(number, "cuda", dtype, 9000, head_dims=dims, backend="sm90").run()


@pytest.mark.parametrize("number", range(PROBLEMS))
def test_histories_of_chunks(number: int, as_chunks: None) -> None:
    dtype = BF16 if number % 3 else torch.float16
    dims = (64, 72, 96, 128, (192, 128), (136, 40), 256)
    longest = (400, 3000, 9000)[number % 3]
    random_history(number, "cuda", dtype, longest, head_dims=dims, backend="sm90").run()


@pytest.mark.parametrize("page_size", [0, 16, 64, 256])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_histories(head_dim: int, page_size: int) -> None:
    """Several segments, which are split and folded; beside them short ones."""
    rng = random.Random(head_dim + page_size)
    how = {"causal": True, "learnable_sink": torch.linspace(-1, 3, 8, device="cuda")}
    lengths = [20_001, 9000, 30, 8193]
    history = History(rng, "cuda", BF16, lengths, (8, 2), head_dim, page_size, how, "sm90")
    history.run()


def paged(length: int, batch: int, page_size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A cache of pages full of keys, and its table."""
    count = -(-length // page_size)
    numbers = torch.randperm(batch * count, generator=torch.Generator().manual_seed(seed))
    table = numbers.view(batch, count).int().cuda()
    k, v = (draw(batch * count, page_size, 2, 128, seed=seed + 1 + i) for i in range(2))
    return k, v, table


def gathered(x: Tensor, table: Tensor, sequence: int, length: int) -> Tensor:
    return x[table[sequence].long()].flatten(0, 1)[None, :length]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [16, 128])
def test_a_captured_graph_replays_lengths_that_grow(page_size: int, backend: str) -> None:
    """The host reads nothing, and every step has the bytes of an eager one, and of one forward."""
    most = 17_000 + STEPS
    k, v, table = paged(most, 3, page_size)
    q, new = draw(3, 1, 8, 128, seed=7), draw(3, 1, 2, 128, seed=8)
    at = int32(5, 8180, 16_500)
    how = {"causal": True, "page_table": table, "backend": backend, "return_lse": True}
    flash_attn_with_kvcache(q, k, v, cache_seqlens=at, **how)
    flash_attn_with_kvcache(q, k.clone(), v.clone(), new, new, cache_seqlens=at, **how)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=at, **how)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for step in range(STEPS):
        q.copy_(draw(3, 1, 8, 128, seed=100 + step))
        new.copy_(draw(3, 1, 2, 128, seed=200 + step))
        graph.replay()
        eager = flash_attn_with_kvcache(q, k, v, cache_seqlens=at + 1, **how)
        assert all(same_bytes(a, b) for a, b in zip(found, eager)), f"step {step}"
        at += 1
    for i, length in enumerate(at.tolist()):
        keys = (gathered(x, table, i, length) for x in (k, v))
        wanted = flash_attn_func(q[i : i + 1], *keys, causal=True, backend=backend, return_lse=True)
        assert all(same_bytes(a[i : i + 1], b) for a, b in zip(found, wanted))


def test_values_out_of_range_are_clamped_for_chunks(as_chunks: None) -> None:
    test_values_out_of_range_are_clamped("sm90")


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_out_of_range_are_clamped(backend: str) -> None:
    """Lengths and pages that only the device knows: nothing is read or written elsewhere."""
    k, v, table = paged(256, 4, 64)
    before, q = (k.clone(), v.clone()), draw(4, 2, 8, 128, seed=5)
    wild = table.clone()
    wild[0, 1], wild[1, 2], wild[3] = -5, 2**31 - 1, 10**6
    lengths = int32(200, 10**9, -3, 77)
    out, lse = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, page_table=wild, causal=True, backend=backend, return_lse=True
    )
    clamped = wild.clamp(0, k.shape[0] - 1)
    for i, length in enumerate((200, 256, 0, 77)):
        keys = (gathered(x, clamped, i, length) for x in (k, v))
        if length:
            wanted = flash_attn_func(q[i : i + 1], *keys, causal=True, backend=backend, return_lse=True)
            assert same_bytes(out[i : i + 1], wanted[0])
            assert same_bytes(lse[i : i + 1], wanted[1])
    assert not out[2].any()
    assert (lse[2] == -torch.inf).all()
    new = draw(4, 2, 2, 128, seed=9)
    flash_attn_with_kvcache(
        q, k, v, new, new, cache_seqlens=int32(255, 10**9, -3, 0), page_table=wild, backend=backend
    )
    last = table[0, 3], 63  # of sequence 0 the first new token, and of the others nothing
    assert same_bytes(k[last], new[0, 0])
    k[last], v[last] = before[0][last], before[1][last]
    assert same_bytes(k, before[0])
    assert same_bytes(v, before[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_bounds_of_rows_out_of_range_are_clamped(backend: str) -> None:
    k, v, table = paged(256, 3, 64)
    q, how = draw(10, 8, 128), {"seqused_k": int32(50, 60, 70), "page_table": table, "backend": backend}
    wanted = flash_attn_varlen_func(q, k, v, int32(0, 4, 7, 10), causal=True, **how)
    found = flash_attn_varlen_func(q, k, v, int32(-9, 4, 7, 10**6), causal=True, **how)
    assert same_bytes(found, wanted)
    flash_attn_varlen_func(q, k, v, int32(9, 4, 10**9, -1), causal=True, **how)
    torch.cuda.synchronize()


def prepared(rows: int, **config: object) -> tuple[CachedProblem, CachedTensors]:
    """Two sequences of 20,000 and 300 keys."""
    k, v, table = paged(20_000, 2, 64, seed=3)
    q = draw(2, rows, 8, 128, seed=4)
    problem = CachedProblem(
        2, 8, 2, 128, 128, "bfloat16", (-1, 0), rows, 2 * rows, rows, 64, k.shape[0], table.shape[1]
    )
    return problem, CachedTensors(q, k, v, int32(20_000, 300), table)


@pytest.mark.parametrize("rows", [1, 40])
def test_placement_decides_no_bit(rows: int) -> None:
    """Blocks, kernel variants, splits or none. Another segment is other numerics: the bytes differ."""
    problem, tensors = prepared(rows)
    config, device = config_of(problem), tensors.q.device
    wanted = Cached(problem, device).forward(tensors, Scores(0.1))
    for blocks in (1, 3, 40, 1000):
        found = Cached(problem, device, blocks=blocks).forward(tensors, Scores(0.1))
        assert all(same_bytes(a, b) for a, b in zip(found, wanted)), blocks
    others = replace(config, warpgroups=3 - config.warpgroups, kv_stages=2)
    found = Cached(problem, device, config=others).forward(tensors, Scores(0.1))
    assert all(same_bytes(a, b) for a, b in zip(found, wanted))
    other = Cached(problem, device, config=replace(config, segment=2048)).forward(tensors, Scores(0.1))
    assert not same_bytes(other[0], wanted[0])


@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9, 16])
def test_any_number_of_rows(rows: int, softcap: float) -> None:
    """4 to 64 per kv head: some, none or all of a warp's or thread's. Whole, and split into segments."""
    q, k, v = draw(3, 9000, 32, 128), draw(3, 9000, 8, 128, seed=1), draw(3, 9000, 8, 128, seed=2)
    of_training = flash_attn_func(q, k, v, causal=True, softcap=softcap, return_lse=True)
    mine = q[:, -rows:].contiguous()
    problem = CachedProblem(3, 32, 8, 128, 128, "bfloat16", (-1, 0), rows, 3 * rows, rows, k.shape[1], 3, 1)
    tensors = CachedTensors(mine, k, v, int32(9000, 9000, 9000), int32(0, 1, 2)[:, None])
    assert config_of(problem).warpgroups == 1
    for blocks in (2, 132):
        out, lse = Cached(problem, q.device, blocks=blocks).forward(
            tensors, Scores(128**-0.5, softcap=softcap)
        )
        assert_same_bytes(out, of_training[0][:, -rows:])
        assert_same_bytes(lse, of_training[1][:, :, -rows:])


def test_what_is_the_same_in_every_call_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor that PyTorch makes is a launch more, and a decode takes as long as a few launches."""
    q, cache, used = draw(8, 1, 8, 128), draw(8, 256, 2, 128), torch.full((8,), 200).int().cuda()

    def call() -> None:
        flash_attn_with_kvcache(q, cache, cache, cache_seqlens=used, backend="sm90")

    def refuse(*given: object, **named: object) -> Tensor:
        raise AssertionError("made anew")

    call()
    for name in ("arange", "full"):
        monkeypatch.setattr(torch, name, refuse)
    call()
    monkeypatch.setattr("dash_attn.backends.cuda.upload.constant", lambda words, device: None)
    with pytest.raises(AssertionError, match="made anew"):  # the control
        call()


def test_a_first_call_of_its_shape_may_be_captured() -> None:
    """Nothing that later calls would find is left by a capture, whose memory belongs to its graph."""
    cache = draw(19, 256, 2, 128)
    q, used = draw(19, 1, 8, 128, seed=1), torch.arange(200, 219, device="cuda").int()

    def call() -> Tensor:
        return flash_attn_with_kvcache(q, cache, cache, cache_seqlens=used, backend="sm90")

    flash_attn_with_kvcache(q[:3], cache[:3], cache[:3], cache_seqlens=used[:3], backend="sm90")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    graph.replay()
    first = captured.clone()
    del graph
    torch.cuda.empty_cache()
    other = torch.cuda.Stream()
    wanted = call()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        found = call()
    torch.cuda.synchronize()
    assert_same_bytes(first, wanted)
    assert_same_bytes(found, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_sequences_and_caches(backend: str) -> None:
    q, cache = draw(2, 3, 8, 128), torch.full((2, 0, 2, 128), torch.nan, device="cuda", dtype=BF16)
    out, lse = flash_attn_with_kvcache(q, cache, cache, return_lse=True, backend=backend)
    assert not out.any()
    assert (lse == -torch.inf).all()
    k, v, table = paged(128, 3, 64)
    used, ends = int32(0, 100, 0), int32(0, 0, 4, 6)
    out = flash_attn_varlen_func(
        draw(6, 8, 128), k, v, ends, seqused_k=used, page_table=table, causal=True, backend=backend
    )
    assert not out[4:].any()
    assert out[:4].any()


def test_one_long_sequence_beside_many_short_ones() -> None:
    """A million keys beside 200 sequences of ten, under a captured graph."""
    page, batch = 256, 201
    pages = 4000
    k, v = (draw(pages, page, 1, 128, seed=i) for i in (1, 2))
    table = torch.zeros(batch, 3907, dtype=torch.int32, device="cuda")
    table[0] = torch.arange(3907)
    table[1:, 0] = torch.arange(batch - 1) % 93 + 3907
    used = torch.full((batch,), 10, dtype=torch.int32, device="cuda")
    used[0] = 1_000_000
    q = draw(batch, 1, 8, 128, seed=3)
    found = flash_attn_with_kvcache(q, k, v, cache_seqlens=used, page_table=table, backend="sm90")
    for i, length in ((0, 1_000_000), (1, 10), (200, 10)):
        keys = (gathered(x, table, i, length) for x in (k, v))
        assert same_bytes(found[i : i + 1], flash_attn_func(q[i : i + 1], *keys, backend="sm90"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_calls_have_the_same_bytes(backend: str) -> None:
    k, v, table = paged(256, 2, 64)
    q, new, at = draw(2, 1, 8, 128), draw(2, 1, 2, 128, seed=1), int32(9, 100)

    def step(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        how = {"cache_seqlens": at, "page_table": table, "causal": True, "backend": backend}
        return flash_attn_with_kvcache(2 * q, k, v, new, new, **how)

    copies = [(k.clone(), v.clone()) for _ in range(2)]
    with torch.no_grad():
        wanted = step(q, *copies[0], at)
        found = torch.compile(step, fullgraph=True, backend="aot_eager")(q, *copies[1], at)
    assert_same_bytes(found, wanted)
    assert_same_bytes(copies[0][0], copies[1][0])


def test_a_cache_is_not_copied() -> None:
    k, v, table = paged(16_384, 8, 64)
    q, at = draw(8, 1, 8, 128), torch.full((8,), 16_000, dtype=torch.int32, device="cuda")
    flash_attn_with_kvcache(q, k, v, cache_seqlens=at, page_table=table)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    flash_attn_with_kvcache(q, k, v, cache_seqlens=at, page_table=table)
    assert torch.cuda.max_memory_allocated() - before < k.numel()

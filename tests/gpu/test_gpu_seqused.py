"""``seqused_k`` on a GPU: the bytes of the used keys alone, whatever lies behind them, and no copy."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch
from cuda_tensors import draw, int32
from torch import Tensor
from torch.library import opcheck

from dash_attn import flash_attn_func, flash_attn_varlen_func
from dash_attn.backends.base import NO_AUX
from dash_attn.backends.cuda.upload import loadable
from dash_attn.errors import InputError
from dash_attn.ops.operators import USED
from dash_attn.spec import AttentionSpec
from dash_attn.testing import same_bytes

BAD = (float("nan"), float("inf"), -float("inf"))
MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window_size": (300, 0)}}
LENGTHS = {"three": (130, 0, 700), "one": (333,), "long": (17_000, 8193, 128)}
PLACES = ("dense", "transposed", "packed")


def ends_of(lengths: list[int]) -> Tensor:
    return int32(*accumulate(lengths, initial=0))


def placed(keys: list[Tensor], place: str, rows: int, bad: float) -> tuple[Tensor, Tensor | None]:
    """A cache with the keys of every sequence, ``bad`` behind them, and its cu_seqlens_k if it is packed."""
    heads, head_dim = keys[0].shape[1:]
    if place == "packed":
        # Places of different lengths, also some that are full.
        lengths = [len(x) + (7, 0, 131)[at % 3] for at, x in enumerate(keys)]
        cache, parts = keys[0].new_full((sum(lengths), heads, head_dim), bad), []
        for part, x in zip(cache.split(lengths), keys):
            part[: len(x)] = x
            parts.append(part)
        return cache, ends_of(lengths)
    shape = (heads, rows) if place == "transposed" else (rows, heads)
    cache = keys[0].new_full((len(keys), *shape, head_dim), bad)
    cache = cache.transpose(1, 2) if place == "transposed" else cache
    for part, x in zip(cache, keys):
        part[: len(x)] = x
    return cache, None


def check(q: list[Tensor], k: list[Tensor], v: list[Tensor], place: str, bad: float, **how: object) -> None:
    """Every sequence has the bytes it has alone, with packed and, if they are alike, with dense queries."""
    rows, used = max(map(len, k)) + 70, int32(*map(len, k))
    (cached_k, ends_k), (cached_v, _) = (placed(x, place, rows, bad) for x in (k, v))
    assert place == "packed" or loadable(cached_k) is cached_k
    wanted = [flash_attn_func(*(x[None] for x in one), return_lse=True, **how) for one in zip(q, k, v)]
    common = {"cu_seqlens_k": ends_k, "seqused_k": used, "return_lse": True, **how}
    ends_q = ends_of([len(x) for x in q])
    out, lse = flash_attn_varlen_func(torch.cat(q), cached_k, cached_v, ends_q, **common)
    sizes = [len(x) for x in q]
    for found, logsumexp, (alone, of_alone) in zip(out.split(sizes), lse.split(sizes, 1), wanted):
        assert same_bytes(found, alone[0])
        assert same_bytes(logsumexp.contiguous(), of_alone[0])
    if len(set(sizes)) == 1:
        out, lse = flash_attn_varlen_func(torch.stack(q), cached_k, cached_v, **common)
        assert same_bytes(out, torch.cat([alone for alone, _ in wanted]))
        assert same_bytes(lse, torch.cat([alone for _, alone in wanted]))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("seqlen_q", [1, 200])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_bytes_are_those_of_the_used_keys_alone(head_dim, lengths, seqlen_q, place, mask):
    """One query, or a chunk of them; of the long ones, the keys of one query are split into segments."""
    of_k = LENGTHS[lengths]
    for kv_heads in (1, 2):
        q = [draw(seqlen_q, 4, head_dim, seed=at) for at in range(len(of_k))]
        k, v = (
            [draw(length, kv_heads, head_dim, seed=seed + at) for at, length in enumerate(of_k)]
            for seed in (10, 20)
        )
        for bad in BAD[: 3 if lengths == "three" else 1]:
            check(q, k, v, place, bad, **MASKS[mask])


@pytest.mark.parametrize("number", range(20))
def test_random_lengths(number):
    rng = random.Random(number)
    head_dim, kv_heads, group = rng.choice((64, 128)), rng.choice((1, 2)), rng.choice((1, 3))
    of_k = [rng.choice((0, rng.randint(1, 300), rng.randint(1, 5000))) for _ in range(rng.randint(1, 5))]
    if not any(of_k):
        of_k[0] = 1
    q = [draw(rng.randint(0, 300), kv_heads * group, head_dim, seed=at) for at in range(len(of_k))]
    if not any(map(len, q)):
        q[0] = draw(1, kv_heads * group, head_dim)
    k, v = ([draw(n, kv_heads, head_dim, seed=seed + n) for n in of_k] for seed in (10, 20))
    window = rng.choice(((-1, -1), (-1, 0), (rng.randint(0, 2000), 0), (rng.randint(0, 99), 20)))
    check(q, k, v, rng.choice(PLACES), rng.choice(BAD), window_size=window)


def test_no_keys_at_all():
    q, cache = draw(2, 5, 4, 64), torch.full((2, 300, 2, 64), torch.nan, device="cuda").bfloat16()
    for k in (cache, cache[:, :0]):
        out, lse = flash_attn_varlen_func(q, k, k, seqused_k=int32(0, 0), causal=True, return_lse=True)
        assert not out.any()
        assert torch.equal(lse, torch.full_like(lse, -torch.inf))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_cache_is_not_copied(batch):
    """Not even the used part of its keys alone: that would be three tenths of it."""
    cache = torch.zeros(2, batch, 2, 16384, 128, device="cuda", dtype=torch.bfloat16).transpose(2, 3)
    q, used = draw(batch, 1, 4, 128), torch.full((batch,), 10000, dtype=torch.int32)
    flash_attn_varlen_func(q, *cache, seqused_k=used, causal=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    flash_attn_varlen_func(q, *cache, seqused_k=used, causal=True)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < cache.numel() * cache.element_size() // 4


def test_lengths_on_the_cpu_are_the_same_and_wait_for_nobody():
    q, cache = draw(3, 7, 4, 64), draw(3, 400, 2, 64, seed=1)
    used = int32(400, 33, 1)
    wanted = flash_attn_varlen_func(q, cache, cache, seqused_k=used)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = flash_attn_varlen_func(q, cache, cache, seqused_k=torch.tensor([400, 33, 1]).int())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same_bytes(found, wanted)


def test_lengths_that_grow_in_place_are_read_again():
    q, cache, used = draw(2, 1, 4, 64), draw(2, 300, 2, 64, seed=1), int32(40, 7)
    for _ in range(3):
        found = flash_attn_varlen_func(q, cache, cache, seqused_k=used, causal=True)
        for at, length in enumerate(used.tolist()):
            keys = cache[at : at + 1, :length]
            assert same_bytes(found[at : at + 1], flash_attn_func(q[at : at + 1], keys, keys, causal=True))
        used += 1


def test_a_captured_graph_replays_the_same_bytes():
    q, cache, used = draw(2, 3, 4, 64), draw(2, 300, 2, 64, seed=1), int32(200, 70)
    wanted = flash_attn_varlen_func(q, cache, cache, seqused_k=used, causal=True)
    others = used.clone()
    torch.cuda.synchronize()
    with (
        pytest.raises(InputError, match="seqused_k on cuda:0 cannot be read while a CUDA graph is captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        flash_attn_varlen_func(q, cache, cache, seqused_k=others, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = flash_attn_varlen_func(q, cache, cache, seqused_k=used, causal=True)
    graph.replay()
    assert same_bytes(found, wanted)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_calls_have_the_same_bytes(mode):
    def run(q, cache, used):
        return flash_attn_varlen_func(2 * q, cache, cache, seqused_k=used, causal=True)

    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, mode=mode)
    q, cache = draw(2, 3, 4, 64), draw(2, 300, 2, 64, seed=1)
    for lengths in ((200, 70), (300, 0), (17, 1)):
        with torch.no_grad():
            assert same_bytes(compiled(q, cache, int32(*lengths)), run(q, cache, int32(*lengths)))


def test_opcheck():
    q, cache = draw(2, 3, 4, 64), draw(2, 300, 2, 64, seed=1)
    opcheck(USED, (q, cache, cache, *NO_AUX, None, None, int32(200, 70), *AttentionSpec(0.1, -1, 0), -1, -1))


def test_what_is_refused():
    q, cache = draw(2, 3, 4, 64), draw(2, 300, 2, 64, seed=1)
    with pytest.raises(InputError, match="the backward does not have seqused_k"):
        flash_attn_varlen_func(q.requires_grad_(), cache, cache, seqused_k=int32(200, 70))
    with pytest.raises(InputError, match="seqused_k has 301 at 1, but sequence 1 has 300 keys"):
        flash_attn_varlen_func(q.detach(), cache, cache, seqused_k=int32(200, 301))


def test_generation_with_a_static_cache_has_the_bytes_of_a_growing_one():
    transformers = pytest.importorskip("transformers")
    from dash_attn.integrations.transformers import register

    register()
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=256, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    tokens = torch.randint(61, (2, 150), device="cuda")
    how = {
        "max_new_tokens": 9, "do_sample": False, "disable_compile": True, "pad_token_id": 0,
        "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip

    def generated(cache):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="dash")
        model = model.eval().to("cuda", torch.bfloat16)
        return model.generate(
            tokens, attention_mask=torch.ones_like(tokens), cache_implementation=cache, **how
        )

    fixed, growing = generated("static"), generated("dynamic")
    assert torch.equal(fixed.sequences, growing.sequences)
    assert all(same_bytes(a, b) for a, b in zip(fixed.logits, growing.logits))

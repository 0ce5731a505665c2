"""Small models of transformers: growing caches, those of fixed length, beams, continuous batching."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from token_cases import padding_of

from dash_attn import flash_attn_func
from dash_attn.errors import InputError
from dash_attn.integrations import NO_CONTINUOUS_BATCHING, release
from dash_attn.integrations.continuous import paged_attention_forward
from dash_attn.testing import assert_same_bytes

transformers = pytest.importorskip("transformers")

from transformers_models import (  # noqa: E402
    CONFIGS,
    SMALL,
    assert_close_with_a_cache,
    llama,
    model_of,
    qwen,
    sliding,
    tokens_of,
)

from dash_attn.integrations import transformers as dash  # noqa: E402


@CONFIGS
def test_generation_with_a_growing_cache(config):
    tokens, mask = tokens_of(), padding_of("left")

    def generated(implementation):
        model = model_of(config, implementation).eval()
        return model.generate(tokens, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)

    assert torch.equal(generated("dash"), generated("sdpa"))


@CONFIGS
def test_beams_and_a_prefix_that_is_used_again(config):
    """Beam search reorders the cache; a prompt goes on from the cache of its beginning."""
    prompt = tokens_of()

    def generated(implementation):
        model = model_of(config, implementation).eval()
        how = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        how["attention_mask"] = torch.ones_like(prompt)
        beams = model.generate(prompt, num_beams=3, **how)
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(prompt[:, :3], past_key_values=cache)
        return beams, model.generate(prompt, past_key_values=cache, **how)

    for found, expected in zip(generated("dash"), generated("sdpa")):
        assert torch.equal(found, expected)


def mistral():
    return transformers.MistralConfig(**SMALL, sliding_window=8)


def exaone():
    """Layers without a window have the attribute of that name, too."""
    return transformers.Exaone4Config(
        **{**SMALL, "num_hidden_layers": 4}, sliding_window=8, sliding_window_pattern=2
    )


def phimoe():
    """Layers neither pass their window nor have it."""
    return transformers.PhimoeConfig(**SMALL, sliding_window=8, num_local_experts=2)


@pytest.mark.parametrize("config", [llama, mistral, exaone, phimoe])
def test_continuous_batching(config, monkeypatch):
    """Requests of several lengths, whose prompts and steps stand beside one another."""
    from transformers.generation.continuous_batching import cache as paged_cache

    ends = release(transformers.__version__) >= NO_CONTINUOUS_BATCHING
    if ends or not hasattr(transformers, "ContinuousBatchingConfig"):
        pytest.skip(f"transformers {transformers.__version__} has another interface for continuous batching")
    # On a CPU it finds no memory for the cache.
    monkeypatch.setattr(
        paged_cache, "get_device_and_memory_breakdown", lambda *_: (torch.device("cpu"), 2**30, 0, 0)
    )
    prompts = [[1, 2, 3, 4, 5], [7, 8], list(range(10, 31))]

    def generated(implementation):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config(), attn_implementation=implementation)
        how = transformers.GenerationConfig(
            max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        batching = transformers.ContinuousBatchingConfig(
            num_blocks=64, max_batch_tokens=64, block_size=16, use_cuda_graph=False
        )
        found = model.eval().generate_batch(
            prompts, generation_config=how, continuous_batching_config=batching
        )
        return [found[name].generated_tokens for name in sorted(found)]

    assert generated("paged|dash") == generated("paged|sdpa")


@pytest.mark.parametrize("passed", [False, True])
@pytest.mark.parametrize("window", [None, 8])
def test_continuous_batching_with_a_block_table(window, passed):
    """One new token per request, which the call writes into its page."""
    pages = [torch.randn(6 * 16, 2, 8, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    cache = SimpleNamespace(
        key_cache=[None, pages[0]], value_cache=[None, pages[1]], block_size=16, num_key_value_heads=2,
        head_dim=8, layer_index_to_group_indices={3: (0, 1)}, sliding_windows={3: window or 1},
    )  # fmt: skip
    q, k, v = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 8)
    table, ends = torch.tensor([[[4, 1], [2, -1]]]).int(), torch.tensor([0, 20, 28]).int()
    module = SimpleNamespace(layer_idx=3, sliding_window=5)  # not this layer's
    how = {"sliding_window": window} if passed else {}
    out, _ = paged_attention_forward(
        module, q, k, v, None, cache=cache, cu_seq_lens_q=None, cu_seq_lens_k=ends, block_table=table, **how
    )
    sides = (-1, -1) if window is None else (window - 1, 0)
    for i, (numbers, length) in enumerate((([4, 1], 20), ([2], 8))):
        keys, values = (x.view(6, 16, 2, 8)[numbers].flatten(0, 1)[None, :length] for x in pages)
        assert_same_bytes(keys[0, -1], k[0, :, i])
        wanted = flash_attn_func(
            q[:, :, i, None].transpose(1, 2), keys, values, causal=True, window_size=sides
        )
        assert_same_bytes(out[:, i], wanted[:, 0])


def test_paged_attention_is_for_continuous_batching():
    with pytest.raises(InputError, match="paged attention is for continuous batching, got no cache"):
        paged_attention_forward(None, None, None, None, None)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"indices": torch.zeros(1, 2)}, r"indices is not supported .* \(1, 2\): .* no sparse attention"),
        ({"dropout": 0.1}, "dropout 0.1 is not supported by paged attention"),
        ({"sliding_window": 4}, "sliding_window 4, but the cache has 8 for this layer"),
    ],
)
def test_paged_attention_refuses_what_it_cannot_honour(how, message):
    module, cache = SimpleNamespace(layer_idx=0), SimpleNamespace(sliding_windows={0: 8})
    with pytest.raises(InputError, match=message):
        paged_attention_forward(module, None, None, None, None, cache=cache, **how)


def chunks_with(model, cache, tokens, mask=None, ends=(5, 6, 20, 33)):
    """Logits of a forward per chunk of tokens."""
    found = []
    for start, end in pairwise((0, *ends)):
        seen = None if mask is None else mask[:, :end]
        with torch.no_grad():
            found.append(model(tokens[:, start:end], attention_mask=seen, past_key_values=cache).logits)
    return found


@pytest.mark.parametrize("padded", [0, 3])
@pytest.mark.parametrize("config", [llama, qwen, sliding])
def test_a_cache_of_fixed_length_has_the_bytes_of_a_growing_one(config, padded):
    model, tokens = model_of(config).eval(), tokens_of()
    mask = torch.ones(3, 33, dtype=torch.long)
    mask[1, :padded] = 0
    expected = chunks_with(model, transformers.DynamicCache(config=model.config), tokens, mask)
    fixed = transformers.StaticCache(config=model.config, max_cache_len=64)
    for a, b in zip(chunks_with(model, fixed, tokens, mask), expected):
        assert_same_bytes(a, b)


def test_keys_of_a_cache_of_fixed_length_are_not_copied(monkeypatch):
    seen = []

    def attend(q, k, v, **how):
        seen.append((k.shape[1], k.untyped_storage().data_ptr(), v.untyped_storage().data_ptr()))
        return flash_attn_func(q, k, v, **how)

    monkeypatch.setattr(dash, "flash_attn_func", attend)
    model = model_of(qwen).eval()
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    chunks_with(model, cache, tokens_of(), ends=(5, 6))
    places = [
        tuple(x.untyped_storage().data_ptr() for x in (layer.keys, layer.values)) for layer in cache.layers
    ]
    assert seen == [(length, *place) for length in (5, 6) for place in places]


def test_what_lies_in_places_for_later_keys_may_be_anything():
    model, tokens = model_of(qwen).eval(), tokens_of()
    caches = [transformers.StaticCache(config=model.config, max_cache_len=64) for _ in range(2)]
    expected = chunks_with(model, caches[0], tokens)
    chunks_with(model, caches[1], tokens, ends=(5,))
    for layer in caches[1].layers:
        layer.keys[:, :, 5:] = layer.values[:, :, 5:] = torch.nan
    with torch.no_grad():
        found = model(tokens[:, 5:6], past_key_values=caches[1]).logits
    assert_same_bytes(found, expected[1])


STATIC = {"cache_implementation": "static", "disable_compile": True, "pad_token_id": 0, "do_sample": False}


@pytest.mark.parametrize("length", [8, 33])
@pytest.mark.parametrize("padded", [0, 3])
def test_a_static_cache_that_the_prompt_fills(length, padded):
    """``generate`` then makes the mask itself, and the model hands it to the mask function."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, :padded] = 0

    def generated(implementation):
        config = transformers.MistralConfig(**{**SMALL, "sliding_window": 8})
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
        return model.eval().generate(tokens_of(2, length), attention_mask=mask, max_new_tokens=12, **STATIC)

    assert torch.equal(generated("dash"), generated("eager"))


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma3Text"])
@pytest.mark.parametrize("padded", [0, 3])
def test_generation_with_a_static_cache_has_the_bytes_of_a_growing_one(name, padded):
    """The prompt does not fill it, also where only a window is kept."""
    change = {} if name == "Llama" else {"sliding_window": 8}
    config = getattr(transformers, f"{name}Config")(**SMALL, **change)
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[1, :padded] = 0

    def generated(cache):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="dash").eval()
        how = {
            **STATIC,
            "cache_implementation": cache,
            "output_logits": True,
            "return_dict_in_generate": True,
        }
        return model.generate(tokens_of(2, 5), attention_mask=mask, max_new_tokens=9, **how)

    fixed, growing = generated("static"), generated("dynamic")
    assert torch.equal(fixed.sequences, growing.sequences)
    for a, b in zip(fixed.logits, growing.logits):
        assert_same_bytes(a, b)


def test_chunks_with_a_growing_cache():
    config = transformers.Llama4TextConfig(
        **{**SMALL, "head_dim": 16, "num_local_experts": 1, "intermediate_size_mlp": 96,
           "attention_chunk_size": 8, "no_rope_layers": [1, 1], "interleave_moe_layer_step": 3}
    )  # fmt: skip
    tokens = tokens_of(1, 33)
    for first in (6, 7, 8, 15, 16):
        ends = [0, first, *range(first + 1, 20), 27, 33]
        assert_close_with_a_cache(config, *[(tokens[:, a:b], {}) for a, b in pairwise(ends)])

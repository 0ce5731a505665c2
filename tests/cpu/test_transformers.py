"""Small models of transformers, built from a config, with ``attn_implementation="dash"`` on the CPU."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from token_cases import LENGTHS, PACKED, padding_of
from torch import Tensor, nn

from dash_attn import flash_attn_func, flash_attn_varlen_func
from dash_attn.errors import InputError, UnavailableError
from dash_attn.integrations import NO_CONTINUOUS_BATCHING, callers, release, token_masks
from dash_attn.integrations.continuous import paged_attention_forward
from dash_attn.integrations.positions import Sizes, assert_separate, separate
from dash_attn.integrations.token_masks import NotATensorError, isolate, token_mask
from dash_attn.testing import assert_same_bytes, same_bytes

transformers = pytest.importorskip("transformers")

from dash_attn.integrations import transformers as dash  # noqa: E402
from model_cases import drop_alike  # noqa: E402

dash.register()

SMALL = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


def llama(**change):
    return transformers.LlamaConfig(**{**SMALL, "num_key_value_heads": 4, **change})


def qwen(**change):
    return transformers.Qwen3Config(**SMALL, head_dim=16, **change)


def sliding(**change):
    return transformers.Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=7, max_window_layers=1, **change
    )


def gemma(**change):
    """Scores are capped, and every other layer has a window."""
    return transformers.Gemma2Config(
        **SMALL,
        head_dim=16,
        attn_logit_softcapping=0.05,
        query_pre_attn_scalar=16,
        sliding_window=7,
        **change,
    )


def deepseek(**change):
    """Latent attention: heads of 24 in Q and K, and of 16 in V."""
    heads = {"num_key_value_heads": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    lora = {"q_lora_rank": 32, "kv_lora_rank": 32, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    return transformers.DeepseekV3Config(**{**SMALL, **heads}, **experts, **lora, **change)


CONFIGS = pytest.mark.parametrize("config", [llama, qwen, sliding])


def model_of(config, implementation="dash", **change):
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config(**change), attn_implementation=implementation)
    assert made.config._attn_implementation == implementation
    return made.train()


def tokens_of(batch=3, length=33, seed=1):
    return torch.randint(61, (batch, length), generator=torch.Generator().manual_seed(seed))


def run(model, tokens, mask=None, **inputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits (zero in padded rows) and the gradient of every weight."""
    model.zero_grad()
    logits = model(tokens, attention_mask=mask, **{"use_cache": False, **inputs}).logits
    if mask is not None and mask.ndim == 2:
        logits = logits * mask[..., None]
    logits.square().mean().backward()
    return logits.detach(), {name: w.grad for name, w in model.named_parameters()}


def assert_close_to_sdpa(config, tokens, mask=None, **inputs):
    logits, grads = run(model_of(config), tokens, mask, **inputs)
    expected, expected_grads = run(model_of(config, "sdpa"), tokens, mask, **inputs)
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)
    for name, grad in grads.items():
        assert torch.allclose(grad, expected_grads[name], atol=2e-6, rtol=1e-3), name


@CONFIGS
def test_logits_and_gradients_are_those_of_sdpa(config):
    assert_close_to_sdpa(config, tokens_of())


@CONFIGS
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches(config, side):
    assert_close_to_sdpa(config, tokens_of(), padding_of(side))


@CONFIGS
def test_packed_sequences_by_position_ids(config):
    positions = torch.cat([torch.arange(n) for n in (20, 1, 12)])[None].expand(3, -1)
    assert_close_to_sdpa(config, tokens_of(), position_ids=positions)


def assert_alone(model, logits, tokens, lengths=LENGTHS, rest=0):
    """Every document has the logits that it has alone in the model; the ``rest`` of the row is padding."""
    logits, tokens = (x[:, : x.shape[1] - rest] for x in (logits, tokens))
    with torch.no_grad():
        expected = [model(part, use_cache=False).logits for part in tokens.split(lengths, 1)]
    torch.testing.assert_close(logits, torch.cat(expected, 1), atol=2e-5, rtol=1e-4)


@CONFIGS
@pytest.mark.parametrize("rows", [1, 3])
def test_packed_sequences_with_a_cache(config, rows):
    """transformers looks for them without a cache only, and the cache is on unless it is turned off."""
    model, tokens, positions = model_of(config), tokens_of(), PACKED.expand(rows, -1)
    logits, grads = run(model, tokens, position_ids=positions)
    assert_alone(model, logits, tokens)
    for mask in (None, torch.ones_like(tokens)):
        again, again_grads = run(model, tokens, mask, position_ids=positions, use_cache=True)
        assert_same_bytes(again, logits)
        for name, grad in grads.items():
            assert_same_bytes(again_grads[name], grad, name)


@CONFIGS
@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_sequences_beside_padding(config, use_cache):
    model, tokens, mask = model_of(config), tokens_of(), torch.ones(3, 33, dtype=torch.long)
    mask[:, -5:] = 0
    positions = PACKED.masked_fill(mask[:1] == 0, 1)
    logits, _ = run(model, tokens, mask, position_ids=positions, use_cache=use_cache)
    assert_alone(model, logits, tokens, (20, 1, 7), rest=5)


JUMPS = {
    "ahead": [*range(10), *range(50, 73)],
    "one position for two tokens": [*range(5), *range(4, 32)],
    "every other": [*range(0, 66, 2)],
}


@pytest.mark.parametrize("jump", JUMPS)
@pytest.mark.parametrize("masked", [True, False])
def test_positions_that_do_not_fall_are_of_one_sequence(jump, masked):
    """With neither a mask nor a cache, transformers' own mask begins another one at each jump."""
    positions, tokens = torch.tensor([JUMPS[jump]]), tokens_of(1)
    mask = torch.ones_like(tokens) if masked else None
    for use_cache in (True, False):
        found, expected = (
            run(model_of(qwen, name), tokens, mask, position_ids=positions, use_cache=use_cache)
            for name in ("dash", "eager")
        )
        torch.testing.assert_close(found[0], expected[0], atol=2e-5, rtol=1e-4)
    sizes = Sizes(1, 33, 33)
    assert separate(positions, None, sizes) is None
    assert_separate(positions, None, sizes)  # compiled code


def test_zeros_begin_sequences_of_one_token():
    numbers = separate(torch.tensor([[0, 0, 0, 1, 3, 2]]), None, Sizes(1, 6, 6))
    assert numbers.diff().tolist() == [[1, 1, 0, 0, 1]]
    for positions in ([[0, 0]], [[3, 2]]):
        with pytest.raises(RuntimeError, match="position_ids pack sequences"):
            assert_separate(torch.tensor(positions), None, Sizes(1, 2, 2))


def test_positions_of_queries_say_nothing_of_the_keys_of_an_encoder():
    """Where there are as many keys as queries, too."""
    config = transformers.BertConfig(
        vocab_size=61, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, is_decoder=True, add_cross_attention=True,
    )  # fmt: skip
    tokens, mask, of_keys = tokens_of(), padding_of("left"), padding_of("right")
    encoded = torch.randn(3, 33, 64, generator=torch.Generator().manual_seed(0))
    how = {"encoder_hidden_states": encoded, "encoder_attention_mask": of_keys}
    how["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    found, expected = (run(model_of(lambda: config, name), tokens, mask, **how) for name in ("dash", "eager"))
    torch.testing.assert_close(found[0], expected[0], atol=2e-5, rtol=1e-4)


@CONFIGS
def test_positions_of_a_growing_cache(config):
    model, tokens, positions = model_of(config).eval(), tokens_of(), torch.arange(33)[None]
    with torch.no_grad():
        expected, cache, found = model(tokens, use_cache=False).logits, transformers.DynamicCache(), []
        for ends in pairwise((0, 13, 14, 21, 33)):
            part = slice(*ends)
            call = model(tokens[:, part], position_ids=positions[:, part], past_key_values=cache)
            found.append(call.logits)
        torch.testing.assert_close(torch.cat(found, 1), expected, atol=2e-5, rtol=1e-4)


def test_the_cache_of_packed_sequences_is_not_continued():
    model, tokens = model_of(qwen).eval(), tokens_of(1)

    def call(first, positions):
        cache = transformers.DynamicCache()
        with torch.no_grad():
            model(tokens[:, :20], position_ids=first, past_key_values=cache)
            model(tokens[:, 20 : 20 + positions.shape[1]], position_ids=positions, past_key_values=cache)

    one, two = torch.arange(20)[None], torch.cat([torch.arange(12), torch.arange(8)])[None]
    call(one, torch.arange(20, 33)[None])
    with pytest.raises(InputError, match="position_ids have 8 in row 0 after 20 cached tokens: not all"):
        call(two, torch.arange(8, 9)[None])
    with pytest.raises(InputError, match="go from 22 to 0 in row 0: packed sequences beside 20 cached keys"):
        call(one, torch.tensor([[20, 21, 22, 0, 1]]))


def test_positions_are_looked_at_once_for_all_layers_and_again_after_a_write(monkeypatch):
    calls = []
    counted = lambda *args: calls.append(args) or separate(*args)  # noqa: E731
    monkeypatch.setattr(token_masks, "separate", counted)
    model = model_of(lambda: transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": 4})).eval()
    with torch.inference_mode():
        for positions in (None, PACKED):
            calls.clear()
            model(tokens_of(1), position_ids=positions)
            assert len(calls) == 1
    made, positions = token_mask(1, 6, 6), torch.arange(6)[None]
    assert isolate(made, positions) is made
    positions[0, 4:] = torch.arange(2)
    assert isolate(made, positions).packing.cu_seqlens_k.tolist() == [0, 4, 6]
    other = torch.tensor([[0, 1, 0, 1, 2, 3]])
    other[0, 0] = 0
    assert other._version == positions._version  # of two tensors it says nothing
    assert isolate(made, other).packing.cu_seqlens_k.tolist() == [0, 2, 6]
    assert isolate(made, torch.arange(6)[None]) is made


@pytest.mark.filterwarnings("ignore::UserWarning")  # of graph breaks beside a tensor that is no leaf
@pytest.mark.parametrize(
    "side", ["left", *(pytest.param(x, marks=pytest.mark.slow) for x in ("right", None))]
)
def test_compiled_code_checks_positions_on_the_device(side):
    mask, model = padding_of(side), model_of(sliding).eval()
    expected = model(tokens_of(), attention_mask=mask).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    assert_same_bytes(compiled(tokens_of(), attention_mask=mask).logits, expected)
    with pytest.raises(
        RuntimeError, match="position_ids pack sequences that the mask of 'dash' attention does"
    ):
        compiled(tokens_of(), attention_mask=mask, position_ids=PACKED)
    if mask is None:
        packed = model(tokens_of(), position_ids=PACKED).logits
        again = compiled(tokens_of(), position_ids=PACKED, use_cache=False).logits
        assert_same_bytes(again, packed)


def test_packed_sequences_by_cu_seq_lens():
    tokens, lengths = tokens_of(1), (20, 1, 12)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    bounds = torch.tensor([0, 20, 21, 33], dtype=torch.int32)
    how = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 20, "max_length_k": 20}
    model = model_of(qwen)
    logits, grads = run(model, tokens, position_ids=positions, **how)
    again, expected = run(model, tokens, position_ids=positions)
    assert_same_bytes(logits, again)
    for name, grad in grads.items():
        assert_same_bytes(grad, expected[name], name)


def test_a_fully_padded_row():
    mask = padding_of("right")
    mask[1] = 0
    logits, grads = run(model_of(qwen), tokens_of(), mask)
    assert not logits[1].any()
    assert all(grad.isfinite().all() for grad in grads.values())


def test_chunks():
    text = {**SMALL, "head_dim": 16, "num_local_experts": 1, "intermediate_size_mlp": 96,
            "attention_chunk_size": 8, "no_rope_layers": [1, 1], "interleave_moe_layer_step": 3}  # fmt: skip

    def config(**change):
        return transformers.Llama4TextConfig(**text, **change)

    assert_close_to_sdpa(config, tokens_of())
    assert_close_to_sdpa(config, tokens_of(), padding_of("right"))


@pytest.mark.parametrize("side", ["left", "right", None])
def test_encoders(side):
    def outputs(implementation):
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=61, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
        )
        model = transformers.AutoModel.from_config(config, attn_implementation=implementation).eval()
        mask = padding_of(side)
        return model(tokens_of(), attention_mask=mask).last_hidden_state

    torch.testing.assert_close(outputs("dash"), outputs("sdpa"), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("side", ["left", "right", None])
def test_encoders_with_a_window(side):
    def outputs(implementation):
        torch.manual_seed(0)
        config = transformers.ModernBertConfig(
            vocab_size=61, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
            local_attention=8, global_attn_every_n_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            cls_token_id=1, sep_token_id=2,
        )  # fmt: skip
        model = transformers.AutoModel.from_config(config, attn_implementation=implementation).eval()
        mask = padding_of(side)
        out = model(tokens_of(), attention_mask=mask).last_hidden_state
        return out if mask is None else out * mask[..., None]

    torch.testing.assert_close(outputs("dash"), outputs("sdpa"), atol=2e-5, rtol=1e-4)


def test_an_encoders_padding_is_not_copied_away_where_no_gradient_is_wanted(monkeypatch):
    """Keys of a row are then its first ones, and ``seqused_k`` says how many."""
    used = []

    def attend(*tensors, seqused_k=None, **how):
        used.append(seqused_k if seqused_k is None else seqused_k.tolist())
        return flash_attn_varlen_func(*tensors, seqused_k=seqused_k, **how)

    monkeypatch.setattr(dash, "flash_attn_varlen_func", attend)
    q, k, v = (torch.randn(2, heads, 9, 16) for heads in (4, 2, 2))
    how = {"is_causal": False}
    for mask, lengths in (
        (torch.tensor([[1] * 9, [1] * 4 + [0] * 5]), [9, 4]),
        (torch.tensor([[1] * 9, [0] * 4 + [1] * 5]), None),
        (torch.tensor([[1] * 9, [0] * 9]), [9, 0]),
    ):
        found, _ = dash.attention_forward(torch.nn.Module(), q, k, v, mask, **how)
        wanted, _ = dash.attention_forward(torch.nn.Module(), q.clone().requires_grad_(), k, v, mask, **how)
        assert_same_bytes(found, wanted.detach())
        assert used[-2:] == [lengths, None]


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


@pytest.mark.parametrize("window", [None, 8])
def test_continuous_batching(window, monkeypatch):
    """Requests of several lengths, whose prompts and steps stand beside one another."""
    from transformers.generation.continuous_batching import cache as paged_cache

    ends = release(transformers.__version__) >= NO_CONTINUOUS_BATCHING
    if ends or not hasattr(transformers, "ContinuousBatchingConfig"):
        pytest.skip(f"transformers {transformers.__version__} has another interface for continuous batching")
    # On a CPU it finds no memory for the cache.
    monkeypatch.setattr(
        paged_cache, "get_device_and_memory_breakdown", lambda *_: (torch.device("cpu"), 2**30, 0, 0)
    )
    config = llama() if window is None else transformers.MistralConfig(**SMALL, sliding_window=window)
    prompts = [[1, 2, 3, 4, 5], [7, 8], [9] * 11]

    def generated(implementation):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
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
        head_dim=8, layer_index_to_group_indices={3: (0, 1)},
    )  # fmt: skip
    q, k, v = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 8)
    table, ends = torch.tensor([[[4, 1], [2, -1]]]).int(), torch.tensor([0, 20, 28]).int()
    module = SimpleNamespace(layer_idx=3, **({} if passed else {"sliding_window": window}))
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
        ({"sliding_window": 4}, "sliding_window 4, but that of the module is 8"),
    ],
)
def test_paged_attention_refuses_what_it_cannot_honour(how, message):
    module = SimpleNamespace(layer_idx=0, sliding_window=8)
    with pytest.raises(InputError, match=message):
        paged_attention_forward(module, None, None, None, None, cache=object(), **how)


def minimax():
    """Every layer attends to blocks of keys that the model chooses."""
    modeling = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
    shape = {**SMALL, "head_dim": 16, "rotary_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    index = {"index_n_heads": 2, "index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 2}
    sizes = {"dense_intermediate_size": 64, "shared_intermediate_size": 64, "index_local_blocks": 1}
    kinds = {"layer_types": ["minimax_m3_sparse"] * 2}
    config = modeling.MiniMaxM3VLTextConfig(
        **shape, **index, **sizes, **kinds, bos_token_id=1, eos_token_id=2
    )
    return modeling.MiniMaxM3VLTextModel._from_config(config, attn_implementation="dash")


def test_sparse_attention_is_refused():
    with pytest.raises(InputError, match="block_indices is not supported .*: 'dash' attention has no sparse"):
        minimax()(tokens_of(), use_cache=False)


def trained(implementation, steps=3, config=qwen):
    """Weights after a few steps of AdamW on padded batches, and the losses."""
    model, mask = model_of(config, implementation), padding_of("right")
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(steps):
        tokens = tokens_of(seed=step)
        labels = tokens.masked_fill(mask == 0, -100)
        loss = model(tokens, attention_mask=mask, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return model.state_dict(), torch.stack(losses)


def qwen_moe(**change):
    """The window is switched off: the model makes a mask of 0 tokens, which no layer uses."""
    experts = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4}
    return transformers.Qwen2MoeConfig(**SMALL, **experts, num_experts_per_tok=2, **change)


@pytest.mark.parametrize("side", [None, "left"])
def test_a_window_that_is_switched_off(side):
    assert_close_to_sdpa(qwen_moe, tokens_of(), None if side is None else padding_of(side))


def test_two_training_runs_end_in_the_same_bytes():
    first, second, other = (trained(name)[0] for name in ("dash", "dash", "sdpa"))
    for name, weight in first.items():
        assert_same_bytes(weight, second[name], name)
    # The control: another attention gives other bytes, so it was ours that ran.
    assert not all(same_bytes(weight, other[name]) for name, weight in first.items())


@pytest.mark.filterwarnings("ignore::UserWarning")  # of graph breaks beside a tensor that is no leaf
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_:FutureWarning")  # other names from 5.23 on
@pytest.mark.parametrize("side", ["left", None])
def test_checkpointing_and_compiling_change_no_byte(side):
    mask, model = padding_of(side), model_of(sliding)
    logits, grads = run(model, tokens_of(), mask)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again, again_grads = run(model, tokens_of(), mask)
    assert_same_bytes(logits, again)
    for name, grad in grads.items():
        assert_same_bytes(grad, again_grads[name], name)
    model.gradient_checkpointing_disable()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    compiled_logits = compiled(tokens_of(), attention_mask=mask, use_cache=False).logits
    if mask is not None:
        compiled_logits = compiled_logits * mask[..., None]
    assert_same_bytes(compiled_logits.detach(), logits)


def gpt2(implementation, p):
    config = transformers.GPT2Config(
        vocab_size=61, n_positions=64, n_embd=64, n_layer=2, n_head=4, attn_pdrop=p, embd_pdrop=0,
        resid_pdrop=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def bert(implementation, p):
    config = transformers.BertConfig(
        vocab_size=61, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=64, attention_probs_dropout_prob=p, hidden_dropout_prob=0,
    )  # fmt: skip
    return transformers.AutoModelForMaskedLM.from_config(config, attn_implementation=implementation)


def with_dropout(config, implementation, mask=None, p=0.1):
    """Losses and weights of a few steps of training with dropout of attention's weights."""
    torch.manual_seed(0)
    model, losses = config(implementation, p).train(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(4)
    for step in range(3):
        tokens = tokens_of(seed=step)
        labels = tokens if mask is None else tokens.masked_fill(mask == 0, -100)
        loss = model(tokens, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, dict(model.named_parameters())


@pytest.mark.parametrize("config", [gpt2, bert])
def test_padded_batches_with_dropout_train_as_in_eager_and_twice_to_the_same_bytes(config, monkeypatch):
    """Without padding: ``test_models.py``."""
    drop_alike(monkeypatch)
    mask = padding_of("right")
    losses, weights = with_dropout(config, "dash", mask)
    expected, expected_weights = with_dropout(config, "eager", mask)
    assert losses == pytest.approx(expected, rel=1e-5)
    again = with_dropout(config, "dash", mask)
    assert again[0] == losses
    for name, weight in weights.items():
        assert_same_bytes(weight, again[1][name], name)
        torch.testing.assert_close(weight, expected_weights[name], atol=2e-5, rtol=1e-3)
    assert with_dropout(config, "dash", mask, p=0.0)[0] != losses


def test_dropout_of_a_model_in_evaluation_is_none():
    model = model_of(qwen, attention_dropout=0.1)
    tokens = tokens_of()
    with torch.no_grad():
        assert not same_bytes(model(tokens).logits, model(tokens).logits)
        model.eval()
        assert_same_bytes(model(tokens).logits, model(tokens).logits)


def gpt_oss(**change):
    """A learnable sink per head, and every other layer has a window."""
    return transformers.GptOssConfig(
        **SMALL, head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=7, **change
    )


def with_sinks(implementation):
    model = model_of(gpt_oss, implementation)
    generator = torch.Generator().manual_seed(2)
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            weight.data = torch.randn(weight.shape, generator=generator)
    return model


def test_sinks():
    tokens = tokens_of()
    mask = padding_of("left")
    for given in (None, mask):
        logits, grads = run(with_sinks("dash"), tokens, given)
        expected, expected_grads = run(with_sinks("eager"), tokens, given)
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)
        for name, grad in grads.items():
            assert torch.allclose(grad, expected_grads[name], atol=2e-6, rtol=1e-3), name
        assert sum(name.endswith("sinks") and bool(grad.any()) for name, grad in grads.items()) == 2


def test_softcap():
    """SDPA has none: transformers' eager attention is what models are compared with."""
    tokens = tokens_of()
    logits, grads = run(model_of(gemma), tokens)
    expected, expected_grads = run(model_of(gemma, "eager"), tokens)
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)
    for name, grad in grads.items():
        assert torch.allclose(grad, expected_grads[name], atol=2e-6, rtol=1e-3), name
    plain, _ = run(model_of(gemma, "sdpa"), tokens)
    assert (plain - logits).abs().max() > 1e-4


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_another_head_dim_of_v(side):
    tokens, mask = tokens_of(), None if side is None else padding_of(side)
    logits, grads = run(model_of(deepseek), tokens, mask)
    expected, expected_grads = run(model_of(deepseek, "eager"), tokens, mask)
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)
    for name, grad in grads.items():
        if grad is not None:
            assert torch.allclose(grad, expected_grads[name], atol=2e-6, rtol=1e-3), name


def test_models_with_masks_of_their_own_raise():
    with pytest.raises(InputError, match=r"attention_mask must be None"):
        model_of(qwen)(tokens_of(), attention_mask=torch.zeros(3, 1, 33, 33))


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


def logits_of(config, implementation, *calls):
    """Logits of calls with one cache, (tokens, keywords) each."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    cache = transformers.DynamicCache()
    with torch.no_grad():
        return [model(tokens, past_key_values=cache, **how).logits for tokens, how in calls]


def assert_close_with_a_cache(config, *calls):
    found, expected = (logits_of(config, implementation, *calls) for implementation in ("dash", "eager"))
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


SMALL_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Phimoe", {"num_local_experts": 2, "sliding_window": 8}),
        ("Qwen2Moe", {**SMALL_MOE, "shared_expert_intermediate_size": 32, "use_sliding_window": True,
                      "sliding_window": 8}),
        ("Mistral", {"sliding_window": 8}),
        ("Gemma3Text", {"head_dim": 16, "sliding_window": 8}),
        ("Cohere2", {"sliding_window": 8, "pad_token_id": 0}),
        ("Phi3", {"sliding_window": 8, "pad_token_id": 0}),
    ],
)  # fmt: skip
def test_the_window_is_that_of_the_mask(name, change):
    """Phimoe and Qwen2Moe pass none to the attention function."""
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **change})
    tokens = tokens_of(1, 40)
    assert_close_with_a_cache(config, (tokens, {}))
    steps = [(tokens[:, start:end], {}) for start, end in ((0, 13), (13, 14), (14, 21), (21, 22))]
    assert_close_with_a_cache(config, *steps)
    # The control: the window matters.
    wide = type(config)(**{**SMALL, **change, "sliding_window": 100})
    (narrow_logits,), (wide_logits,) = (logits_of(c, "dash", (tokens, {})) for c in (config, wide))
    assert (narrow_logits - wide_logits).abs().max() > 1e-3


@pytest.mark.parametrize(
    "config",
    [
        transformers.BloomConfig(vocab_size=61, hidden_size=64, n_layer=1, n_head=4),
        transformers.CodeGenConfig(
            vocab_size=61, n_embd=64, n_layer=1, n_head=4, rotary_dim=8, bos_token_id=0, eos_token_id=0
        ),
        transformers.XGLMConfig(vocab_size=61, d_model=64, ffn_dim=64, num_layers=1, attention_heads=4),
    ],
    ids=lambda config: config.model_type,
)
@pytest.mark.parametrize("side", [None, "right"])
def test_models_that_do_their_own_attention_raise(config, side, monkeypatch):
    """Also where nobody has noticed it before they use their mask."""
    monkeypatch.setattr(callers, "_calls", lambda *_: True)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="dash")
    mask = padding_of(side)
    with pytest.raises(NotATensorError, match="this model does its own attention"):
        model(tokens_of(), attention_mask=mask)


OWN = {  # with what makes it small
    "WavLMModel": {"num_attention_heads": 4, "hidden_size": 32, "num_hidden_layers": 1},
    "XLNetModel": {"d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 32},
    "OpenAIGPTModel": {"n_embd": 32, "n_layer": 1, "n_head": 4},
    "PegasusXModel": {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    },
    "SamVisionModel": {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32, "mlp_dim": 32,
        "output_channels": 8, "global_attn_indexes": [0],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("asked", ["dash", "paged|dash"])
def test_models_that_never_call_it_cannot_be_built(name, asked):
    made = getattr(transformers, name)
    config = made.config_class(vocab_size=61, **OWN[name])
    with pytest.raises(
        InputError, match=rf"{name} does its own attention: .* call '{asked.replace('|', '.')}'"
    ):
        made._from_config(config, attn_implementation=asked)
    assert made._from_config(config, attn_implementation="eager").config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["OpenAIGPTModel", "FSMTModel"])
def test_models_that_never_call_it_are_known_to_older_versions_too(name, monkeypatch):
    """They looked for other names of the classes, and let these choose."""
    monkeypatch.setattr(
        transformers.PreTrainedModel, "_can_set_attn_implementation", classmethod(lambda cls: True)
    )
    assert not callers._calls(getattr(transformers, name), transformers.PreTrainedModel)
    assert callers._calls(transformers.LlamaModel, transformers.PreTrainedModel)


class DebertaAttention(nn.Module):
    """With it, this file looks to transformers like one of a model that does its own attention."""


class Mine(transformers.LlamaForCausalLM):
    """A model that is made from one that calls it."""


class Own(transformers.PreTrainedModel):
    """A model of somebody's own; what is in this file would not do for transformers."""


def test_who_calls_it(monkeypatch):
    assert model_of(llama).config._attn_implementation == "dash"
    Mine._can_set_attn_implementation_cached_value = None
    assert not Mine._can_set_attn_implementation()
    assert Mine._from_config(llama(), attn_implementation="dash").config._attn_implementation == "dash"
    assert callers._calls(Own, transformers.PreTrainedModel)  # this file names ALL_ATTENTION_FUNCTIONS
    assert callers._calls(Mine, transformers.PreTrainedModel)
    monkeypatch.setattr(callers, "_TABLE", "nobody " + "names this")
    assert not callers._calls(Own, transformers.PreTrainedModel)
    # There is no attention in that file, and none of which transformers says that it cannot be chosen.
    assert callers._calls(transformers.VisionEncoderDecoderModel, transformers.PreTrainedModel)
    assert callers._calls(type("Nameless", (Mine,), {"__module__": "nowhere"}), transformers.PreTrainedModel)
    before = transformers.PreTrainedModel.get_correct_attn_implementation
    dash.register()
    assert transformers.PreTrainedModel.get_correct_attn_implementation is before
    monkeypatch.delattr(transformers.PreTrainedModel, "_can_set_attn_implementation")
    monkeypatch.delattr(transformers.PreTrainedModel, "get_correct_attn_implementation")
    dash.register()  # of another version: nothing to check with
    assert not hasattr(transformers.PreTrainedModel, "get_correct_attn_implementation")


def test_padding_is_aligned_as_eager_does():
    tokens, mask = tokens_of(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[1, :3] = 0
    assert_close_with_a_cache(llama(), (tokens[:1, :10], {"attention_mask": mask[:1]}))
    late = mask.flip(1)  # padding behind the keys
    found, expected = (
        logits_of(llama(), implementation, (tokens[:, :10], {"attention_mask": mask}))[0]
        for implementation in ("dash", "eager")
    )
    torch.testing.assert_close(found[:, 3:], expected[:, 3:], atol=2e-5, rtol=1e-4)
    assert_close_with_a_cache(llama(), (tokens[:, :10], {"attention_mask": late}))
    with pytest.raises(InputError, match=r"attention_mask has shape \(2, 10\), .* keys up to position 20"):
        logits_of(llama(), "dash", (tokens[:, :10], {}), (tokens[:, 10:], {"attention_mask": mask[:, 10:]}))


def test_bounds_beside_padding_or_other_sequences_raise():
    tokens, model = tokens_of(1, 20), model_of(llama)
    bounds = torch.tensor([0, 8, 20], dtype=torch.int32)
    how = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 12, "max_length_k": 12}
    mask = torch.ones(1, 20, dtype=torch.long)
    mask[0, -4:] = 0
    with pytest.raises(InputError, match="cu_seq_lens_q and an attention_mask with padding"):
        run(model, tokens, mask, **how)
    positions = torch.cat([torch.arange(9), torch.arange(11)])[None]
    with pytest.raises(InputError, match=r"sequences of \[8, 12\], .* of \[9, 11\]"):
        run(model, tokens, position_ids=positions, **how)


def test_chunks_with_a_growing_cache():
    config = transformers.Llama4TextConfig(
        **{**SMALL, "head_dim": 16, "num_local_experts": 1, "intermediate_size_mlp": 96,
           "attention_chunk_size": 8, "no_rope_layers": [1, 1], "interleave_moe_layer_step": 3}
    )  # fmt: skip
    tokens = tokens_of(1, 33)
    for first in (6, 7, 8, 15, 16):
        ends = [0, first, *range(first + 1, 20), 27, 33]
        assert_close_with_a_cache(config, *[(tokens[:, a:b], {}) for a, b in pairwise(ends)])


def test_a_bidirectional_decoder_is_bidirectional():
    """Its layers still say ``is_causal``; the mask decides."""

    def outputs(implementation):
        torch.manual_seed(0)
        config = llama(is_causal=False)
        model = transformers.AutoModel.from_config(config, attn_implementation=implementation).eval()
        return model(tokens_of(), use_cache=False).last_hidden_state

    torch.testing.assert_close(outputs("dash"), outputs("eager"), atol=2e-5, rtol=1e-4)


def test_an_old_or_missing_transformers(monkeypatch):
    with monkeypatch.context() as old:
        old.setattr(sys.modules["transformers"], "__version__", "5.3.1")
        with pytest.raises(UnavailableError, match=r"transformers >= 5.4 is needed: .* \(found 5.3.1\)"):
            dash.register()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnavailableError, match="transformers >= 5.4 is needed"):
        dash.register()

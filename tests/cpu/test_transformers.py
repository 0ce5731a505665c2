"""Small models of transformers with ``attn_implementation="dash"``: logits, gradients and bytes."""

from __future__ import annotations

import pytest
import torch
from token_cases import padding_of

from dash_attn import flash_attn_varlen_func
from dash_attn.errors import InputError
from dash_attn.testing import assert_same_bytes, same_bytes

transformers = pytest.importorskip("transformers")

from transformers_models import (  # noqa: E402
    CONFIGS,
    SMALL,
    assert_close_to_sdpa,
    assert_close_with_a_cache,
    llama,
    logits_of,
    model_of,
    qwen,
    run,
    sliding,
    tokens_of,
)

from dash_attn.integrations import sdpa  # noqa: E402
from dash_attn.integrations import transformers as dash  # noqa: E402
from model_cases import drop_alike  # noqa: E402


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


@CONFIGS
def test_logits_and_gradients_are_those_of_sdpa(config):
    assert_close_to_sdpa(config, tokens_of())


@CONFIGS
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches(config, side):
    assert_close_to_sdpa(config, tokens_of(), padding_of(side))


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of graph breaks beside a tensor that is no leaf
def test_a_model_that_calls_sdpa_compiles_inside_a_block():
    """Where its graph breaks, PyTorch asks the block's mode about every call."""
    mask, model = padding_of("left"), model_of(llama, "sdpa", num_hidden_layers=1)
    torch._dynamo.reset()
    with sdpa.enabled():
        logits, grads = run(model, tokens_of(), mask)
        model.zero_grad()
        compiled = torch.compile(model, backend="aot_eager")(tokens_of(), attention_mask=mask).logits
        (compiled * mask[..., None]).square().mean().backward()
    assert_same_bytes(compiled * mask[..., None], logits)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, grads[name], rtol=1e-4, atol=1e-6)


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


def test_a_bidirectional_decoder_is_bidirectional():
    """Its layers still say ``is_causal``; the mask decides."""

    def outputs(implementation):
        torch.manual_seed(0)
        config = llama(is_causal=False)
        model = transformers.AutoModel.from_config(config, attn_implementation=implementation).eval()
        return model(tokens_of(), use_cache=False).last_hidden_state

    torch.testing.assert_close(outputs("dash"), outputs("eager"), atol=2e-5, rtol=1e-4)

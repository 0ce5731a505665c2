"""Small models of transformers, built from a config, with ``attn_implementation="dash"`` on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from dash_attn.integrations import transformers as dash  # noqa: E402

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

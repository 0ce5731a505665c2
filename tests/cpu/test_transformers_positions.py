"""Small models of transformers: sequences packed by ``position_ids`` or ``cu_seq_lens_q`` stay apart."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from token_cases import LENGTHS, PACKED, padding_of

from dash_attn.errors import InputError
from dash_attn.integrations import token_masks
from dash_attn.integrations.positions import Sizes, assert_separate, separate
from dash_attn.integrations.token_masks import isolate, token_mask
from dash_attn.testing import assert_same_bytes

transformers = pytest.importorskip("transformers")

from transformers_models import (  # noqa: E402
    CONFIGS,
    SMALL,
    assert_close_to_sdpa,
    llama,
    model_of,
    qwen,
    run,
    sliding,
    tokens_of,
)


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

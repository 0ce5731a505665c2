"""Models of transformers that ask for what is not supported, or that never call our attention, raise."""

from __future__ import annotations

import sys

import pytest
import torch
from token_cases import padding_of
from torch import nn

from dash_attn.errors import InputError, UnavailableError
from dash_attn.integrations import callers
from dash_attn.integrations.token_masks import NotATensorError, token_mask

transformers = pytest.importorskip("transformers")

from transformers.models.gemma3n.modeling_gemma3n import Gemma3nAudioEncoder  # noqa: E402
from transformers_models import (  # noqa: E402
    SMALL,
    llama,
    model_of,
    qwen,
    tokens_of,
)

from dash_attn.integrations import transformers as dash  # noqa: E402


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


def test_models_with_masks_of_their_own_raise():
    with pytest.raises(InputError, match=r"attention_mask must be None"):
        model_of(qwen)(tokens_of(), attention_mask=torch.zeros(3, 1, 33, 33))


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
    monkeypatch.setattr(callers, "_attends_by_itself", lambda _: False)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="dash")
    mask = padding_of(side)
    with pytest.raises(NotATensorError, match="this model does its own attention"):
        model(tokens_of(), attention_mask=mask)


OWN = {  # with what makes it small
    "WavLMModel": {"num_attention_heads": 4, "hidden_size": 32, "num_hidden_layers": 1},
    "XLNetModel": {"d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 32},
    "OpenAIGPTModel": {"n_embd": 32, "n_layer": 1, "n_head": 4},
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


PARTS = {  # with a layer that does its own attention, whose it is, and what makes it small
    "PegasusXModel": ("PegasusXGlobalLocalAttention", "PegasusXEncoder", {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    }),
    "LongT5EncoderModel": ("LongT5LocalAttention", "LongT5Stack", {
        "d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 1, "d_ff": 32, "vocab_size": 61,
    }),
    "ClapAudioModel": ("ClapAudioSelfAttention", "ClapAudioModel", {
        "spec_size": 64, "patch_size": 4, "patch_stride": [4, 4], "num_mel_bins": 16, "hidden_size": 64,
        "patch_embeds_hidden_size": 16, "depths": [1, 1, 1], "num_attention_heads": [2, 2, 2],
        "window_size": 4, "num_hidden_layers": 3,
    }),
    "Gemma3nAudioEncoder": ("Gemma3nAudioAttention", "Gemma3nAudioEncoder", {
        "hidden_size": 32, "conf_num_hidden_layers": 1, "conf_num_attention_heads": 4,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_models_that_do_not_call_it_in_all_their_layers_cannot_be_built(name):
    layer, part, small = PARTS[name]
    made = getattr(transformers, name, Gemma3nAudioEncoder)
    config = made.config_class(**small)
    with pytest.raises(InputError, match=f"^{part} does its own attention, in {layer}: .* call 'dash'"):
        made._from_config(config, attn_implementation="dash")
    model = made._from_config(config, attn_implementation="eager")
    if model._can_set_attn_implementation():
        with pytest.raises(InputError, match=f"does its own attention, in {layer}: "):
            model.set_attn_implementation("dash")


def test_models_that_never_call_it_do_not_take_its_name_later(monkeypatch):
    """Transformers leaves them as they were, with a warning."""
    made = transformers.FalconModel
    config = made.config_class(vocab_size=61, hidden_size=32, num_attention_heads=4, num_hidden_layers=1)
    model = made._from_config(config, attn_implementation="eager")
    with pytest.raises(InputError, match="FalconModel does its own attention: .* call 'dash'"):
        model.set_attn_implementation("dash")
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("eager")
    with pytest.raises(InputError, match="FalconModel does its own attention"):
        model.set_attn_implementation({"": "dash"})
    taken = model_of(qwen)
    monkeypatch.setattr(type(taken), "_can_set_attn_implementation", classmethod(lambda _: False))
    taken.set_attn_implementation("dash")  # it has it
    taken.config._attn_implementation = "eager"
    with pytest.raises(InputError, match="transformers does not change .* later: give attn_implementation"):
        taken.set_attn_implementation("dash")
    monkeypatch.undo()
    taken.set_attn_implementation("eager")
    taken.set_attn_implementation("dash")
    assert taken.config._attn_implementation == "dash"


def test_attention_weights_of_a_configuration_are_refused():
    model = model_of(qwen, output_attentions=True)
    with pytest.raises(InputError, match="output_attentions=True of the configuration: 'dash' attention has"):
        model(tokens_of())


def test_parts_are_asked_for_by_name():
    """As transformers does: a part that a dict does not name stays as it is."""
    config = transformers.LlavaConfig(
        text_config={"model_type": "falcon", "hidden_size": 32, "num_attention_heads": 4,
                     "num_hidden_layers": 1, "vocab_size": 61},
        vision_config={"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 32,
                       "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4},
        image_token_index=60,
    )  # fmt: skip
    model = transformers.LlavaModel._from_config(config, attn_implementation="eager")
    for asked in ("dash", {"text_config": "dash"}):
        with pytest.raises(InputError, match="FalconModel does its own attention"):
            model.set_attn_implementation(asked)
    model.set_attn_implementation({"vision_config": "dash"})
    names = [part._attn_implementation for part in (model.config.text_config, model.config.vision_config)]
    assert names == ["eager", "dash"]


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


def test_an_old_or_missing_transformers(monkeypatch):
    with monkeypatch.context() as old:
        old.setattr(sys.modules["transformers"], "__version__", "5.3.1")
        with pytest.raises(UnavailableError, match=r"transformers >= 5.4 is needed: .* \(found 5.3.1\)"):
            dash.register()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnavailableError, match="transformers >= 5.4 is needed"):
        dash.register()


def test_a_mask_of_another_size_is_no_matter_of_caches():
    """Some models make one for a single query on purpose."""
    model = model_of(qwen)
    mask = token_mask(2, 1, 9, 8)
    x = torch.zeros(2, 4, 9, 16)
    with pytest.raises(InputError, match=r"are \(2, 9, 9\), the model made its mask for \(2, 1, 9\)$"):
        dash.attention_forward(model.model.layers[0].self_attn, x, x, x, mask)

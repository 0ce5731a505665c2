"""Tiny models with random weights and true head dims, and what training them for a few steps gives.

They are built with ``attn_implementation="dash"`` or another one. ``JointAttention`` is no model of
transformers: it calls ``F.scaled_dot_product_attention``, which "dash" takes by ``sdpa.enabled()``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from dash_attn.backends.base import BACKENDS
from dash_attn.backends.cpu.dropout import Dropout
from dash_attn.integrations import sdpa
from dash_attn.integrations import transformers as dash
from dash_attn.scores import Scores
from dash_attn.tools.demo.repeatable import deterministic_torch

WORDS, LAYERS, BATCH, STEPS = 61, 2, 2, 3
SIZE, RATE = 0.15, 0.003
"""Of new weights, large enough that scores differ, and of a step."""
WINDOW = 16
DROPOUT = 0.1

TEXT = {
    "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": SIZE,
}  # fmt: skip


class Case(NamedTuple):
    """A model.

    Attributes:
        make: the model, given the name of an attention and a number of layers.
        inputs: what a step is called with, given a generator and a length; also ``labels``.
        backend: what ``auto`` must take on a Hopper GPU.
    """

    make: Callable[[str, int], nn.Module]
    inputs: Callable[[torch.Generator, int], dict[str, Tensor]]
    backend: str


class Trained(NamedTuple):
    """Of a few steps: the loss of each, and what the last one left."""

    losses: list[float]
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for kind in ("grads", "weights"):
            for name, x in getattr(self, kind).items():
                yield f"{kind}: {name}", x


def train(
    case: Case,
    implementation: str,
    length: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    layers: int = LAYERS,
) -> Trained:
    """Three steps of SGD with PyTorch's deterministic algorithms. Weights and inputs are the same ones for
    every ``implementation``, and in every dtype up to rounding."""
    dash.register()
    torch.manual_seed(0)
    model = case.make(implementation, layers).to(device, dtype).train()
    _draw_sinks(model)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    torch.manual_seed(4)  # of dropout
    with deterministic_torch():
        for step in range(STEPS):
            inputs = case.inputs(torch.Generator().manual_seed(step), length)
            inputs = {
                name: x.to(device, dtype if x.is_floating_point() else None) for name, x in inputs.items()
            }
            loss = model(**inputs).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    grads = {name: w.grad for name, w in model.named_parameters() if w.grad is not None}
    return Trained(losses, grads, {name: w.detach() for name, w in model.named_parameters()})


def total_error(found: Trained, exact: Trained) -> float:
    """How far all gradients together are from the exact ones, as a share of those."""
    squares = [(_norm(found.grads[name].double() - x.double()), _norm(x)) for name, x in exact.grads.items()]
    return float((sum(a * a for a, _ in squares) / sum(b * b for _, b in squares)) ** 0.5)


def error_of(found: Trained, exact: Trained) -> dict[str, float]:
    """How far every gradient is from the exact one, as a share of that and a thousandth of all of them. (That
    of a bias of keys is 0 but for rounding.)"""
    total = sum(_norm(x) ** 2 for x in exact.grads.values()) ** 0.5
    assert found.grads.keys() == exact.grads.keys()
    return {
        name: _norm(found.grads[name].double() - x.double()) / (_norm(x) + 1e-3 * total)
        for name, x in exact.grads.items()
    }


def _norm(x: Tensor) -> float:
    return float(x.double().norm())


def _draw_sinks(model: nn.Module) -> None:
    """Sinks of a new model are not set to anything."""
    generator = torch.Generator().manual_seed(2)
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            weight.data.copy_(torch.randn(weight.shape, generator=generator))


@contextmanager
def recorded_backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, str]]]:
    """Which backends ran a forward or a backward inside: ("sm90", "backward")."""
    found: set[tuple[str, str]] = set()
    with monkeypatch.context() as patch:
        for backend, path in BACKENDS.items():
            prepared = import_module(f"dash_attn.backends{path}")._Prepared
            for way in ("forward", "backward"):
                patch.setattr(prepared, way, _recording(found, (backend, way), getattr(prepared, way)))
        yield found


def _recording(found: set[tuple[str, str]], entry: tuple[str, str], method: Any) -> Any:
    def recording(self: Any, *args: Any, **how: Any) -> Any:
        found.add(entry)
        return method(self, *args, **how)

    return recording


def force(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Models are run by a backend, which ``auto`` might not take."""
    for module in (dash, sdpa):
        for name in ("flash_attn_func", "flash_attn_varlen_func"):
            if (function := getattr(module, name, None)) is not None:
                monkeypatch.setattr(module, name, partial(function, backend=backend))


@pytest.fixture
def same_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """As :func:`drop_alike`."""
    drop_alike(monkeypatch)


def drop_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention drops what ours drops."""
    plain = F.dropout

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if x.ndim != 4 or not p:
            return plain(x, p, training, inplace)
        seed = int(torch.randint(2**63 - 1, (), device=x.device))
        threshold, (batch, heads, rows, columns) = Scores(1.0, dropout_p=p).dropout_threshold, x.shape
        kept = [
            Dropout(seed, (head, sequence), threshold, 1.0).kept(0, 0, rows, columns)
            for sequence in range(batch)
            for head in range(heads)
        ]
        return x * torch.stack(kept).view(x.shape).to(x.device) / (1 - p)

    monkeypatch.setattr(F, "dropout", dropout)


# Models of text


def _words(generator: torch.Generator, length: int) -> dict[str, Tensor]:
    tokens = torch.randint(3, WORDS, (BATCH, length), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def _translation(generator: torch.Generator, length: int) -> dict[str, Tensor]:
    """A source that is longer than its target."""
    tokens = torch.randint(3, WORDS, (BATCH, length), generator=generator)
    return {"input_ids": tokens, "labels": tokens[:, : length // 2 + 3].contiguous()}


DEPTHS = ("num_hidden_layers", "n_layer", "encoder_layers", "decoder_layers", "num_layers")


def _config(name: str, layers: int, config: dict[str, Any]) -> Any:
    """The configuration of a model, with so many of its layers."""
    config = config | {depth: layers for depth in DEPTHS if depth in config}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    return getattr(transformers, f"{name}Config")(**config)


def _causal(name: str, **change: Any) -> Callable[[str, int], nn.Module]:
    def make(implementation: str, layers: int) -> nn.Module:
        config = _config(name, layers, {**TEXT, **change})
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=implementation, **EAGER_EXPERTS.get(name, {})
        )
        model.config.use_cache = False
        return model

    return make


EAGER_EXPERTS = {"GptOss": {"experts_implementation": "eager"}}
"""Grouped products are not deterministic on a GPU in every version of PyTorch."""


def _model(kind: str, name: str, **config: Any) -> Callable[[str, int], nn.Module]:
    def make(implementation: str, layers: int) -> nn.Module:
        made = _config(name, layers, config)
        return getattr(transformers, kind).from_config(made, attn_implementation=implementation)

    return make


GPT2 = {
    "vocab_size": WORDS, "n_positions": 1024, "n_embd": 128, "n_layer": LAYERS, "n_head": 2,
    "attn_pdrop": DROPOUT, "embd_pdrop": 0, "resid_pdrop": 0, "bos_token_id": 1, "eos_token_id": 2,
    "use_cache": False, "initializer_range": SIZE,
}  # fmt: skip
BERT = {
    "vocab_size": WORDS, "hidden_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 1024, "attention_probs_dropout_prob": DROPOUT,
    "hidden_dropout_prob": 0, "initializer_range": SIZE,
}  # fmt: skip
BART = {
    "vocab_size": WORDS, "d_model": 128, "encoder_layers": LAYERS, "decoder_layers": LAYERS,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "max_position_embeddings": 1024, "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 2, "use_cache": False, "init_std": SIZE,
}  # fmt: skip
T5 = {
    "vocab_size": WORDS, "d_model": 64, "d_kv": 64, "d_ff": 96, "num_layers": LAYERS, "num_heads": 2,
    "decoder_start_token_id": 0,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 2, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "q_lora_rank": 32, "kv_lora_rank": 32, "first_k_dense_replace": LAYERS, "n_routed_experts": 4,
    "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
CAPPED = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": None, "query_pre_attn_scalar": 256}


# Models of images


def _image(generator: torch.Generator, length: int) -> dict[str, Tensor]:
    """14 x 14 patches, and a token of its class."""
    images = torch.randn(BATCH, 3, 224, 224, generator=generator)
    return {"pixel_values": images, "labels": torch.randint(5, (BATCH,), generator=generator)}


VIT = {
    "hidden_size": 160, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": 96,
    "image_size": 224, "patch_size": 16, "num_labels": 5, "initializer_range": SIZE,
}  # fmt: skip


class Output(NamedTuple):
    loss: Tensor


class JointAttention(nn.Module):
    """Blocks as in Stable Diffusion 3: an image and a text have weights of their own, and attend to both."""

    HEADS, HEAD_DIM = 2, 64

    def __init__(self, implementation: str, layers: int) -> None:
        super().__init__()
        width = self.HEADS * self.HEAD_DIM
        self.attention = sdpa.enabled if implementation == "dash" else nullcontext
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    f"{part}_{stream}": nn.Linear(width, size)
                    for stream in ("image", "text")
                    for part, size in (("qkv", 3 * width), ("out", width))
                }
                | {f"norm_{x}": nn.RMSNorm(self.HEAD_DIM, eps=1e-6) for x in "qk"}
            )
            for _ in range(layers)
        )

    def forward(self, image: Tensor, text: Tensor, labels: Tensor) -> Output:
        streams = {"image": image, "text": text}
        for layer in self.layers:
            joint = [layer[f"qkv_{name}"](F.layer_norm(x, x.shape[-1:])) for name, x in streams.items()]
            q, k, v = torch.cat(joint, 1).unflatten(-1, (3, self.HEADS, -1)).permute(2, 0, 3, 1, 4)
            with self.attention():
                out = F.scaled_dot_product_attention(layer["norm_q"](q), layer["norm_k"](k), v)
            parts = out.transpose(1, 2).flatten(2).split([x.shape[1] for x in streams.values()], 1)
            streams = {
                name: x + layer[f"out_{name}"](part) for (name, x), part in zip(streams.items(), parts)
            }
        return Output((streams["image"].float() - labels.float()).square().mean())


def _joint(generator: torch.Generator, length: int) -> dict[str, Tensor]:
    width = JointAttention.HEADS * JointAttention.HEAD_DIM
    sizes = {"image": length, "text": length // 2 + 5, "labels": length}
    return {name: torch.randn(BATCH, n, width, generator=generator) for name, n in sizes.items()}


CASES = {
    "llama": Case(_causal("Llama", head_dim=64), _words, "sm90"),
    "qwen3": Case(_causal("Qwen3", head_dim=128), _words, "sm90"),
    "mistral": Case(_causal("Mistral", head_dim=128, sliding_window=WINDOW), _words, "sm90"),
    "gemma2": Case(_causal("Gemma2", head_dim=256, **ALTERNATING, **CAPPED), _words, "sm90"),
    "gemma3": Case(_causal("Gemma3Text", head_dim=256, **ALTERNATING), _words, "sm90"),
    "gpt-oss": Case(_causal("GptOss", head_dim=64, **ALTERNATING, **EXPERTS), _words, "sm90"),
    "phi3": Case(_causal("Phi3", hidden_size=192, num_key_value_heads=2), _words, "sm90"),
    "deepseek-v3": Case(_causal("DeepseekV3", **LATENT), _words, "sm90"),
    "gpt2": Case(_model("AutoModelForCausalLM", "GPT2", **GPT2), _words, "triton"),
    "bert": Case(_model("AutoModelForMaskedLM", "Bert", **BERT), _words, "triton"),
    "bart": Case(_model("AutoModelForSeq2SeqLM", "Bart", **BART), _translation, "sm90"),
    "vit": Case(_model("AutoModelForImageClassification", "ViT", **VIT), _image, "sm90"),
    "sd3": Case(JointAttention, _joint, "sm90"),
}  # fmt: skip
"""Every model that trains."""

REFUSED = Case(_model("AutoModelForSeq2SeqLM", "T5", **T5), _translation, "")
"""T5 adds a learned bias to its scores."""

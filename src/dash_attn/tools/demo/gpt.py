"""The small byte-level GPT of the demo, and the English text that every CPython ships."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GPT", "GPTShape", "batch_of", "python_manual"]

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention of q, k, v: (batch, seqlen, heads, head_dim), to the shape of q."""

VOCABULARY = 256


@dataclass(frozen=True)
class GPTShape:
    """Size of the model. ``width`` is split into heads of ``head_dim``."""

    layers: int = 3
    width: int = 128
    head_dim: int = 64
    seqlen: int = 512


class Block(nn.Module):
    """Pre-norm transformer block: attention, then a two-layer perceptron."""

    def __init__(self, shape: GPTShape, attend: AttentionFunction) -> None:
        super().__init__()
        self.shape, self.attend = shape, attend
        self.norm_attention, self.norm_mlp = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.projection = nn.Linear(shape.width, shape.width, bias=False)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seqlen, width) to the same."""
        heads = self.shape.width // self.shape.head_dim
        qkv = self.qkv(self.norm_attention(x)).view(*x.shape[:2], 3, heads, self.shape.head_dim)
        q, k, v = qkv.unbind(2)
        x = x + self.projection(self.attend(q, k, v).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_mlp(x))))
        return out


class GPT(nn.Module):
    """Predicts the next byte; weights come from the seed alone."""

    def __init__(self, shape: GPTShape, attend: AttentionFunction, seed: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, shape.width)
        self.position = nn.Embedding(shape.seqlen, shape.width)
        self.blocks = nn.ModuleList(Block(shape, attend) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                # What leaves a block is halved, so that the residual stream grows slowly.
                gain = 0.5 if name.endswith(("projection.weight", "down.weight")) else 1.0
                std = gain * weight.shape[1] ** -0.5 if name.startswith("blocks") else 0.02
                nn.init.normal_(weight, std=std, generator=generator)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy (nats per byte) of targets after tokens, both (batch, seqlen) int64."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.token.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def python_manual() -> Tensor:
    """The text of ``pydoc_data.topics`` (the help of Python's own language), (bytes,) uint8."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def batch_of(text: Tensor, batch: int, seqlen: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows of the text: tokens and the bytes that follow them, (batch, seqlen) int64."""
    starts = torch.randint(len(text) - seqlen, (batch,), generator=generator).tolist()
    windows = torch.stack([text[start : start + seqlen + 1] for start in starts]).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

"""One block of each model of the DASH paper's figure 10, from published configurations, with random weights.

Plain PyTorch: the attention is given to the call, all else is the same for every contender. What is left out:
SAM's relative positions, which no fused attention here adds, and the second attention over images alone that
some blocks of Stable Diffusion 3.5 medium have. Mixtral's tokens go to experts in turns, two each, as if its
router were perfectly balanced; the router's weights count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of q, k and v, each (batch, seqlen, heads, head_dim)."""

CAUSAL_SEQLENS, FULL_SEQLENS = (8192, 16_384, 32_768), (2048, 4096, 8192)
CENTRAL = (16_384, 4096)
"""Of the paper: figure 10b of causal models, and all of full masks."""
FULL_TOKENS = 16 * 4096


class Model(NamedTuple):
    """A block's configuration.

    Attributes:
        hidden, heads, kv_heads, head_dim: of the attention.
        mlp: width between the two halves of the feed-forward part.
        causal: the mask is causal, else full.
        language: RMSNorm, rotary positions and SwiGLU; else LayerNorm, GELU and biases.
        qkv_bias: the projections to q, k and v have biases.
        experts: of the feed-forward part; two per token.
        text: tokens of a text that stand beside an image and have weights of their own.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    causal: bool
    language: bool = True
    qkv_bias: bool = False
    experts: int = 1
    text: int = 0


MODELS = {
    "LLaMA3-8B": Model(4096, 32, 8, 128, 14_336, causal=True),
    "Qwen2.5-7B": Model(3584, 28, 4, 128, 18_944, causal=True, qkv_bias=True),
    "Mixtral-8x7B": Model(4096, 32, 8, 128, 14_336, causal=True, experts=8),
    "SAM-H": Model(1280, 16, 16, 80, 5120, causal=False, language=False, qkv_bias=True),
    "SD3.5-medium": Model(1536, 24, 24, 64, 6144, causal=False, language=False, qkv_bias=True, text=333),
    "SD3.5-large": Model(2432, 38, 38, 64, 9728, causal=False, language=False, qkv_bias=True, text=333),
    "LLaDA-1B": Model(2048, 32, 4, 64, 5634, causal=False),
}


class Case(NamedTuple):
    """A block on a batch. ``seqlen`` is without the tokens of a text."""

    name: str
    model: Model
    batch: int
    seqlen: int

    @property
    def tokens(self) -> int:
        """Per sequence."""
        return self.seqlen + self.model.text

    @property
    def title(self) -> str:
        return f"{self.name}, {self.batch} x {self.tokens:,}"


def cases() -> Iterator[Case]:
    """The paper's: one sequence under a causal mask, 16 x 4,096 under a full one; and neighbours of that."""
    for name, model in MODELS.items():
        for seqlen in CAUSAL_SEQLENS if model.causal else FULL_SEQLENS:
            yield Case(name, model, 1 if model.causal else FULL_TOKENS // seqlen, seqlen)


def block_of(case: Case) -> nn.Module:
    """Its ``forward`` takes (batch, tokens, hidden) and an :data:`Attend`."""
    return JointBlock(case.model) if case.model.text else Block(case.model)


class Block(nn.Module):
    """Attention, then the feed-forward part, each behind a norm and beside a residual."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.qkv = Projections(model)
        self.out = nn.Linear(model.heads * model.head_dim, model.hidden, bias=not model.language)
        self.norms = nn.ModuleList(_norm(model) for _ in range(2))
        self.mlp = Experts(model) if model.experts > 1 else FeedForward(model)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x))
        if self.model.language:
            q, k = rotated(q, k)
        x = x + self.out(attend(q, k, v).flatten(2))
        return x + self.mlp(self.norms[1](x))


class JointBlock(nn.Module):
    """MMDiT: image and text have projections and feed-forward parts of their own, which a condition scales,
    shifts and gates; attention is over both, with q and k normalised."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.condition = nn.Parameter(torch.randn(1, 1, model.hidden))
        self.streams = nn.ModuleList(nn.ModuleDict(_stream(model)) for _ in ("image", "text"))

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        parts = x.split([x.shape[1] - self.model.text, self.model.text], 1)
        changes = [s["change"](F.silu(self.condition)).chunk(6, -1) for s in self.streams]
        heads = []
        for stream, part, (shift, scale, *_) in zip(self.streams, parts, changes):
            q, k, v = stream["qkv"](_plain_norm(part) * (1 + scale) + shift)
            heads.append((stream["norm_q"](q), stream["norm_k"](k), v))
        out = attend(*(torch.cat(tensors, 1) for tensors in zip(*heads))).flatten(2)
        done = []
        for stream, part, change, mixed in zip(
            self.streams, parts, changes, out.split([part.shape[1] for part in parts], 1)
        ):
            _, _, gate, shift, scale, second_gate = change
            part = part + gate * stream["out"](mixed)
            inner = stream["mlp"](_plain_norm(part) * (1 + scale) + shift)
            done.append(part + second_gate * inner)
        return torch.cat(done, 1)


class Projections(nn.Module):
    """To q, k and v, each (batch, seqlen, heads, head_dim), by one product."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.heads = [model.heads, model.kv_heads, model.kv_heads]
        self.all = nn.Linear(model.hidden, sum(self.heads) * model.head_dim, bias=model.qkv_bias)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.all(x).unflatten(-1, (sum(self.heads), -1)).split(self.heads, 2)


class FeedForward(nn.Module):
    """SwiGLU, or GELU with biases."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gated = model.language
        self.up = nn.Linear(model.hidden, model.mlp * (2 if self.gated else 1), bias=not self.gated)
        self.down = nn.Linear(model.mlp, model.hidden, bias=not self.gated)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.up(x)) if self.gated else F.gelu(self.up(x), approximate="tanh"))


class Experts(nn.Module):
    """SwiGLU by two of several experts: token t has experts t and t + 1, modulo their number."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.experts = model.experts
        self.router = nn.Linear(model.hidden, model.experts, bias=False)
        self.up = nn.Parameter(torch.randn(model.experts, model.hidden, 2 * model.mlp) / model.hidden**0.5)
        self.down = nn.Parameter(torch.randn(model.experts, model.mlp, model.hidden) / model.mlp**0.5)

    def forward(self, x: Tensor) -> Tensor:
        groups = x.reshape(-1, self.experts, x.shape[-1]).transpose(0, 1)  # of the tokens with expert e first
        logits = self.router(groups)
        scores = [s.diagonal(dim1=0, dim2=2).T for s in (logits, logits.roll(-1, 2))]
        first, second = torch.stack(scores).float().softmax(0).to(x.dtype)[..., None]
        given = torch.cat([groups, groups.roll(1, 0)], 1)
        by_first, by_second = (swiglu(given @ self.up) @ self.down).chunk(2, 1)
        return (first * by_first + second * by_second.roll(-1, 0)).transpose(0, 1).reshape(x.shape)


def swiglu(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1)
    return F.silu(gate) * value


def rotated(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q and k with rotary positions."""
    half = q.shape[-1] // 2
    speed = 500_000.0 ** (-torch.arange(half, device=q.device) / half)
    angle = torch.arange(q.shape[1], device=q.device)[:, None] * speed
    cos, sin = (x.to(q.dtype)[:, None] for x in (angle.cos(), angle.sin()))

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    return turned(q), turned(k)


def _norm(model: Model) -> nn.Module:
    return nn.RMSNorm(model.hidden, eps=1e-6) if model.language else nn.LayerNorm(model.hidden, eps=1e-6)


def _plain_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


def _stream(model: Model) -> dict[str, nn.Module]:
    """The weights of image or text."""
    return {
        "qkv": Projections(model),
        "out": nn.Linear(model.heads * model.head_dim, model.hidden),
        "mlp": FeedForward(model),
        "change": nn.Linear(model.hidden, 6 * model.hidden),
        "norm_q": nn.RMSNorm(model.head_dim, eps=1e-6),
        "norm_k": nn.RMSNorm(model.head_dim, eps=1e-6),
    }

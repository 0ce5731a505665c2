"""A small model samples with a cache of keys, and is trained on what it sampled: exactly on-policy.

Policy gradients weigh what was sampled by the ratio of two probabilities of each token: that of the trainer
and that of the sampler. Both are the same model with the same weights. Yet the sampler works token by token
with a cache, and the trainer on whole sequences, and usual kernels round otherwise then. So ratios are not 1.

Here they are, bit for bit. Two things make it so:

* Attention is dash-attn's: ``flash_attn_with_kvcache`` has the bits of ``flash_attn_func``.
* Everything else works row by row. It is computed in blocks of ROWS rows, filled up with zeros, so that every
  product of matrices has the same shape. Then a row's bits do not depend on its company. This part is no
  library: it is shown here, as slow as it is.

Beside it, the same with PyTorch's attention and products of any shape.

    python examples/on_policy.py
    python examples/on_policy.py --device cuda --batch 32 --tokens 300 --save on-policy.svg

On a GPU, sequences of few tokens may take the same kernels either way, and then PyTorch's ratios are 1, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dash_attn import flash_attn_func, flash_attn_with_kvcache
from dash_attn.testing import same_bytes

ROWS = 64
VOCABULARY, PROMPT, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 4, 4, 2, 64, 2
WIDTH = HEADS * HEAD_DIM // 2


def row_by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function`` of rows (..., width), in blocks of ROWS."""
    rows = x.flatten(0, -2)
    padded = F.pad(rows, (0, 0, 0, -len(rows) % ROWS))
    found = torch.cat([function(block) for block in padded.split(ROWS)])
    return found[: len(rows)].unflatten(0, x.shape[:-1])


def at_once(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """As PyTorch's users do it."""
    return function(x)


@dataclass
class Cache:
    """Keys and values of a layer, (batch, longest, kv_heads, head_dim), and how many there are."""

    k: Tensor
    v: Tensor
    length: int = 0


class Layer(nn.Module):
    """Attention and a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, way: Way, cache: Cache | None) -> Tensor:
        qkv = way.rows(lambda rows: linear(self.qkv, norm(rows)), x)
        heads = qkv.unflatten(-1, (-1, HEAD_DIM)).split((HEADS, KV_HEADS, KV_HEADS), -2)
        q, k, v = (part.contiguous() for part in heads)
        attended = way.train(q, k, v) if cache is None else way.sample(q, k, v, cache)
        x = x + way.rows(lambda rows: linear(self.out, rows), attended.flatten(-2))
        return x + way.rows(lambda rows: linear(self.down, F.gelu(linear(self.up, norm(rows)))), x)


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """In bfloat16."""
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return F.linear(x, layer.weight.to(x.dtype), bias)


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


@dataclass
class Way:
    """How rows and attention are computed."""

    rows: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
    train: Callable[[Tensor, Tensor, Tensor], Tensor]
    sample: Callable[[Tensor, Tensor, Tensor, Cache], Tensor]


def dash_train(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = flash_attn_func(q, k, v, causal=True)
    assert isinstance(out, Tensor)
    return out


def dash_sample(q: Tensor, k: Tensor, v: Tensor, cache: Cache) -> Tensor:
    out = flash_attn_with_kvcache(q, cache.k, cache.v, k, v, cache_seqlens=cache.length, causal=True)
    assert isinstance(out, Tensor)
    cache.length += q.shape[1]
    return out


def torch_train(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def torch_sample(q: Tensor, k: Tensor, v: Tensor, cache: Cache) -> Tensor:
    end = cache.length + q.shape[1]
    cache.k[:, cache.length : end], cache.v[:, cache.length : end] = k, v
    first, cache.length = cache.length == 0, end
    q, k, v = (x.transpose(1, 2) for x in (q, cache.k[:, :end], cache.v[:, :end]))
    return F.scaled_dot_product_attention(q, k, v, is_causal=first, enable_gqa=True).transpose(1, 2)


WAYS = {
    "dash-attn": Way(row_by_row, dash_train, dash_sample),
    "PyTorch's defaults": Way(at_once, torch_train, torch_sample),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(1024, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, way: Way, caches: list[Cache] | None = None) -> Tensor:
        """Log-probabilities of the next token, (batch, tokens, VOCABULARY) fp32."""
        first = caches[0].length if caches else 0
        places = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        x = (self.tokens(tokens) + self.places(places)).bfloat16()
        for i, layer in enumerate(self.layers):
            x = layer(x, way, caches[i] if caches else None)
        return way.rows(lambda rows: linear(self.head, norm(rows)).float().log_softmax(-1), x)


@torch.no_grad()
def sampled(
    model: Model, way: Way, prompts: Tensor, new: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Tokens with their prompts, and the log-probabilities of the new ones, (batch, new)."""
    batch, longest = prompts.shape[0], prompts.shape[1] + new
    shape = (batch, longest, KV_HEADS, HEAD_DIM)
    empty = torch.zeros(shape, dtype=torch.bfloat16, device=prompts.device)
    caches = [Cache(empty.clone(), empty.clone()) for _ in range(LAYERS)]
    tokens, found, step = prompts, [], prompts
    for _ in range(new):
        log_probs = model(step, way, caches)[:, -1]
        step = torch.multinomial(log_probs.exp(), 1, generator=generator)
        found.append(log_probs.gather(1, step))
        tokens = torch.cat([tokens, step], 1)
    return tokens, torch.cat(found, 1)


@dataclass
class Run:
    """What happened in each step: the mean reward, the largest distance of a ratio from 1, and whether the
    log-probabilities of sampler and trainer were the same bytes."""

    rewards: list[float] = field(default_factory=list)
    drift: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)


def run(name: str, steps: int, batch: int = 4, new: int = 14, device: str = "cpu") -> Run:
    """Train a model to say even tokens."""
    torch.manual_seed(0)
    model, way, done = Model().to(device), WAYS[name], Run()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator(device).manual_seed(1)
    for _ in range(steps):
        prompts = torch.randint(VOCABULARY, (batch, PROMPT), device=device, generator=generator)
        tokens, old = sampled(model, way, prompts, new, generator)
        log_probs = model(tokens[:, :-1], way)[:, PROMPT - 1 :].gather(2, tokens[:, PROMPT:, None])[..., 0]
        ratios = (log_probs - old).exp()
        rewards = (tokens[:, PROMPT:] % 2 == 0).float()
        loss = -(ratios * (rewards - rewards.mean())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done.rewards.append(rewards.mean().item())
        done.drift.append((ratios.detach() - 1).abs().max().item())
        done.same.append(same_bytes(log_probs.detach(), old))
    return done


def draw(runs: dict[str, Run], path: Path) -> None:
    """The largest distance of a ratio from 1, and the reward, by step."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3), layout="constrained")
    for name, one in runs.items():
        left.plot(one.drift, label=name)
        right.plot(one.rewards, label=name)
    left.set(xlabel="step", ylabel="largest |ratio - 1|")
    right.set(xlabel="step", ylabel="mean reward")
    left.legend()
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> dict[str, Run]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=14, help="sampled per sequence, at most 1,000")
    parser.add_argument("--save", type=Path, metavar="FILE.svg", help="draw a picture; needs matplotlib")
    args = parser.parse_args(argv)
    if not 0 < args.tokens <= 1000:
        parser.error(f"--tokens must be in 1 .. 1000, got {args.tokens}")
    runs = {}
    for name in WAYS:
        one = runs[name] = run(name, args.steps, args.batch, args.tokens, args.device)
        print(
            f"{name}: log-probabilities of sampler and trainer are the same bytes in {sum(one.same)} of "
            f"{args.steps} steps; largest |ratio - 1| {max(one.drift):.3g}; mean reward "
            f"{one.rewards[0]:.2f} -> {one.rewards[-1]:.2f}"
        )
    if args.save:
        draw(runs, args.save)
    return runs


if __name__ == "__main__":
    main()

"""Time training steps of a model of eight LLaMA3-8B layers, eager and compiled: what order costs per step.

A step is forward, loss, backward and AdamW on one batch of random tokens. Three ways: nothing has a fixed
order; attention alone has one; everything has one (``torch.use_deterministic_algorithms`` too). Each layer is
compiled by itself. FlashAttention-4 is measured in eager mode only. Timing is sustained, as in blocks.py.

    python benchmarks/steps.py --output benchmarks/results/h200-steps.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from block_attention import Kind, attentions
from block_models import MODELS, Attend, Block, Case
from blocks import BLOCK_S, LEAST_CALLS, peak_mib
from card import facts_of_run
from forward import once, sustained
from forward_calls import Call
from record import Row, write
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import dash_attn
from dash_attn.tools.bench import require_hopper

LAYERS, WORDS, ROUNDS = 8, 32_000, 7


class Way(NamedTuple):
    """A contender.

    Attributes:
        mode: "eager" or "compiled".
        impl, ordered: of the attention.
        everything: all other operators have a fixed order, too.
    """

    mode: str
    impl: str
    ordered: bool
    everything: bool


class Layers(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, case: Case, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, case.model.hidden)
        self.blocks = nn.ModuleList(Block(case.model) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(case.model.hidden, eps=1e-6)
        self.head = nn.Linear(case.model.hidden, words, bias=False)

    def forward(self, tokens: Tensor, attend: Attend, layer: Any) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = layer(block, x, attend)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.flatten())


def _layer(block: nn.Module, x: Tensor, attend: Attend) -> Any:
    return block(x, attend)


def steps(case: Case, device: torch.device, words: int = WORDS, backend: str = "inductor") -> dict[Way, Call]:
    """A step by contender, on one model whose weights all change. What fails is left out, with a line."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = Layers(case, words).to(dtype)
        tokens = torch.randint(words, (case.batch, case.tokens))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")

    def step(way: Way, attend: Attend, layer: Any) -> Tensor:
        with determinism(way.everything):
            loss = model(tokens, attend, layer)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.detach()

    made = {}
    for mode, found in (("eager", attentions(case, device)), ("compiled", plain(case, device))):
        layer = _layer if mode == "eager" else torch.compile(_layer, backend=backend, fullgraph=True)
        for (impl, ordered), attend in found.items():
            for everything in (False, True) if ordered else (False,):
                way = Way(mode, impl, ordered, everything)
                made[way] = partial(step, way, attend, layer)
    return {way: call for way, call in made.items() if _runs(way, call)}


def plain(case: Case, device: torch.device) -> dict[Kind, Attend]:
    """Attentions that the compiler can go through."""
    causal = case.model.causal

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)

    def ours(order: bool, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return dash_attn.flash_attn_func(q, k, v, causal=causal, deterministic=order)

    found: dict[Kind, Attend] = {("dash_attn", order): partial(ours, order) for order in (True, False)}
    if device.type == "cuda":
        found |= {("fa2", True): sdpa, ("fa2", False): sdpa}  # its order follows PyTorch's setting
    return found


@contextmanager
def determinism(everything: bool) -> Iterator[None]:
    """PyTorch's deterministic algorithms, and its flash backend for SDPA."""
    settings: Any = torch.utils.deterministic
    before, fill = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(everything)
    settings.fill_uninitialized_memory = False
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            yield
    finally:
        settings.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(before)


def _runs(way: Way, call: Call) -> bool:
    if (way.mode, way.impl, way.ordered, way.everything) == ("compiled", "fa2", True, False):
        return False  # nothing would give it an order
    try:
        call()
    except Exception as error:  # a library that cannot do it
        if way.impl == "dash_attn":
            raise
        why = (str(error).strip().splitlines() or [""])[0]
        print(f"{way} is left out: {type(error).__name__}: {why}"[:300], file=sys.stderr, flush=True)
        return False
    return True


def rows(case: Case, rounds: int) -> list[Row]:
    """Of all contenders."""
    made = steps(case, torch.device("cuda"))
    counts = {way: max(LEAST_CALLS, int(BLOCK_S / once(call))) for way, call in made.items()}
    found = []
    for way, all_ms in sustained(made, counts, rounds).items():
        ms = statistics.median(all_ms)
        found.append(
            {"case": f"{LAYERS} layers of {case.title}, {way.mode}", "mode": way.mode, "impl": way.impl,
             "deterministic": way.ordered, "everything": way.everything, "ms": round(ms, 4),
             "spread": round((max(all_ms) - min(all_ms)) / ms, 4), "peak_mib": peak_mib(made[way])}
        )  # fmt: skip
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write header and rows as JSON")
    parser.add_argument("--seqlen", type=int, default=8192, help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default %(default)s")
    args = parser.parse_args(argv)
    for name in ("seqlen", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be >= 1, got {getattr(args, name)}")
    require_hopper()
    facts = facts_of_run(args.rounds, "torch", "flash-attn-4", "nvidia-cutlass-dsl") | {"timing": "sustained"}
    found = rows(Case("LLaMA3-8B", MODELS["LLaMA3-8B"], 1, args.seqlen), args.rounds)
    for row in found:
        order = "everything" if row["everything"] else "attention" if row["deterministic"] else "nothing"
        print(f"{row['case']}: {row['impl']}, ordered: {order}: {row['ms']:.2f} ms, {row['peak_mib']} MiB")
    if args.output:
        write(args.output, facts, found)


if __name__ == "__main__":
    main()

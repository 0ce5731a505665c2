"""Time a softcap and sinks on the Hopper kernels, beside the same calls without them.

16,384 tokens, hidden size 2,048, bf16, public functions, sustained timing as in forward.py; all calls of a
point take turns. "softcap" has normal inputs, whose scores are far below the cap. For "softcap, wide" q is
eight times as large: one score of 400,000 is beyond three quarters of the cap. For "softcap, wider" it is
sixteen times as large: one score of 50, so that every warp sees some in every tile.

    python benchmarks/scores.py --output benchmarks/results/h200-scores.json
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from card import facts_of_run
from forward import medians
from forward_calls import Call, without_gradients
from record import Row, write

from dash_attn import attention

TOKENS, HIDDEN, ROUNDS, SOFTCAP = 16_384, 2_048, 5, 50.0


def calls(head_dim: int, seqlen: int, causal: bool) -> Iterator[tuple[tuple[str, str], Call]]:
    """((pass, implementation), call). A backward goes on from the out of a forward."""
    heads = HIDDEN // head_dim
    size = (TOKENS // seqlen, seqlen, heads, head_dim)
    q, k, v, dout = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    sink = torch.randn(heads, device="cuda")
    variants: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {
        "plain": (q, {}),
        "sink": (q, {"learnable_sink": sink}),
        "softcap": (q, {"softcap": SOFTCAP}),
        "softcap, wide": (8 * q, {"softcap": SOFTCAP}),
        "softcap, wider": (16 * q, {"softcap": SOFTCAP}),
        "softcap, triton": (q, {"softcap": SOFTCAP, "backend": "triton"}),
    }
    for name, (of_q, options) in variants.items():
        leaves = [x.clone().requires_grad_() for x in (of_q, k, v)]
        how = {"causal": causal, "q_segment": 2**30, **options}
        if "learnable_sink" in how:
            how["learnable_sink"] = sink.clone().requires_grad_()
            leaves.append(how["learnable_sink"])
        yield ("forward", name), without_gradients(forward(leaves, how))
        yield ("backward", name), backward(forward(leaves, how)(), leaves, dout)


def forward(leaves: Sequence[torch.Tensor], how: dict[str, Any]) -> Call:
    return lambda: attention(*leaves[:3], **how)


def backward(out: torch.Tensor, leaves: Sequence[torch.Tensor], dout: torch.Tensor) -> Call:
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write header and rows as JSON")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default {ROUNDS}")
    args = parser.parse_args(argv)
    facts = facts_of_run(args.rounds, "torch", "triton", "nvidia-cutlass-dsl") | {"timing": "sustained"}
    found: list[Row] = []
    for head_dim in (64, 128, 256):
        for seqlen in (1_024, 4_096, 16_384):
            for causal in (True, False):
                point: Row = {"head_dim": head_dim, "mask": "causal" if causal else "full", "seqlen": seqlen}
                ms = medians(dict(calls(head_dim, seqlen, causal)), args.rounds)
                found += [point | {"pass": which, "impl": impl, "ms": t} for (which, impl), t in ms.items()]
                print(point, {f"{which} {impl}": round(t, 3) for (which, impl), t in ms.items()}, flush=True)
                if args.output:
                    write(args.output, facts, found)


if __name__ == "__main__":
    main()

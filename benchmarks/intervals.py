"""Time masks given as intervals of rows on the Hopper kernels, beside Triton's and FlexAttention.

Forward and backward of one sequence of 16,384 tokens, 16 heads, bf16, sustained timing as in forward.py.
FlexAttention is compiled, with a block mask of the same elements. "no intervals" is what the mask without
intervals takes on the same kernels. "packed" is a packed batch of the same documents.

    python benchmarks/intervals.py --output benchmarks/results/h200-intervals.json
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from card import facts_of_run
from forward import medians
from forward_calls import Call, without_gradients
from record import Row, write
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dash_attn import attention, flash_attn_varlen_func

SEQLEN, HEADS, ROUNDS = 16_384, 16, 5
FIRST, LAST = 0, 2**31 - 1
CASES = (
    "one document",
    "16 documents",
    "64 documents",
    "prefix of a quarter",
    "prefix shared by 8",
    "half padding",
)


def bounds_of(case: str) -> list[int]:
    """Where parts of the sequence begin and end; as the packed batch has them, if it is documents."""
    if case == "prefix shared by 8":
        return [0, *range(SEQLEN // 4, SEQLEN + 1, SEQLEN * 3 // 32)]
    count = {"16 documents": 16, "64 documents": 64}.get(case, 1)
    return list(range(0, SEQLEN + 1, SEQLEN // count))


def intervals_of(case: str) -> tuple[bool, Tensor, Tensor]:
    """Whether the mask is causal, row_starts and row_ends, (1, SEQLEN) int32."""
    starts, ends = torch.full((SEQLEN,), FIRST), torch.full((SEQLEN,), LAST)
    for begin, end in pairwise(bounds_of(case)):
        ends[begin:end] = end
    if case == "prefix of a quarter":
        starts = torch.arange(SEQLEN)
        starts[: SEQLEN // 4] = 0
    elif case == "prefix shared by 8":
        ends[: SEQLEN // 4] = SEQLEN
    elif case == "half padding":
        ends[SEQLEN // 2 :] = 0
    return case != "prefix of a quarter", *(x.int()[None].cuda() for x in (starts, ends))


@cache
def compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)


class Elements:
    """FlexAttention's mask: the function is one for all cases, so that it is compiled once."""

    def __init__(self) -> None:
        starts, ends = (torch.zeros(SEQLEN, dtype=torch.int32, device="cuda") for _ in range(2))

        def seen(_batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return (row >= starts[key]) & (row < ends[key])

        self.starts, self.ends, self.seen = starts, ends, seen

    def of(self, causal: bool, starts: Tensor, ends: Tensor) -> Any:
        keys = torch.arange(SEQLEN, dtype=torch.int32, device="cuda")
        self.starts.copy_(torch.maximum(starts[0], keys) if causal else starts[0])
        self.ends.copy_(ends[0])
        return create_block_mask(self.seen, None, None, SEQLEN, SEQLEN, device="cuda")


def calls(head_dim: int, case: str, elements: Elements) -> Iterator[tuple[tuple[str, str], Call]]:
    """((passes, implementation), call)."""
    size = (1, SEQLEN, HEADS, head_dim)
    leaves = [torch.randn(size, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    dout = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    causal, starts, ends = intervals_of(case)
    how = {"causal": causal, "row_starts": starts, "row_ends": ends}
    blocks = elements.of(causal, starts, ends)
    bounds = torch.tensor(bounds_of(case), dtype=torch.int32)
    longest = int(bounds.diff().max())
    functions = {
        "dash_attn": lambda: attention(*leaves, backend="sm90", **how),
        "triton": lambda: attention(*leaves, backend="triton", **how),
        "flex": lambda: compiled()(*(x.transpose(1, 2) for x in leaves), block_mask=blocks).transpose(1, 2),
        "no intervals": lambda: attention(*leaves, causal=causal, q_segment=2**30),
    }
    if case.endswith("documents"):
        flat = [x.squeeze(0) for x in leaves]  # the gradient of x[0] is a copy into zeros
        functions["packed"] = lambda: flash_attn_varlen_func(
            *flat, bounds, bounds, longest, longest, causal=True
        )[None]
    for name, function in functions.items():
        yield ("forward", name), without_gradients(function)
        yield ("both", name), both(function, leaves, dout)


def both(function: Call, leaves: Sequence[Tensor], dout: Tensor) -> Call:
    return lambda: torch.autograd.grad(function(), leaves, dout)


def rows(head_dim: int, case: str, elements: Elements, rounds: int) -> list[Row]:
    made = dict(calls(head_dim, case, elements))
    return [
        {"case": case, "head_dim": head_dim, "pass": kind[0], "impl": kind[1], "ms": ms}
        for kind, ms in medians(made, rounds).items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write header and rows as JSON")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default {ROUNDS}")
    args = parser.parse_args(argv)
    facts = facts_of_run(args.rounds, "torch", "triton", "nvidia-cutlass-dsl") | {"timing": "sustained"}
    elements, found = Elements(), list[Row]()
    for head_dim in (64, 128):
        for case in CASES:
            new = rows(head_dim, case, elements, args.rounds)
            found += new
            said = ", ".join(f"{row['pass']} {row['impl']} {row['ms']:.3f}" for row in new)
            print(f"{head_dim}, {case}: {said} ms", flush=True)
            if args.output:
                write(args.output, facts, found)


if __name__ == "__main__":
    main()

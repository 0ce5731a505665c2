"""Time forward and backward of the Triton backend, beside FlexAttention and PyTorch's FlashAttention-2.

Dense batches of 16,384 tokens and hidden size 2,048, bf16, sustained timing as in forward.py. FlexAttention
is compiled, with a block mask where the mask is causal; PyTorch's FlashAttention-2 runs under
``use_deterministic_algorithms``, by which it sums dQ in splits.

    python benchmarks/triton_backend.py --output benchmarks/results/h200-triton.json
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from card import facts_of_run
from forward import medians
from forward_calls import Call, without_gradients
from points import HIDDEN, TOKENS
from record import Row, write
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import dash_attn
from dash_attn.peers import torch_sdpa

HEAD_DIMS, SEQLENS = (64, 96, 128, 256), (1024, 4096, 16_384)
ROUNDS = 5


def attentions(causal: bool, seqlen: int) -> dict[str, Any]:
    """By name: functions of q, k and v, (batch, heads, seqlen, head_dim)."""
    blocks = None
    if causal:
        blocks = create_block_mask(lambda b, h, q, k: q >= k, None, None, seqlen, seqlen, device="cuda")
    flex = torch.compile(flex_attention, dynamic=False)

    def ours(*tensors: Tensor) -> Any:
        q, k, v = (x.transpose(1, 2) for x in tensors)
        return dash_attn.flash_attn_func(q, k, v, causal=causal, backend="triton")

    def fa2(*tensors: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(*tensors, is_causal=causal)

    return {"dash_attn": ours, "flex": lambda q, k, v: flex(q, k, v, block_mask=blocks), "fa2": fa2}


def calls(head_dim: int, causal: bool, seqlen: int) -> Iterator[tuple[tuple[str, str], Call]]:
    """((pass, implementation), call)."""
    size = (TOKENS // seqlen, seqlen, HIDDEN // head_dim, head_dim)
    leaves = [torch.randn(size, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
    for x in leaves:
        x.requires_grad_()
    for name, function in attentions(causal, seqlen).items():
        out = function(*leaves)
        dout = torch.randn_like(out)
        yield ("forward", name), without_gradients(partial(function, *leaves))
        yield ("backward", name), _backward(out, leaves, dout, name == "fa2")


def _backward(out: Tensor, leaves: Sequence[Tensor], dout: Tensor, strict: bool) -> Call:
    def run() -> Any:
        with torch_sdpa.strict() if strict else nullcontext():
            return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return run


def rows(head_dim: int, causal: bool, seqlen: int, rounds: int) -> list[Row]:
    case = f"{TOKENS // seqlen} x {seqlen}, {head_dim}, {'causal' if causal else 'full'}"
    torch._dynamo.reset()
    made = dict(calls(head_dim, causal, seqlen))
    return [
        {"case": case, "pass": kind[0], "impl": kind[1], "deterministic": True, "head_dim": head_dim,
         "causal": causal, "seqlen": seqlen, "ms": ms}
        for kind, ms in medians(made, rounds).items()
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write header and rows as JSON")
    parser.add_argument("--share", default="0/1", metavar="I/N", help="every Nth case only, from I on")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default {ROUNDS}")
    args = parser.parse_args(argv)
    facts = facts_of_run(args.rounds, "torch", "triton") | {"timing": "sustained"}
    found: list[Row] = []
    first, of = map(int, args.share.split("/"))
    for case in list(product(HEAD_DIMS, (False, True), SEQLENS))[first::of]:
        new = rows(*case, args.rounds)
        found += new
        said = ", ".join(f"{row['pass']} {row['impl']} {row['ms']:.3f}" for row in new)
        print(f"{new[0]['case']}: {said} ms", flush=True)
        if args.output:
            write(args.output, facts, found)


if __name__ == "__main__":
    main()

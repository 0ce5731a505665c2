"""Every kernel variant at small sizes, once, for compute-sanitizer (`make sanitize`).

No oracle and no test framework: the tools are slow, and what is wrong here is found by them, not by values. Workspaces and
results are as the allocator gives them, so that initcheck sees what is read before it is written.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence

# A buffer is an allocation of its own, so that the tools know its ends; read by PyTorch when it allocates first.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch
from gpu_cases import CAUSAL, FULL, WINDOW, auto_plan, dense, packed

from dash_attn.kernels.compile import program, variants
from dash_attn.kernels.launch import Debug, run_backward
from dash_attn.kernels.sm90.config import BackwardConfig
from dash_attn.problem import Problem
from dash_attn.schedule import Plan, Shift, build_plan

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def plans(config: BackwardConfig) -> Iterator[tuple[str, Plan]]:
    """What a variant is launched with: dense with a window; the one users get also packed, in head groups, with empty sequences,
    and with tiles that wait for another block at every task."""
    like = {"head_dim": config.head_dim, "dtype": DTYPES[config.dtype]}
    yield "window", auto_plan(dense(WINDOW, seqlen=300, **like))
    if config == BackwardConfig(config.head_dim, config.dtype):
        yield "rings", build_plan(dense(FULL, seqlen=300, batch=1, **like), Shift(ring=3))
        lengths = ((130, 260), (0, 100), (100, 0), (0, 0), (1, 999), 64)
        yield "packed", auto_plan(packed(*lengths, mask=CAUSAL, **like))
        yield (
            "head groups",
            auto_plan(packed(300, 200, mask=FULL, heads=8, kv_heads=1, **like), head_groups=4),
        )


def launch(config: BackwardConfig, plan: Plan) -> None:
    """One backward with random inputs, waited for."""
    problem = plan.problem
    arguments = inputs(problem)
    debug = Debug(config.spin_limit > 0, config.dump_partials, config.trace)
    run_backward(plan, *arguments, problem.head_dim**-0.5, ordered=config.ordered, debug=debug)
    torch.cuda.synchronize()


def inputs(problem: Problem) -> list[torch.Tensor]:
    """dout, q, k, v, out, lse: made on the CPU, so that no kernel but ours runs."""
    generator = torch.Generator().manual_seed(0)
    (seqlen_q, seqlen_k), batch = problem.sequences[0], len(problem.sequences)
    rows_q, rows_k = (batch, seqlen_q), (batch, seqlen_k)
    stats = (batch, problem.heads, seqlen_q)
    if len(set(problem.sequences)) > 1:
        total_q, total_k = (sum(pair[side] for pair in problem.sequences) for side in (0, 1))
        rows_q, rows_k, stats = (total_q,), (total_k,), (problem.heads, total_q)
    q, k = (*rows_q, problem.heads, problem.head_dim), (*rows_k, problem.kv_heads, problem.head_dim)
    dtype = getattr(torch, problem.dtype)
    tensors = [torch.randn(size, generator=generator).to(dtype).cuda() for size in (q, q, k, k, q)]
    return [*tensors, torch.full(stats, 6.0).cuda()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="variants whose name contains TEXT")
    parser.add_argument(
        "--compile", action="store_true", help="compile the variants into the cache, and launch nothing"
    )
    args = parser.parse_args(argv)
    chosen = {name: config for name, config in variants().items() if args.only in name}
    if not chosen:
        parser.error(f"no variant's name contains {args.only!r}; known: {', '.join(variants())}")
    for name, config in chosen.items():
        if args.compile:
            program(config)
            continue
        for label, plan in plans(config):
            launch(config, plan)
            print(f"{name}: {label}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

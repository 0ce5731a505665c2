"""Time the attention forward of dash-attn and of its peers, side by side in one process.

Two modes, contenders in turns. Sustained: blocks of back-to-back calls, about 12 ms each, so that the GPU
is as hot as in training. Single: one call at a time, timed by events. Sets: ``grid`` has the DASH paper's
24 points; ``grouped`` several q heads per kv head; ``other`` odd lengths, windows, chunks and long
sequences. FLOPs = 4 S_q S_k D H B of what the mask leaves.

    python benchmarks/forward.py --output benchmarks/results/h200-forward.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from card import driver
from points import HIDDEN, SEQLENS, TOKENS
from torch import Tensor

import dash_attn
from dash_attn.backends.base import backend_for
from dash_attn.peers import fa4
from dash_attn.problem import Mask, Problem

Call = Callable[[], Any]
BLOCK_S, ROUNDS = 0.012, 9


def points() -> Iterator[tuple[str, Problem]]:
    for head_dim in (64, 128):
        for mask in (Mask.full(), Mask.causal()):
            for seqlen in SEQLENS:
                yield (
                    "grid",
                    dense(TOKENS // seqlen, seqlen, seqlen, HIDDEN // head_dim, None, head_dim, mask),
                )
    for kv_heads, seqlen in ((4, 4096), (4, 16_384), (2, 4096), (1, 8192)):
        yield "grouped", dense(TOKENS // seqlen, seqlen, seqlen, 16, kv_heads, 128, Mask.causal())
    for head_dim in (64, 128):
        heads = HIDDEN // head_dim
        for seqlen in (1500, 3000, 10_000, 32_768, 65_536, 131_072):
            for mask in (Mask.full(), Mask.causal()):
                yield "other", dense(max(1, TOKENS // seqlen), seqlen, seqlen, heads, None, head_dim, mask)
        for left in (1024, 4096):
            yield "other", dense(1, 16_384, 16_384, heads, None, head_dim, Mask.window(left, 0))
        yield "other", dense(4, 1024, 8192, heads, None, head_dim, Mask.causal())


def dense(batch: int, q: int, k: int, heads: int, kv_heads: int | None, head_dim: int, mask: Mask) -> Problem:
    return Problem.dense(
        batch=batch, seqlen_q=q, seqlen_k=k, heads=heads, kv_heads=kv_heads, head_dim=head_dim, mask=mask
    )


def contenders(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Call]:
    scale = problem.head_dim**-0.5
    ours = backend_for(q.device).prepare(problem, q.device, False)
    found: dict[str, Call] = {"dash_attn": lambda: ours.forward(q, k, v, scale)}
    if not fa4.why_not():
        found["fa4"] = lambda: fa4.forward(q, k, v, scale, problem.mask)
    grid, mask = problem.grid(0), problem.mask
    if problem.group == 1 and (mask.is_full or (mask.is_causal and grid.seqlen_q == grid.seqlen_k)):
        turned = [x.transpose(1, 2) for x in (q, k, v)]
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        found["cudnn"] = lambda: cudnn(*turned, None, True, 0.0, mask.is_causal, False, scale=scale)
    return found


def sustained(calls: dict[str, Call]) -> dict[str, list[float]]:
    """Milliseconds of a call, of every block."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    counts = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        counts[name] = max(3, int(BLOCK_S / (time.perf_counter() - start)))
    for number in range(ROUNDS):
        names = list(calls)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            times[name].append(block(calls[name], counts[name]))
    return times


def single(calls: dict[str, Call]) -> dict[str, list[float]]:
    return {name: [block(call, 1) for _ in range(ROUNDS)] for name, call in calls.items()}


def block(call: Call, count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def rows(which: str, problem: Problem) -> Iterator[dict[str, Any]]:
    (seqlen_q, seqlen_k), batch = problem.sequences[0], len(problem.sequences)
    shape = (batch, seqlen_q, problem.heads, problem.head_dim)
    keys = (batch, seqlen_k, problem.kv_heads, problem.head_dim)
    q, k, v = (torch.randn(x, device="cuda", dtype=torch.bfloat16) for x in (shape, keys, keys))
    calls = contenders(problem, q, k, v)
    flops = problem.backward_flops * 0.4
    for timing, found in (("sustained", sustained(calls)), ("single", single(calls))):
        for name, times in found.items():
            ms = statistics.median(times)
            yield {
                "set": which, "timing": timing, "impl": name, "mask": problem.mask.name,
                "head_dim": problem.head_dim, "seqlen": seqlen_q, "seqlen_k": seqlen_k, "batch": batch,
                "heads": problem.heads,
                "kv_heads": problem.kv_heads, "dtype": problem.dtype, "ms": round(ms, 5),
                "spread": round((max(times) - min(times)) / ms, 4), "tflops": round(flops / ms / 1e9, 1),
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    parser.add_argument("--sets", nargs="+", default=["grid", "grouped", "other"])
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    for which, problem in points():
        if which not in args.sets:
            continue
        new = list(rows(which, problem))
        found += new
        ms = {row["impl"]: row["tflops"] for row in new if row["timing"] == "sustained"}
        grid = problem.grid(0)
        print(which, problem.head_dim, problem.mask.name, grid.seqlen_q, grid.seqlen_k, ms, flush=True)
    if args.output:
        header = {
            "gpu": torch.cuda.get_device_name(), "driver": driver(), "dash_attn": dash_attn.__version__,
            "versions": {name: version(name) for name in ("torch", "flash-attn-4", "nvidia-cutlass-dsl")},
            "command": shlex.join(["python", *sys.argv]),
        }  # fmt: skip
        args.output.write_text(json.dumps({"header": header, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

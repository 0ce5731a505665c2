"""Ablations of the forward: what each part of it is worth, beside FlashAttention-4's forward.

Sets (ablation_variants.py), all bf16, 16,384 tokens, hidden size 2,048:

``pipelining``  what a warpgroup's products run beside, with warpgroups in turns and without
``exp2``        2^x by a polynomial: speed, error of 2^x, error of out
``rescaling``   when a row's maximum is raised: speed by kind of inputs, and how often
``order``       the order in which items are claimed
``persistent``  blocks that claim items, or one block per item
``segment``     keys per segment
``accuracy``    root mean square errors of out against float64, beside peers

Speed is in sustained mode (forward.py): blocks of back-to-back calls of about 12 ms, contenders in turns. A
row of speed has its set, variant, head dim, mask, length, kind of inputs, milliseconds, TFLOP/s, spread, and
whether out has the bits of what ships.
The file keeps the sets that are not measured.

    python benchmarks/ablations.py --compile --output benchmarks/results/h200-ablations.json
    python benchmarks/ablations.py --only order segment --rounds 3
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import ablation_errors as errors
import torch
from ablation_variants import (
    ABLATIONS,
    HEAD_DIMS,
    OURS,
    AblatedForward,
    Ablation,
    Variant,
    all_configs,
    points,
    rescaling,
)
from forward import header, timed
from forward_calls import Call
from forward_points import MASKS
from record import Record, Row

from dash_attn.backends.base import backend_for
from dash_attn.backends.sm90.compile import program
from dash_attn.peers import fa4
from dash_attn.problem import Mask, Problem
from dash_attn.scores import Scores
from dash_attn.testing import same_bytes
from dash_attn.tools.bench import require_hopper

DEVICE, ROUNDS, MOST_PROCESSES = "cuda", 5, 16
ERROR_HEADS, ERROR_SEQLENS = 8, (1024, 2048, 4096)
ERROR_INPUTS = (("normal", "bfloat16"), ("fa3", "bfloat16"), ("fa3", "float16"))
"""Kinds of inputs and dtypes whose errors are measured."""
RISES_SEQLEN = 4096
TOLERANCE = 0.05
"""By how much results of variants may differ, relative norms: bfloat16 alone makes some thousandths."""


# Speed


def speeds(name: str, rounds: int) -> Iterator[Row]:
    """All variants of an ablation at all of its points, and FlashAttention-4."""
    ablation = ABLATIONS[name]
    for problem, kind in points(ablation):
        row = {
            "set": name,
            "what": "speed",
            **_where(problem),
            "batch": len(problem.sequences),
            "inputs": kind,
        }
        calls = contenders(ablation, problem, kind)
        same = compared(calls)
        found = timed({x: calls[x] for x in same}, rounds, with_single=False)["sustained"]
        for variant, times in found.items():
            ms = statistics.median(times)
            yield row | {
                "variant": variant, "ms": round(ms, 5), "spread": round((max(times) - min(times)) / ms, 4),
                "tflops": round(0.4 * problem.backward_flops / ms / 1e9, 1), "same_bits": same[variant],
            }  # fmt: skip


def _where(problem: Problem) -> Row:
    seqlen, _ = problem.sequences[0]
    return {"head_dim": problem.head_dim, "mask": problem.mask.name, "seqlen": seqlen}


def contenders(ablation: Ablation, problem: Problem, kind: str) -> dict[str, Call]:
    """Calls by name, all on the same tensors."""
    x = drawn(problem, kind)
    scale = problem.head_dim**-0.5
    calls: dict[str, Call] = {}
    for variant in ablation.variants(problem.head_dim):
        calls[variant.name] = partial(forward_of(problem, x.q.device, variant), *x, scale)
    if not fa4.why_not():
        calls["fa4"] = partial(fa4.forward, *x, scale, problem.mask)
    return calls


def compared(calls: Mapping[str, Call]) -> dict[str, bool]:
    """Call each once, which compiles it: has out the bits of ours? What is wrong is left out, with a line."""
    ours = calls[OURS]()[0]
    same = {}
    for name, call in calls.items():
        out = call()[0]
        error = float((out.float() - ours.float()).norm() / ours.float().norm())
        if error <= TOLERANCE:  # not NaN, either
            same[name] = same_bytes(out, ours)
        else:
            print(f"{name} is left out: it differs from ours by {error:.1e}", file=sys.stderr, flush=True)
    return same


def drawn(problem: Problem, kind: str) -> errors.Inputs:
    (seqlen, _), batch = problem.sequences[0], len(problem.sequences)
    shape = (batch, seqlen, problem.heads, problem.head_dim)
    return errors.inputs(kind, shape, getattr(torch, problem.dtype), DEVICE)


def forward_of(problem: Problem, device: torch.device, variant: Variant) -> Call:
    return AblatedForward(problem, device, variant)


# Errors, and how often a maximum rises


def error_points(masks: Sequence[Mask], seqlens: Sequence[int], dtype: str = "bfloat16") -> Iterator[Problem]:
    """Single sequences of a few heads."""
    for head_dim in HEAD_DIMS:
        for mask in masks:
            for seqlen in seqlens:
                shape = {"seqlen": seqlen, "heads": ERROR_HEADS, "head_dim": head_dim}
                yield Problem.dense(**shape, mask=mask, dtype=dtype)


def exp2_errors() -> Iterator[Row]:
    """Of 2^x itself, then of out by share of the polynomial."""
    numbers = errors.exponents()
    unit = torch.from_numpy(numbers).to(DEVICE).exp2().cpu().numpy()
    for name, found in (("exponential unit", unit), ("polynomial", errors.polynomial_exp2(numbers))):
        yield {"set": "exp2", "what": "2^x", "variant": name, **errors.exp2_errors(found, numbers)}
    for problem in error_points(MASKS, (RISES_SEQLEN,)):
        x = drawn(problem, "normal")
        wanted = errors.exact(x, problem.mask)
        for variant in ABLATIONS["exp2"].variants(problem.head_dim):
            out, _ = forward_of(problem, x.q.device, variant)(*x, problem.head_dim**-0.5)
            row = {"set": "exp2", "what": "rmse", "variant": variant.name, **_where(problem)}
            yield row | {"rmse": errors.rmse(out, wanted)}


def rises() -> Iterator[Row]:
    """Shares of pairs in which a maximum rises, by rule and kind of inputs."""
    for problem in error_points(MASKS, (RISES_SEQLEN,)):
        for kind in ABLATIONS["rescaling"].kinds:
            x = drawn(problem, kind)
            q, k = (t[0].transpose(0, 1) for t in x[:2])
            for variant in rescaling(problem.head_dim):
                found = rises_of(q, k, problem, variant)
                row = {"set": "rescaling", "what": "rises", "variant": variant.name, "inputs": kind}
                shares = found.rising / found.pairs, found.warps_rising / found.warp_pairs
                yield row | _where(problem) | dict(zip(("rows", "warps"), shares)) | {"pairs": found.pairs}


def rises_of(q: torch.Tensor, k: torch.Tensor, problem: Problem, variant: Variant) -> errors.Rises:
    config = variant.config
    numbers = (config.tile_n, config.segment, config.keep, config.room)
    numerics = errors.ForwardNumerics(problem.head_dim, problem.dtype, *numbers)
    return errors.rises(*errors.tile_maxima(q, k, problem.mask, config.tile_n), numerics)


def accuracy() -> Iterator[Row]:
    """Errors of out: ours, FlashAttention-4's, and PyTorch's."""
    for kind, dtype in ERROR_INPUTS:
        for problem in error_points(MASKS, ERROR_SEQLENS, dtype):
            x = drawn(problem, kind)
            wanted = errors.exact(x, problem.mask)
            row = {"set": "accuracy", "what": "rmse", "inputs": kind, "dtype": dtype, **_where(problem)}
            for name, call in {OURS: shipped(problem, x), **dict(errors.peers(x, problem.mask))}.items():
                yield row | {"variant": name, "rmse": errors.rmse(call(), wanted)}


def shipped(problem: Problem, x: errors.Inputs) -> Call:
    """The output of our forward."""
    ours = backend_for(x.q.device).prepare(problem, x.q.device, False)
    return lambda: ours.forward(*x, Scores(problem.head_dim**-0.5))[0]


# All of it


def measures(name: str, rounds: int) -> Iterator[Row]:
    if name in ABLATIONS:
        yield from speeds(name, rounds)
    more: Mapping[str, Callable[[], Iterator[Row]]] = {
        "exp2": exp2_errors, "rescaling": rises, "accuracy": accuracy,
    }  # fmt: skip
    if name in more:
        yield from more[name]()


SETS = (*ABLATIONS, "accuracy")


def compile_all() -> None:
    """Put every configuration into the cache on disk, in parallel processes."""
    configs = all_configs()
    processes = min(MOST_PROCESSES, os.cpu_count() or 1, len(configs))
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile_one, configs))


def _compile_one(config: object) -> None:
    program(config)


def line(row: Row) -> str:
    """A row in words."""
    numbers = (
        f"{x} {row[x]:.4g}" for x in ("tflops", "rmse", "rows", "warps", "fp32_max", "bf16_max") if x in row
    )
    where = [
        str(row[x]) for x in ("set", "inputs", "dtype", "head_dim", "mask", "seqlen", "variant") if x in row
    ]
    return f"{' '.join(where)}: {', '.join(numbers)}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="add to this file, or write it")
    parser.add_argument("--only", nargs="+", choices=SETS, default=SETS, metavar="NAME", help=", ".join(SETS))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"blocks per contender, default {ROUNDS}")
    parser.add_argument("--compile", action="store_true", help="compile all kernels first, in parallel")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds must be >= 1, got {args.rounds}")
    require_hopper()
    began = time.perf_counter()
    if args.compile:
        compile_all()
        print(f"{time.perf_counter() - began:4.0f} s  compiled", flush=True)
    record = Record(args.output) if args.output else None
    for name in args.only:
        facts, found = header(args.rounds), list[Row]()
        for row in measures(name, args.rounds):
            found.append(row)
            print(f"{time.perf_counter() - began:4.0f} s  {line(row)}", flush=True)
        torch.cuda.empty_cache()
        if record:
            record.replace(name, facts, found)


if __name__ == "__main__":
    main()

"""Time the attention forward of dash-attn and of its peers, side by side in one process.

Two timings, contenders in turns. Sustained: blocks of back-to-back calls, about 12 ms each, so that the GPU
is as hot as in training; in random order, and each behind a block of the same contender, which is not
counted. Single: one call at a time, timed by events. A point at which a call takes 40 ms or
more has few rounds, one call per block, and no single calls.

Sets (forward_points.py): ``grid`` has the DASH paper's 24 points; ``grouped`` several q heads per kv head;
``other`` odd and long sequences, windows, unequal lengths and packed batches. ``total`` is the grid once
more: forward and backward through public functions with their gradients, ours and the peers', and every
forward and every backward of the peers by itself. FLOPs of a forward = 4 S_q S_k D H B of what the mask
leaves, of a backward 2.5 times that.

The file keeps the sets that are not measured, and says for each set which run it is of.

    python benchmarks/forward.py --output benchmarks/results/h200-forward.json
    python benchmarks/forward.py --sets total --output benchmarks/results/h200-forward.json
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from card import facts_of_run
from forward_calls import Call, contenders
from forward_points import SETS, Point, points
from record import Record, Row

from dash_attn.schedule import ForwardNumerics
from dash_attn.tools.bench import require_hopper

BLOCK_S, LEAST_CALLS = 0.012, 3
LONG_S, LONG_ROUNDS = 0.04, 3
"""From how many seconds per call on a point has fewer rounds, and how many."""
ROUNDS = {"total": 5}
CAPTURED = 8
"""Calls in a CUDA graph."""
DEFAULT_ROUNDS = 9
"""Of the sets that ROUNDS does not name."""

Name = TypeVar("Name", bound=Hashable)
"""What calls are told apart by."""


def sustained(calls: dict[Name, Call], counts: dict[Name, int], rounds: int) -> dict[Name, list[float]]:
    """Milliseconds of a call, of every block.

    A block follows one of its own: behind a contender whose workers wait, a GPU at its power limit is up to
    5 % faster (docs/experiments/timing.md).
    """
    times: dict[Name, list[float]] = {name: [] for name in calls}
    chance = random.Random(0)
    for _ in range(rounds):
        for name in chance.sample(list(calls), len(calls)):
            block(calls[name], counts[name])
            times[name].append(block(calls[name], counts[name]))
    return times


def medians(calls: dict[Name, Call], rounds: int) -> dict[Name, float]:
    """Milliseconds of a call in blocks of at least two calls."""
    took = {name: min(once(call), once(call)) for name, call in calls.items()}
    counts = {name: max(2, int(BLOCK_S / s)) for name, s in took.items()}
    times = sustained(calls, counts, rounds)
    return {name: round(statistics.median(found), 5) for name, found in times.items()}


def single(calls: dict[Name, Call], rounds: int) -> dict[Name, list[float]]:
    return {name: [block(call, 1) for _ in range(rounds)] for name, call in calls.items()}


def block(call: Call, count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def once(call: Call) -> float:
    """Seconds of one call, about."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def captured(call: Call) -> tuple[Call, int]:
    """CAPTURED calls as the replay of one CUDA graph, and how many they are; the call itself if it cannot be
    captured. A replay takes the host no time per call."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with suppress(Exception):
        with torch.cuda.graph(graph):
            for _ in range(CAPTURED):
                call()
        return graph.replay, CAPTURED
    torch.cuda.synchronize()
    return call, 1


def timed(
    calls: dict[Name, Call], rounds: int, *, with_single: bool = True
) -> dict[str, dict[Name, list[float]]]:
    """Milliseconds of a call, by timing and name. Calls that take long are not timed one by one."""
    seconds = {name: once(call) for name, call in calls.items()}
    if max(seconds.values()) >= LONG_S:
        return {"sustained": sustained(calls, dict.fromkeys(calls, 1), min(rounds, LONG_ROUNDS))}
    counts = {name: max(LEAST_CALLS, int(BLOCK_S / s)) for name, s in seconds.items()}
    found = {"sustained": sustained(calls, counts, rounds)}
    return found | {"single": single(calls, rounds)} if with_single else found


def rows(point: Point, rounds: int) -> Iterator[Row]:
    problem = point.problem
    seqlen_q, seqlen_k = (max(lengths) for lengths in zip(*problem.sequences))
    for timing, found in timed(contenders(point), rounds).items():
        for name, times in found.items():
            ms = statistics.median(times)
            row = {
                "set": point.set, "timing": timing, "impl": name, "mask": problem.mask.name,
                "head_dim": problem.head_dim, "seqlen": seqlen_q, "seqlen_k": seqlen_k,
                "batch": len(problem.sequences), "heads": problem.heads,
                "kv_heads": problem.kv_heads, "dtype": problem.dtype, "ms": round(ms, 5),
                "spread": round((max(times) - min(times)) / ms, 4),
                "tflops": round(flops(point, name) / ms / 1e9, 1),
            }  # fmt: skip
            yield row | ({"packed": point.packed} if point.packed else {})


def flops(point: Point, name: str) -> float:
    """Of what has this name: a forward, a backward, or both."""
    backward = point.problem.backward_flops
    if name.endswith(" backward"):
        return backward
    both = point.set == "total" and not name.endswith(" forward")
    return backward * (1.4 if both else 0.4)


def header(rounds: int) -> dict[str, Any]:
    packages = ("torch", "flash-attn-4", "nvidia-cutlass-dsl", "nvidia-cudnn-frontend")
    return facts_of_run(rounds, *packages) | {
        "cudnn": torch.backends.cudnn.version(),
        "numerics": ForwardNumerics(128, "bfloat16").fingerprint,
    }


def line(found: Sequence[Row]) -> str:
    """One point in a line: TFLOP/s of every contender, sustained."""
    row = found[0]
    what = f"{row['set']} D{row['head_dim']} {row['mask']} {row['batch']} x {row['seqlen']}"
    if row["seqlen_k"] != row["seqlen"]:
        what += f" of {row['seqlen_k']} keys"
    what += f", {row['packed']}" if "packed" in row else ""
    speeds = [f"{row['impl']} {row['tflops']:.0f}" for row in found if row["timing"] == "sustained"]
    return f"{what}: {', '.join(speeds)}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="add to this file, or write it")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS, help="default: all")
    parser.add_argument(
        "--rounds", type=int, help=f"default {DEFAULT_ROUNDS}, and {ROUNDS['total']} of the set total"
    )
    args = parser.parse_args(argv)
    if args.rounds is not None and args.rounds < 1:
        parser.error(f"--rounds must be >= 1, got {args.rounds}")
    require_hopper()
    record = Record(args.output) if args.output else None
    for set_ in args.sets:
        measure(set_, args.rounds or ROUNDS.get(set_, DEFAULT_ROUNDS), record)


def measure(set_: str, rounds: int, record: Record | None) -> None:
    """Every point of a set. The file is written after each: a run that is cut short leaves what it has."""
    facts, found, began = header(rounds), list[Row](), time.perf_counter()
    for point in points(set_):
        new = list(rows(point, rounds))
        found += new
        print(f"{time.perf_counter() - began:4.0f} s  {line(new)}", flush=True)
        torch.cuda.empty_cache()
        if record:
            record.replace(set_, facts, found)


if __name__ == "__main__":
    main()

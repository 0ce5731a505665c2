"""Host time of the public functions beside FlashAttention-4's, in one process on one GPU.

Problems are so small that the GPU waits for the host: a call takes what Python takes for it.
Contenders take turns, call by call, and every figure is a median. Measured are the forward without gradients,
the forward with its backward, a packed batch of known lengths, batches of lengths never seen before, and
a small problem in a CUDA graph, whose replay shows what the start of the kernels costs on the GPU.
First calls are measured in processes of their own: how long kernels are compiled, or loaded from the cache on
disk.

    python benchmarks/host.py --output benchmarks/results/h200-host.json
    python benchmarks/host.py --first-calls --output benchmarks/results/h200-first-calls.json
    python benchmarks/host.py --profile            # where the host's time goes
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from card import driver
from torch import Tensor

import dash_attn
from dash_attn.backends.base import Tensors, backend_for
from dash_attn.ops.calls import packed_call
from dash_attn.ops.lengths import Packing
from dash_attn.scores import Scores
from dash_attn.spec import AttentionSpec

Call = Callable[[], Any]

DENSE = {
    "dense, causal": {"batch": 2, "seqlen": 256, "heads": 8, "kv_heads": 8, "head_dim": 128, "causal": True},
    "dense, full (rings)": {
        "batch": 2,
        "seqlen": 512,
        "heads": 4,
        "kv_heads": 4,
        "head_dim": 64,
        "causal": False,
    },
    "grouped, causal": {
        "batch": 2,
        "seqlen": 256,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 128,
        "causal": True,
    },
}
PACKED = {
    "packed, causal": {"lengths": (200, 17, 120, 175), "heads": 8, "kv_heads": 8, "head_dim": 128},
    "packed, grouped": {"lengths": (200, 17, 120, 175), "heads": 8, "kv_heads": 2, "head_dim": 128},
}
GRAPH = {"batch": 4, "seqlen": 256, "heads": 8, "kv_heads": 8, "head_dim": 128, "causal": True}
UNSEEN = {"sequences": 64, "shortest": 64, "longest": 1024, "heads": 16, "kv_heads": 4, "head_dim": 128}


def tensors(rows: tuple[int, ...], shape: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """dout, and q, k, v that want gradients."""

    def draw(heads: int) -> Tensor:
        return torch.randn(*rows, heads, shape["head_dim"], device="cuda", dtype=torch.bfloat16)

    return draw(shape["heads"]), [
        draw(shape[name]).requires_grad_() for name in ("heads", "kv_heads", "kv_heads")
    ]


def peer() -> Any:
    """FlashAttention-4's public functions. Not to be asked for while something is timed: it imports."""
    from flash_attn import cute

    return cute


def first(found: Any) -> Tensor:
    return found[0] if isinstance(found, tuple) else found


def with_backward(forward: Call, leaves: list[Tensor], dout: Tensor) -> Call:
    def run() -> None:
        torch.autograd.grad(first(forward()), leaves, dout)

    return run


def without_gradients(forward: Call) -> Call:
    def run() -> None:
        with torch.no_grad():
            forward()

    return run


def dense_calls(shape: dict[str, Any]) -> dict[str, dict[str, Call]]:
    """For each measurement, one call per contender."""
    dout, (q, k, v) = tensors((shape["batch"], shape["seqlen"]), shape)
    causal, fa4 = shape["causal"], peer()
    forwards = {
        "dash_attn": lambda: dash_attn.flash_attn_func(q, k, v, causal=causal),
        "fa4": lambda: fa4.flash_attn_func(q, k, v, causal=causal, deterministic=True),
    }
    return both(forwards, [q, k, v], dout)


def both(forwards: dict[str, Call], leaves: list[Tensor], dout: Tensor) -> dict[str, dict[str, Call]]:
    return {
        "forward": {name: without_gradients(call) for name, call in forwards.items()},
        "forward and backward": {name: with_backward(call, leaves, dout) for name, call in forwards.items()},
    }


def packed_calls(shape: dict[str, Any], place: str) -> dict[str, dict[str, Call]]:
    lengths = shape["lengths"]
    dout, (q, k, v) = tensors((sum(lengths),), shape)
    ends = bounds_of(lengths)
    on_gpu, mine, longest, fa4 = ends.cuda(), ends.to(place), max(lengths), peer()
    forwards = {
        "dash_attn": lambda: dash_attn.flash_attn_varlen_func(
            q, k, v, mine, mine, longest, longest, causal=True
        ),
        "fa4": lambda: fa4.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=on_gpu, cu_seqlens_k=on_gpu, max_seqlen_q=longest, max_seqlen_k=longest,
            causal=True, deterministic=True,
        ),
    }  # fmt: skip
    return both(forwards, [q, k, v], dout)


def host_us(call: Call) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def medians(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Microseconds of each contender; the GPU has nothing to do when a call begins."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(5):
            call()
    for number in range(rounds):
        names = list(calls)
        for name in names if number % 2 else reversed(names):
            torch.cuda.synchronize()
            times[name].append(host_us(calls[name]))
    return {name: round(statistics.median(found), 1) for name, found in times.items()}


def known(rounds: int) -> Iterator[dict[str, Any]]:
    cases = {name: dense_calls(shape) for name, shape in DENSE.items()}
    for name, shape in PACKED.items():
        for place in ("cuda", "cpu"):
            cases[f"{name}, lengths on {place}"] = packed_calls(shape, place)
    for name, measurements in cases.items():
        for what, calls in measurements.items():
            yield {"problem": name, "what": what, "us": medians(calls, rounds)}


def bounds_of(lengths: Sequence[int]) -> Tensor:
    """cu_seqlens, int32, on the CPU."""
    return torch.tensor([0, *lengths]).cumsum(0).int()


def drawn_lengths(rng: random.Random) -> tuple[int, ...]:
    """New lengths with the same sum every time, so that tensors are the same."""
    low, high, n = UNSEEN["shortest"], UNSEEN["longest"], UNSEEN["sequences"]
    lengths = [rng.randint(low, high) for _ in range(n)]
    total = n * (low + high) // 2
    while (off := total - sum(lengths)) != 0:
        at = rng.randrange(n)
        lengths[at] = min(max(lengths[at] + off, low), high)
    return tuple(lengths)


def unseen(rounds: int) -> Iterator[dict[str, Any]]:
    """Batches of lengths never seen before; tile counts are seen after the first few."""
    rng = random.Random(0)
    lengths = drawn_lengths(rng)
    dout, (q, k, v) = tensors((sum(lengths),), UNSEEN)
    longest, fa4 = UNSEEN["longest"], peer()

    def ends() -> Tensor:
        return bounds_of(drawn_lengths(rng))

    def ours(bounds: Tensor) -> Call:
        forward = lambda: dash_attn.flash_attn_varlen_func(q, k, v, bounds, bounds, causal=True)  # noqa: E731
        return with_backward(forward, [q, k, v], dout)

    def theirs(bounds: Tensor) -> Call:
        forward = lambda: fa4.flash_attn_varlen_func(  # noqa: E731
            q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=longest, max_seqlen_k=longest,
            causal=True, deterministic=True,
        )  # fmt: skip
        return with_backward(forward, [q, k, v], dout)

    def plan(bounds: Tensor) -> Call:
        return lambda: dash_attn.plan_for(q, k, v, bounds, bounds, causal=True)

    for place in ("cpu", "cuda"):
        times: dict[str, list[float]] = {"plan_for": [], "dash_attn": [], "dash_attn, again": [], "fa4": []}
        for number in range(rounds + 20):
            bounds, others = ends().to(place), ends()
            calls = {"plan_for": plan(others), "dash_attn": ours(bounds), "dash_attn, again": ours(bounds)}
            calls["fa4"] = theirs(bounds.cuda())
            for name, call in calls.items():
                torch.cuda.synchronize()
                us = host_us(call)
                if number >= 20:
                    times[name].append(us)
        us = {name: round(statistics.median(found), 1) for name, found in times.items()}
        us["new lengths"] = round(us["dash_attn"] - us["dash_attn, again"], 1)
        yield {"problem": f"64 unseen lengths on {place}", "what": "forward and backward", "us": us}
    yield {"problem": "64 known lengths", "what": "look-up", "us": {"dash_attn": look_up(q, k, ends())}}
    synchronizations(ours, ends)


def look_up(q: Tensor, k: Tensor, bounds: Tensor) -> float:
    """Microseconds to find a known packed batch."""
    spec, packing = AttentionSpec(0.1, -1, 0), Packing(bounds, bounds)

    def call() -> Call:
        return packed_call(q, k, k, packing, (-1, -1), spec)

    call()
    return round(statistics.median(host_us(call) for _ in range(200)), 1)


def synchronizations(ours: Callable[[Tensor], Call], ends: Callable[[], Tensor]) -> None:
    """Unseen lengths on the CPU never wait for the GPU: PyTorch raises where something would."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours(ends())()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def graphs(rounds: int) -> Iterator[dict[str, Any]]:
    """GPU time of a small problem, captured once."""
    shape = GRAPH
    dout, leaves = tensors((shape["batch"], shape["seqlen"]), shape)
    q, k, v = leaves
    fa4 = peer()
    forwards = {
        "dash_attn": lambda: dash_attn.flash_attn_func(q, k, v, causal=True),
        "fa4": lambda: fa4.flash_attn_func(q, k, v, causal=True, deterministic=True),
        "fa4, no order": lambda: fa4.flash_attn_func(q, k, v, causal=True),
    }
    steps = {name: with_backward(call, leaves, dout) for name, call in forwards.items()}
    yield {"problem": "4 x 256, 8 heads", "what": "graph", "us": replayed(steps, rounds)}
    backwards = dict(backward_alone(q, k, v, dout))
    yield {"problem": "4 x 256, 8 heads", "what": "graph, backward alone", "us": replayed(backwards, rounds)}


def backward_alone(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Iterator[tuple[str, Call]]:
    with torch.no_grad():
        out, lse = dash_attn.flash_attn_func(q, k, v, causal=True, return_lse=True)
    plan, scale = dash_attn.plan_for(q, k, v, causal=True), q.shape[-1] ** -0.5
    prepared = backend_for(q.device).prepare(plan.problem, q.device, False)
    saved = Tensors(dout, *(x.detach() for x in (q, k, v)), out, lse)
    yield "dash_attn", lambda: prepared.backward(plan, saved, Scores(scale))
    from flash_attn.cute import interface

    for name, deterministic in (("fa4", True), ("fa4, no order", False)):
        yield (
            name,
            lambda d=deterministic: interface._flash_attn_bwd(
                *saved[1:4], out, dout, lse, scale, True, deterministic=d
            ),
        )


def replayed(steps: dict[str, Call], rounds: int) -> dict[str, float]:
    """Microseconds of a replay, from blocks of 20 of each."""
    captured = {}
    for name, step in steps.items():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        captured[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured[name]):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, graph in captured.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            start.record()
            for _ in range(20):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / 20)
    return {name: round(statistics.median(found), 2) for name, found in times.items()}


FIRST = {"dash_attn, compiled": 3, "dash_attn, from the cache": 3, "fa4, compiled": 1}
"""How many processes make their first calls."""

FIRST_CALLS = """
import json, sys, time
import torch

shape = dict(device="cuda", dtype=torch.bfloat16)
q, k, v = (torch.randn(1, 512, 4, 128, **shape).requires_grad_() for _ in range(3))
dout = torch.randn(1, 512, 4, 128, **shape)
torch.autograd.grad(2 * q, q, dout)  # imports SymPy
torch.cuda.synchronize()
took = {}

def timed(what, call):
    start = time.perf_counter()
    found = call()
    torch.cuda.synchronize()
    took[what] = (time.perf_counter() - start) * 1e6
    return found

def imported():
    if sys.argv[1] == "dash_attn":
        from dash_attn import flash_attn_func
    else:
        from flash_attn.cute import flash_attn_func
    return flash_attn_func

function = timed("import", imported)
for call in ("first", "second"):
    out = timed(f"{call} forward", lambda: function(q, k, v, causal=True))
    out = out[0] if isinstance(out, tuple) else out
    timed(f"{call} backward", lambda: torch.autograd.grad(out, (q, k, v), dout))
print(json.dumps(took))
"""
"""Forward and backward with a causal mask, in a process that has only used PyTorch on the GPU before."""


def first_calls() -> Iterator[dict[str, Any]]:
    times: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for contender, processes in FIRST.items():
            package, _, how = contender.partition(", ")
            for number in range(processes):
                # What the first process has compiled is found by those that look.
                place = f"{folder}/{0 if how == 'from the cache' else number}"
                environment = os.environ | {"DASH_ATTN_CACHE_DIR": place}
                command = [sys.executable, "-W", "ignore", "-c", FIRST_CALLS, package]
                done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
                for what, us in json.loads(done.stdout.splitlines()[-1]).items():
                    times.setdefault(what, {}).setdefault(contender, []).append(us)
    for what, of_each in times.items():
        us = {name: round(statistics.median(found), 1) for name, found in of_each.items()}
        yield {"problem": "1 x 512, 4 heads", "what": what, "us": us}


def profile() -> None:
    for name, measurements in (
        ("dense", dense_calls(DENSE["dense, causal"])),
        ("rings", dense_calls(DENSE["dense, full (rings)"])),
        ("packed", packed_calls(PACKED["packed, causal"], "cuda")),
    ):
        for what, calls in measurements.items():
            for contender, call in calls.items():
                medians({contender: call}, 5)
                profiler = cProfile.Profile()
                # The backward runs on another thread unless this one is told to do it.
                with torch.autograd.set_multithreading_enabled(False):
                    profiler.enable()
                    for _ in range(200):
                        call()
                    profiler.disable()
                torch.cuda.synchronize()
                print(f"\n=== {name}, {what}, {contender}")
                pstats.Stats(profiler).sort_stats("tottime").print_stats(14)


def profile_unseen() -> None:
    """Where the host's time goes with lengths never seen before."""
    rng = random.Random(0)
    dout, (q, k, v) = tensors((sum(drawn_lengths(rng)),), UNSEEN)
    profiler = cProfile.Profile()
    for number in range(80):
        bounds = bounds_of(drawn_lengths(rng))
        torch.cuda.synchronize()
        with torch.autograd.set_multithreading_enabled(False):
            if number >= 30:
                profiler.enable()
            out = dash_attn.flash_attn_varlen_func(q, k, v, bounds, bounds, causal=True)
            torch.autograd.grad(out, [q, k, v], dout)
            profiler.disable()
    print("\n=== unseen lengths, forward and backward, dash_attn, 50 calls")
    pstats.Stats(profiler).sort_stats("cumtime").print_stats(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300, help="calls of each contender (default 300)")
    parser.add_argument("--output", type=Path, help="JSON file of the rows")
    parser.add_argument("--profile", action="store_true", help="where the host's time goes, and nothing else")
    parser.add_argument("--first-calls", action="store_true", help="measure first calls, and nothing else")
    args = parser.parse_args()
    if args.profile:
        profile()
        profile_unseen()
        return
    measured = [known(args.rounds), unseen(max(args.rounds // 4, 10)), graphs(max(args.rounds // 3, 10))]
    rows = []
    for row in first_calls() if args.first_calls else chain.from_iterable(measured):
        rows.append(row)
        print(f"{row['problem']:<36} {row['what']:<22} {row['us']}", flush=True)
    if args.output:
        facts = {
            "command": shlex.join(["python", *sys.argv]),
            "gpu": torch.cuda.get_device_name(),
            "driver": driver(),
            "versions": {
                "python": sys.version.split()[0],
                **{name: version(name) for name in ("torch", "flash-attn-4", "nvidia-cutlass-dsl")},
            },
            "dash_attn": dash_attn.__version__,
            "rows": rows,
        }
        args.output.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Time the attention backward of dash-attn and of its peers, side by side in one run.

The grid of the DASH paper: 16,384 tokens, hidden size 2,048, head dims 64 and 128, full and causal,
sequences of 512 to 16,384 tokens. Every implementation of a point is timed in interleaved rounds with
CUDA events, all kernels and allocations of the backward included. FLOPs = 2.5 * 4 S^2 D H B, half of
that under a causal mask. ``repeatable`` says that replays gave the same bytes.

    python benchmarks/backward.py --output benchmarks/results/h200-backward.json
    python benchmarks/backward.py --quick
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from peers import PEERS, Backward, Inputs, forward

import dash_attn
from dash_attn.errors import DashError
from dash_attn.kernels import launch
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import POLICIES, Plan, Policy, Shift, build_plan, choose_policy, policy_by_name

TOKENS, HIDDEN = 16_384, 2_048
SEQLENS = (512, 1024, 2048, 4096, 8192, 16_384)
QUICK = (512, 4096)
WARM_UP, REPLAYS = 3, 4
HEAD_START = 4_000_000
"""Cycles of the GPU's pause before a round: 2 ms."""
PACKAGES = ("torch", "nvidia-cutlass-dsl", "flash-attn-4", "nvidia-cudnn-frontend", "numpy")

Row = dict[str, Any]


@dataclass
class Contender:
    """One implementation of a point: what its row says, and the call that is timed."""

    row: Row
    make: Callable[[], Backward]
    run: Backward | None = None
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def prepare(self) -> None:
        """Compile, warm up and see whether replays agree; an error becomes part of the row."""
        try:
            self.run = self.make()
            first = [x.clone() for x in self.run()]
            self.row["repeatable"] = all(_same(first, self.run()) for _ in range(REPLAYS))
            for _ in range(WARM_UP):
                self.run()
            torch.cuda.synchronize()
        except Exception as error:  # a peer that fails is a row of the table
            self.run = None
            self.row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]

    def enqueue(self) -> None:
        """One timed call, not waited for."""
        assert self.run is not None
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.run()
        end.record()
        self.events.append((start, end))

    def finish(self, flops: float) -> Row:
        times = [start.elapsed_time(end) for start, end in self.events]
        if times:
            ms = statistics.median(times)
            low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else [ms] * 3
            self.row |= {"ms": round(ms, 5), "spread": round((high - low) / ms, 4)}
            self.row["tflops"] = round(flops / ms / 1e9, 1)
        return self.row


def _same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return all(
        torch.equal(x.contiguous().view(torch.int16), y.contiguous().view(torch.int16)) for x, y in zip(a, b)
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    rows = []
    for head_dim in args.head_dim:
        for mask in args.mask:
            for seqlen in args.seqlen:
                rows += measure(Mask.causal() if mask == "causal" else Mask.full(), head_dim, seqlen, args)
                torch.cuda.empty_cache()
                if args.output:  # after every point: a run that is cut short leaves what it has
                    args.output.write_text(json.dumps({"header": header(), "rows": rows}, indent=1) + "\n")
    print_table(rows)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write header and rows as JSON")
    parser.add_argument("--quick", action="store_true", help=f"sequence lengths {QUICK}, 7 rounds, no sweep")
    parser.add_argument("--head-dim", type=int, nargs="+", choices=(64, 128), default=(64, 128))
    parser.add_argument("--mask", nargs="+", choices=("full", "causal"), default=("full", "causal"))
    parser.add_argument("--seqlen", type=int, nargs="+", help=f"divisors of {TOKENS}, default {SEQLENS}")
    parser.add_argument("--rounds", type=int, help="timed calls of each implementation, default 25")
    args = parser.parse_args(argv)
    args.seqlen = args.seqlen or (QUICK if args.quick else SEQLENS)
    args.rounds = args.rounds or (7 if args.quick else 25)
    if any(seqlen < 1 or TOKENS % seqlen for seqlen in args.seqlen):
        parser.error(f"--seqlen must divide {TOKENS}, got {args.seqlen}")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        parser.error("this benchmark needs a Hopper GPU (sm_90)")
    return args


def measure(mask: Mask, head_dim: int, seqlen: int, args: argparse.Namespace) -> list[Row]:
    """Rows of one point of the grid."""
    problem = Problem.dense(
        batch=TOKENS // seqlen, heads=HIDDEN // head_dim, seqlen=seqlen, head_dim=head_dim, mask=mask
    )
    inputs = _inputs(problem)
    contenders = [*_ours(problem, inputs, args.quick), *_peers(problem, inputs)]
    for contender in contenders:
        contender.prepare()
    running = [contender for contender in contenders if contender.run]
    for number in range(args.rounds):
        torch.cuda._sleep(HEAD_START)  # calls queue up behind it: the time between events is the GPU's
        for contender in running[:: 1 if number % 2 else -1]:  # nobody always follows the same one
            contender.enqueue()
        torch.cuda.synchronize()
    flops = 10.0 * seqlen**2 * head_dim * problem.heads * len(problem.sequences)
    flops /= 2 if mask.name == "causal" else 1
    rows = [contender.finish(flops) for contender in contenders]
    for row in rows:
        print(_line(row), flush=True)
    return rows


def _inputs(problem: Problem) -> Inputs:
    shape = (len(problem.sequences), problem.sequences[0][0], problem.heads, problem.head_dim)
    generator = torch.Generator("cuda").manual_seed(0)
    dout, q, k, v = (
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).bfloat16()
        for _ in range(4)
    )
    causal, scale = problem.mask.name == "causal", problem.head_dim**-0.5
    return Inputs(dout, q, k, v, *forward(q, k, v, causal, scale), causal, scale)


def _row(problem: Problem, impl: str, policy: str, placement: str, deterministic: bool) -> Row:
    return {
        "impl": impl,
        "policy": policy,
        "placement": placement,
        "deterministic": deterministic,
        "mask": problem.mask.name,
        "head_dim": problem.head_dim,
        "seqlen": problem.sequences[0][0],
        "batch": len(problem.sequences),
        "heads": problem.heads,
        "kv_heads": problem.kv_heads,
        "dtype": problem.dtype,
        "auto": False,
    }


def _ours(problem: Problem, inputs: Inputs, quick: bool) -> Iterator[Contender]:
    """Every policy and placement that covers the problem, and the unordered mode of the automatic one."""
    chosen = choose_policy(problem)
    auto = build_plan(problem, *chosen)
    workers = torch.cuda.get_device_properties(0).multi_processor_count
    candidates: dict[tuple[str, str], tuple[Policy, Any]] = {(str(chosen[0]), chosen[1]): chosen}
    if not quick:
        for policy in (*map(policy_by_name, POLICIES), Shift(ring=32)):
            for placement in ("policy", "lpt"):
                candidates.setdefault((str(policy), placement), (policy, placement))
    seen = set()
    for (policy_name, placement), candidate in candidates.items():
        try:
            plan = auto if candidate == chosen else build_plan(problem, *candidate)
        except DashError:
            continue  # the policy does not cover this mask
        key = (plan.fingerprint, plan.items.tobytes())
        if key in seen or plan.min_workers > workers:
            continue
        seen.add(key)
        row = _row(problem, "dash_attn", policy_name, placement, True)
        row |= {"auto": plan is auto, "fingerprint": plan.fingerprint, "min_workers": plan.min_workers}
        yield Contender(row, lambda plan=plan: _call(launch.backward, plan, inputs))
    row = _row(problem, "dash_attn", f"unordered ({chosen[0]})", chosen[1], False)
    yield Contender(row, lambda: _call(launch.unordered_backward, auto, inputs))


def _call(function: Callable[..., Any], plan: Plan, x: Inputs) -> Backward:
    return lambda: function(plan, x.dout, x.q, x.k, x.v, x.out, x.lse, x.scale)


def _peers(problem: Problem, inputs: Inputs) -> Iterator[Contender]:
    for peer in PEERS:
        row = _row(problem, peer.impl, peer.policy, "", peer.deterministic)
        yield Contender(row, lambda peer=peer: peer.make(inputs))


def header() -> Row:
    """What was measured on what."""
    versions = {"dash-attn": dash_attn.__version__}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = ""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": sys.version.split()[0],
        "versions": versions,
        "tokens": TOKENS,
        "hidden": HIDDEN,
        "command": shlex.join(["python", *sys.argv]),
    }


def _driver() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return ""


def _line(row: Row) -> str:
    what = f"D{row['head_dim']:<4}{row['mask']:7}{row['seqlen']:>6} {row['impl']:10}{row['policy']:28}"
    what += f"{row['placement']:7}{'det' if row['deterministic'] else 'nondet':7}"
    if "error" in row:
        return what + row["error"][:90]
    return what + f"{row['tflops']:6.1f} TFLOP/s {row['ms']:8.3f} ms, repeatable {row['repeatable']}"


RATIOS = ("best/fa4", "auto/fa4", "auto/nd")


def print_table(rows: list[Row]) -> None:
    """A line a point: TFLOP/s of ours and of FlashAttention-4, and ratios; then geometric means."""
    points: dict[tuple[int, str, int], list[Row]] = {}
    for row in rows:
        points.setdefault((row["head_dim"], row["mask"], row["seqlen"]), []).append(row)
    columns = "".join(f"{name:>7}" for name in ("best", "auto", "fa4", "fa4 nd"))
    print(f"\n{'point':20}{columns}{''.join(f'{name:>10}' for name in RATIOS)}  best is")
    every: list[tuple[float, ...]] = []
    for (head_dim, mask, seqlen), here in points.items():
        ours = [row for row in here if row["impl"] == "dash_attn" and row["deterministic"]]
        best = max(ours, key=lambda row: row.get("tflops", 0.0))
        speeds = [
            _speed(best),
            _speed(next(row for row in ours if row["auto"])),
            *(
                _speed(next(r for r in here if r["impl"] == "fa4" and r["deterministic"] is det))
                for det in (True, False)
            ),
        ]
        top, auto, fa4, loose = speeds
        every.append((top / fa4, auto / fa4, auto / loose))
        columns = "".join(f"{speed:7.0f}" for speed in speeds)
        ratios = "".join(f"{ratio:10.3f}" for ratio in every[-1])
        print(f"{f'D{head_dim} {mask} {seqlen}':20}{columns}{ratios}  {best['policy']} {best['placement']}")
    for name, values in zip(RATIOS, zip(*every)):
        known = [value for value in values if math.isfinite(value)]
        if known:
            mean = math.exp(statistics.fmean(map(math.log, known)))
            print(f"{name}: geometric mean {mean:.3f}, least {min(known):.3f}, of {len(known)} points")


def _speed(row: Row) -> float:
    """TFLOP/s, not a number for a row with an error."""
    return float(row.get("tflops", math.nan))


if __name__ == "__main__":
    sys.exit(main())

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
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import dash_attn
from dash_attn.bench.peers import PEERS, Inputs
from dash_attn.bench.run import call_of, prepare
from dash_attn.bench.timing import Contender
from dash_attn.bench.timing import measure as time_all
from dash_attn.errors import DashError
from dash_attn.problem import Problem
from dash_attn.schedule import POLICIES, Policy, Shift, build_plan, choose_policy, policy_by_name
from dash_attn.shapes import Shape

TOKENS, HIDDEN = 16_384, 2_048
SEQLENS = (512, 1024, 2048, 4096, 8192, 16_384)
QUICK = (512, 4096)
PEER_ROWS = {
    ("fa4", True): ("fa4", "spt"),
    ("fa4", False): ("fa4", "none"),
    ("cudnn (PyTorch)", False): ("cudnn", "none"),
    ("cudnn", True): ("cudnn", "unknown"),
    ("fa2 (PyTorch)", True): ("fa2", "split"),
}
"""impl and policy in a row, of every mode of a peer that is measured."""
PACKAGES = ("torch", "nvidia-cutlass-dsl", "flash-attn-4", "nvidia-cudnn-frontend", "numpy")

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    rows = []
    for head_dim in args.head_dim:
        for mask in args.mask:
            for seqlen in args.seqlen:
                rows += measure(mask == "causal", head_dim, seqlen, args)
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


def measure(causal: bool, head_dim: int, seqlen: int, args: argparse.Namespace) -> list[Row]:
    """Rows of one point of the grid."""
    shape = Shape(
        batch=TOKENS // seqlen, seqlen=seqlen, heads=HIDDEN // head_dim, head_dim=head_dim, causal=causal
    )
    _, inputs = prepare(shape)
    entries = [*_ours(inputs, args.quick), *_peers(inputs)]
    time_all([contender for _, contender in entries], args.rounds)
    flops = 10.0 * seqlen**2 * head_dim * shape.heads * shape.batch / (2 if causal else 1)
    rows = [_filled(row, contender, flops) for row, contender in entries]
    for row in rows:
        print(_line(row), flush=True)
    return rows


def _filled(row: Row, contender: Contender, flops: float) -> Row:
    """The row with what was measured, or with the error."""
    if contender.reason:
        return row | {"error": contender.reason}
    return row | {
        "repeatable": contender.repeatable,
        "ms": round(contender.ms, 5),
        "spread": round(contender.spread, 4),
        "tflops": round(flops / contender.ms / 1e9, 1),
    }


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


def _ours(inputs: Inputs, quick: bool) -> Iterator[tuple[Row, Contender]]:
    """Every policy and placement that covers the problem, and the unordered mode of the automatic one."""
    problem = inputs.problem
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
        yield row, Contender(call_of(plan, inputs, ordered=True))
    row = _row(problem, "dash_attn", f"unordered ({chosen[0]})", chosen[1], False)
    yield row, Contender(call_of(auto, inputs, ordered=False))


def _peers(inputs: Inputs) -> Iterator[tuple[Row, Contender]]:
    for peer in PEERS:
        if named := PEER_ROWS.get((peer.impl, peer.deterministic)):
            row = _row(inputs.problem, *named, "", peer.deterministic)
            yield row, Contender(partial(peer.make, inputs), reason=peer.why_not(inputs))


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

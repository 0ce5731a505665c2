"""Time the attention backward of dash-attn and of its peers, side by side in one process.

The grid of the DASH paper: 16,384 tokens, hidden size 2,048, head dims 64 and 128, full and causal,
sequences of 512 to 16,384 tokens. Then grouped heads and lengths outside the grid, there the automatic plan
and FlashAttention-4 only (points.py). Every implementation of a point is timed in interleaved rounds with
CUDA events, all kernels and allocations of the backward included. The whole sweep runs several times; in the
first run every policy is measured, and clock and power under the automatic plan. FLOPs = 2.5 * 4 S^2 D H B,
half of that under a causal mask. ``repeatable`` says that replays gave the same bytes.

    python benchmarks/backward.py --rounds 5 --output benchmarks/results/h200-backward.json
    python benchmarks/backward.py --quick
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from card import clock_and_power, driver
from points import HIDDEN, SEQLENS, TOKENS, Point, beyond_the_grid, grid
from record import versions
from report import report
from summary import POINT, Row, flops, over_runs, tflops

import dash_attn
from dash_attn.errors import DashError
from dash_attn.peers.registry import PEERS, Inputs
from dash_attn.schedule import (
    POLICIES,
    Plan,
    Policy,
    Schedule,
    Shift,
    build_plan,
    choose_policy,
    policy_by_name,
)
from dash_attn.tools.bench import require_hopper
from dash_attn.tools.bench.run import call_of, prepare
from dash_attn.tools.bench.timing import REPLAYS, Contender
from dash_attn.tools.bench.timing import measure as time_all

QUICK = (512, 4096)
NOMINAL_TFLOPS = 500.0
"""From it follows how long a call takes about, and so how often a slow one is called."""
TIMED_S, REPLAYED_S, LEAST_ROUNDS = 0.4, 0.2, 2
PEER_ROWS = {
    ("fa4", True): ("fa4", "spt"),
    ("fa4", False): ("fa4", "none"),
    ("cudnn (PyTorch)", False): ("cudnn", "none"),
    ("cudnn", True): ("cudnn", "unknown"),
    ("fa2 (PyTorch)", True): ("fa2", "split"),
}
"""impl and policy in a row, of every mode of a peer that is measured."""
EVERYWHERE = "fa4"
"""The peer that is measured at points beyond the grid, too."""
PACKAGES = ("torch", "nvidia-cutlass-dsl", "flash-attn-4", "nvidia-cudnn-frontend", "numpy")

Entry = tuple[Row, Contender]


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    require_hopper()
    points = list(grid(args.head_dim, args.mask, args.seqlen))
    if args.also:
        points += beyond_the_grid(args.head_dim, args.mask)
    facts = header(args)
    measured: dict[tuple[Any, ...], tuple[Row, list[Row]]] = {}
    rows: list[Row] = []
    for run in range(args.runs):
        for point in points:
            for row, found in measure(
                point, args.rounds, args.peers, policies=run == 0 and not args.quick, first=run == 0
            ):
                measured.setdefault(_identity(row), (row, []))[1].append(found)
            torch.cuda.empty_cache()
            rows = [over_runs(row, found) for row, found in measured.values()]
            if args.output:  # after every point: a run that is cut short leaves what it has
                args.output.write_text(json.dumps({"header": facts, "rows": rows}, indent=1) + "\n")
    print(f"\n{report(rows)}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write header and rows as JSON")
    parser.add_argument(
        "--quick", action="store_true", help=f"sequence lengths {QUICK}, one run, automatic plans, grid only"
    )
    parser.add_argument("--head-dim", type=int, nargs="+", choices=(64, 128), default=(64, 128))
    parser.add_argument("--mask", nargs="+", choices=("full", "causal"), default=("full", "causal"))
    parser.add_argument("--seqlen", type=int, nargs="+", help=f"of the grid: divisors of {TOKENS}")
    parser.add_argument("--runs", type=int, help="runs of the whole sweep, default 3")
    parser.add_argument("--rounds", type=int, default=7, help="calls timed in a run, default 7")
    peers = sorted({impl for impl, _ in PEER_ROWS.values()})
    parser.add_argument("--peers", nargs="+", choices=peers, default=peers, help="default: all")
    parser.add_argument(
        "--also", action=argparse.BooleanOptionalAction, help="points beyond the grid, default: yes"
    )
    args = parser.parse_args(argv)
    args.seqlen = args.seqlen or (QUICK if args.quick else SEQLENS)
    args.runs = (1 if args.quick else 3) if args.runs is None else args.runs
    args.also = not args.quick if args.also is None else args.also
    if any(seqlen < 1 or TOKENS % seqlen for seqlen in args.seqlen):
        parser.error(f"--seqlen must divide {TOKENS}, got {args.seqlen}")
    for name in ("runs", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be >= 1, got {getattr(args, name)}")
    return args


def measure(
    point: Point, rounds: int, peers: Sequence[str], *, policies: bool, first: bool
) -> list[tuple[Row, Row]]:
    """Of one point in one run: rows, and what was found for each.

    Args:
        point: the shape and its set.
        rounds: timed calls of each implementation; slow ones have fewer.
        peers: those to be measured.
        policies: on the grid, all of them and not the automatic one only.
        first: of the runs: also records clock and power.
    """
    auto_row = _row(point, "dash_attn", *_chosen(point), True) | {"auto": True}
    try:
        plan, inputs = prepare(point.shape)
    except (DashError, torch.OutOfMemoryError) as error:  # a row of the table, like a peer that fails
        print(f"{_line(auto_row)}{error}", flush=True)
        return [(auto_row, {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]})]
    auto_row |= {"fingerprint": plan.fingerprint, "min_workers": plan.min_workers}
    auto = Contender(call_of(plan, inputs, ordered=True))
    entries = [(auto_row, auto)]
    if point.set == "grid":
        entries += _policies(point, plan, inputs) if policies else []
        row = _row(point, "dash_attn", f"unordered ({auto_row['policy']})", auto_row["placement"], False)
        entries.append((row, Contender(call_of(plan, inputs, ordered=False))))
    entries += _peers(point, inputs, peers)
    time_all(
        [contender for _, contender in entries],
        _calls_in(TIMED_S, auto_row, LEAST_ROUNDS, rounds),
        _calls_in(REPLAYED_S, auto_row, 1, REPLAYS),
    )
    if first and not auto.reason:
        auto_row["sm_mhz"], auto_row["watts"] = clock_and_power(auto.make())
    found = [(row, _found(contender)) for row, contender in entries]
    for row, what in found:
        print(_line(row) + _shown(row, what), flush=True)
    return found


def _calls_in(seconds: float, row: Row, least: int, most: int) -> int:
    """How many calls take about so long, between ``least`` and ``most``; ``most`` wins."""
    return min(max(int(seconds * NOMINAL_TFLOPS * 1e12 / flops(row)), least), most)


def _found(contender: Contender) -> Row:
    if contender.reason:
        return {"error": contender.reason}
    return {"ms": contender.ms, "spread": contender.spread, "repeatable": contender.repeatable}


def _row(point: Point, impl: str, policy: str, placement: str, deterministic: bool) -> Row:
    problem = point.shape.problem
    return {
        "set": point.set,
        "impl": impl,
        "policy": policy,
        "placement": placement,
        "deterministic": deterministic,
        "mask": problem.mask.name,
        "head_dim": problem.head_dim,
        "seqlen": point.shape.seqlen,
        "batch": point.shape.batch,
        "heads": problem.heads,
        "kv_heads": problem.kv_heads,
        "dtype": problem.dtype,
        "auto": False,
    }


def _identity(row: Row) -> tuple[Any, ...]:
    """What a row has in common with those of the same implementation and point in other runs."""
    return tuple(row[field] for field in (*POINT, "impl", "policy", "placement", "deterministic"))


def _chosen(point: Point) -> tuple[str, str]:
    """Policy and placement of the automatic plan; "policy" is the placement that suits the policy."""
    chosen = choose_policy(point.shape.problem)
    suits = chosen == Schedule.of(chosen.numerics)
    return str(chosen.numerics), "policy" if suits else str(chosen.placement)


def _policies(point: Point, auto: Plan, inputs: Inputs) -> Iterator[Entry]:
    """Every other policy and placement that covers the problem and makes a plan of its own."""
    workers = torch.cuda.get_device_properties(0).multi_processor_count
    policies: list[Policy] = [*map(policy_by_name, POLICIES), Shift(ring=32)]
    seen = {_order(auto)}
    for policy in policies:
        for placement in ("policy", "lpt"):
            try:
                plan = build_plan(inputs.problem, policy, placement)
            except DashError:
                continue  # the policy does not cover this mask
            if _order(plan) in seen or plan.min_workers > workers:
                continue
            seen.add(_order(plan))
            row = _row(point, "dash_attn", str(policy), placement, True)
            row |= {"fingerprint": plan.fingerprint, "min_workers": plan.min_workers}
            yield row, Contender(call_of(plan, inputs, ordered=True))


def _order(plan: Plan) -> tuple[str, bytes]:
    """Equal for plans that run alike."""
    return plan.fingerprint, plan.items.tobytes()


def _peers(point: Point, inputs: Inputs, wanted: Sequence[str]) -> Iterator[Entry]:
    for peer in PEERS:
        named = PEER_ROWS.get((peer.impl, peer.deterministic))
        if named and named[0] in wanted and (point.set == "grid" or peer.impl == EVERYWHERE):
            row = _row(point, *named, "", peer.deterministic)
            yield row, Contender(partial(peer.make, inputs), reason=peer.why_not(inputs))


def header(args: argparse.Namespace) -> Row:
    """What was measured on what."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        "driver": driver(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": sys.version.split()[0],
        "versions": {"dash-attn": dash_attn.__version__, **versions(*PACKAGES)},
        "tokens": TOKENS,
        "hidden": HIDDEN,
        "runs": args.runs,
        "rounds": args.rounds,
        "command": shlex.join(["python", *sys.argv]),
    }


def _line(row: Row) -> str:
    heads = f"{row['heads']}:{row['kv_heads']}"
    what = (
        f"D{row['head_dim']:<4}{row['mask']:7}{row['seqlen']:>6} {heads:6}{row['impl']:10}{row['policy']:42}"
    )
    return what + f"{row['placement']:7}{'det' if row['deterministic'] else 'nondet':7}"


def _shown(row: Row, found: Row) -> str:
    if "error" in found:
        return str(found["error"])[:90]
    figures = f"{tflops(row, found['ms']):6.1f} TFLOP/s {found['ms']:8.3f} ms, "
    return figures + f"repeatable {found['repeatable']}"


if __name__ == "__main__":
    sys.exit(main())

"""Time other schedules than the default one: is the rule of ``auto`` a good one?

Cases are those of shape_cases.py and the DASH paper's grid. Each runs under the default plan and under those
that somebody might choose: other policies, other placements, other numbers of head groups. Timing is
sustained, as in forward.py, and contenders take turns. The default is measured twice, as two contenders: by
how much these differ says what a difference means.

    python benchmarks/choices.py --output benchmarks/results/h100-choices.json
    python benchmarks/choices.py --only groups --rounds 9

What the model says of the same plans is added to a file by a call of its own, which needs no GPU:

    python benchmarks/choices.py --model benchmarks/results/h100-choices.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from card import facts_of_run
from forward import timed
from forward_calls import inputs
from forward_points import Point
from record import Row, write
from shape_cases import GRID, cases

from dash_attn.errors import UnsupportedMaskError
from dash_attn.machine import WORKERS
from dash_attn.model import H200, H200_WORKERS, estimate, simulate
from dash_attn.problem import Problem
from dash_attn.schedule import Plan, build_plan, choose_policy
from dash_attn.schedule.constants import Q_SEGMENT
from dash_attn.tools.bench import require_hopper
from dash_attn.tools.bench.run import call_of

ROUNDS, MOST_TASKS = 5, 140_000
FULL = tuple(
    f"shift(ring={ring}, min_stride={low}, max_stride={high})"
    for ring, low, high in ((16, 2, 2), (8, 2, 4), (32, 2, 4), (64, 2, 4), (16, 1, 4))
)
CUT = ("spt", "spt + lpt", "descending", "descending + lpt", "descending + long_first(long_from=0)")
CAUSAL = ("spt + long_first(long_from=0)", "symmetric_shift", "symmetric_shift + pairs(heads_at_once=8)")


def schedules(problem: Problem) -> Iterator[tuple[str, int | None]]:
    """Names and numbers of head groups, None: the default. The default schedule comes first and second."""
    auto = str(choose_policy(problem))
    yield from ((auto, None), (auto, None))
    if problem.group > 1:
        numbers = sorted({1, 2, 4, 8, 16, problem.group})
        yield from ((auto, number) for number in numbers if number <= problem.group)
    others = FULL if problem.mask.is_full else CUT + (CAUSAL if problem.mask.is_causal else ())
    yield from ((name, None) for name in ("fa3", *others) if name != auto)


def plans(problem: Problem) -> list[tuple[Plan, int | None]]:
    """Plans that differ, but for the first two."""
    found: list[tuple[Plan, int | None]] = []
    for number, (name, head_groups) in enumerate(schedules(problem)):
        try:
            plan = build_plan(problem, name, head_groups=head_groups)
        except UnsupportedMaskError:
            continue
        same = any(
            plan.fingerprint == other.fingerprint and (plan.items == other.items).all() for other, _ in found
        )
        if number < 2 or (plan.min_workers <= WORKERS and not same):
            found.append((plan, head_groups))
    return found


def claims_of(plan: Plan) -> str:
    """A hash of the order in which items are claimed."""
    return hashlib.sha256(plan.items.tobytes()).hexdigest()[:16]


def rows(name: str, point: Point, rounds: int) -> Iterator[Row]:
    """Of one case."""
    torch.manual_seed(0)
    x, found = inputs(point, torch.device("cuda")), plans(point.problem)
    calls = {at: call_of(plan, x, ordered=True)() for at, (plan, _) in enumerate(found)}
    for call in calls.values():
        call()
    for at, times in timed(calls, rounds, with_single=False)["sustained"].items():
        (plan, head_groups), ms = found[at], statistics.median(times)
        yield {
            "case": name, "schedule": plan.policy, "head_groups": head_groups, "auto": at < 2,
            "fingerprint": plan.fingerprint, "claims": claims_of(plan), "min_workers": plan.min_workers,
            "ms": round(ms, 5),
            "spread": round((max(times) - min(times)) / ms, 4),
        }  # fmt: skip


def with_model(found: Sequence[Row]) -> Iterator[Row]:
    """Rows with the cycles of the simulation and of the estimate, where that takes seconds at most.

    Where a plan has changed since it was timed, in its fingerprint or its order of claims, the row stays as
    it is, and a line says so.
    """
    points = dict((*cases(), *cases(GRID, ())))
    for row in found:
        problem = points[row["case"]].problem
        if problem.tasks > MOST_TASKS:
            yield row
            continue
        plan = build_plan(problem, row["schedule"], head_groups=row["head_groups"])
        if (plan.fingerprint, claims_of(plan)) != (row["fingerprint"], row["claims"]):
            print(f"{row['case']}: {row['schedule']} is another plan now", file=sys.stderr)
            yield row
            continue
        found_cycles = estimate(simulate(plan, H200, H200_WORKERS))
        yield row | {"simulated": round(found_cycles.tasks), "estimated": round(found_cycles.cycles)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write header and rows as JSON")
    parser.add_argument("--model", type=Path, metavar="FILE.json", help="add the model's cycles to this file")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name has one of these")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default {ROUNDS}")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds must be >= 1, got {args.rounds}")
    if args.model:
        known = json.loads(args.model.read_text())
        write(args.model, known["header"], with_model(known["rows"]))
        return
    require_hopper()
    facts = facts_of_run(args.rounds, "torch", "nvidia-cutlass-dsl") | {"timing": "sustained"}
    found: list[Row] = []
    for name, point in (*cases(), *cases(GRID, ())):
        cut = max(rows for rows, _ in point.problem.sequences) > Q_SEGMENT  # it runs in segments
        if cut or not any(x in name for x in args.only):
            continue
        new = list(rows(name, point, args.rounds))
        found += new
        default = min(row["ms"] for row in new if row["auto"])
        best = min(new, key=lambda row: row["ms"])
        print(
            f"{name:58} {default:8.3f} ms, twice {new[0]['ms'] / new[1]['ms']:.3f}; best {best['schedule']}"
            f" of {best['head_groups']} groups: {default / best['ms']:.3f}",
            flush=True,
        )
        torch.cuda.empty_cache()
        if args.output:  # after every case: a run that is cut short leaves what it has
            write(args.output, facts, found)


if __name__ == "__main__":
    main()

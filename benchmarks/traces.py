"""Measured against simulated: what every worker does when, for one configuration a policy.

Each policy runs once under its own mask on a Hopper GPU with the tracing variant of the kernel; the
picture has the simulated timeline above the measured one, on one time axis.

    python benchmarks/traces.py --output benchmarks/results/h200-traces.json --pictures docs/figures
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dash_attn.model import Timeline
from dash_attn.model.render import save_gantt
from dash_attn.model.roofline import CLOCK_GHZ
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import POLICIES, Descending, Plan, build_plan, choose_policy, policy_by_name
from dash_attn.tools.bench import require_hopper
from dash_attn.tools.measure import simulated_and_measured

HEADS, SEQLEN, HEAD_DIM = 16, 4_096, 128
SHOWN = 24
TIMES = ("compute_start", "compute_end", "reduce_start", "reduce_end")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the facts as JSON")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="write trace-POLICY.svg there")
    args = parser.parse_args(argv)
    require_hopper()
    rows = []
    for name, plan in plans():
        simulated, measured = simulated_and_measured(plan)
        rows.append(facts(name, simulated, measured))
        print(rows[-1], flush=True)
        if args.pictures:
            save(simulated, measured, args.pictures / f"trace-{name}.svg")
    if args.output:
        header = {"gpu": torch.cuda.get_device_name(), "clock_ghz": CLOCK_GHZ}
        args.output.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")
    return 0


def plans() -> Iterator[tuple[str, Plan]]:
    """What "auto" is under the full mask, LPT, and every policy under the mask it is for."""
    full, causal = (
        Problem.dense(heads=HEADS, seqlen=SEQLEN, head_dim=HEAD_DIM, mask=mask)
        for mask in (Mask.full(), Mask.causal())
    )
    yield "auto-full", build_plan(full, *choose_policy(full))
    yield "descending-lpt", build_plan(causal, Descending(), "lpt")
    for name in POLICIES:
        if name == "by_length":  # descending at this length
            continue
        yield name, build_plan(full if name in ("fa3", "shift") else causal, policy_by_name(name))


def facts(name: str, simulated: Timeline, measured: Timeline) -> dict[str, Any]:
    """Makespans and medians in cycles; see :func:`medians`."""
    problem = measured.plan.problem
    row: dict[str, Any] = {"name": name, "policy": measured.plan.policy, "mask": problem.mask.name}
    row |= {"heads": problem.heads, "seqlen": SEQLEN, "head_dim": problem.head_dim}
    for what, t in (("simulated", simulated), ("measured", measured)):
        row[what] = {"makespan": round(t.makespan), **medians(t)}
    return row


def medians(t: Timeline) -> dict[str, int]:
    """Median cycles between contributions of an item ("task") and across two items ("item_change").

    Both count from the moment at which a reduction could start, its ticket granted, because the trace has no
    earlier one that the simulation has too: they include waiting for tickets. The reduction of the simulated
    timeline is the cost put in; the measured one lasts until it was performed.
    """
    within, across = [], []
    for items in t.items_of_workers():
        bounds = [(t.first_task[i], t.first_task[i + 1]) for i in items]
        within += [np.diff(t.reduce_start[a:b]) for a, b in bounds]
        across += [t.reduce_start[b[0]] - t.reduce_start[a[1] - 1] for a, b in pairwise(bounds)]
    found = {
        "task": np.concatenate(within),
        "item_change": np.array(across),
        "reduction": t.reduce_end - t.reduce_start,
    }
    return {what: round(float(np.median(values))) for what, values in found.items()}


def save(simulated: Timeline, measured: Timeline, path: Path) -> Path:
    """Both timelines in one picture: of the first ``SHOWN`` workers, which are enough to see the pattern."""
    plan = measured.plan
    panels = [
        (f"{what}: {t.makespan:,.0f} cycles", first_workers(t, SHOWN))
        for what, t in (("simulated", simulated), ("measured", measured))
    ]
    shape = f"{plan.problem.mask.name} mask, {HEADS} heads of {SEQLEN:,} tokens, head dim {HEAD_DIM}"
    return save_gantt(panels, path, title=f"{plan.policy}, {shape}; {SHOWN} of {measured.workers} workers")


def first_workers(t: Timeline, count: int) -> Timeline:
    """The part of a timeline that the first workers ran, for drawing."""
    items = np.flatnonzero(t.item_worker < count)
    sizes = np.diff(t.first_task)
    tasks = np.flatnonzero(np.repeat(t.item_worker < count, sizes))
    times = {name: getattr(t, name)[tasks] for name in TIMES}
    return replace(
        t,
        plan=t.plan.with_items(t.plan.items[items]),
        workers=min(count, t.workers),
        item_worker=t.item_worker[items],
        item_start=t.item_start[items],
        first_task=np.concatenate(([0], np.cumsum(sizes[items]))),
        **times,
    )


if __name__ == "__main__":
    sys.exit(main())

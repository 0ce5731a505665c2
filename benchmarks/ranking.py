"""How well the cost model ranks policies: every measured plan, simulated with an H200's costs.

Reads the ordered dash_attn rows of the grid in ``h200-backward.json``, rebuilds their plans and writes
simulated cycles beside the milliseconds of the first run, which measured all policies, and whether the plan's
fingerprint is still that of the measurement. Needs no GPU, and some minutes.

    python benchmarks/ranking.py --output benchmarks/results/h200-ranking.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from documents import RESULTS
from summary import Row, first_ms

from dash_attn.model import H200, H200_WORKERS, simulate
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import Plan, Schedule, build_plan
from dash_attn.schedule.constants import NUMERICS_VERSION

OTHER_NAMES = {"symmetric_shift(heads_at_once=2)": "symmetric_shift + pairs(heads_at_once=2)"}
"""Schedules that files of results name in a form that is not parsed."""
KEPT = ("policy", "placement", "mask", "head_dim", "seqlen", "auto", "ms")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measured", type=Path, default=RESULTS / "h200-backward.json", metavar="FILE.json")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.json")
    args = parser.parse_args(argv)
    rows = []
    for row in ranked(json.loads(args.measured.read_text())["rows"]):
        row["ms"] = first_ms(row)
        plan = plan_of(row)
        cycles = simulate(plan, H200, H200_WORKERS).makespan
        rows.append({name: row[name] for name in KEPT} | {"simulated_cycles": round(cycles)})
        rows[-1]["same_fingerprint"] = sums_as(plan, row["fingerprint"])
        print(rows[-1], flush=True)
        args.output.write_text(json.dumps({"measured": args.measured.name, "rows": rows}, indent=1) + "\n")
    return 0


def ranked(rows: Iterable[Row]) -> list[Row]:
    """Those of our plans on the grid that were measured, in their order."""
    return [
        row
        for row in rows
        if row["impl"] == "dash_attn" and row["deterministic"] and "ms" in row
        if row.get("set", "grid") == "grid"
    ]


def sums_as(plan: Plan, fingerprint: str) -> bool:
    """Whether a plan sums in the order of a recorded fingerprint, which may be of an older version."""
    return fingerprint in (plan.fingerprint_under(v) for v in range(1, NUMERICS_VERSION + 1))


def plan_of(row: dict[str, Any]) -> Plan:
    """The plan that a row was measured with."""
    mask = Mask.causal() if row["mask"] == "causal" else Mask.full()
    problem = Problem.dense(
        batch=row["batch"],
        heads=row["heads"],
        kv_heads=row["kv_heads"],
        seqlen=row["seqlen"],
        head_dim=row["head_dim"],
        mask=mask,
        dtype=row["dtype"],
    )
    name = OTHER_NAMES.get(row["policy"], row["policy"])
    return build_plan(problem, Schedule.parse(name), row["placement"])


if __name__ == "__main__":
    sys.exit(main())

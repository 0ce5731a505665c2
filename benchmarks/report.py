"""The rows of ``backward.py`` as text: every point, means, spread from run to run, and targets.

python benchmarks/report.py benchmarks/results/h200-backward.json
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from summary import (
    POINT,
    RATIOS,
    TARGETS,
    Points,
    Row,
    by_point,
    fastest,
    first_ms,
    geometric_mean,
    least,
    ours,
    ratios_of,
    reached,
    run_spread,
    tflops,
    values_of,
)


def report(rows: Sequence[Row]) -> str:
    """All points, their means, the spread from run to run, rows without figures, and the targets."""
    points = by_point(rows)
    return "\n\n".join(
        "\n".join(part)
        for part in (
            _point_lines(points),
            _mean_lines(points),
            _spread_lines(rows),
            _failure_lines(rows),
            _target_lines(points),
        )
        if part
    )


def _point_lines(points: Points) -> list[str]:
    columns = "".join(f"{f'[{k}]':>7}" for k in range(1, len(RATIOS) + 1))
    lines = [
        "TFLOP/s, ratios of speeds, and spread of auto's runs",
        *(f"  [{k}] {name}" for k, name in enumerate(RATIOS, 1)),
    ]
    head = f"{'point':26}{'auto':>6}  {'fastest det':14}{'fastest peer':14}{columns}"
    lines.append(f"{head}{'runs':>7}{'MHz':>6}{'W':>5}  best")
    for point, rows in points.items():
        auto = ours(rows, lambda row: row["auto"]) or {}
        peers = [row for row in rows if row["impl"] != "dash_attn"]
        line = f"{_name(point):26}{_figure(_tflops(auto), 6)}  "
        for some in ([row for row in peers if row["deterministic"]], peers):
            line += f"{_peer(fastest(some)):14}"
        line += "".join(_figure(x, 7, 3) for x in ratios_of(rows).values())
        line += _figure(run_spread(auto), 7, 3)
        line += f"{_figure(auto.get('sm_mhz'), 6)}{_figure(auto.get('watts'), 5)}"
        lines.append(f"{line}  {_best(rows)}")
    return lines


def _best(rows: Sequence[Row]) -> str:
    """The fastest ordered policy in the first run, where all of them were measured, against auto in it."""
    ordered = [row for row in rows if row["impl"] == "dash_attn" and row["deterministic"] and "ms" in row]
    auto = ours(ordered, lambda row: row["auto"])
    if auto is None or len(ordered) == 1:
        return "-"
    best = min(ordered, key=first_ms)
    if best is auto:
        return "auto"
    return f"{best['policy']} {best['placement']} {first_ms(auto) / first_ms(best):.3f} x auto"


def _mean_lines(points: Points) -> list[str]:
    lines = [f"{'':80}{'mean':>6}{'least':>7}  of points (geometric mean)"]
    sets = list(dict.fromkeys(point[0] for point in points))
    groups: list[tuple[str, tuple[int, ...]]] = [(name, ()) for name in sets]
    groups += [("grid", (seqlen,)) for seqlen in (512, 1024)]
    for name, seqlens in groups:
        label = f"{name}{''.join(f', {seqlen:,} tokens' for seqlen in seqlens)}"
        for ratio in RATIOS:
            known = [value for value in values_of(points, ratio, name, seqlens) if math.isfinite(value)]
            if known:
                figures = f"{geometric_mean(known):6.3f}{least(known):7.3f}{len(known):4}"
                lines.append(f"{label:20}{ratio:60}{figures}")
    return lines


def _spread_lines(rows: Sequence[Row]) -> list[str]:
    several = [row for row in rows if math.isfinite(run_spread(row))]
    if not several:
        return []
    worst = max(several, key=run_spread)
    worst_auto = max((row for row in several if row["auto"]), key=run_spread, default=worst)
    middle = statistics.median(map(run_spread, several))
    return [
        f"spread from run to run: largest {run_spread(worst):.1%}, {_row_name(worst)}",
        f"    of automatic plans: largest {run_spread(worst_auto):.1%}, {_row_name(worst_auto)}",
        f"    median {middle:.1%}, of {len(several)} rows",
    ]


def _failure_lines(rows: Sequence[Row]) -> list[str]:
    """Each reason once, and every deterministic row that did not repeat."""
    reasons: dict[tuple[str, str], int] = {}
    for row in rows:
        if "error" in row:
            name = f"{row['impl']} {row['policy']}"
            reasons[name, row["error"]] = reasons.get((name, row["error"]), 0) + 1
    lines = [f"no figures: {name}, {count} rows: {error}" for (name, error), count in reasons.items()]
    loose = [row for row in rows if row["deterministic"] and row.get("repeatable") is False]
    return lines + [f"deterministic and did not repeat: {_row_name(row)}" for row in loose]


def _target_lines(points: Points) -> list[str]:
    lines = ["targets"]
    for target in TARGETS:
        value, count = reached(target, points)
        outcome = "met" if value >= target.at_least else "missed"
        if math.isnan(value) or count < target.points:
            outcome = "incomplete" if count else "not measured"
        figures = f"{_figure(value, 6, 3)} (at least {target.at_least:.2f})"
        lines.append(
            f"{outcome:13}{figures}  {target.what}; {target.how} of {count} of {target.points} points"
        )
    return lines


def _name(point: Sequence[Any]) -> str:
    facts = dict(zip(POINT, point))
    grouped = f" {facts['heads']}:{facts['kv_heads']}" if facts["heads"] != facts["kv_heads"] else ""
    return f"D{facts['head_dim']} {facts['mask']} {facts['seqlen']}{grouped}"


def _peer(row: Row | None) -> str:
    return f"{row['impl']} {_tflops(row):.0f}" if row else "-"


def _tflops(row: Row) -> float:
    """From the time, because the row's own figure is rounded already; not a number without a time."""
    return tflops(row, row["ms"]) if "ms" in row else math.nan


def _row_name(row: Row) -> str:
    mode = "det" if row["deterministic"] else "nondet"
    return f"{_name([row[field] for field in POINT])} {row['impl']} {row['policy']} {row['placement']} {mode}"


def _figure(value: float | None, width: int, digits: int = 0) -> str:
    return f"{'-':>{width}}" if value is None or math.isnan(value) else f"{value:{width}.{digits}f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measured", type=Path, metavar="FILE.json")
    rows = json.loads(parser.parse_args(argv).measured.read_text())["rows"]
    print(report([{"set": "grid", **row} for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

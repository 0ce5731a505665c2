"""Everything in the docs that comes from measurements: figures 8 and 9, and tables filled in between markers.

Reads only JSON of benchmarks/results. A table stands in a page between ``<!-- NAME -->`` and
``<!-- end of NAME -->``, and is replaced there.

    python benchmarks/figures.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from ranking import plan_of
from summary import first_ms

from dash_attn.model.charts import PALETTE, lighter, new_figure, plotting, save_figure
from dash_attn.model.roofline import measured_cycles, roofline
from dash_attn.schedule import ByLength

ROOT = Path(__file__).parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
OTHER_KERNELS_MS = 0.039
"""Preprocessing at 16,384 tokens and hidden size 2,048 (docs/perf-log.md)."""
TIE = 0.01
"""Speeds this close are not ranked: rounds of one run differ by as much."""

Row = dict[str, Any]
COLOURS = {
    "shift": PALETTE[0],
    "shift(ring=32)": "#7A5195",
    "shift(ring=16, min_stride=2, max_stride=4)": PALETTE[5],
    "symmetric_shift": PALETTE[0],
    "descending": PALETTE[6],
    "spt": PALETTE[2],
    "fa3": PALETTE[4],
    "unordered": PALETTE[0],
    "fa4": PALETTE[1],
    "cudnn": PALETTE[3],
    "fa2": PALETTE[7],
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(argv)
    rows = [row for row in read("h200-backward.json") if row.get("set", "grid") == "grid"]
    for mask, number in (("full", 8), ("causal", 9)):
        print(throughput([row for row in rows if row["mask"] == mask], mask, number))
    fill("measurements.md", "table 1", deviation_table)
    fill("measurements.md", "traces", trace_table)
    fill("measurements.md", "ranking", ranking_table)
    fill("roofline.md", "units", unit_table)
    fill("roofline.md", "shared memory", shared_table)
    fill("roofline.md", "measured", lambda: distance_table(rows))
    return 0


def read(name: str) -> list[Row]:
    rows: list[Row] = json.loads((RESULTS / name).read_text())["rows"]
    return rows


def fill(page: str, name: str, table: Callable[[], str]) -> None:
    """Replace what stands between the markers of a table; ValueError if the page has none."""
    path = DOCS / page
    before, start, rest = path.read_text().partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    if not start or not end:
        raise ValueError(f"{page} has no markers of {name!r}")
    path.write_text(f"{before}{start}{table()}\n{end}{after}")
    print(f"{path}: {name}")


def table_of(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def series_name(row: Row) -> str:
    if row["impl"] != "dash_attn":
        return f"{row['impl']} {'det' if row['deterministic'] else 'nondet'}"
    policy = str(row["policy"]).partition("(heads")[0]
    if policy == str(ByLength()):
        policy = "descending" if row["seqlen"] >= ByLength().long_from else "spt"
    return policy if row["deterministic"] else "unordered"


def coloured(series: str) -> str:
    """The key of a series in COLOURS: a policy, or the name of a peer without its mode."""
    return series.removesuffix(" nondet").removesuffix(" det")


@plotting
def throughput(rows: Sequence[Row], mask: str, number: int) -> Path:
    """Figure 8 or 9: TFLOP/s by length, a panel a head dim; of a policy its faster placement."""
    figure = new_figure(7.2, 11.0)
    axes = figure.subplots(2, 1)
    for ax, head_dim in zip(axes, (64, 128), strict=True):
        here = [row for row in rows if row["head_dim"] == head_dim and "tflops" in row]
        lengths = sorted({row["seqlen"] for row in here})
        best: dict[str, dict[int, float]] = defaultdict(dict)
        for row in here:
            of_series = best[series_name(row)]
            of_series[row["seqlen"]] = max(row["tflops"], of_series.get(row["seqlen"], 0.0))
        ours = {series_name(row) for row in here if row["impl"] == "dash_attn"}
        names = sorted(best, key=lambda name: (list(COLOURS).index(coloured(name)), name))
        width = 0.85 / len(names)
        for k, name in enumerate(names):
            colour = COLOURS[coloured(name)]
            loose = name == "unordered" or name.endswith("nondet")
            x = [lengths.index(seqlen) + (k + 0.5) * width - 0.425 for seqlen in best[name]]
            style: Row = {"facecolor": lighter(colour) if loose else colour}
            style |= {"edgecolor": "#333333" if name in ours else colour, "linewidth": 0.6}
            ax.bar(x, list(best[name].values()), width * 0.9, label=name, **style)
        ax.set_xticks(range(len(lengths)), [f"{seqlen:,}" for seqlen in lengths])
        ax.set_ylabel("TFLOP/s")
        ax.set_title(f"head dim {head_dim}", loc="left")
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes[-1].set_xlabel("sequence length; outlined: this kernel; pale: no fixed order")
    figure.suptitle(f"Figure {number}: backward throughput, {mask} mask, 16,384 tokens, H200", fontsize=12)
    return save_figure(figure, DOCS / "figures" / f"fig{number}.svg")


def deviation_table() -> str:
    rows: dict[str, Row] = defaultdict(dict)
    for row in read("h200-deviation.json"):
        name = f"{row['impl']}, {'deterministic' if row['deterministic'] else 'not deterministic'}"
        shown = f"{row['max']:.1e}" if row.get("max") else "0"
        rows[name][row["head_dim"], row["mask"]] = row.get("error", shown)
    points = [(head_dim, mask) for head_dim in (64, 128) for mask in ("full", "causal")]
    head = ["mode", *(f"{mask}, head dim {head_dim}" for head_dim, mask in points)]
    return table_of(head, [[name, *(found[point] for point in points)] for name, found in rows.items()])


def trace_table() -> str:
    head = [
        "mask",
        "policy",
        "makespan simulated",
        "measured",
        "off by",
        "task",
        "change of items",
        "reduction",
    ]
    lines = []
    for row in sorted(read("h200-traces.json"), key=lambda row: (row["mask"], row["measured"]["makespan"])):
        s, m = row["simulated"], row["measured"]
        line = [row["mask"], row["policy"], f"{s['makespan']:,}", f"{m['makespan']:,}"]
        line.append(f"{m['makespan'] / s['makespan'] - 1:+.0%}")
        line += [f"{s[what]:,} / {m[what]:,}" for what in ("task", "item_change", "reduction")]
        lines.append(line)
    return table_of(head, lines)


def ranking_table() -> str:
    """By head dim and mask: pairs of policies in the wrong order, and what the model's pick gives away."""
    points: dict[tuple[int, str], dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    rows = read("h200-ranking.json")
    for row in rows:
        points[row["head_dim"], row["mask"]][row["seqlen"]].append(row)
    lines = []
    for (head_dim, mask), by_length in points.items():
        wrong = pairs = undecided = 0
        lost: dict[str, list[float]] = {"model": [], "auto": []}
        for here in by_length.values():
            for a, b in combinations(here, 2):
                if abs(a["ms"] / b["ms"] - 1) <= TIE:
                    continue
                pairs += 1
                order = a["simulated_cycles"] - b["simulated_cycles"]
                undecided += order == 0
                wrong += order * (a["ms"] - b["ms"]) < 0
            fastest = min(row["ms"] for row in here)
            pick = min(here, key=lambda row: row["simulated_cycles"])
            lost["model"].append(1 - fastest / pick["ms"])
            lost["auto"].append(1 - fastest / next(row["ms"] for row in here if row["auto"]))
        line = [head_dim, mask, f"{wrong} of {pairs}", undecided]
        for losses in lost.values():
            line.append(f"{statistics.fmean(losses):.1%}, at most {max(losses):.1%}")
        lines.append(line)
    head = [
        "head dim",
        "mask",
        "pairs in the wrong order",
        "called equal",
        "the model's pick is slower",
        "auto is slower",
    ]
    agree = sum(row["same_fingerprint"] for row in rows)
    note = f"{len(rows)} measured plans; the fingerprints of {agree} are those of this version."
    return f"{table_of(head, lines)}\n\n{note}"


def unit_table() -> str:
    found = [roofline(head_dim) for head_dim in (64, 128)]
    head = ["cycles a task", *(f"head dim {r.head_dim}, {r.tile_m} x {r.tile_n}" for r in found)]
    lines: list[Sequence[object]] = [
        [
            unit,
            *(f"**{r.units[unit]:,.0f}**" if unit == r.binding else f"{r.units[unit]:,.0f}" for r in found),
        ]
        for unit in found[0].units
    ]
    lines.append(["one reduction alone, start to completion", *(f"{r.alone:,.0f}" for r in found)])
    lines.append(["one hop of a dQ tile, hand-over included", *(f"{r.hop:,.0f}" for r in found)])
    return table_of(head, lines)


def shared_table() -> str:
    found = [roofline(head_dim) for head_dim in (64, 128)]
    head = ["shared memory", *(f"head dim {r.head_dim}" for r in found)]
    return table_of(head, [[what, *(f"{r.shared[what]:,.0f}" for r in found)] for what in found[0].shared])


def distance_table(rows: Sequence[Row]) -> str:
    """Of what auto runs, how many cycles a task takes, by length, and the share of the bound."""
    lengths = sorted({row["seqlen"] for row in rows})
    lines = []
    for head_dim in (64, 128):
        bound = roofline(head_dim).bound
        for mask in ("full", "causal"):
            line: list[object] = [head_dim, mask]
            for seqlen in lengths:
                (row,) = (
                    row
                    for row in rows
                    if row["auto"]
                    and (row["head_dim"], row["mask"], row["seqlen"]) == (head_dim, mask, seqlen)
                )
                clock = row["sm_mhz"] / 1000  # in the first run
                cycles = measured_cycles(plan_of(row).problem, first_ms(row), OTHER_KERNELS_MS, clock)
                line.append(f"{cycles:,.0f} ({bound / cycles:.0%})")
            lines.append(line)
    return table_of(["head dim", "mask", *(f"{seqlen:,}" for seqlen in lengths)], lines)


if __name__ == "__main__":
    sys.exit(main())

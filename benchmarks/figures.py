"""Everything in the docs that comes from measurements: figures 1, 8, 9 and 10, pictures of the forward's
ablations, and what markers quote (quoted.py).

Reads only JSON of benchmarks/results, and needs no GPU.

    python benchmarks/figures.py
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from ablation_figures import ablation_figures
from block_values import block_figure, measured
from quoted import ROOT, filled, pages
from replication_figures import order_figure
from summary import Row
from throughput import grid_rows

from dash_attn.model.charts import PALETTE, lighter, new_figure, plotting, save_figure
from dash_attn.schedule import Schedule

DOCS = ROOT / "docs"

COLOURS = {
    "shift": PALETTE[0],
    "shift(ring=32)": "#7A5195",
    "shift(ring=16, min_stride=2, max_stride=4)": PALETTE[5],
    "shift(ring=16, min_stride=2, max_stride=2)": PALETTE[5],
    "symmetric_shift": PALETTE[0],
    "descending": PALETTE[6],
    "spt": PALETTE[2],
    "fa3": PALETTE[4],
    "unordered": PALETTE[0],
    "fa4": PALETTE[1],
    "cudnn": PALETTE[3],
    "fa2": PALETTE[7],
}
NOTES = {"causal": "\nsymmetric_shift: two heads at a time, which is not its best (see the text)"}
"""Under the horizontal axis, by mask."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(argv)
    rows = grid_rows()
    for mask, number in (("full", 8), ("causal", 9)):
        print(throughput([row for row in rows if row["mask"] == mask], mask, number))
    print(order_figure(DOCS / "figures" / "fig1.svg"))
    for path in ablation_figures(DOCS / "figures"):
        print(path)
    if measured():
        print(block_figure(DOCS / "figures" / "fig10.svg"))
    for path in pages():
        before = path.read_text()
        after = filled(before)
        if after != before:
            path.write_text(after)
            print(path)
    return 0


def series_name(row: Row) -> str:
    if row["impl"] != "dash_attn":
        return f"{row['impl']} {'det' if row['deterministic'] else 'nondet'}"
    policy = str(row["policy"]).partition("(heads")[0]
    if policy.startswith("by_length"):
        policy = Schedule.parse(policy).numerics.for_lengths(row["seqlen"], row["seqlen"]).name
    return policy if row["deterministic"] else "unordered"


def coloured(series: str) -> str:
    """The key of a series in COLOURS: a policy, or the name of a peer without its mode."""
    return series.removesuffix(" nondet").removesuffix(" det")


@plotting
def throughput(rows: Sequence[Row], mask: str, number: int) -> Path:
    """Figure 8 or 9: TFLOP/s by length, a panel per head dim; of each policy its faster placement."""
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
    axes[-1].set_xlabel(f"sequence length; outlined: this kernel; pale: no fixed order{NOTES.get(mask, '')}")
    figure.suptitle(f"Figure {number}: backward throughput, {mask} mask, 16,384 tokens, H200", fontsize=12)
    return save_figure(figure, DOCS / "figures" / f"fig{number}.svg")


if __name__ == "__main__":
    sys.exit(main())

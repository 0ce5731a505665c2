"""Figure 1 of the DASH paper, its right panel: what a fixed order costs, by library."""

from __future__ import annotations

from pathlib import Path

from points import SEQLENS
from replication_values import PANELS, order_ratios

from dash_attn.model.charts import PALETTE, new_figure, plotting, save_figure

__all__ = ["order_figure"]

COLOURS = (PALETTE[0], PALETTE[1], PALETTE[3], PALETTE[5])


@plotting
def order_figure(path: Path) -> Path:
    """Speed with order as a share of that without, a panel per head dim and mask."""
    ratios = order_ratios()
    figure = new_figure(5.6)
    axes = figure.subplots(2, 2, sharey=True).flatten()
    width = 0.85 / len(ratios)
    for ax, panel in zip(axes, PANELS, strict=True):
        for k, ((name, of_library), colour) in enumerate(zip(ratios.items(), COLOURS, strict=True)):
            here = [(i, of_library[(*panel, seqlen)]) for i, seqlen in enumerate(SEQLENS)]
            at = [i + (k + 0.5) * width - 0.425 for i, _ in here]
            ax.bar(at, [x for _, x in here], width * 0.9, label=name, color=colour)
        ax.axhline(1.0, color="#333333", linewidth=0.8)
        ax.set_xticks(range(len(SEQLENS)), [f"{seqlen:,}" for seqlen in SEQLENS])
        ax.set_title(f"head dim {panel[0]}, {panel[1]}", loc="left")
    for ax in axes[::2]:
        ax.set_ylabel("with order / without")
    axes[1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.suptitle("Figure 1, right: what a fixed order leaves of the backward's speed, H200", fontsize=12)
    return save_figure(figure, path)

"""A picture of each ablation of the forward: TFLOP/s of its variants."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ablation_values import FA4, OURS, SPEEDS, name_of_variant, rows, speed_table_rows

from dash_attn.model.charts import PALETTE, lighter, new_figure, plotting, save_figure

__all__ = ["ablation_figures"]

COLOURS = (*(PALETTE[i] for i in (5, 0, 2, 1, 3, 4)), "#7A5195")
"""Of variants other than ours."""
TITLES = {
    "pipelining": "what a warpgroup's products run beside",
    "exp2": "2^x by a polynomial",
    "rescaling": "when a row's maximum is raised, 4,096 tokens",
    "order": "order of claims, causal",
    "persistent": "blocks",
    "segment": "keys per segment",
}


def ablation_figures(folder: Path) -> Iterator[Path]:
    """Draw what was measured as ablation-NAME.svg."""
    measured = {row["set"] for row in rows()}
    for name in SPEEDS:
        if name in measured:
            yield ablation_figure(name, folder / f"ablation-{name}.svg")


@plotting
def ablation_figure(name: str, path: Path) -> Path:
    """Bars of all variants by point, a panel per head dim."""
    points = speed_table_rows(name)
    several = len({point[3] for point in points}) > 1
    head_dims = sorted({point[0] for point in points})
    names = list(dict.fromkeys(variant for speeds in points.values() for variant in speeds if variant != FA4))
    colours = dict(zip((x for x in names if x != OURS), COLOURS * 2))
    colours |= {OURS: PALETTE[6], FA4: PALETTE[7]}
    figure = new_figure(2.4 * len(head_dims))
    axes = figure.subplots(len(head_dims), 1, squeeze=False)[:, 0]
    width = 0.85 / (len(names) + 1)
    for ax, head_dim in zip(axes, head_dims, strict=True):
        here = {point[1:]: speeds for point, speeds in points.items() if point[0] == head_dim}
        for k, variant in enumerate([*names, FA4]):
            of_variant = [(i, x[variant]) for i, x in enumerate(here.values()) if variant in x]
            if of_variant:
                at = [i + (k + 0.5) * width - 0.425 for i, _ in of_variant]
                colour = colours[variant]
                style = {"facecolor": lighter(colour) if variant == FA4 else colour, "linewidth": 0.6}
                edge = "#333333" if variant == OURS else colour
                heights = [speed for _, speed in of_variant]
                ax.bar(at, heights, width * 0.9, label=name_of_variant(variant), edgecolor=edge, **style)
        ax.set_xticks(range(len(here)), [_label(*point, several) for point in here])
        ax.set_ylabel("TFLOP/s")
        ax.set_title(f"head dim {head_dim}", loc="left")
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.suptitle(f"Forward, {TITLES[name]}; H200", fontsize=11)
    return save_figure(figure, path)


def _label(mask: object, seqlen: int, kind: str, several: bool) -> str:
    """Of a point; its kind of inputs where there are several, else its length."""
    return f"{mask}\n{kind}" if several else f"{mask}\n{seqlen:,}"

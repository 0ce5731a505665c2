"""A dependency graph drawn: chains by depth, the edges a fixed order of additions puts between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from ..schedule.graph import ChainGraph
from .charts import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["RED", "Node", "critical_nodes", "draw_arrow", "draw_graph", "draw_graph_legend"]

RED, GREEN, CRITICAL = PALETTE[5], PALETTE[2], "#F7D774"
INK, REDUCE = "#222222", PALETTE[0]
Node = tuple[int, int]
"""(chain, depth), as in :class:`~dash_attn.schedule.graph.ChainGraph`."""


def critical_nodes(graph: ChainGraph) -> list[Node]:
    """Nodes (chain, depth) of one longest path, from the source to the end of a chain."""
    reached = graph.distances()
    ends = [(path[-1], -k) for k, path in enumerate(reached)]
    k = -max(ends)[1]
    nodes = [(k, len(reached[k]) - 1)]
    while (d := nodes[-1][1]) > 0:
        k = nodes[-1][0]
        tails = [
            e.tail for e in graph.edges if e.head == (k, d) and reached[e.tail[0]][e.tail[1]] == reached[k][d]
        ]
        along = reached[k][d - 1] + graph.chains[k][d - 1] == reached[k][d]
        nodes.append((k, d - 1) if along or not tails else tails[0])
    return nodes[::-1]


def draw_graph(ax: Axes, graph: ChainGraph, labels: Mapping[Node, str]) -> None:
    """Chains from left to right by depth, added edges as arrows, one longest path on a yellow ground.

    Args:
        ax: where to draw.
        graph: the graph.
        labels: texts for chain edges, by the node they lead to.
    """
    last = max(len(chain) for chain in graph.chains)
    middle = (len(graph.chains) - 1) / 2
    place = {(k, d): (float(d), float(k)) for k, c in enumerate(graph.chains) for d in range(1, len(c) + 1)}
    place |= {(k, 0): (0.0, middle) for k in range(len(graph.chains))}
    sink = (last + 0.8, middle)
    path = [place[node] for node in critical_nodes(graph)] + [sink]
    ax.plot(*zip(*path, strict=True), color=CRITICAL, linewidth=11, solid_capstyle="round", zorder=0)
    for k, weights in enumerate(graph.chains):
        for d in range(len(weights)):
            (x0, y0), (x1, y1) = place[k, d], place[k, d + 1]
            ax.plot((x0, x1), (y0, y1), color=REDUCE if d % 2 else INK, linewidth=1.8, zorder=1)
            if (k, d + 1) in labels:
                # Outside of the picture's middle; the first edges lean, so their labels end at the edge.
                side, outside = ("bottom", -0.09) if y1 <= middle else ("top", 0.09)
                where = ((x0 + x1) / 2 - (0.12 if d == 0 else 0), (y0 + y1) / 2 + outside)
                ax.text(*where, labels[k, d + 1], ha="center" if d else "right", va=side, fontsize=8)
        ax.plot(*zip(place[k, len(weights)], sink, strict=True), color="#999999", linewidth=0.8, zorder=1)
    backward = set(graph.backward_edges())
    for edge in graph.edges:
        draw_arrow(ax, place[edge.tail], place[edge.head], RED if edge in backward else GREEN)
    ax.plot(*zip(*place.values(), sink, strict=True), "o", color="white", mec=INK, markersize=7, zorder=4)
    for name, (x, y), side in (("s", (-0.04 * last, middle), "right"), ("t", sink, "left")):
        ax.text(x + (0.04 * last if name == "t" else 0), y, name, ha=side, va="center", fontsize=11)
    _finish_axes(ax, graph, last)


def _finish_axes(ax: Axes, graph: ChainGraph, last: int) -> None:
    ax.set_ylim(len(graph.chains) - 0.5, -0.5)
    ax.set_xlim(-0.5, last + 1.3)
    ax.set_yticks(range(len(graph.chains)))
    ax.set_ylabel("chain (worker)")
    ax.set_xticks(range(last + 1))
    ax.set_xlabel("depth (edges from s)")
    ax.spines["left"].set_visible(False)


def draw_arrow(ax: Axes, tail: tuple[float, float], head: tuple[float, float], colour: str) -> None:
    """A dashed arrow that ends just outside the nodes it connects."""
    look: dict[str, Any] = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.6, "linestyle": "--"}
    look |= {"shrinkA": 4, "shrinkB": 4}
    ax.annotate("", xy=head, xytext=tail, arrowprops=look, zorder=3)


def draw_graph_legend(figure: Figure, *, both: bool) -> None:
    """The legend below graphs; ``both`` kinds of added edges, or only the order of additions."""
    from matplotlib.lines import Line2D

    entries: list[tuple[str, Literal["-", "--"], float, str]] = [
        (INK, "-", 1.8, "compute edge, weight c"),
        (REDUCE, "-", 1.8, "reduce edge, weight r"),
    ]
    if both:
        entries.append((GREEN, "--", 1.6, "added edge, weight 0: allowed"))
        entries.append((RED, "--", 1.6, "added edge, weight 0: leads back in depth"))
    else:
        entries.append((RED, "--", 1.6, "order of additions, weight 0"))
    entries.append((CRITICAL, "-", 8, "a critical path"))
    handles = [Line2D([], [], color=c, linestyle=s, linewidth=w, label=name) for c, s, w, name in entries]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=3 if both else 4, frameon=False, fontsize=8.5
    )

"""The dependency graph of a plan, its critical path, and the test that says which edges are free.

DASH section 3.1 draws a plan as chains, one a worker, of edges that alternate between computing a tile
(weight c) and reducing it (weight r). Fixing the order of additions puts zero-weight edges between the
chains: from the end of one reduction to the start of the next one on the same dQ tile. The length of
the longest path is the makespan when hand-overs cost nothing.

Lemma 1 (section 3.4, proof in appendix B): if the chains are isomorphic (same weights edge by edge),
zero-weight edges that keep the graph acyclic leave the critical path as long as it was if and only if
each of them leads from a depth to the same or a greater one. Both directions hold for any number of
edges: the path through one backward edge alone is longer than a chain, and along forward edges no node
gets further from the source than its depth says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import CycleError
from .interleave import item_tasks
from .plan import Plan

__all__ = ["ChainGraph", "Edge", "dependency_graph"]


class Edge(NamedTuple):
    """A zero-weight edge between two nodes, each (chain, depth)."""

    tail: tuple[int, int]
    head: tuple[int, int]


@dataclass(frozen=True)
class ChainGraph:
    """Parallel chains from a source to a sink, and zero-weight edges between their nodes.

    Node (k, d) lies ``d`` edges from the start of chain ``k``; depth 0 is the source, shared by all.

    Attributes:
        chains: for each chain the weights of its edges, in order.
        edges: the added zero-weight edges.

    >>> chains = ((2.0, 1.0), (2.0, 1.0))
    >>> free, late = ChainGraph(chains, (Edge((0, 1), (1, 1)),)), ChainGraph(chains, (Edge((0, 2), (1, 1)),))
    >>> free.critical_path(), late.critical_path(), late.backward_edges() == list(late.edges)
    (3.0, 4.0, True)
    """

    chains: tuple[tuple[float, ...], ...]
    edges: tuple[Edge, ...] = ()

    @property
    def isomorphic(self) -> bool:
        """True when all chains have the same weights: what Lemma 1 asks for."""
        return len(set(self.chains)) <= 1

    def backward_edges(self) -> list[Edge]:
        """The added edges that lead to a smaller depth."""
        return [edge for edge in self.edges if edge.tail[1] > edge.head[1]]

    def without_edges(self) -> ChainGraph:
        """The chains alone."""
        return ChainGraph(self.chains)

    def distances(self) -> list[list[float]]:
        """Longest path from the source to every node, per chain.

        Raises:
            CycleError: the edges close a cycle.
        """
        incoming: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for tail, head in self.edges:
            if head[1] == 0:
                raise CycleError(f"the edge from {tail} leads back to the source")
            incoming.setdefault(head, []).append(tail)
        reached = [[0.0] for _ in self.chains]
        moved = True
        while moved:
            moved = False
            for k, weights in enumerate(self.chains):
                while len(reached[k]) <= len(weights):
                    node = (k, len(reached[k]))
                    tails = incoming.get(node, ())
                    if any(depth >= len(reached[chain]) for chain, depth in tails):
                        break
                    along = reached[k][-1] + weights[node[1] - 1]
                    reached[k].append(max([along, *(reached[chain][depth] for chain, depth in tails)]))
                    moved = True
        if any(len(r) <= len(w) for r, w in zip(reached, self.chains, strict=True)):
            raise CycleError("the added edges close a cycle")
        return reached

    def critical_path(self) -> float:
        """Length of the longest path from the source to the sink."""
        return max((path[-1] for path in self.distances()), default=0.0)


def dependency_graph(
    plan: Plan, workers: Sequence[Sequence[int]], compute: float, reduce: float
) -> ChainGraph:
    """The graph of a plan whose items are shared out to workers in a given way.

    Args:
        plan: the plan.
        workers: for each worker the items (indices into ``plan.items``) it runs, in order; a
            :class:`~dash_attn.model.Timeline` gives them as ``items_of_workers()``.
        compute, reduce: c and r. Task k of a worker is the edges 2k (compute) and 2k + 1 (reduce).

    Returns:
        One chain a worker; an edge from the end of every contribution to the start of the next.

    >>> from dash_attn.problem import Problem
    >>> from dash_attn.schedule import FA3, Shift, build_plan
    >>> full = Problem.dense(seqlen=4 * 128, head_dim=64)
    >>> graphs = [dependency_graph(build_plan(full, p), [[0], [1], [2], [3]], 2, 1) for p in (FA3(), Shift())]
    >>> [(g.critical_path(), len(g.backward_edges())) for g in graphs]
    [(15.0, 12), (12.0, 0)]
    """
    at: dict[tuple[int, int, int, int], tuple[int, int]] = {}  # contribution: (chain, depth before reducing)
    chains = []
    for worker, items in enumerate(workers):
        tasks = [task for item in items for task in item_tasks(plan, item)]
        for k, task in enumerate(tasks):
            at[task.sequence, task.q_head, task.q_tile, task.ticket] = (worker, 2 * k + 1)
        chains.append((float(compute), float(reduce)) * len(tasks))
    edges = []
    for (sequence, head, q, ticket), (chain, depth) in at.items():
        if (following := at.get((sequence, head, q, ticket + 1))) is not None:
            edges.append(Edge((chain, depth + 1), following))
    return ChainGraph(tuple(chains), tuple(edges))

"""Lemma 1 (DASH section 3.4, appendix B) and the dependency graphs of plans."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dash_attn.errors import CycleError, UnsupportedMaskError
from dash_attn.model import Costs, simulate
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import POLICIES, build_plan, policy_by_name
from dash_attn.schedule.graph import ChainGraph, Edge, dependency_graph


@st.composite
def graphs(draw: st.DrawFn) -> ChainGraph:
    """Isomorphic chains of strictly positive weights; edges of any direction, added while acyclic."""
    weights = tuple(float(w) for w in draw(st.lists(st.integers(1, 9), min_size=3, max_size=8)))
    chains = (weights,) * draw(st.integers(2, 5))
    # Depth 0 is the source and the last node the sink: both are shared, edges lead between the others.
    nodes = st.tuples(st.integers(0, len(chains) - 1), st.integers(1, len(weights) - 1))
    edges: tuple[Edge, ...] = ()
    for tail, head in draw(st.lists(st.tuples(nodes, nodes), min_size=2, max_size=12)):
        if tail[0] != head[0] and acyclic(ChainGraph(chains, (*edges, Edge(tail, head)))):
            edges += (Edge(tail, head),)
    return ChainGraph(chains, edges)


@given(graphs())
def test_lemma_1_in_both_directions(graph: ChainGraph) -> None:
    alone = graph.without_edges()
    if graph.backward_edges():
        assert graph.critical_path() > alone.critical_path()
    else:
        assert graph.critical_path() == alone.critical_path()


@given(graphs())
def test_lemma_1_without_the_backward_edges(graph: ChainGraph) -> None:
    """What is left when they are removed is free, and no node has moved away from the source."""
    backward = graph.backward_edges()
    assume(backward)
    forward = ChainGraph(graph.chains, tuple(edge for edge in graph.edges if edge not in backward))
    assert forward.distances() == graph.without_edges().distances()


def acyclic(graph: ChainGraph) -> bool:
    try:
        graph.distances()
    except CycleError:
        return False
    return True


def test_a_cycle_is_refused() -> None:
    chains = ((1.0, 1.0, 1.0), (1.0, 1.0, 1.0))
    with pytest.raises(CycleError, match="close a cycle"):
        ChainGraph(chains, (Edge((0, 2), (1, 1)), Edge((1, 2), (0, 1)))).critical_path()


def test_an_edge_to_the_source_is_a_cycle() -> None:
    with pytest.raises(CycleError, match="back to the source"):
        ChainGraph(((1.0,), (1.0,)), (Edge((0, 1), (1, 0)),)).critical_path()


def test_lemma_needs_isomorphic_chains() -> None:
    """On chains of other lengths a backward edge can be free, so the test must say which case it is."""
    graph = ChainGraph(((1.0,) * 9, (1.0,) * 3), (Edge((0, 3), (1, 1)),))
    assert not graph.isomorphic
    assert graph.backward_edges()
    assert graph.critical_path() == graph.without_edges().critical_path()


def satisfied_at(policy: str, mask: Mask, heads: int, sizes: range) -> list[int]:
    """Sizes n at which the policy, on n workers, has isomorphic chains and no backward edge."""
    found = []
    for n in sizes:
        problem = Problem.dense(heads=heads, seqlen=128 * n, head_dim=64, mask=mask)
        try:
            plan = build_plan(problem, policy_by_name(policy))
        except UnsupportedMaskError:
            continue
        timeline = simulate(plan, Costs(2, 1), n)
        graph = dependency_graph(plan, timeline.items_of_workers(), 2, 1)
        # With hand-overs that cost nothing, the longest path is the time a machine needs.
        assert graph.critical_path() == timeline.makespan
        if graph.isomorphic and not graph.backward_edges():
            assert graph.critical_path() == graph.without_edges().critical_path()
            found.append(n)
    return found


SIZES = range(2, 13)


@pytest.mark.parametrize("heads", [1, 2, 3, 4])
def test_shift_satisfies_the_lemma_at_every_size(heads: int) -> None:
    assert satisfied_at("shift", Mask.full(), heads, SIZES) == list(SIZES)


@pytest.mark.parametrize("heads", [2, 4])
def test_symmetric_shift_satisfies_the_lemma_at_even_sizes(heads: int) -> None:
    assert satisfied_at("symmetric_shift", Mask.causal(), heads, SIZES) == list(SIZES)[::2]


@pytest.mark.parametrize("n", range(1, 16))
def test_symmetric_shift_alone_on_half_the_workers(n: int) -> None:
    """One head on ceil(n / 2) workers: no backward edge at even and odd n, nobody ever waits."""
    problem = Problem.dense(seqlen=128 * n, head_dim=64, mask=Mask.causal())
    plan = build_plan(problem, "symmetric_shift + pairs(heads_at_once=1)")
    timeline = simulate(plan, Costs(2, 1), -(-n // 2))
    graph = dependency_graph(plan, timeline.items_of_workers(), 2, 1)
    assert graph.isomorphic
    assert graph.backward_edges() == []
    assert timeline.makespan == 3 * (n + 1 if n % 2 == 0 else n)


@pytest.mark.usefixtures("large_heads")
@pytest.mark.parametrize("policy", ["fa3", "descending", "spt", "by_length"])
@pytest.mark.parametrize("mask", [Mask.full(), Mask.causal()], ids=lambda m: m.name)
def test_other_policies_never_satisfy_it(policy: str, mask: Mask) -> None:
    assert satisfied_at(policy, mask, 2, SIZES) == []


def test_every_policy_is_accounted_for() -> None:
    assert set(POLICIES) == {"fa3", "descending", "shift", "symmetric_shift", "spt", "by_length"}

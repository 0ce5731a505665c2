"""What the docs quote: tables in Markdown and single figures, each by its source and a name.

A page names both in a marker (quoted.py). ``python benchmarks/tables.py`` prints all of them.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, combinations, product
from typing import Any

from ablation_values import ablation_values
from block_values import block_values, measured
from decode_values import decode_values
from documents import Value, document, read, table_of
from evidence import COUNTS, count_values, litmus_values, soak_values
from forward_values import forward_values
from other_values import other_values
from ranking import plan_of, ranked, sums_as
from replication_values import other_build_values, replication_values
from schedule_values import schedule_values
from score_values import score_values
from shape_values import interval_values, segment_values, shape_values, triton_values
from sharing_values import choice_values, sharing_values
from step_values import step_values
from summary import Row
from throughput import grid_rows, throughput_values
from tlx_values import tlx_values
from total_values import total_values

from dash_attn.model.roofline import ForwardRoofline, Roofline, forward_roofline, roofline
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import POLICIES, build_plan, choose_policy

TIE = 0.01
"""Speeds this close are not ranked: rounds of one run differ by as much."""

# Deviation, error growth and the demo


def deviation_table() -> str:
    """Table 1 of the paper: the largest difference from the first pass, by mode."""
    rows: dict[str, Row] = defaultdict(dict)
    for row in read("h200-deviation.json"):
        name = f"{row['impl']}, {'deterministic' if row['deterministic'] else 'not deterministic'}"
        shown = f"{row['max']:.1e}" if row.get("max") else "0"
        rows[name][row["head_dim"], row["mask"]] = row.get("error", shown)
    points = [(head_dim, mask) for head_dim in (64, 128) for mask in ("full", "causal")]
    head = ["mode", *(f"{mask}, head dim {head_dim}" for head_dim, mask in points)]
    return table_of(head, [[name, *(found[point] for point in points)] for name, found in rows.items()])


def error_values() -> Iterator[tuple[str, Value]]:
    """Relative errors against float64: the range of each tensor over all rows, and a table of two lengths."""
    for name in ("out", "dq", "dk", "dv"):
        for of, pick in (("least", min), ("most", max)):
            yield f"{name}-{of}", partial(_error, name, pick)
    yield "causal-128-table", error_table


def _error(name: str, pick: Callable[[Sequence[float]], float]) -> str:
    return f"{pick([row[name] for row in read('h200-error-growth.json')]) * 1e3:.1f}e-3"


def error_table() -> str:
    columns = {"out": "out", "dq": "dq", "dk": "dk", "dv": "dv", "dq_unordered": "dq without order"}
    lines = [
        [f"{row['seqlen']:,}", *(f"{row[name] * 1e3:.2f}e-3" for name in columns)]
        for row in read("h200-error-growth.json")
        if (row["mask"], row["head_dim"]) == ("causal", 128) and row["seqlen"] in (4096, 131_072)
    ]
    return table_of(["tokens", *columns.values()], lines)


def demo_values() -> Iterator[tuple[str, Value]]:
    """What the demo trained with, and how fast."""
    yield "steps", lambda: f"{document('h200-demo.json')['settings']['steps']:,}"
    yield "million-weights", lambda: f"{document('h200-demo.json')['parameters'] / 1e6:.0f}"
    yield "tokens-per-second-ordered", partial(_demo_speed, 0)
    yield "tokens-per-second-shuffled", partial(_demo_speed, 2)
    yield "policy", demo_policy
    yield "policy-today", lambda: f"`{choose_policy(_demo_problem())[0]}`"


def _demo_speed(run: int) -> str:
    return f"{round(document('h200-demo.json')['tokens_per_second'][run], -3):,.0f}"


def _demo_problem() -> Problem:
    settings = document("h200-demo.json")["settings"]
    shape = settings["shape"]
    return Problem.dense(
        batch=settings["batch"],
        heads=shape["width"] // shape["head_dim"],
        seqlen=shape["seqlen"],
        head_dim=shape["head_dim"],
        mask=Mask.causal(),
        dtype=settings["dtype"],
    )


def demo_policy() -> str:
    """The policy whose plan has the fingerprint that the demo recorded; ValueError if none has it."""
    wanted = document("h200-demo.json")["fingerprint"]
    problem = _demo_problem()
    for name, kind in POLICIES.items():
        if name != "shift" and sums_as(build_plan(problem, kind()), wanted):
            return f"`{name}`"
    raise ValueError(f"no policy has the demo's fingerprint {wanted}")


# Traces and the cost model


def trace_values() -> Iterator[tuple[str, Value]]:
    yield "traces", trace_table
    yield "off-least", partial(_trace_off, min)
    yield "off-most", partial(_trace_off, max)
    for name, what in (("task", "task"), ("reduction", "reduction"), ("change", "item_change")):
        for of, pick in (("least", min), ("most", max)):
            yield f"{name}-{of}", partial(_trace, what, pick)


def _trace_off(pick: Callable[[Sequence[float]], float]) -> str:
    """By how much a measured makespan is longer than the simulated one."""
    rows = read("h200-traces.json")
    return f"{pick([row['measured']['makespan'] / row['simulated']['makespan'] - 1 for row in rows]):.0%}"


def _trace(what: str, pick: Callable[[Sequence[int]], int]) -> str:
    """Cycles, of the traced plans that wait least for this in the model."""
    rows = read("h200-traces.json")
    least = min(row["simulated"][what] for row in rows)
    return f"{pick([row['measured'][what] for row in rows if row['simulated'][what] == least]):,}"


def trace_table() -> str:
    """By policy, simulated and measured: the makespan, a task, a change of items, a reduction."""
    head = ["mask", "policy", "makespan simulated", "measured", "off by"]
    head += ["task", "change of items", "reduction"]
    lines = []
    for row in sorted(read("h200-traces.json"), key=lambda row: (row["mask"], row["measured"]["makespan"])):
        s, m = row["simulated"], row["measured"]
        line = [row["mask"], row["policy"], f"{s['makespan']:,}", f"{m['makespan']:,}"]
        line.append(f"{m['makespan'] / s['makespan'] - 1:+.0%}")
        line += [f"{s[what]:,} / {m[what]:,}" for what in ("task", "item_change", "reduction")]
        lines.append(line)
    return table_of(head, lines)


def ranking_values() -> Iterator[tuple[str, Value]]:
    yield "ranking", ranking_table
    yield "plans", lambda: str(len(read("h200-ranking.json")))
    yield "plans-of-today", plans_of_today


def plans_of_today() -> str:
    """Of the plans that were ranked, how many have the fingerprint that was measured."""
    return str(sum(sums_as(plan_of(row), row["fingerprint"]) for row in ranked(grid_rows())))


def ranking_table() -> str:
    """By head dim and mask: pairs of policies in the wrong order, and what the model's pick gives away."""
    points: dict[tuple[int, str], dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in read("h200-ranking.json"):
        points[row["head_dim"], row["mask"]][row["seqlen"]].append(row)
    lines = []
    for (head_dim, mask), by_length in points.items():
        wrong, pairs, undecided = map(sum, zip(*map(_pairs, by_length.values())))
        line = [head_dim, mask, f"{wrong} of {pairs}", undecided]
        for pick in (_model_pick, _auto_pick):
            losses = [1 - min(row["ms"] for row in x) / pick(x)["ms"] for x in by_length.values()]
            line.append(f"{statistics.fmean(losses):.1%}, at most {max(losses):.1%}")
        lines.append(line)
    head = ["head dim", "mask", "pairs in the wrong order", "called equal"]
    return table_of([*head, "the model's pick is slower", "`auto` is slower"], lines)


def _model_pick(here: Sequence[Row]) -> Row:
    return min(here, key=lambda row: row["simulated_cycles"])


def _auto_pick(here: Sequence[Row]) -> Row:
    return next(row for row in here if row["auto"])


def _pairs(here: Sequence[Row]) -> tuple[int, int, int]:
    """Pairs of plans of one point: in the wrong order by the model, all, and called equal by it."""
    apart = [(a, b) for a, b in combinations(here, 2) if abs(a["ms"] / b["ms"] - 1) > TIE]
    orders = [(a["simulated_cycles"] - b["simulated_cycles"], a["ms"] - b["ms"]) for a, b in apart]
    return sum(s * m < 0 for s, m in orders), len(apart), sum(s == 0 for s, _ in orders)


# Roofline


def unit_table() -> str:
    """Cycles of a task by unit; the binding one is bold."""
    found = [roofline(head_dim) for head_dim in (64, 128)]
    head = ["cycles per task", *(f"head dim {r.head_dim}, {r.tile_m} x {r.tile_n}" for r in found)]
    lines: list[Sequence[object]] = []
    for unit in found[0].units:
        lines.append(_of_unit(unit, found))
    lines.append(["one reduction alone, start to completion", *(f"{r.alone:,.0f}" for r in found)])
    lines.append(["one hop of a dQ tile, hand-over included", *(f"{r.hop:,.0f}" for r in found)])
    return table_of(head, lines)


def _of_unit(unit: str, found: Sequence[Roofline | ForwardRoofline]) -> list[str]:
    """Cycles of a unit, bold where it binds."""
    cycles = [(r.units[unit], r.units[unit] == r.bound) for r in found]
    return [unit, *(f"**{x:,.0f}**" if binds else f"{x:,.0f}" for x, binds in cycles)]


def forward_unit_table() -> str:
    """Cycles of a kv tile of a forward's item by unit, shared memory by purpose."""
    found = [forward_roofline(head_dim) for head_dim in (64, 128)]
    head = ["cycles per kv tile", *(f"head dim {r.head_dim}, {r.tile_m} x {r.tile_n}" for r in found)]
    lines: list[Sequence[object]] = []
    for unit in found[0].units:
        lines.append(_of_unit(unit, found))
        if unit == "shared memory":
            lines += [[f"... {what}", *(f"{r.shared[what]:,.0f}" for r in found)] for what in found[0].shared]
    return table_of(head, lines)


def shared_table() -> str:
    """Cycles of shared memory of a task, by purpose."""
    found = [roofline(head_dim) for head_dim in (64, 128)]
    head = ["shared memory, cycles per task", *(f"head dim {r.head_dim}" for r in found)]
    return table_of(head, [[what, *(f"{r.shared[what]:,.0f}" for r in found)] for what in found[0].shared])


def host_table() -> str:
    """Host time of a call beside FlashAttention-4's, microseconds."""
    lines = [
        [row["problem"], what, f"{row['us']['dash_attn']:.0f}", f"{row['us']['fa4']:.0f}", f"{ratio:.2f}"]
        for row, what, ratio in _host_ratios()
    ]
    return table_of(["problem", "call", "ours, us", "FA4, us", "ours / FA4"], lines)


HOST_CALLS = {"forward": "forward", "both": "forward and backward"}


def _host_ratios() -> Iterator[tuple[dict[str, Any], str, float]]:
    """Rows of known lengths, what was called, and our time / FlashAttention-4's."""
    for row in read("h200-host.json"):
        if row["what"] in HOST_CALLS.values() and "unseen" not in row["problem"]:
            yield row, row["what"], row["us"]["dash_attn"] / row["us"]["fa4"]


def _host_ratio(call: str, which: Callable[[Iterable[float]], float]) -> str:
    return f"{which(ratio for _, what, ratio in _host_ratios() if what == call):.2f}"


def host_values() -> Iterator[tuple[str, Value]]:
    """Host times: known lengths as a table, the others by what they are of. New lengths in ms."""
    yield "known", host_table
    for (name, call), (extreme, which) in product(HOST_CALLS.items(), {"least": min, "most": max}.items()):
        yield f"{name}-{extreme}", partial(_host_ratio, call, which)
    for name, problem, what, key in (
        ("plan", "64 unseen lengths on cpu", "forward and backward", "plan_for"),
        ("unseen-on-cpu", "64 unseen lengths on cpu", "forward and backward", "new lengths"),
        ("look-up", "64 known lengths", "look-up", "dash_attn"),
        ("graph", "4 x 256, 8 heads", "graph", "dash_attn"),
        ("graph-fa4", "4 x 256, 8 heads", "graph", "fa4"),
        ("graph-backward", "4 x 256, 8 heads", "graph, backward alone", "dash_attn"),
        ("graph-backward-fa4", "4 x 256, 8 heads", "graph, backward alone", "fa4"),
    ):
        yield name, partial(_host, problem, what, key)


def first_call_values() -> Iterator[tuple[str, Value]]:
    """Seconds of our first calls, ``WHAT-HOW``; and a table."""
    for what, how in product(("forward", "backward"), ("compiled", "cached")):
        yield f"{what}-{how}", partial(_first_call, what, FIRST_CALLS[how])
    yield "first-calls", first_call_table


FIRST_CALLS = {
    "compiled": "dash_attn, compiled", "cached": "dash_attn, from the cache", "fa4": "fa4, compiled"
}  # fmt: skip


def _first_call(what: str, key: str) -> str:
    named = what if what == "import" else f"first {what}"
    (us,) = (row["us"][key] for row in read("h200-first-calls.json") if row["what"] == named)
    return f"{us / 1e6:.2f}"


def first_call_table() -> str:
    """Seconds of import, first forward and first backward."""
    lines = [[key, *(_first_call(what, key) for what in ("import", "forward", "backward"))]
             for key in FIRST_CALLS.values()]  # fmt: skip
    return table_of(["seconds", "import", "first forward", "first backward"], lines)


def _host(problem: str, what: str, key: str) -> str:
    (us,) = (
        row["us"][key] for row in read("h200-host.json") if (row["problem"], row["what"]) == (problem, what)
    )
    return f"{us / 1000:.1f}" if key in ("plan_for", "new lengths") else f"{us:.0f}"


def _values() -> Iterator[tuple[tuple[str, str], Value]]:
    folder = "benchmarks/results/h200-"
    of_source: Mapping[str, Iterator[tuple[str, Value]]] = {
        f"{folder}backward.json": chain(throughput_values(), tlx_values(), replication_values()),
        f"{folder}forward.json": chain(forward_values(), other_values(), total_values("h200-forward.json")),
        "benchmarks/results/h100-forward.json": total_values("h100-forward.json"),
        f"{folder}ablations.json": ablation_values(),
        f"{folder}deviation.json": iter([("table-1", deviation_table)]),
        f"{folder}error-growth.json": error_values(),
        f"{folder}demo.json": demo_values(),
        f"{folder}traces.json": trace_values(),
        f"{folder}ranking.json": ranking_values(),
        "benchmarks/results/h200-host.json": host_values(),
        f"{folder}first-calls.json": first_call_values(),
        "benchmarks/results/h200-decode.json": decode_values(),
        "benchmarks/results/h100-choices.json": schedule_values(),
        f"{folder}grid.json": shape_values("h200-grid.json"),
        "benchmarks/results/h100-grid.json": shape_values("h100-grid.json"),
        "benchmarks/results/h200-shapes.json": shape_values("h200-shapes.json"),
        f"{folder}head-dims.json": shape_values("h200-head-dims.json"),
        f"{folder}segments.json": segment_values(),
        "benchmarks/results/h200x2-context-parallel.json": sharing_values(),
        f"{folder}steps.json": step_values(),
        f"{folder}triton.json": triton_values(),
        "benchmarks/results/h200-intervals.json": interval_values(),
        "benchmarks/results/h200-scores.json": score_values(),
        f"{folder}litmus.json": litmus_values(),
        f"{folder}soak.json": soak_values(),
        "benchmarks/summary.py": other_build_values(),
        COUNTS: count_values(),
        "dash_attn.model.links": choice_values(),
        "dash_attn.model.roofline": iter(
            [("units", unit_table), ("shared-memory", shared_table), ("forward", forward_unit_table)]
        ),
    }
    if measured():
        of_source = {**of_source, f"{folder}blocks.json": block_values()}
    for source, values in of_source.items():
        for name, value in values:
            yield (source, name), value


VALUES: Mapping[tuple[str, str], Value] = dict(_values())
"""By source and name: the text that a page has behind its marker."""


def main() -> int:
    for (source, name), value in VALUES.items():
        text = value()
        print(f"{source}: {name}{chr(10) if chr(10) in text else ' = '}{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

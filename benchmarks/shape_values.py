"""What the docs quote of other shapes (h200-shapes.json), of the Triton backend (h200-triton.json), and of
intervals of rows (h200-intervals.json)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from documents import STATISTICS, Value, read, table_of
from summary import Row

__all__ = ["RATIOS", "interval_values", "ratio", "segment_values", "shape_values", "times", "triton_values"]

Kind = tuple[str, str, bool]
"""Pass, implementation, whether it is deterministic."""

TRITON, INTERVALS = "h200-triton.json", "h200-intervals.json"
STRICT: list[Kind] = [("backward", "fa4", True), ("backward", "cudnn", True)]
"""Deterministic peers."""
RATIOS: Mapping[str, tuple[Kind, list[Kind]]] = {
    "forward": (("forward", "dash_attn", True), [("forward", "fa4", True)]),
    "det": (("backward", "dash_attn", True), STRICT),
    "any": (("backward", "dash_attn", True), [*STRICT, ("backward", "fa4", False)]),
    "order": (("backward", "dash_attn", True), [("backward", "dash_attn", False)]),
    "whole": (("backward", "dash_attn", True), [("backward", "dash_attn whole", True)]),
}
"""Of which call, and of whose fastest one, speeds are compared."""
SHORT = r" x (512|1024),"
"""What names of cases of 512 and 1,024 tokens have."""
ENERGY = ("det", "any")
"""Those of RATIOS whose energy is compared, too."""
SEGMENTS = "h200-segments.json"
"""The file with a backward of whole sequences."""


def shape_values(file: str) -> Iterator[tuple[str, Value]]:
    """``RATIO-STATISTIC`` over all cases of what ``shapes.py`` wrote, ``short-RATIO-STATISTIC`` over those of
    512 and 1,024 tokens, and tables."""
    for name in RATIOS:
        for statistic in STATISTICS:
            yield f"{name}-{statistic}", partial(_shape_statistic, file, name, statistic)
            yield f"short-{name}-{statistic}", partial(_shape_statistic, file, name, statistic, cases=SHORT)
            if name in ENERGY:
                yield f"{name}-energy-{statistic}", partial(_shape_statistic, file, name, statistic, "joules")
    yield "summary", partial(summary_table, file)
    yield "table", partial(shape_table, file)


def segment_values() -> Iterator[tuple[str, Value]]:
    """As :func:`shape_values`, and a table beside whole sequences."""
    yield from shape_values(SEGMENTS)
    yield "cut-table", cut_table


def summary_table(file: str) -> str:
    """Every ratio over all cases."""
    names = {
        "det": "backward / FA4 det",
        "any": "backward / faster mode of FA4",
        "order": "backward / no order",
        "forward": "forward / FA4",
    }
    shown = {"mean": "geometric mean", "least": "least", "behind": "cases below 1", "points": "cases"}
    lines = [[what, *(_shape_statistic(file, name, s) for s in shown)] for name, what in names.items()]
    lines += [
        [f"energy, {names[name]}", *(_shape_statistic(file, name, s, "joules") for s in shown)]
        for name in ENERGY
        if any("joules" in row for row in read(file))
    ]
    return table_of(["ratio", *shown.values()], lines)


def times(rows: Iterable[Row], what: str = "ms") -> dict[str, dict[Kind, float]]:
    """Milliseconds, or joules, by case and kind of call."""
    found: dict[str, dict[Kind, float]] = {}
    for row in rows:
        if what in row:
            found.setdefault(row["case"], {})[row["pass"], row["impl"], row["deterministic"]] = row[what]
    return found


def ratio(ms: Mapping[Kind, float], name: str) -> float:
    """What the fastest of the others takes / what ours takes; 0 where there is none."""
    ours, others = RATIOS[name]
    return min((ms[other] for other in others if other in ms), default=0.0) / ms[ours]


def _shape_statistic(file: str, name: str, statistic: str, what: str = "ms", cases: str = "") -> str:
    ratios = (ratio(ms, name) for case, ms in times(read(file), what).items() if re.search(cases, case))
    found = [x for x in ratios if x]
    return STATISTICS[statistic](found) if found else "-"


def cut_table() -> str:
    """Milliseconds of the backward in segments, beside whole sequences and beside no order."""
    lines = []
    for case, ms in times(read(SEGMENTS)).items():
        ratios = (ratio(ms, "whole"), ratio(ms, "order"))
        if ratios[0]:
            lines.append(
                [
                    case.partition(": ")[2],
                    f"{ms['backward', 'dash_attn', True]:.2f}",
                    *map("{:.2f}".format, ratios),
                ]
            )
    return table_of(["case", "in segments, ms", "/ whole", "/ no order"], lines)


def shape_table(file: str) -> str:
    """Milliseconds of our backward, and ratios."""
    head = ["case", "backward, ms", "/ FA4 det", "/ FA4", "/ no order", "forward / FA4"]
    lines = []
    for case, ms in times(read(file)).items():
        free = ms.get(("backward", "fa4", False), 0.0) / ms["backward", "dash_attn", True]
        ratios = (ratio(ms, "det"), free, ratio(ms, "order"), ratio(ms, "forward"))
        shown = [f"{x:.2f}" if x else "-" for x in ratios]
        lines.append([case, f"{ms['backward', 'dash_attn', True]:.3f}", *shown])
    return table_of(head, lines)


def triton_values() -> Iterator[tuple[str, Value]]:
    """``PASS-PEER-STATISTIC`` over all cases, and a table."""
    for which in ("forward", "backward"):
        for peer in ("flex", "fa2"):
            for statistic in STATISTICS:
                yield f"{which}-{peer}-{statistic}", partial(_triton_statistic, which, peer, statistic)
    yield "table", triton_table


def _triton() -> dict[tuple[int, bool, int], dict[tuple[str, str], float]]:
    found: dict[tuple[int, bool, int], dict[tuple[str, str], float]] = {}
    for row in read(TRITON):
        point = (row["head_dim"], row["causal"], row["seqlen"])
        found.setdefault(point, {})[row["pass"], row["impl"]] = row["ms"]
    return found


def _triton_statistic(which: str, peer: str, statistic: str) -> str:
    return STATISTICS[statistic]([ms[which, peer] / ms[which, "dash_attn"] for ms in _triton().values()])


def triton_table() -> str:
    """Geometric means over lengths and masks, by head dim."""
    by_head_dim: dict[int, list[dict[tuple[str, str], float]]] = {}
    for (head_dim, _, _), ms in _triton().items():
        by_head_dim.setdefault(head_dim, []).append(ms)
    columns = [(which, peer) for which in ("forward", "backward") for peer in ("flex", "fa2")]
    lines = []
    for head_dim, points in by_head_dim.items():
        ratios = [[ms[which, peer] / ms[which, "dash_attn"] for ms in points] for which, peer in columns]
        lines.append([head_dim, *(STATISTICS["mean"](x) for x in ratios)])
    names = {"flex": "FlexAttention", "fa2": "FlashAttention-2"}
    return table_of(["head dim", *(f"{which} / {names[peer]}" for which, peer in columns)], lines)


INTERVAL_PEERS = {"triton": "Triton", "flex": "FlexAttention"}


def interval_values() -> Iterator[tuple[str, Value]]:
    """``PASS-PEER-STATISTIC`` over all cases, and a table."""
    for which in ("forward", "both"):
        for peer in INTERVAL_PEERS:
            for statistic in STATISTICS:
                yield f"{which}-{peer}-{statistic}", partial(_interval_statistic, which, peer, statistic)
    yield "table", interval_table


def _intervals() -> dict[tuple[int, str], dict[tuple[str, str], float]]:
    found: dict[tuple[int, str], dict[tuple[str, str], float]] = {}
    for row in read(INTERVALS):
        found.setdefault((row["head_dim"], row["case"]), {})[row["pass"], row["impl"]] = row["ms"]
    return found


def _interval_statistic(which: str, peer: str, statistic: str) -> str:
    ratios = [ms[which, peer] / ms[which, "dash_attn"] for ms in _intervals().values()]
    return STATISTICS[statistic](ratios)


def interval_table() -> str:
    """Milliseconds of forward and backward, and ratios."""
    head = ["head dim", "mask", "ours, ms", *(f"{name} / ours" for name in INTERVAL_PEERS.values())]
    lines = []
    for (head_dim, case), ms in _intervals().items():
        mine = ms["both", "dash_attn"]
        peers = [f"{ms['both', peer] / mine:.2f}" for peer in INTERVAL_PEERS]
        others = (ms.get(("both", name)) for name in ("no intervals", "packed"))
        shown = [f"{x:.3f}" if x else "-" for x in others]
        lines.append([head_dim, case, f"{mine:.3f}", *peers, *shown])
    return table_of([*head, "without intervals, ms", "packed, ms"], lines)

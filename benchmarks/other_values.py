"""What the docs quote of the forward outside the grid: a table, and ratios by kind of point."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from documents import STATISTICS, Value, read, table_of
from summary import Row

__all__ = ["other_values"]

POINT = ("head_dim", "mask", "batch", "seqlen", "seqlen_k", "packed")
SELECTIONS: Mapping[str, Callable[[Row], bool]] = {
    "other": lambda point: True,
    "other-odd": lambda point: _plain(point) and point["seqlen"] < 16_384,
    "other-long": lambda point: _plain(point) and point["seqlen"] > 16_384,
    "other-window": lambda point: point["mask"].startswith("window"),
    "other-unequal": lambda point: point["seqlen"] != point["seqlen_k"],
    "other-packed": lambda point: bool(point["packed"]),
}
"""Points of the set ``other``, chosen by the fields of POINT."""
PEERS = {"fa4": ("fa4",), "any": ("fa4", "cudnn")}


def _plain(point: Row) -> bool:
    """Nothing is unusual but the length."""
    return (
        point["mask"] in ("full", "causal") and point["seqlen"] == point["seqlen_k"] and not point["packed"]
    )


def other_values() -> Iterator[tuple[str, Value]]:
    """``SELECTION-PEERS-STATISTIC`` for all of them, and a table."""
    if not _points():
        return  # not measured yet
    for selection in SELECTIONS:
        for peers in PEERS:
            for statistic in STATISTICS:
                yield f"{selection}-{peers}-{statistic}", partial(_statistic, selection, peers, statistic)
    yield "other-table", other_table


def _points() -> list[tuple[Row, dict[str, float]]]:
    """The fields of POINT, and TFLOP/s in sustained mode by contender."""
    found: dict[tuple[object, ...], dict[str, float]] = {}
    for row in read("h200-forward.json"):
        if (row["set"], row["timing"]) == ("other", "sustained"):
            point = tuple(row.get(field, "") for field in POINT)
            found.setdefault(point, {})[row["impl"]] = row["tflops"]
    return [(dict(zip(POINT, point)), speeds) for point, speeds in found.items()]


def _ratio(speeds: Mapping[str, float], peers: str) -> float:
    """Our speed / that of the fastest of these peers that has one."""
    return speeds["dash_attn"] / max(speeds[peer] for peer in PEERS[peers] if peer in speeds)


def _statistic(selection: str, peers: str, statistic: str) -> str:
    wanted = SELECTIONS[selection]
    return STATISTICS[statistic]([_ratio(speeds, peers) for point, speeds in _points() if wanted(point)])


def other_table() -> str:
    """TFLOP/s of all contenders and ratios; "-" where a peer was not measured."""
    lines = []
    for point, speeds in _points():
        shape = point["packed"] and f"packed: {point['packed']}"
        if not shape:
            shape = f"{point['batch']} x {point['seqlen']:,}"
            shape += f" of {point['seqlen_k']:,} keys" if point["seqlen"] != point["seqlen_k"] else ""
        shown = [f"{speeds[x]:.0f}" if x in speeds else "-" for x in ("dash_attn", "fa4", "cudnn")]
        ratios = [f"{_ratio(speeds, peers):.2f}" for peers in PEERS]
        lines.append([point["head_dim"], point["mask"], shape, *shown, *ratios])
    head = ["head dim", "mask", "sequences", "ours", "FA4", "cuDNN", "ours / FA4", "ours / fastest"]
    return table_of(head, lines)

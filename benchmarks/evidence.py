"""What pages on reliability quote: the litmus test of the hand-over, the soak, the counts of CPU tests."""

from __future__ import annotations

import runpy
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from documents import Value, document, read, table_of
from summary import Row

COUNTS = "tests/cpu/counts.py"

FORMS = {
    "release_warp": "as above; what ships, from block to block",
    "queued": "as above, through a queue; what ships, to the block that converts a tile",
    "reduce_warp": "`red.release.gpu` by Ra itself",
    "relaxed_poll": "as shipped, but `ld.relaxed.gpu`",
    "source_read": "as shipped, but `.read` in step 2",
    "nothing": "as shipped, without a wait in step 2",
}
PROMISED = ("release_warp", "queued", "reduce_warp")
SIZES = {"small": "512 B", "large": "32 KB"}


def litmus(form: str, load: str | None = None, size: str = "") -> list[Row]:
    """Rows of a form: beside one load, or beside any; of one size of tile, or of all."""
    return [
        row
        for row in read("h200-litmus.json")
        if row["form"] == form
        and (row["load"] == load if load else row["load"] != "none")
        and row["shape"].startswith(size)
    ]


def total(rows: list[Row], name: str) -> int:
    return sum(sum(row[name]) if name == "wrong" else row[name] for row in rows)


def form_table() -> str:
    """Hand-overs and wrong reads of each form that was not expected to fail, beside traffic."""
    lines = []
    for form, what in FORMS.items():
        rows, promised = litmus(form), form in PROMISED
        wrong = f"{total(rows, 'wrong'):,}"
        lines.append([
            f"`{form}`: {what}", "yes" if promised else "no", _hand_overs(form), _small_share(form),
            f"{total(rows, 'reads'):,}", f"**{wrong}**" if promised else wrong,
        ])  # fmt: skip
    return table_of(["form", "promised", "hand-overs", "of 512 B", "reads", "wrong reads"], lines)


def relaxed_table() -> str:
    """The forms that hand over by a relaxed operation, by load and size of the tile."""
    found: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in read("h200-litmus.json"):
        if row["form"].endswith("relaxed"):
            found[f"`{row['form']}`", row["load"], SIZES[row["shape"].split("-")[0]]].append(row)
    lines = [
        [*key, *(f"{total(rows, name):,}" for name in ("rounds", "reads", "wrong"))]
        for key, rows in found.items()
    ]
    return table_of(["form", "load", "tile", "hand-overs", "reads", "wrong reads"], lines)


def rate_table() -> str:
    """Hand-overs per second of 512-byte tiles, one tile per block, in millions."""
    lines = []
    for form in (*PROMISED, "relaxed"):
        cells = []
        for load in ("dram", "l2"):
            rates = [
                row["rounds"] / row["seconds"] / 1e6
                for row in litmus(form, load, "small")
                if row["chains"] == 1
            ]
            cells.append(f"{min(rates):.0f} to {max(rates):.0f}" if rates else "-")
        lines.append([f"`{form}`", *cells])
    return table_of(["million hand-overs per second, 512 B", "beside dram", "beside l2"], lines)


def litmus_values() -> Iterator[tuple[str, Value]]:
    yield "forms", form_table
    yield "relaxed-forms", relaxed_table
    yield "rates", rate_table
    yield "release_warp-hand-overs", partial(_hand_overs, "release_warp")
    yield "release_warp-small-share", partial(_small_share, "release_warp")
    for form in ("release_warp", "reduce_warp"):
        yield f"{form}-alone", partial(_alone, form)
    yield "order-share", _order_share
    for form in ("relaxed", "source_read_relaxed"):
        yield f"{form}-wrong", partial(_wrong, form, "wrong")
        yield f"{form}-reads", partial(_wrong, form, "reads")
    for form in ("relaxed", "queued_relaxed"):
        for place in (1, 8):
            yield f"{form}-wrong-after-{place}", partial(_wrong_after, form, place)


def _hand_overs(form: str) -> str:
    return f"{total(litmus(form), 'rounds'):,}"


def _small_share(form: str) -> str:
    return f"{total(litmus(form, size='small'), 'rounds') / total(litmus(form), 'rounds'):.0%}"


def _alone(form: str) -> str:
    return f"{total(litmus(form, 'none'), 'rounds'):,}"


def _wrong(form: str, name: str) -> str:
    """Wrong reads, or all, of 512-byte tiles that are read after each hand-over by `ld.global`."""
    return f"{total(litmus(form, 'dram', 'small-load'), name):,}"


def _order_share() -> str:
    """Wrong sums of eight of `relaxed`, which are read after the last addition only, one tile per block."""
    (row,) = (r for r in litmus("relaxed", "dram", "small-order") if r["chains"] == 1)
    return f"{sum(row['wrong']) / row['reads']:.1%}"


def _wrong_after(form: str, place: int) -> str:
    (row,) = litmus(form, "dram", "small-load")
    return f"{row['wrong'][place - 1]:,}"


def soak_table() -> str:
    """Replays of each phase, and those that differ; the control in bold."""
    lines = []
    for phase in document("h200-soak.json")["phases"]:
        cells = [
            phase["phase"],
            f"{phase['replays']:,}",
            f"{phase['differing']:,}",
            f"{phase['seconds']:.1f}",
        ]
        lines.append([cells[0], cells[1], f"**{cells[2]}**", cells[3]] if phase["control"] else cells)
    return table_of(["phase", "replays", "that differ", "seconds"], lines)


def soak_values() -> Iterator[tuple[str, Value]]:
    yield "phases", soak_table
    yield "torch", lambda: f"`{document('h200-soak.json')['versions']['torch']}`"
    yield "nvidia-cutlass-dsl", lambda: f"`{document('h200-soak.json')['versions']['nvidia-cutlass-dsl']}`"


def count_values() -> Iterator[tuple[str, Value]]:
    """The numbers of tests/cpu/counts.py, by their names in lower case with hyphens."""
    counts = runpy.run_path(str(Path(__file__).parents[1] / COUNTS))
    for name, number in counts.items():
        if isinstance(number, int):
            yield name.lower().replace("_", "-"), partial(format, number, ",")

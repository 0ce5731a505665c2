"""What the replication page quotes: the DASH paper's comparisons, made with what was measured here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from documents import STATISTICS, Value, table_of
from points import SEQLENS
from summary import (
    FREE_FA3_TFLOPS,
    OTHER_BUILDS_TFLOPS,
    POINT,
    Row,
    by_point,
    fastest,
    first_ms,
    geometric_mean,
    ours,
)
from throughput import CUDNN, MAIN, grid_rows

__all__ = ["PANELS", "order_ratios", "other_build_values", "replication_values"]

Place = tuple[int, str, int]
"""Head dim, mask, tokens per sequence."""

BASELINE = "fa3"
POLICIES = ("descending", "shift", "symmetric_shift", "auto")
LIBRARIES = {"dash_attn": "ours", "fa4": "FlashAttention-4", "cudnn": "cuDNN, in another run"}
PANELS = ((64, "full"), (64, "causal"), (128, "full"), (128, "causal"))


def replication_values() -> Iterator[tuple[str, Value]]:
    """Of this package's own kernel under several policies, and of libraries with and without order."""
    yield "policies-table", policies_table
    yield "order-table", order_table
    for head_dim, mask in PANELS:
        for policy in ("descending", "auto", "best", "shift" if mask == "full" else "symmetric_shift"):
            for statistic in STATISTICS:
                name = f"own-{policy}-{mask}-{head_dim}-{statistic}"
                yield name, partial(_own, policy, (head_dim, mask), STATISTICS[statistic])
    for statistic in STATISTICS:
        yield f"auto-fa3-{statistic}", partial(_beside_fa3, STATISTICS[statistic])


def other_build_values() -> Iterator[tuple[str, Value]]:
    """Of kernels that were built from source and measured in one other run."""
    yield "fa3-order-most", lambda: f"{max(1 - x for x in _fa3_order().values()):.1%}"
    yield "fork-table", fork_table
    yield "fork-most", lambda: STATISTICS["most"](list(_fork().values()))
    for statistic in ("behind", "points"):
        yield f"fork-causal-{statistic}", partial(_fork_causal, STATISTICS[statistic])


def by_place(file: str = MAIN) -> dict[Place, list[Row]]:
    """The rows of the grid in a file of ``backward.py``."""
    found = {}
    for point, rows in by_point(grid_rows(file)).items():
        facts = dict(zip(POINT, point))
        found[facts["head_dim"], facts["mask"], facts["seqlen"]] = rows
    return found


def policy_ratios() -> dict[Place, dict[str, float]]:
    """Speed by policy as a multiple of FlashAttention-3's order in the same kernel, in the first run. Of each
    policy its faster placement counts; "shift" has one ring per head, as in the paper, and "best" is the
    fastest of the paper's three."""
    found = {}
    for place, rows in by_place().items():
        times: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            if row["impl"] == "dash_attn" and row["deterministic"] and "ms" in row:
                times[str(row["policy"]).partition("(heads")[0]].append(first_ms(row))
                if row["auto"]:
                    times["auto"].append(first_ms(row))
                if place[2] >= 6144 and row["policy"] == "by_length(long_from=6144)":
                    times["descending"].append(first_ms(row))  # what it is for long sequences
        least = {name: min(x) for name, x in times.items()}
        ratios = {name: least[BASELINE] / least[name] for name in POLICIES if name in least}
        found[place] = ratios | {"best": max(x for name, x in ratios.items() if name != "auto")}
    return found


def policies_table() -> str:
    """By head dim, mask and policy."""
    ratios = policy_ratios()
    lines = []
    for head_dim, mask in PANELS:
        for policy in POLICIES:
            here = [ratios[head_dim, mask, seqlen].get(policy) for seqlen in SEQLENS]
            if any(here):
                lines.append(
                    [head_dim, mask, f"`{policy}`", *("-" if x is None else f"{x:.2f}" for x in here)]
                )
    return table_of(["head dim", "mask", "policy", *_lengths()], lines)


def _own(policy: str, panel: tuple[int, str], statistic: Callable[[Sequence[float]], str]) -> str:
    found = policy_ratios()
    here = [found[(*panel, seqlen)].get(policy) for seqlen in SEQLENS]
    return statistic([x for x in here if x is not None])


def order_ratios() -> dict[str, dict[Place, float]]:
    """By library: speed with order / speed without."""
    found = {
        name: {
            place: x
            for place, rows in by_place(CUDNN if impl == "cudnn" else MAIN).items()
            if (x := _ordered(rows, impl))
        }
        for impl, name in LIBRARIES.items()
    }
    fa3 = {(*panel, seqlen): x for (panel, seqlen), x in _fa3_order().items()}
    return found | {"FlashAttention-3, in another run": fa3}


def order_table() -> str:
    """What is lost against the same library without order: at most, where, and on the geometric mean."""
    lines = [[name, *_loss(ratios)] for name, ratios in order_ratios().items()]
    return table_of(["library", "lost at most", "where", "lost on the mean", "points with a loss"], lines)


def _ordered(rows: Sequence[Row], impl: str) -> float | None:
    """Speed with order / speed without; ours is that of ``auto``."""
    if impl == "dash_attn":
        with_order, without = (
            ours(rows, lambda row: row["auto"]),
            ours(rows, lambda row: not row["deterministic"]),
        )
    else:
        here = [row for row in rows if str(row["impl"]).partition(" ")[0] == impl]
        with_order = fastest([row for row in here if row["deterministic"]])
        without = fastest([row for row in here if not row["deterministic"]])
    if with_order is None or without is None:
        return None
    return float(without["ms"] / with_order["ms"])


def _loss(ratios: Mapping[Place, float]) -> list[str]:
    place = min(ratios, key=lambda at: ratios[at])
    where = f"{place[0]}, {place[1]}, {place[2]:,}"
    mean, behind = 1 - geometric_mean(list(ratios.values())), sum(x < 1 for x in ratios.values())
    return [f"{1 - ratios[place]:.1%}", where, f"{mean:.1%}", f"{behind} of {len(ratios)}"]


def _beside_fa3(statistic: Callable[[Sequence[float]], str]) -> str:
    """``auto`` / FlashAttention-3 in a fixed order, through FlashAttention-4, which was in both runs."""
    values = []
    for (head_dim, mask, seqlen), rows in by_place().items():
        auto = ours(rows, lambda row: row["auto"])
        fa4 = fastest([row for row in rows if row["impl"] == "fa4" and row["deterministic"]])
        if auto is None or fa4 is None:
            raise ValueError(f"a side of {head_dim}, {mask}, {seqlen} has no figures")
        speeds = OTHER_BUILDS_TFLOPS[head_dim, mask]
        at = SEQLENS.index(seqlen)
        values.append(fa4["ms"] / auto["ms"] * speeds["fa4"][at] / speeds["fa3"][at])
    return statistic(values)


# Other builds


def _fa3_order() -> dict[tuple[tuple[int, str], int], float]:
    """FlashAttention-3 with order / without, by head dim and mask, and length."""
    return {
        (panel, seqlen): OTHER_BUILDS_TFLOPS[panel]["fa3"][at] / FREE_FA3_TFLOPS[panel][at]
        for panel in PANELS
        for at, seqlen in enumerate(SEQLENS)
    }


def _fork() -> dict[tuple[tuple[int, str], str, int], float]:
    """The DASH authors' fork / FlashAttention-3 in a fixed order, by panel, policy and length."""
    return {
        (panel, name, seqlen): speeds[at] / OTHER_BUILDS_TFLOPS[panel]["fa3"][at]
        for panel in PANELS
        for name, speeds in OTHER_BUILDS_TFLOPS[panel].items()
        if name.startswith("DASH")
        for at, seqlen in enumerate(SEQLENS)
    }


def _fork_causal(statistic: Callable[[Sequence[float]], str]) -> str:
    return statistic([x for ((_, mask), _, _), x in _fork().items() if mask == "causal"])


def fork_table() -> str:
    """By head dim, mask and schedule."""
    lines: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for ((head_dim, mask), name, _), ratio in _fork().items():
        lines[head_dim, mask, name.removeprefix("DASH ")].append(f"{ratio:.2f}")
    return table_of(["head dim", "mask", "schedule", *_lengths()], [[*key, *x] for key, x in lines.items()])


def _lengths() -> list[str]:
    return [f"{seqlen:,}" for seqlen in SEQLENS]

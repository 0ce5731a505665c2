"""What the docs quote of the forward's ablations: a table of each, and ratios."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from documents import RESULTS, STATISTICS, Value, read, table_of
from summary import Row

__all__ = ["FILE", "SPEEDS", "ablation_values", "name_of_variant", "speed_table_rows"]

FILE = "h200-ablations.json"
SPEEDS = ("pipelining", "exp2", "rescaling", "order", "persistent", "segment")
"""Ablations with speeds."""
OURS, FA4 = "ours", "fa4"
NAMES = {FA4: "FA4", "sdpa flash": "SDPA flash", "sdpa math": "SDPA math"}
POINT = ("head_dim", "mask", "seqlen", "inputs")
FA4_TABLE_2 = (
    ("FA4's paper: MUFU.EX2", ("1.41e-07", "3.04e-08", "3.89e-03", "1.41e-03")),
    ("FA4's paper: degree 3", ("8.77e-05", "5.43e-05", "3.90e-03", "1.41e-03")),
)
"""FlashAttention-4's table 2, on [0, 1): largest and mean relative errors as float32, then as bfloat16."""
FA3_TABLE_3 = (("standard", "3.2e-4"), ("FlashAttention-2", "1.9e-4"), ("FlashAttention-3", "1.9e-4"))
"""FlashAttention-3's table 3: root mean square errors in FP16. "standard" is its baseline."""


def ablation_values() -> Iterator[tuple[str, Value]]:
    """Of what was measured: ``SET-table``, ``SET-VARIANT-STATISTIC`` of the ratio to what ships, and errors.

    SET-HEADDIM-VARIANT-STATISTIC is of one head dim; where there are several kinds of inputs, the kind comes
    before the variant.
    """
    measured = {row["set"] for row in rows()}
    for name in SPEEDS:
        if name in measured:
            yield f"{name}-table", partial(speed_table, name)
            yield from _ratio_values(name)
            yield f"{name}-other-bits", partial(other_bits, name)
    if "exp2" in measured:
        yield "exp2-errors", exp2_table
        yield "exp2-rmse", exp2_rmse_table
    if "rescaling" in measured:
        yield "rises", rises_table
    if "accuracy" in measured:
        yield "accuracy-table", accuracy_table
        yield "accuracy-published", published_table
        for statistic in STATISTICS:
            for kind in dict.fromkeys(row["inputs"] for row in _chosen("accuracy", "rmse")):
                yield f"accuracy-{kind}-{statistic}", partial(_error_ratio, kind, statistic)


def rows() -> list[Row]:
    """All rows; none if nothing was measured yet."""
    return read(FILE) if (RESULTS / FILE).exists() else []


def _chosen(set_: str, what: str) -> list[Row]:
    return [row for row in rows() if (row["set"], row["what"]) == (set_, what)]


def _points(set_: str, what: str, field: str) -> dict[tuple[object, ...], dict[str, float]]:
    """A field by point and variant."""
    found: dict[tuple[object, ...], dict[str, float]] = {}
    for row in _chosen(set_, what):
        point = tuple(row.get(name, "") for name in (*POINT, "dtype"))
        found.setdefault(point, {})[row["variant"]] = row[field]
    return found


def _variants(points: Mapping[tuple[object, ...], Mapping[str, float]]) -> list[str]:
    """In the order of the file, FlashAttention-4 last."""
    names = dict.fromkeys(name for by_variant in points.values() for name in by_variant)
    return [*(name for name in names if name != FA4), *(name for name in names if name == FA4)]


def name_of_variant(variant: str) -> str:
    """As tables and figures have it."""
    return NAMES.get(variant, variant)


# Speeds


def speed_table_rows(name: str) -> dict[tuple[object, ...], dict[str, float]]:
    """TFLOP/s by (head dim, mask, length, kind of inputs) and variant, variants in the table's order."""
    points = _points(name, "speed", "tflops")
    order = _variants(points)
    return {point[:4]: {x: speeds[x] for x in order if x in speeds} for point, speeds in points.items()}


def speed_table(name: str) -> str:
    """TFLOP/s of all variants; "-" where there is no such variant."""
    points = _points(name, "speed", "tflops")
    variants = _variants(points)
    several = len({point[3] for point in points}) > 1
    head = ["head dim", "mask", "tokens", *(["inputs"] if several else []), *map(name_of_variant, variants)]
    lines = []
    for (head_dim, mask, seqlen, kind, _), speeds in points.items():
        where = [head_dim, mask, f"{seqlen:,}", *([kind] if several else [])]
        lines.append([*where, *(f"{speeds[x]:.0f}" if x in speeds else "-" for x in variants)])
    return table_of(head, lines)


def other_bits(name: str) -> str:
    """How many measurements of our variants had other bits than what ships."""
    return str(sum(not row["same_bits"] for row in _chosen(name, "speed") if row["variant"] != FA4))


def _ratio_values(name: str) -> Iterator[tuple[str, Value]]:
    points = _points(name, "speed", "tflops")
    kinds = ("", *dict.fromkeys(point[3] for point in points))
    for head_dim in ("", *dict.fromkeys(point[0] for point in points)):
        for kind in kinds if len(kinds) > 2 else kinds[:1]:
            prefix = "-".join(str(x) for x in (name, head_dim, kind) if x)
            for variant in _variants(points):
                ratios = _ratios(name, variant, head_dim, kind)
                for statistic in STATISTICS if ratios and variant != OURS else ():
                    slug = variant.replace(", ", "-").replace(",", "").replace(" ", "-")
                    value = partial(_ratio, name, variant, head_dim, kind, statistic)
                    yield f"{prefix}-{slug}-{statistic}", value


def _ratios(name: str, variant: str, head_dim: object, kind: object) -> list[float]:
    """Speed of a variant / of what ships, at all points or those of a head dim or a kind of inputs."""
    return [
        speeds[variant] / speeds[OURS]
        for point, speeds in _points(name, "speed", "tflops").items()
        if variant in speeds and (not head_dim or point[0] == head_dim) and (not kind or point[3] == kind)
    ]


def _ratio(name: str, variant: str, head_dim: object, kind: object, statistic: str) -> str:
    return STATISTICS[statistic](_ratios(name, variant, head_dim, kind))


# Errors and counts


def _scientific(value: float) -> str:
    """2.5e-4."""
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{digits}e{int(power)}"


def exp2_table() -> str:
    """Relative errors of 2^x, beside FlashAttention-4's."""
    fields = ("fp32_max", "fp32_mean", "bf16_max", "bf16_mean")
    lines: list[Sequence[object]] = [
        [row["variant"], *(f"{row[field]:.2e}" for field in fields)] for row in _chosen("exp2", "2^x")
    ]
    lines += [[method, *numbers] for method, numbers in FA4_TABLE_2]
    return table_of(["2^x", "float32, largest", "mean", "bfloat16, largest", "mean"], lines)


def exp2_rmse_table() -> str:
    points = _points("exp2", "rmse", "rmse")
    variants = _variants(points)
    lines = [
        [point[0], point[1], f"{point[2]:,}", *(f"{x[v]:.4e}" if v in x else "-" for v in variants)]
        for point, x in points.items()
    ]
    return table_of(["head dim", "mask", "tokens", *map(name_of_variant, variants)], lines)


def rises_table() -> str:
    """Shares of rows, and of warps, whose maximum rises at a kv tile."""
    of_rows, of_warps = (_points("rescaling", "rises", field) for field in ("rows", "warps"))
    variants = _variants(of_rows)
    lines = []
    for point, shares in of_rows.items():
        both = (f"{100 * shares[x]:.2f} / {100 * of_warps[point][x]:.1f}" for x in variants)
        lines.append([point[0], point[1], point[3], *both])
    head = [f"{name_of_variant(x)}: rows / warps, %" for x in variants]
    return table_of(["head dim", "mask", "inputs", *head], lines)


def accuracy_table() -> str:
    """Root mean square errors at the longest length."""
    points = _points("accuracy", "rmse", "rmse")
    variants, longest = _variants(points), max(row["seqlen"] for row in _chosen("accuracy", "rmse"))
    lines = []
    for (head_dim, mask, seqlen, kind, dtype), errors in points.items():
        if seqlen == longest:
            shown = (_scientific(errors[x]) if x in errors else "-" for x in variants)
            lines.append([kind, dtype, head_dim, mask, f"{seqlen:,}", *shown])
    return table_of(["inputs", "dtype", "head dim", "mask", "tokens", *map(name_of_variant, variants)], lines)


def published_table() -> str:
    """FlashAttention-3's outliers in float16: its own figures, and ours over all shapes."""
    found: dict[str, list[float]] = {}
    for row in _chosen("accuracy", "rmse"):
        if (row["inputs"], row["dtype"]) == ("fa3", "float16"):
            found.setdefault(row["variant"], []).append(row["rmse"])
    lines = [[f"{name}, FA3's paper, table 3", error] for name, error in FA3_TABLE_3]
    for variant, errors in found.items():
        least, most = (_scientific(pick(errors)) for pick in (min, max))
        lines.append([f"{name_of_variant(variant)}, this run", f"{least} to {most}"])
    return table_of(["method, float16", "RMSE"], lines)


def _error_ratio(kind: str, statistic: str) -> str:
    """Our error / FlashAttention-4's."""
    points = _points("accuracy", "rmse", "rmse")
    ratios = [x[OURS] / x[FA4] for point, x in points.items() if point[3] == kind and FA4 in x]
    return STATISTICS[statistic](ratios)

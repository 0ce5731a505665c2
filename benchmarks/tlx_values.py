"""Beside what Meta publishes of TLX, its extension of Triton: by ratios, for it needs its own compiler."""

from __future__ import annotations

from collections.abc import Iterator

from documents import Value, read, table_of
from forward_values import FA3_TO_FA4, by_point
from points import SEQLENS
from summary import FREE_FA3_TFLOPS, OTHER_BUILDS_TFLOPS

__all__ = ["tlx_values"]

LENGTHS = (1024, 2048, 4096, 8192)
TLX_TO_FA3 = {"backward": (1.21, 1.10, 1.06, 1.00), "forward": (1.01, 1.01, 0.96, 0.97)}
"""At LENGTHS: H100, bf16, head dim 128, causal, 4 x 48 heads, no fixed order
(facebookexperimental/triton #3582)."""


def tlx_values() -> Iterator[tuple[str, Value]]:
    yield "tlx-table", tlx_table


def tlx_table() -> str:
    """Speeds as multiples of FlashAttention-3's without order."""
    lines = []
    for name, ours in (("backward", _backward), ("forward", _forward)):
        lines.append([f"{name}, TLX", *(f"{x:.2f}" for x in TLX_TO_FA3[name])])
        lines.append([f"{name}, ours", *(f"{ours(seqlen):.2f}" for seqlen in LENGTHS)])
    return table_of(["", *(f"{seqlen:,}" for seqlen in LENGTHS)], lines)


def _forward(seqlen: int) -> float:
    speeds = by_point("grid", "sustained", "tflops")[128, "causal", seqlen]
    return speeds["dash_attn"] / speeds["fa4"] / FA3_TO_FA4[128, "causal"][SEQLENS.index(seqlen)]


def _backward(seqlen: int) -> float:
    """By FlashAttention-4's deterministic mode, which was in both runs."""
    ms = {
        row["impl"]: row["ms"]
        for row in read("h200-backward.json")
        if (row["set"], row["mask"], row["head_dim"], row["seqlen"]) == ("grid", "causal", 128, seqlen)
        and row["deterministic"] and (row["auto"] or row["impl"] == "fa4")
    }  # fmt: skip
    at = SEQLENS.index(seqlen)
    fa3_to_fa4 = FREE_FA3_TFLOPS[128, "causal"][at] / OTHER_BUILDS_TFLOPS[128, "causal"]["fa4"][at]
    return ms["fa4"] / ms["dash_attn"] / fa3_to_fa4

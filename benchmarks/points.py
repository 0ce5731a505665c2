"""What ``backward.py`` measures: the grid of the DASH paper, grouped heads, and lengths outside the grid.

All points have 16,384 tokens, or as many as whole sequences fit in that; longer sequences come alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dash_attn.tools.shapes import Shape

TOKENS, HIDDEN = 16_384, 2_048
SEQLENS = (512, 1024, 2048, 4096, 8192, 16_384)
OTHER_LENGTHS = (1_500, 3_000, 6_144, 10_000, 32_768, 65_536, 131_072)
GROUPED_HEADS, GROUPED_KV_HEADS, GROUPED_SEQLENS = 16, (4, 2), (4096, 16_384)


class Point(NamedTuple):
    """One shape of a set: "grid", "grouped" or "lengths"."""

    set: str
    shape: Shape


def grid(head_dims: Sequence[int], masks: Sequence[str], seqlens: Sequence[int]) -> Iterator[Point]:
    """The paper's points."""
    for head_dim in head_dims:
        for mask in masks:
            for seqlen in seqlens:
                yield Point("grid", _shape(seqlen, HIDDEN // head_dim, head_dim, mask))


def beyond_the_grid(head_dims: Sequence[int], masks: Sequence[str]) -> Iterator[Point]:
    """Grouped heads (causal, head dim 128), then other lengths."""
    if 128 in head_dims and "causal" in masks:
        for kv_heads in GROUPED_KV_HEADS:
            for seqlen in GROUPED_SEQLENS:
                yield Point("grouped", _shape(seqlen, GROUPED_HEADS, 128, "causal", kv_heads))
    for head_dim in head_dims:
        for mask in masks:
            for seqlen in OTHER_LENGTHS:
                yield Point("lengths", _shape(seqlen, HIDDEN // head_dim, head_dim, mask))


def _shape(seqlen: int, heads: int, head_dim: int, mask: str, kv_heads: int | None = None) -> Shape:
    return Shape(
        batch=max(1, TOKENS // seqlen),
        seqlen=seqlen,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        causal=mask == "causal",
    )

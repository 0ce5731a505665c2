"""The shapes that people run and the DASH paper does not have: what ``shapes.py`` measures."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from forward_points import Point
from points import HIDDEN, SEQLENS, TOKENS

from dash_attn.problem import Mask, Problem

CAUSAL, FULL = Mask.causal(), Mask.full()
PACKED_TOKENS, MEDIAN_LENGTH, TAIL, LONGEST = 32_768, 400, 1.2, 16_384
"""Packed batches: tokens, and a log-normal distribution of lengths, cut at the longest."""


class Dense(NamedTuple):
    """A dense batch; ``head_dim_v`` is -1 where V has the head dim of Q."""

    set: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    mask: Mask = CAUSAL
    dtype: str = "bfloat16"
    head_dim_v: int = -1


class Packed(NamedTuple):
    """A packed batch of sequences whose lengths have a long tail, or of the lengths given."""

    heads: int
    kv_heads: int
    head_dim: int
    mask: Mask
    seed: int
    lengths: tuple[int, ...] = ()


def _square(
    set_: str, batch: int, seqlen: int, heads: int, kv_heads: int, head_dim: int, mask: Mask = CAUSAL,
    dtype: str = "bfloat16", head_dim_v: int = -1,
) -> Dense:  # fmt: skip
    return Dense(set_, batch, seqlen, seqlen, heads, kv_heads, head_dim, mask, dtype, head_dim_v)


def _window(left: int, batch: int, seqlen: int, heads: int, kv_heads: int, head_dim: int) -> Dense:
    return _square("window", batch, seqlen, heads, kv_heads, head_dim, Mask.window(left, 0))


DENSE = (
    Dense("rectangle", 4, 1024, 8192, 32, 32, 64),
    Dense("rectangle", 4, 1024, 8192, 16, 16, 128),
    Dense("rectangle", 1, 4096, 32_768, 16, 4, 128),
    Dense("rectangle", 1, 2048, 16_384, 16, 16, 128),
    Dense("rectangle", 8, 512, 4096, 32, 32, 64),
    Dense("rectangle", 1, 512, 32_768, 32, 8, 128),
    Dense("rectangle", 1, 2048, 65_536, 8, 1, 128),
    Dense("rectangle", 2, 4096, 6144, 32, 32, 64),
    Dense("rectangle", 2, 8192, 2048, 16, 16, 128),
    Dense("cross", 4, 4096, 1000, 16, 16, 128, FULL),
    Dense("cross", 8, 4096, 77, 16, 16, 64, FULL),
    Dense("cross", 4, 256, 4096, 16, 16, 64, FULL),
    Dense("few rows", 1, 64, 8192, 8, 2, 128),
    Dense("few rows", 1, 64, 32_768, 32, 8, 128),
    Dense("few rows", 1, 512, 8192, 8, 2, 128),
    Dense("few rows", 1, 256, 16_384, 8, 8, 64),
    Dense("few rows", 1, 300, 2048, 8, 8, 64),
    Dense("few rows", 1, 77, 4096, 16, 16, 128, FULL),
    Dense("few rows", 1, 300, 2048, 8, 8, 80),
    Dense("few rows", 1, 64, 8192, 8, 2, 96),
    Dense("few rows", 1, 256, 16_384, 8, 8, 192, head_dim_v=128),
    Dense("few rows", 1, 77, 4096, 16, 16, 256, FULL),
    _square("groups", 1, 8192, 8, 1, 128),
    _square("groups", 1, 8192, 8, 1, 64),
    _square("groups", 8, 2048, 8, 1, 128),
    _square("groups", 1, 32_768, 8, 1, 128),
    _square("groups", 4, 4096, 4, 1, 128),
    _square("groups", 1, 16_384, 4, 1, 128),
    _square("groups", 4, 2048, 16, 1, 128),
    _square("groups", 1, 8192, 16, 1, 128),
    _square("groups", 8, 2048, 32, 8, 128),
    _square("groups", 1, 8192, 32, 8, 128),
    _square("groups", 1, 32_768, 32, 8, 128),
    _square("groups", 1, 4096, 64, 8, 128),
    _square("groups", 1, 4096, 28, 4, 128),
    _square("groups", 4, 4096, 32, 8, 64),
    _square("groups", 1, 8192, 8, 1, 128, FULL),
    _window(4096, 4, 4096, 16, 4, 128),
    _window(4096, 1, 16_384, 16, 16, 128),
    _window(1024, 4, 4096, 16, 4, 128),
    _window(512, 4, 4096, 16, 4, 128),
    _window(512, 1, 16_384, 32, 32, 64),
    _window(1024, 1, 32_768, 32, 8, 128),
    _window(2048, 2, 8192, 16, 16, 128),
    _window(8192, 1, 32_768, 16, 4, 128),
    _square("window", 2, 8192, 32, 32, 64, Mask.window(256, 256)),
    _square("few", 1, 2048, 16, 16, 128),
    _square("few", 1, 4096, 8, 8, 128),
    _square("few", 2, 4096, 16, 16, 128),
    _square("few", 1, 3000, 16, 16, 128, FULL),
    _square("few", 1, 4096, 16, 16, 64),
    _square("few", 2, 2048, 32, 32, 64),
    _square("few", 1, 577, 16, 16, 64, FULL),
    _square("few", 1, 1024, 16, 16, 64, FULL),
    _square("few", 1, 2048, 8, 8, 64, FULL),
    _square("patches", 64, 197, 12, 12, 64, FULL),
    _square("patches", 32, 197, 16, 16, 128, FULL),
    _square("patches", 16, 577, 16, 16, 64, FULL),
    _square("patches", 16, 577, 16, 16, 128, FULL),
    _square("long", 1, 32_768, 16, 16, 128, FULL),
    _square("long", 1, 32_768, 32, 32, 64),
    _square("long", 1, 65_536, 32, 8, 128),
    _square("long", 1, 65_536, 16, 16, 128),
    _square("long", 1, 131_072, 8, 8, 128),
    _square("long", 1, 131_072, 4, 4, 64, FULL),
    _square("tiny", 4, 256, 8, 8, 128),
    _square("tiny", 1, 128, 8, 8, 128),
    _square("tiny", 1, 512, 16, 16, 64),
    _square("tiny", 2, 384, 12, 12, 64, FULL),
    _square("tiny", 1, 1024, 8, 1, 128),
    _square("fp16", 2, 8192, 16, 16, 128, CAUSAL, "float16"),
    _square("fp16", 8, 2048, 32, 32, 64, FULL, "float16"),
    _square("fp16", 4, 4096, 16, 4, 128, CAUSAL, "float16"),
)
PACKED = (
    Packed(16, 4, 128, CAUSAL, 0),
    Packed(32, 32, 64, CAUSAL, 1),
    Packed(16, 16, 64, FULL, 2),
    Packed(8, 1, 128, CAUSAL, 3),
    Packed(32, 8, 128, CAUSAL, 4),
    Packed(16, 16, 128, FULL, 5),
    Packed(16, 16, 128, CAUSAL, 0, (8192, *64 * (128,))),
)


GRID = tuple(
    _square("grid", TOKENS // seqlen, seqlen, HIDDEN // head_dim, HIDDEN // head_dim, head_dim, mask)
    for head_dim in (64, 128)
    for mask in (FULL, CAUSAL)
    for seqlen in SEQLENS
)
"""The DASH paper's points, as backward.py has them."""


HEAD_DIMS = tuple(
    _square("head dim", batch, seqlen, 16, 16, head_dim, mask, head_dim_v=head_dim_v)
    for head_dim, head_dim_v in ((72, -1), (80, -1), (96, -1), (112, -1), (192, 128), (256, -1))
    for mask in (CAUSAL, FULL)
    for batch, seqlen in ((16, 1024), (4, 4096), (1, 16_384))
)


SEGMENTS = (
    _square("segments", 1, 32_768, 16, 16, 128),
    _square("segments", 1, 32_768, 16, 4, 128),
    _square("segments", 1, 65_536, 16, 16, 128),
    _square("segments", 1, 65_536, 32, 8, 128),
    _square("segments", 1, 65_536, 8, 1, 128),
    _square("segments", 1, 131_072, 16, 4, 128),
    _square("segments", 1, 65_536, 16, 16, 64),
    _square("segments", 1, 65_536, 16, 4, 64),
    _square("segments", 1, 32_768, 16, 16, 128, FULL),
    _square("segments", 1, 65_536, 16, 4, 64, FULL),
)
"""Sequences that the backward cuts into segments of q rows."""


def cases(dense: Iterable[Dense] = DENSE, packed: Iterable[Packed] = PACKED) -> Iterator[tuple[str, Point]]:
    """Every case, by name."""
    for case in dense:
        problem = Problem(
            ((case.seqlen_q, case.seqlen_k),) * case.batch, case.heads, case.kv_heads, case.head_dim,
            case.mask, dtype=case.dtype, head_dim_v=case.head_dim_v,
        )  # fmt: skip
        yield _name(case.set, problem), Point(case.set, problem)
    for one in packed:
        lengths = one.lengths or long_tailed(one.seed)
        problem = Problem.varlen(
            lengths, heads=one.heads, kv_heads=one.kv_heads, head_dim=one.head_dim, mask=one.mask
        )
        what = "one long, 64 short" if one.lengths else f"lengths of seed {one.seed}"
        yield _name("packed", problem), Point("packed", problem, what)


def long_tailed(seed: int) -> list[int]:
    """PACKED_TOKENS tokens in sequences of a long-tailed distribution, the same ones every time."""
    rng, lengths, middle = random.Random(seed), list[int](), MEDIAN_LENGTH
    while left := PACKED_TOKENS - sum(lengths):
        length = int(middle * rng.lognormvariate(0.0, TAIL))
        lengths.append(min(max(length, 1), LONGEST, left))
    return lengths


def _name(set_: str, problem: Problem) -> str:
    """Such as "groups: 1 x 8192, 8:1, 128, causal"."""
    seqlen_q, seqlen_k = (max(lengths) for lengths in zip(*problem.sequences))
    lengths = f"{seqlen_q}" if seqlen_q == seqlen_k else f"{seqlen_q} of {seqlen_k}"
    batch = f"{len(problem.sequences)} x " if set_ != "packed" else f"{len(problem.sequences)} up to "
    heads = f"{problem.heads}:{problem.kv_heads}"
    mask = problem.mask.name
    head_dims = f"{problem.head_dim}"
    if problem.head_dim_v != problem.head_dim:
        head_dims += f"/{problem.head_dim_v}"
    return f"{set_}: {batch}{lengths}, {heads}, {head_dims}, {mask}"

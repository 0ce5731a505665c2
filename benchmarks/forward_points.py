"""What ``forward.py`` measures, as sets of points.

``grid`` has the DASH paper's 24 points, and ``total`` the same ones with the backward; ``grouped`` several q
heads per kv head; ``other`` odd and long sequences, windows, q and k of unequal lengths, and packed batches.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from points import HIDDEN, SEQLENS, TOKENS

from dash_attn.problem import Mask, Problem

SETS = ("grid", "grouped", "other", "total")
MASKS = (Mask.full(), Mask.causal())
ODD_LENGTHS, LONG_LENGTHS = (1500, 3000, 10_000), (32_768, 65_536, 131_072)
WINDOWS = (1024, 4096)
UNEQUAL = ((4, 1024, 8192, Mask.causal()), (1, 2048, 16_384, Mask.causal()), (4, 4096, 1000, Mask.full()))
"""Batch, lengths of q and of k, mask."""
SHORTEST, LONGEST = 64, 2048
ONE_LONG = (8192, *64 * (128,))


class Point(NamedTuple):
    """One problem of a set.

    Attributes:
        set: one of SETS.
        problem: what to compute.
        packed: which lengths its packed sequences have, in words; empty: a dense batch.
    """

    set: str
    problem: Problem
    packed: str = ""


def points(set_: str) -> Iterator[Point]:
    """The points of a set."""
    return {"grid": grid, "total": grid, "grouped": grouped, "other": other}[set_](set_)


def grid(set_: str) -> Iterator[Point]:
    for head_dim in (64, 128):
        for mask in MASKS:
            for seqlen in SEQLENS:
                yield Point(set_, square(seqlen, HIDDEN // head_dim, head_dim, mask))


def grouped(set_: str) -> Iterator[Point]:
    for kv_heads, seqlen in ((4, 4096), (4, 16_384), (2, 4096), (1, 8192)):
        yield Point(set_, square(seqlen, 16, 128, Mask.causal(), kv_heads))


def other(set_: str) -> Iterator[Point]:
    for head_dim in (64, 128):
        heads = HIDDEN // head_dim
        for seqlen in (*ODD_LENGTHS, *LONG_LENGTHS):
            for mask in MASKS:
                yield Point(set_, square(seqlen, heads, head_dim, mask))
        for left in WINDOWS:
            yield Point(set_, square(16_384, heads, head_dim, Mask.window(left, 0)))
        for batch, seqlen_q, seqlen_k, mask in UNEQUAL:
            sequences = ((seqlen_q, seqlen_k),) * batch
            yield Point(set_, Problem(sequences, heads, heads, head_dim, mask))
        for mask in MASKS:
            problem = Problem.varlen(random_lengths(), heads=heads, head_dim=head_dim, mask=mask)
            yield Point(set_, problem, "random lengths")
        problem = Problem.varlen(ONE_LONG, heads=heads, head_dim=head_dim, mask=Mask.causal())
        yield Point(set_, problem, "one long, 64 short")


def square(seqlen: int, heads: int, head_dim: int, mask: Mask, kv_heads: int | None = None) -> Problem:
    """A dense batch of as many whole sequences as fit in TOKENS, but one at least."""
    return Problem.dense(
        batch=max(1, TOKENS // seqlen),
        seqlen=seqlen,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mask=mask,
    )


def random_lengths() -> list[int]:
    """TOKENS tokens in sequences of random lengths, the same ones every time."""
    rng, lengths = random.Random(0), list[int]()
    while left := TOKENS - sum(lengths):
        lengths.append(min(rng.randint(SHORTEST, LONGEST), left))
    return lengths

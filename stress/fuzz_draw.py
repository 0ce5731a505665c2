"""The fuzzer's choices: drawing a case from a seed, making a failing one smaller, and writing it down."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fuzz_case
from dash_attn.backends.sm90.tiles import has_softcap
from dash_attn.errors import DashError, UnsupportedMaskError
from dash_attn.schedule import POLICIES
from fuzz_case import LAYOUTS, FuzzCase

LONGEST = (1, 40, 130, 300, 300, 700, 700, 1500, 5000)
"""Bounds of the lengths of a case; most are small, so that the oracle costs little."""

HEAD_DIMS = (
    (64, 64), (64, 64), (128, 128), (128, 128), (48, 48), (80, 80), (96, 96), (112, 64), (192, 128),
    (136, 48),
)  # fmt: skip
"""Of Q and V."""

CHOICES = ("auto", *POLICIES, "descending(by_head_from=0)")
"""Policies."""

MOST_SCORES = 3e8
"""Elements of all score matrices of a case: what the oracle has to do."""

MOST_ATTEMPTS = 400
"""Cases that :func:`shrink` tries at most."""


def draw(seed: int) -> FuzzCase:
    """The case of a seed, which is always the same."""
    rng = random.Random(seed)
    while True:
        case = _draw(rng, seed)
        scores = sum(m * n for m, n in case.lengths) * case.group * case.kv_heads
        if scores <= MOST_SCORES and _covered(case):
            return case


def _draw(rng: random.Random, seed: int) -> FuzzCase:
    longest, packed = rng.choice(LONGEST), rng.random() < 0.5
    pairs = [_lengths(rng, longest, packed) for _ in range(rng.choice((1, 1, 2, 3, 6)))]
    if not packed:
        pairs = pairs[:1] * rng.randint(1, 3)
    kv_heads = rng.choice((1, 1, 2, 3, 4))
    group = rng.choice((1, 1, 2, 3, 4, 7, 8)) if kv_heads < 4 else rng.choice((1, 1, 2))
    left, right = rng.choice(((None, None), (None, 0), (None, 0), _window(rng, longest)))
    layouts = [rng.choice(list(LAYOUTS)) if rng.random() < 0.4 else "plain" for _ in range(5)]
    policy = rng.choice(("auto", *CHOICES))
    ring = rng.choice((None, rng.randint(1, 64))) if policy == "shift" else None
    head_dim, head_dim_v = rng.choice(HEAD_DIMS)
    return FuzzCase(
        lengths=tuple(pairs),
        group=group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=rng.choice(("bfloat16", "float16")),
        left=left,
        right=right,
        packed=packed,
        policy=policy,
        ring=ring,
        stride=rng.choice((None, rng.randint(1, 4))) if ring else None,
        placement=rng.choice(("policy", "lpt", "shuffled")),
        head_groups=rng.choice((None, None, rng.randint(1, group))),
        layouts=(*layouts[:4], "plain" if layouts[4] == "one_head" else layouts[4]),
        scale=rng.choice((1.0, 1.0, 1.0, 0.1, 4.0)),
        softcap=rng.choice((0.0, 0.0, 0.0, 2.0, 30.0)) if has_softcap(head_dim, head_dim_v) else 0.0,
        outliers=rng.random() < 0.2,
        streams=rng.choice((1, 1, 2, 3)),
        extra_workers=rng.choice((None, 0, 0, rng.randint(1, 60))),
        seed=seed,
    )


def _lengths(rng: random.Random, longest: int, packed: bool) -> tuple[int, int]:
    def length() -> int:
        least = 0 if packed and rng.random() < 0.1 else 1
        near_a_tile = 64 * rng.randint(1, max(longest // 64, 1)) + rng.randint(-1, 1)
        return near_a_tile if rng.random() < 0.2 else rng.randint(least, longest)

    seqlen_q = length()
    return seqlen_q, seqlen_q if rng.random() < 0.6 else length()


def _window(rng: random.Random, longest: int) -> tuple[int | None, int | None]:
    return rng.choice((None, rng.randint(0, longest))), rng.choice((None, 0, rng.randint(0, longest)))


def _covered(case: FuzzCase) -> bool:
    """Whether the policy covers every sequence, alone and in the batch."""
    try:
        case.plan("policy", resident=1)
    except (UnsupportedMaskError, DashError):
        return False
    return True


# Making it smaller


def size(case: FuzzCase) -> tuple[int, ...]:
    """What a smaller case has less of. Every step of :func:`shrink` makes it smaller, so it ends."""
    simple = FuzzCase(lengths=())
    plainness = [
        getattr(case, name) != getattr(simple, name)
        for name in (
            "dtype", "head_dim", "head_dim_v", "policy", "ring", "stride", "placement", "head_groups",
            "scale", "softcap", "outliers", "packed",
        )
    ]  # fmt: skip
    tokens = sum(m + n for m, n in case.lengths)
    unusual = sum(plainness) + sum(layout != "plain" for layout in case.layouts)
    sides = sum(1 + len(str(side)) for side in (case.left, case.right) if side is not None)
    workers = 0 if case.extra_workers is None else 1 + case.extra_workers
    heads = case.group + case.kv_heads
    return (len(case.lengths), heads, tokens, unusual, sides, case.streams, workers)


def shrink(case: FuzzCase, fails: Callable[[FuzzCase], bool]) -> FuzzCase:
    """A smaller case that still fails: fewer sequences and heads, shorter, plainer.

    Args:
        case: fails.
        fails: whether a case does; one that cannot be built does not.
    """
    attempts = 0
    steps = _smaller(case)
    while attempts < MOST_ATTEMPTS and (smaller := next(steps, None)):
        if size(smaller) < size(case) and _covered(smaller):
            attempts += 1
            if fails(smaller):
                case, steps = smaller, _smaller(smaller)
    return case


def _smaller(case: FuzzCase) -> Iterator[FuzzCase]:
    """Simpler cases, the boldest steps first."""
    count = len(case.lengths)
    for keep in (count // 2, count - 1):
        for start in range(0, count, max(keep, 1)):
            if part := case.lengths[start : start + keep]:
                yield replace(case, lengths=part)
    for group in sorted({1, case.group // 2, case.group - 1} - {0, case.group}):
        groups = None if case.head_groups is None else min(case.head_groups, group)
        yield replace(case, group=group, head_groups=groups)
    for kv_heads in sorted({1, case.kv_heads - 1} - {0, case.kv_heads}):
        yield replace(case, kv_heads=kv_heads)
    plain: dict[str, Any] = {
        "layouts": ("plain",) * 5, "placement": "policy", "head_groups": None, "outliers": False,
        "streams": 1, "extra_workers": None, "scale": 1.0, "policy": "fa3", "ring": None, "stride": None,
        "softcap": 0.0, "dtype": "bfloat16", "left": None, "right": None,
    }  # fmt: skip
    for name, value in plain.items():
        if getattr(case, name) != value:
            yield replace(case, **{name: value})
    # Together: kernels do not take every pair that one of them alone would leave.
    yield replace(case, head_dim=64, head_dim_v=0)
    for at, layout in enumerate(case.layouts):
        if layout != "plain":
            yield replace(case, layouts=(*case.layouts[:at], "plain", *case.layouts[at + 1 :]))
    yield from _shorter(case)
    if case.packed and len(set(case.lengths)) == 1:
        yield replace(case, packed=False)
    for name in ("extra_workers", "streams", "left", "right"):
        value = getattr(case, name)
        for less in (0, value // 2, value - 1) if value else ():
            if less or name != "streams":
                yield replace(case, **{name: less})


def _shorter(case: FuzzCase) -> Iterator[FuzzCase]:
    """One sequence shorter, or all of a dense batch alike: to one token, by a half, a quarter, and so on."""
    for at, pair in enumerate(case.lengths if case.packed else case.lengths[:1]):
        for less in (max(pair) - 1, *(max(pair) >> k for k in range(1, 14))):
            for sides in ((0, 1), (0,), (1,)) if less else ():
                new = tuple(max(n - less, min(n, 1)) if i in sides else n for i, n in enumerate(pair))
                if case.packed:
                    yield replace(case, lengths=(*case.lengths[:at], new, *case.lengths[at + 1 :]))
                else:
                    yield replace(case, lengths=(new,) * len(case.lengths))


def script_of(case: FuzzCase) -> str:
    """Python that needs dash_attn and torch alone, runs one case and says what fails."""
    source = Path(fuzz_case.__file__).read_text()
    return f'{source}\n\nCASE = {case!r}\n\nif __name__ == "__main__":\n    raise SystemExit(report(CASE))\n'

"""The Triton forward where few rows are split by segments of keys; ``test_triton.py`` starts this file.

By hand: TRITON_INTERPRET=1 OPENBLAS_CORETYPE=SANDYBRIDGE .venv/bin/pytest tests/cpu/triton_split.py

Segments have 128 keys here, so that short sequences have several. Memory that nobody has written is NaN.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from attention_cases import SCALE, packed_tensors
from torch import Tensor

from dash_attn import flash_attn_func, flash_attn_with_kvcache
from dash_attn.backends.base import NO_AUX, AuxTensors
from dash_attn.backends.cached import CachedProblem, CachedTensors
from dash_attn.backends.shapes import Keys
from dash_attn.backends.triton import cached, launch, split
from dash_attn.backends.triton.append import append
from dash_attn.backends.triton.backend import BACKEND
from dash_attn.backends.triton.tables import forward_table, most_segments
from dash_attn.backends.triton.tiles import forward_numerics
from dash_attn.problem import Mask, Problem
from dash_attn.scores import Origin, Scores
from dash_attn.testing import assert_same_bytes, same_bytes
from interval_cases import random_intervals
from kvcache_cases import random_history
from triton_cases import Results, fold_backwards, noted_folds, triton_problem, with_and_without_a_split

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in rows that see nothing

CPU = torch.device("cpu")
SLOW = pytest.mark.slow
SEGMENT = 128
SCORES = Scores(SCALE)
MASKS = [Mask.full(), Mask.causal(), Mask.window(40, 0), Mask.window(150, 30)]
LENGTHS = ((70, 70), (0, 30), (40, 0), (33, 300), (150, 33), (1, 520))
"""Also rows without keys, keys without rows, rows before the diagonal, and one row of many keys."""

problem_of = partial(triton_problem, head_dim=16, mask=None, dtype="float32", heads=2, kv_heads=1)


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (launch, cached):
        monkeypatch.setattr(
            module, "forward_numerics", lambda *of: replace(forward_numerics(*of), segment=SEGMENT)
        )
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Results]], Results]:
    return partial(with_and_without_a_split, monkeypatch)


def forward(
    problem: Problem, tensors: list[Tensor], scores: Scores = SCORES, aux: AuxTensors = NO_AUX
) -> Results:
    return BACKEND.prepare(problem, CPU, packed=tensors[0].ndim == 3).forward(*tensors, scores, aux)


def features(problem: Problem, *names: str) -> tuple[Scores, AuxTensors]:
    """Scores and tensors of a problem with two heads."""
    scores, aux = SCORES, NO_AUX
    if "softcap" in names:
        scores = scores._replace(softcap=5.0)
    if "sink" in names:
        scores, aux = scores._replace(sink=True), aux._replace(learnable_sink=torch.tensor([0.5, 3.0]))
    if "alibi" in names:
        slopes = torch.tensor([0.02, 0.3]) / torch.arange(1, len(problem.sequences) + 1)[:, None]
        scores, aux = scores._replace(alibi=True), aux._replace(alibi_slopes=slopes)
    if "dropout" in names:
        scores = scores._replace(dropout_p=0.3).at(Origin(1, 2, 3, 4))
        aux = aux._replace(dropout_seed=torch.tensor(11))
    if "intervals" in names:
        parts = [random_intervals(n, m, at) for at, (m, n) in enumerate(problem.sequences)]
        starts, ends = (torch.cat(side) for side in zip(*parts))
        scores, aux = scores._replace(row_intervals=True), aux._replace(row_starts=starts, row_ends=ends)
    return scores, aux


EVERYTHING = ("softcap", "sink", "alibi", "dropout", "intervals")


NAMES = ((), ("sink",), ("dropout",), ("intervals",), EVERYTHING)


def is_quick(dtype: str, mask: Mask, names: tuple[str, ...]) -> bool:
    return names in ((), EVERYTHING) if dtype == "float16" else mask.is_causal and names == EVERYTHING


@pytest.mark.parametrize(
    ("dtype", "mask", "names"),
    [
        pytest.param(
            *case, id="-".join((case[0], case[1].name, *case[2])), marks=() if is_quick(*case) else SLOW
        )
        for case in itertools.product(("float16", "float32"), MASKS, NAMES)
    ],
)
def test_a_split_changes_no_byte(dtype: str, mask: Mask, names: tuple[str, ...], both: Any) -> None:
    problem = problem_of(*LENGTHS, mask=mask, dtype=dtype, head_dim_v=24)
    tensors = packed_tensors(problem)[1:]
    out, lse = both(lambda: forward(problem, tensors, *features(problem, *names)))
    assert out.isfinite().all()
    blind = slice(70, 110)  # of the sequence without keys
    assert not out[blind].any()
    assert "sink" in names or (lse[:, blind] == -torch.inf).all()


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2)])
@pytest.mark.parametrize("head_dim", [8, 72, 200])
def test_head_dims_and_heads(head_dim: int, heads: int, kv_heads: int, both: Any) -> None:
    dtype = "float16" if head_dim == 72 else "float32"
    shape: dict[str, Any] = {"head_dim": head_dim, "dtype": dtype, "heads": heads, "kv_heads": kv_heads}
    problem = problem_of((3, 300), (20, 140), mask=Mask.causal(), **shape)
    tensors = packed_tensors(problem)[1:]
    tensors[0] = tensors[0] / head_dim**0.5
    both(lambda: forward(problem, tensors, Scores(0.1, softcap=2.0)))


@pytest.mark.parametrize("segment", [256, 512])
def test_other_segments(segment: int, both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        launch, "forward_numerics", lambda *of: replace(forward_numerics(*of), segment=segment)
    )
    problem = problem_of((40, 1100), mask=Mask.causal(), heads=1)
    tensors = packed_tensors(problem)[1:]
    found = both(lambda: forward(problem, tensors))
    monkeypatch.undo()
    assert not same_bytes(forward(problem, tensors)[0], found[0]), "the example shows nothing"


def test_another_order_of_folds_gives_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of((5, 520), mask=Mask.full())
    tensors = packed_tensors(problem)[1:]
    wanted = forward(problem, tensors)
    monkeypatch.setattr(split, "processors", lambda device: 10**6)
    fold_backwards(monkeypatch)
    out, lse = forward(problem, tensors)
    torch.testing.assert_close(lse, wanted[1])
    torch.testing.assert_close(out, wanted[0])
    assert not same_bytes(out, wanted[0])


def test_dense_batches_strides_and_used_keys(both: Any) -> None:
    problem = problem_of((4, 300), (4, 150), mask=Mask.causal())
    q, k, v = packed_tensors(problem)[1:]
    wanted = both(lambda: forward(problem, [q, k, v]))
    caches = [torch.full((2, 310, 1, 16), torch.nan) for _ in "kv"]
    for x, cache in zip((k, v), caches):
        for place, part in zip(cache, x.split([300, 150])):
            place[: len(part)] = part
    turned = q.unflatten(0, (2, 4)).transpose(1, 2).contiguous().transpose(1, 2)
    keys = Keys((2, 310, 1, 16), None)
    prepared = BACKEND.prepare(problem, CPU, packed=False, keys=keys)
    found = both(lambda: prepared.forward(turned, *caches, SCORES))
    assert_same_bytes(found[0].flatten(0, 1), wanted[0], "out")


@pytest.mark.parametrize("mask", [Mask.causal(), Mask.window(200, 0)], ids=lambda mask: mask.name)
def test_few_rows_have_the_bytes_of_a_long_sequence(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Public functions: a sequence whose rows are not split, and few of them, which are."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 500, heads, 16, generator=generator) for heads in (2, 1, 1))
    how: dict[str, Any] = {"causal": True, "window_size": mask.sides, "backend": "triton", "return_lse": True}
    whole = flash_attn_func(q, k, v, **how)
    monkeypatch.setattr(split, "processors", lambda device: 10**6)
    for rows in (slice(499, 500), slice(300, 370)):
        found = flash_attn_func(q[:, rows], k[:, : rows.stop], v[:, : rows.stop], **how)
        assert_same_bytes(found[0], whole[0][:, rows], "out")
        assert_same_bytes(found[1], whole[1][..., rows], "lse")


# Caches of keys


def cached_call(
    lengths: tuple[int, ...], rows: int, sides: tuple[int, int], bounds: list[int] | None = None
) -> Callable[[], Results]:
    """Over pages of 16, six q heads on two kv heads, with a sink; ``rows`` per sequence, or of all."""
    generator = torch.Generator().manual_seed(rows)
    batch, most, pages = len(lengths), 32, 40
    k, v = (torch.randn(pages, 16, 2, n, generator=generator).half() for n in (16, 24))
    size = (batch, rows, 6, 16) if bounds is None else (rows, 6, 16)
    q = torch.randn(size, generator=generator).half()
    table = torch.randint(-2, pages + 2, (batch, most), generator=generator).int()
    each = (rows, batch * rows, rows) if bounds is None else (-1, rows, rows)
    problem = CachedProblem(batch, 6, 2, 16, 24, "float16", sides, *each, 16, pages, most)
    ends = None if bounds is None else torch.tensor(bounds).int()
    tensors = CachedTensors(q, k, v, torch.tensor(lengths).int(), table, ends)
    prepared = BACKEND.prepare_cached(problem, CPU)
    scores, aux = Scores(SCALE, sink=True), AuxTensors(torch.linspace(-2, 2, 6))
    return lambda: prepared.forward(tensors, scores, aux)


@pytest.mark.parametrize("sides", [(-1, -1), (-1, 0), (200, 0), (30, 40)])
@pytest.mark.parametrize("rows", [1, 37])
def test_a_cache_with_lengths_on_the_device(rows: int, sides: tuple[int, int], both: Any) -> None:
    """Also empty sequences, fewer keys than rows, and lengths out of range."""
    out, lse = both(cached_call((300, 0, 512, 20, 10**9, -5, 129), rows, sides))
    for empty in (1, 5):
        assert not out[empty].any()
        torch.testing.assert_close(lse[empty], torch.linspace(-2, 2, 6)[:, None].expand(-1, rows))
    assert out[4].any()


def test_a_cache_with_packed_rows(both: Any) -> None:
    """Sequences without rows, and rows that no sequence has: these are not written."""
    out, _ = both(cached_call((300, 40, 0, 512), 60, (-1, 0), [0, 2, 2, 40, 55]))
    assert out[55:].isnan().all()
    assert out[:55].isfinite().all()


@pytest.mark.parametrize("number", [5, 6, pytest.param(11, marks=SLOW)])
def test_histories_over_a_cache(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding and chunks, contiguous, in pages, with a window, with a shared prefix: all calls are split.
    Whole sequences, with which they are compared, are not."""
    folds = noted_folds(monkeypatch)
    monkeypatch.setattr("dash_attn.backends.cpu.cached.append", append)
    history = random_history(number, "cpu", torch.float16, 300, head_dims=((16, 24),), backend="triton")
    assert not folds
    monkeypatch.setattr(split, "processors", lambda device: 10**6)
    assert history.run() == len(folds) > 1


def test_an_empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "processors", lambda device: 10**6)
    q, cache = torch.ones(2, 3, 4, 16), torch.zeros(2, 0, 2, 16)
    out, lse = flash_attn_with_kvcache(q, cache, cache, return_lse=True, backend="triton")
    assert not out.any()
    assert (lse == -torch.inf).all()


# When, and by how many


def test_what_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "processors", lambda device: 100)
    for programs, segments, words, parts in (
        (50, 16, 1000, 16),
        (51, 16, 1000, 1),  # a round more than without
        (50, 1, 1000, 1),
        (50, 0, 1000, 1),  # a cache without room
        (1, 128, 2**19, 128),
        (1, 129, 2**19, 1),  # memory
        (1, 65_535, 10, 65_535),
        (1, 65_536, 10, 1),  # blocks of a grid
    ):
        assert split.parts_of(programs, segments, words, CPU) == parts
    monkeypatch.undo()
    assert split.parts_of(1, 16, 1000, CPU) == 1


def segments_seen(rows: range, diagonal: int, keys: int, sides: tuple[int, int]) -> int:
    """From the first to the last one that a row sees, row by row."""
    left, right = sides
    first = [0 if left < 0 else max(row + diagonal - left, 0) for row in rows]
    last = [keys - 1 if right < 0 else min(row + diagonal + right, keys - 1) for row in rows]
    return max((max(last) + SEGMENT) // SEGMENT - min(first) // SEGMENT, 0)


def test_as_many_segments_as_any_tile_sees() -> None:
    rng, below = random.Random(0), 0
    for _ in range(300):
        left, right = (rng.choice([-1, 0, 30, 128, 300]) for _ in "lr")
        lengths = [(rng.randint(0, 200), rng.choice([0, rng.randint(1, 900)])) for _ in range(2)]
        problem = problem_of(*lengths, mask=Mask.of_sides(left, right))
        found = most_segments(forward_table(problem, True, None, 64), problem.mask, 64, SEGMENT)
        tiles = [(range(t, min(t + 64, m)), n - m, n) for m, n in lengths for t in range(0, m, 64)]
        assert found == max([segments_seen(*tile, (left, right)) for tile in tiles], default=0)
        # A cache whose lengths are on the device: no length sees more, wherever its tiles begin.
        group, rows = rng.choice([1, 3, 8, 100]), rng.randint(1, 60)
        shape = (1, group, 1, 16, 16, "float16", (left, right), rows, rows, rows, 16, 64, 64)
        most = cached.Cached(CachedProblem(*shape), CPU)._segments
        tops = range(0, rows * group, 64)
        seen = 0
        for top in tops:
            mine = range(top // group, (min(top + 64, rows * group) - 1) // group + 1)
            ends = range(0, 1025, 37)
            seen = max(seen, *(segments_seen(mine, n - rows, n, (left, right)) for n in ends))
        assert seen <= most <= 8
        below += most < 8
    assert below > 50

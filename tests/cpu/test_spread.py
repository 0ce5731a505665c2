"""Keys of a cache that are spread over many blocks: when, and with the bytes of the kernels that do not."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from emulator.backend import emulated
from emulator.mutants import unnoticed

from dash_attn import flash_attn_with_kvcache
from dash_attn.backends.base import AuxTensors
from dash_attn.backends.cached import CachedProblem, CachedTensors
from dash_attn.backends.sm90 import backend
from dash_attn.backends.sm90.backend import BACKEND
from dash_attn.backends.sm90.cached.launch import Cached, config_of
from dash_attn.backends.sm90.spread.config import SpreadConfig, spread_config
from dash_attn.backends.sm90.spread.launch import Spread, spreads
from dash_attn.ops import cached as calls
from dash_attn.scores import Scores
from dash_attn.testing import assert_same_bytes, same_bytes

slow = pytest.mark.slow
SEGMENT = 256
CPU = torch.device("cpu")
PLAIN = CachedProblem(1, 32, 8, 128, 128, "bfloat16", (-1, 0), 1, 1, 1, 8192, 1, 1)


# When


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"most_pages": 64, "page_size": 16, "pages": 100},
        {"head_dim": 64, "head_dim_v": 64},
        {"seqlen_q": 16, "total_q": 16, "longest_q": 16, "page_size": 2048},
        {"batch": 4, "total_q": 4, "page_size": 1024},
        {"batch": 8, "total_q": 8, "page_size": 1024, "head_dim": 64, "head_dim_v": 64},
    ],
)
def test_few_sequences_of_many_keys_are_spread(more: dict[str, int]) -> None:
    assert spreads(PLAIN._replace(**more), 132)


@pytest.mark.parametrize(
    "more",
    [
        {"page_size": 511},
        {"head_dim": 96, "head_dim_v": 96},
        {"head_dim": 192},
        {"seqlen_q": -1},
        {"seqlen_q": 17, "total_q": 17, "longest_q": 17},
        {"seqlen_q": 0, "total_q": 0, "longest_q": 0},
        {"batch": 5, "total_q": 5},
        {"page_size": 9 * 8192, "head_dim": 64, "head_dim_v": 64},
        {"seqlen_q": 5, "total_q": 5, "longest_q": 5, "page_size": 3 * 8192},
        {
            "seqlen_q": 4,
            "total_q": 4,
            "longest_q": 4,
            "page_size": 8 * 8192,
            "head_dim": 64,
            "head_dim_v": 64,
        },
    ],
)
def test_what_others_do_as_well_is_left_to_them(more: dict[str, int]) -> None:
    """Few keys; other head dims; packed or more rows; more blocks than SMs; more than fits half of L2."""
    assert not spreads(PLAIN._replace(**more), 132)


def test_a_smaller_gpu_has_enough_items_sooner() -> None:
    assert spreads(PLAIN, 32)
    assert not spreads(PLAIN, 31)


@pytest.mark.parametrize("keys", [640, 9_000])
@pytest.mark.parametrize("batch", [1, 3, 7])
def test_buffers_begin_at_multiples_of_128_bytes(batch: int, keys: int) -> None:
    """As programs ask for: they are parts of one allocation."""
    problem = PLAIN._replace(batch=batch, total_q=batch, heads=4, kv_heads=1, page_size=keys)
    words, _ = Spread(problem, CPU)._numbers
    assert [n for n in words if n % 32 or not n] == []


def test_what_a_call_runs_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "multiprocessors", lambda _: 132)
    assert type(BACKEND.prepare_cached(PLAIN, CPU)) is Spread
    assert type(BACKEND.prepare_cached(PLAIN._replace(page_size=256), CPU)) is Cached


@pytest.mark.parametrize("wrong", [{"warpgroups": 2}, {"head_dim": 80}, {"segment": 16384}])
def test_configurations_that_do_not_exist(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"one warpgroup|32 columns|64 tiles"):
        replace(spread_config(64, "bf16", 128), **{"head_dim_v": wrong.get("head_dim", 64), **wrong})


# Its bytes


class Case(NamedTuple):
    """used: keys of every sequence; page_size 0: contiguous; growth: of scores, from the last key to the
    first, so that maxima rise from tile to tile."""

    name: str
    used: tuple[int, ...]
    rows: int = 1
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    page_size: int = 0
    sides: tuple[int, int] = (-1, 0)
    growth: float = 1.0
    sink: bool = False
    softcap: float = 0.0
    dtype: torch.dtype = torch.bfloat16
    keys: int = 700
    segment: int = SEGMENT


CASES = (
    Case("no key, one key", (0, 1), keys=128),
    Case("around a tile", (127, 128, 129), heads=(2, 1), rows=2),
    Case("segments", (256, 257, 513, 700), heads=(2, 1), growth=8.0),
    Case("one segment", (256, 200, 0), rows=3, growth=8.0, sink=True, keys=256, head_dim=128),
    Case("one segment of 40 rows", (130,), rows=20, heads=(2, 1), growth=8.0, keys=256, dtype=torch.float16),
    Case("risen", (700, 3), rows=3, growth=30.0, head_dim=128, heads=(2, 1)),
    Case("groups", (600,), heads=(16, 2), rows=2, growth=8.0, sink=True),
    Case("64 rows", (400,), heads=(8, 1), rows=8, head_dim=128, growth=8.0),
    Case("37 rows", (333, 20), heads=(1, 1), rows=37, growth=8.0, sink=True),
    Case("pages of 16", (600, 65), page_size=16, growth=8.0, rows=4),
    Case("pages of 64", (639,), page_size=64, head_dim=128, sink=True, dtype=torch.float16),
    Case("pages of 256", (500, 700), page_size=256, heads=(2, 2), growth=8.0, dtype=torch.float16),
    Case("full mask", (300, 0), sides=(-1, -1), rows=5, growth=8.0),
    Case("window", (600, 100), sides=(200, 0), rows=8, growth=8.0, sink=True),
    Case("sides", (500, 9), sides=(90, 30), rows=12, heads=(2, 1)),
    Case("softcap", (600,), softcap=5.0, growth=8.0, rows=2),
    Case("many tiles", (5000,), heads=(2, 1), growth=4.0, keys=5120, segment=4096),
    Case("many tiles of 12 rows", (2600,), heads=(4, 1), rows=3, growth=4.0, keys=3072, segment=4096),
    Case("many tiles of 30 rows", (2700,), heads=(2, 1), rows=15, growth=8.0, keys=3072, segment=4096),
    Case("many tiles of 64 rows", (1900,), heads=(4, 1), rows=16, keys=2048, segment=2048),
)


class Given(NamedTuple):
    problem: CachedProblem
    tensors: CachedTensors
    scores: Scores
    aux: AuxTensors


def given(case: Case, seed: int = 0) -> Given:
    generator = torch.Generator().manual_seed(seed)
    batch, (heads, kv_heads) = len(case.used), case.heads
    size = case.page_size or case.keys
    most = -(-case.keys // size)
    q = torch.randn(batch, case.rows, heads, case.head_dim, generator=generator).to(case.dtype)
    k, v = (torch.randn(batch * most, size, kv_heads, case.head_dim, generator=generator) for _ in "kv")
    table = torch.randperm(batch * most, generator=generator).view(batch, most).int()
    for s, used in enumerate(case.used):
        token = torch.arange(most * size).view(most, size, 1, 1)
        k[table[s].long()] *= 1.0 + (case.growth - 1.0) * (1.0 - token / (most * size))
        for x in (k, v):
            x[table[s].long()] = x[table[s].long()].masked_fill(token >= used, torch.nan)
    lengths = torch.tensor(case.used, dtype=torch.int32)
    shape = (case.sides, case.rows, batch * case.rows, case.rows, size, batch * most, most)
    dims = (heads, kv_heads, case.head_dim, case.head_dim, str(case.dtype).removeprefix("torch."))
    sink = torch.linspace(-2, 4, heads) if case.sink else None
    return Given(
        CachedProblem(batch, *dims, *shape),
        CachedTensors(q, k.to(case.dtype), v.to(case.dtype), lengths, table),
        Scores(case.head_dim**-0.5, softcap=case.softcap, sink=case.sink),
        AuxTensors(learnable_sink=sink),
    )


Result = tuple[torch.Tensor, torch.Tensor]


def whole(x: Given, segment: int = SEGMENT) -> Result:
    config = replace(config_of(x.problem), segment=segment)
    with emulated(blocks=3):
        return Cached(x.problem, CPU, config=config).forward(x.tensors, x.scores, x.aux)


def spread(x: Given, seed: int = 0, races: bool = False, late: bool = True, **other: float) -> Result:
    base = spread_config(x.problem.head_dim, config_of(x.problem).dtype, 128)
    config = replace(base, **{"segment": SEGMENT, **other})
    with emulated(seed=seed, races=races, late=late):
        return Spread(x.problem, CPU, config=config).forward(x.tensors, x.scores, x.aux)


@slow
@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_the_same_bytes(number: int) -> None:
    """Behind the used keys lies NaN."""
    x = given(CASES[number], number)
    segment = CASES[number].segment
    found = spread(x, seed=number, races=number % 2 == 0, late=number % 3 > 0, segment=segment)
    wanted = whole(x, segment)
    assert not wanted[0].isnan().any()
    for a, b in zip(wanted, found):
        assert_same_bytes(a, b)


@slow
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_warps_has_the_same_bytes(seed: int) -> None:
    x = given(Case("orders", (700, 130), rows=5, heads=(6, 2), growth=30.0), 7)
    wanted, found = whole(x), spread(x, seed=100 + seed, races=True, late=seed != 1)
    assert all(same_bytes(a, b) for a, b in zip(wanted, found))


@slow
def test_the_fence_behind_reads_is_missed() -> None:
    """Twelve tiles go round eight places. The other fence is for what the kernel before has written, which is
    not seen here."""
    x = given(Case("mutants", (1500,), rows=3, heads=(2, 1), keys=1536, segment=2048))
    config = replace(spread_config(64, "bf16", 128), segment=2048)
    places, missed = unnoticed(config, lambda: spread(x, seed=1, races=True, segment=2048), product="mma")
    assert [operation for operation in missed if "fence" in operation] == ["fence.proxy.async.global"]
    assert places > len(missed)


@slow
def test_other_decisions_have_other_bytes() -> None:
    """The control: rows that rise sooner than the numerics say have other sums."""
    x = given(Case("control", (700,), rows=3, growth=8.0), 3)
    wanted = whole(x)
    assert all(same_bytes(a, b) for a, b in zip(wanted, spread(x)))
    sooner = spread(x, keep=0.0)
    assert not same_bytes(wanted[0], sooner[0])
    assert not same_bytes(wanted[1], sooner[1])


@slow
def test_a_call_over_two_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the public function, with the segments of the numerics, on GPUs of few and of enough SMs."""
    made: list[SpreadConfig] = []
    init = Spread.__init__

    def noted(self: Spread, *args: object, **more: object) -> None:
        init(self, *args, **more)  # type: ignore[arg-type]
        made.append(self.config)  # type: ignore[arg-type]

    monkeypatch.setattr(Spread, "__init__", noted)
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, n, 1, 64, generator=generator).bfloat16() for n in (1, 8400, 8400))
    used, found = torch.tensor([8350], dtype=torch.int32), []
    for blocks, spread_calls in ((3, 0), (4, 1)):
        calls._call.cache_clear()
        with emulated(blocks=blocks):
            found.append(flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=True, backend="sm90"))
        assert len(made) == spread_calls
    calls._call.cache_clear()
    assert_same_bytes(*found)

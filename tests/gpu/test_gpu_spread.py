"""Keys of a cache that are spread over many blocks: the bytes of the kernels that do not, on a GPU.

The emulator cannot show that a warp's product of fewer rows and columns (mma.sync) has the bits of a
warpgroup's (wgmma) on a GPU, nor what one kernel does beside the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from cuda_tensors import draw, int32
from torch import Tensor

from dash_attn import flash_attn_func, flash_attn_with_kvcache
from dash_attn.backends.sm90 import backend
from dash_attn.backends.sm90.cached.launch import Cached
from dash_attn.backends.sm90.spread import launch as spread_launch
from dash_attn.backends.sm90.spread.launch import Spread, spreads
from dash_attn.ops import cached as calls
from dash_attn.testing import assert_same_bytes, same_bytes

BF16 = torch.bfloat16
Result = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def _new_calls() -> Iterator[None]:
    """A call that is known keeps its kernels."""
    calls._call.cache_clear()
    yield
    calls._call.cache_clear()


def ask(monkeypatch: pytest.MonkeyPatch, spread: bool) -> None:
    """Spread keys where it is worth it, as always, or never."""
    monkeypatch.setattr(backend, "spreads", lambda *given: spread and spreads(*given))
    calls._call.cache_clear()


def cache(
    keys: int, batch: int, heads: int, head_dim: int, page: int, growth: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, values and their pages in random order. Scores grow towards the first key."""
    size = page or keys
    most = keys // size
    k, v = (draw(batch * most, size, heads, head_dim, seed=i, dtype=torch.float32) for i in (1, 2))
    table = torch.randperm(batch * most, generator=torch.Generator().manual_seed(3)).view(batch, most)
    for pages in table:
        k[pages.cuda()] *= torch.linspace(growth, 1.0, keys, device="cuda").view(most, size, 1, 1)
    if not page:
        k, v = k[table[:, 0].cuda()], v[table[:, 0].cuda()]
    return k.to(dtype), v.to(dtype), table.int().cuda() if page else None


def prepared() -> set[type]:
    """What the calls that are known run with: the last one only, as the fixture says."""
    return {type(x) for x in MADE}


MADE: list[Cached] = []


@pytest.fixture(autouse=True)
def _made(monkeypatch: pytest.MonkeyPatch) -> None:
    MADE.clear()
    init = Cached.__init__

    def noted(self: Cached, *args: object, **more: object) -> None:
        MADE.append(self)
        init(self, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Cached, "__init__", noted)


def both(
    monkeypatch: pytest.MonkeyPatch, q: Tensor, k: Tensor, v: Tensor, used: Tensor, **how: object
) -> None:
    """Compare a call that is spread with one that is not, and with itself."""
    found: list[Result] = []
    for spread in (False, True, True):
        ask(monkeypatch, spread)
        MADE.clear()
        args = {"cache_seqlens": used, "backend": "sm90", "return_lse": True, **how}
        found.append(flash_attn_with_kvcache(q, k, v, **args))  # type: ignore[arg-type]
        assert prepared() == {Spread if spread else Cached}
    for other in found[1:]:
        for a, b in zip(found[0], other):
            assert_same_bytes(a, b)


@pytest.mark.parametrize("growth", [1.0, 12.0])
@pytest.mark.parametrize("page", [0, 16, 64, 256])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, head_dim: int, page: int, growth: float
) -> None:
    """Two sequences of three segments at most, and lengths at all kinds of ends."""
    k, v, table = cache(18_432, 2, 2, head_dim, page, growth, dtype)
    how = {"causal": True} | ({} if table is None else {"page_table": table})
    sink = torch.linspace(-2, 4, 8, device="cuda")
    for i, used in enumerate(((0, 1), (127, 128), (129, 1000), (8192, 8193), (16_385, 18_432))):
        q = draw(2, 1 + i % 3, 8, head_dim, seed=10 + i, dtype=dtype)
        both(monkeypatch, q, k, v, int32(*used), **how, learnable_sink=sink if i % 2 else None)


@pytest.mark.parametrize(
    "how",
    [
        {"causal": False},
        {"causal": True, "window_size": (1000, 0)},
        {"window_size": (300, 20)},
        {"causal": True, "softcap": 10.0},
    ],
)
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_masks_and_rows(monkeypatch: pytest.MonkeyPatch, rows: int, how: dict[str, object]) -> None:
    k, v, table = cache(9216, 3, 1, 128, 128, 6.0, BF16)
    q = draw(3, rows, 4, 128)
    both(monkeypatch, q, k, v, int32(9000, 700, 8200), page_table=table, **how)


@pytest.mark.parametrize("page", [0, 64])
def test_a_captured_graph_replays_other_lengths(monkeypatch: pytest.MonkeyPatch, page: int) -> None:
    """Kernels of one step start beside those of the step before, and must see its lengths and keys."""
    k, v, table = cache(9216, 2, 2, 128, page, 1.0, BF16)
    q, new, at = draw(2, 1, 8, 128), draw(2, 1, 2, 128, seed=8), int32(5, 8180)
    how = {"causal": True, "backend": "sm90", "return_lse": True} | ({"page_table": table} if page else {})
    ask(monkeypatch, True)
    flash_attn_with_kvcache(q, k.clone(), v.clone(), new, new, cache_seqlens=at, **how)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=at, **how)
    assert Spread in prepared()
    ask(monkeypatch, False)
    lengths = [(5, 8180), (8191, 3), (8192, 9000), (0, 127), (9215, 128)] + [(i, 8170 + i) for i in range(30)]
    for step, values in enumerate(lengths):
        at.copy_(int32(*values))
        q.copy_(draw(2, 1, 8, 128, seed=100 + step))
        new.copy_(draw(2, 1, 2, 128, seed=200 + step))
        graph.replay()
        wanted = flash_attn_with_kvcache(q, k, v, cache_seqlens=at + 1, **how)
        assert all(same_bytes(a, b) for a, b in zip(found, wanted)), f"step {step}"


def test_replays_one_behind_the_other(monkeypatch: pytest.MonkeyPatch, replays: int) -> None:
    """No time between one call and the next: each uses the workspace of the one before."""
    k, v, _ = cache(8192, 1, 8, 128, 0, 1.0, BF16)
    q, used = draw(1, 1, 32, 128), int32(8000)
    ask(monkeypatch, True)
    how = {"cache_seqlens": used, "causal": True, "backend": "sm90"}
    first = flash_attn_with_kvcache(q, k, v, **how)
    found = [flash_attn_with_kvcache(q, k, v, **how) for _ in range(replays)]
    assert prepared() == {Spread}
    assert all(same_bytes(first, other) for other in found)
    other = flash_attn_with_kvcache(q, k, v, **(how | {"cache_seqlens": int32(7999)}))
    assert not same_bytes(first, other)


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_tile_is_read_before_the_next_one_is_in_its_place(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, rows: int
) -> None:
    """Every kv tile has scores of its own, so a row that reads those of another one has other bytes."""
    tile = torch.arange(20_100, device="cuda")[:, None] // 128
    k = torch.zeros(6, 20_100, 2, head_dim, dtype=BF16, device="cuda")
    k[..., 0] = 0.03 * tile
    v = (tile % 32 == torch.arange(head_dim, device="cuda") % 32).to(BF16)
    v = v[None, :, None].expand(k.shape).contiguous()
    q = torch.zeros(1, rows, 8, head_dim, dtype=BF16, device="cuda")
    q[..., 0] = head_dim**0.5
    how = {"cache_seqlens": int32(8183 + rows), "cache_batch_idx": int32(1), "causal": True}
    how |= {"backend": "sm90"}
    ask(monkeypatch, False)
    wanted = flash_attn_with_kvcache(q, k, v, **how)  # type: ignore[arg-type]
    ask(monkeypatch, True)
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    allocate = spread_launch.allocate

    def filled(words: list[int], device: torch.device) -> Sequence[Tensor]:
        torch.full((sum(words),), 50.0, device=device)  # memory that the workspace gets
        return allocate(words, device)

    monkeypatch.setattr(spread_launch, "allocate", filled)
    for _ in range(3000):
        found = flash_attn_with_kvcache(q, k, v, **how)  # type: ignore[arg-type]
        differ += (found.view(torch.int16) != wanted.view(torch.int16)).any()
    assert prepared() == {Cached, Spread}
    assert int(differ) == 0, f"{int(differ)} of 3000 calls differ"


def test_values_out_of_range_are_clamped(monkeypatch: pytest.MonkeyPatch) -> None:
    k, v, table = cache(2048, 3, 2, 64, 64, 1.0, BF16)
    assert table is not None
    table[0, 1], table[1, 2], table[2] = -5, 2**31 - 1, 10**6
    both(monkeypatch, draw(3, 2, 8, 64), k, v, int32(200, 10**9, -3), page_table=table, causal=True)


def test_a_row_has_the_bytes_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    k, v, _ = cache(8192, 1, 2, 128, 0, 6.0, BF16)
    ask(monkeypatch, True)
    q = draw(1, 4, 8, 128)
    found = flash_attn_with_kvcache(q, k, v, cache_seqlens=int32(8100), causal=True, backend="sm90")
    assert prepared() == {Spread}
    assert_same_bytes(found, flash_attn_func(q, k[:, :8100], v[:, :8100], causal=True, backend="sm90"))

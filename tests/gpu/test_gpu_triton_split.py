"""The Triton forward where few rows are split by segments of keys, on any GPU: the bytes of one launch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from cuda_tensors import draw, int32
from torch import Tensor

from dash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from dash_attn.backends.base import NO_AUX, AuxTensors
from dash_attn.backends.triton import launch, split
from dash_attn.backends.triton.backend import BACKEND
from dash_attn.backends.triton.tiles import forward_numerics
from dash_attn.problem import Mask
from dash_attn.scores import Scores
from dash_attn.testing import assert_same_bytes, same_bytes
from interval_cases import random_intervals
from triton_cases import Results, fold_backwards, noted_folds, triton_problem, with_and_without_a_split

pytest.importorskip("triton", reason="Triton is not installed")

DEVICE = torch.device("cuda", 0)
LENGTHS = ((70, 70), (0, 30), (40, 0), (33, 3000), (900, 130), (1, 5000))
MASKS = [Mask.full(), Mask.causal(), Mask.window(700, 0), Mask.window(600, 70)]

problem_of = partial(triton_problem, mask=Mask.causal(), dtype="bfloat16", heads=4, kv_heads=2)


def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """For prepared calls alone: the public functions would keep what they prepare."""
    monkeypatch.setattr(launch, "forward_numerics", lambda *of: replace(forward_numerics(*of), segment=512))


def features(names: tuple[str, ...]) -> tuple[Scores, AuxTensors]:
    """Of packed sequences of LENGTHS, with four heads."""
    scores, aux = Scores(0.125), NO_AUX
    if "sink" in names:
        sink = torch.tensor([-1.0, 0.5, 2.0, 4.0], device="cuda")
        scores, aux = scores._replace(sink=True), aux._replace(learnable_sink=sink)
    if "softcap" in names:
        scores = scores._replace(softcap=5.0)
    if "alibi" in names:
        slopes = torch.tensor([0.02, 0.3, 0.1, 0.0], device="cuda")
        scores, aux = scores._replace(alibi=True), aux._replace(alibi_slopes=slopes)
    if "dropout" in names:
        seed = torch.tensor(11, device="cuda")
        scores, aux = scores._replace(dropout_p=0.3), aux._replace(dropout_seed=seed)
    if "intervals" in names:
        parts = [random_intervals(n, m, at) for at, (m, n) in enumerate(LENGTHS)]
        starts, ends = (torch.cat(side).to(DEVICE) for side in zip(*parts))
        scores, aux = scores._replace(row_intervals=True), aux._replace(row_starts=starts, row_ends=ends)
    return scores, aux


EVERYTHING = ("sink", "softcap", "alibi", "dropout", "intervals")


@pytest.mark.parametrize("names", [(), ("sink",), ("dropout",), ("intervals",), EVERYTHING], ids="+".join)
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        (64, "bfloat16"),
        (80, "bfloat16"),
        (128, "bfloat16"),
        (256, "bfloat16"),
        (64, "float16"),
        (64, "float32"),
    ],
)
def test_a_split_changes_no_byte(
    head_dim: int, dtype: str, mask: Mask, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also rows without keys, keys without rows, and rows before the diagonal."""
    short_segments(monkeypatch)
    problem = problem_of(*LENGTHS, mask=mask, head_dim=head_dim, dtype=dtype)
    sizes = zip([*problem.lengths.sum(0).tolist(), int(problem.lengths[:, 1].sum())], (4, 2, 2))
    tensors = [
        draw(rows, heads, head_dim, dtype=getattr(torch, dtype), seed=at)
        for at, (rows, heads) in enumerate(sizes)
    ]
    prepared = BACKEND.prepare(problem, DEVICE, packed=True)
    scores, aux = features(names)
    out, _ = with_and_without_a_split(monkeypatch, lambda: prepared.forward(*tensors, scores, aux))
    assert out.isfinite().all()


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (40, 200), (24, 16)])
def test_head_dims_of_v(head_dim: int, head_dim_v: int, monkeypatch: pytest.MonkeyPatch) -> None:
    short_segments(monkeypatch)
    problem = problem_of((100, 4000), head_dim=head_dim, head_dim_v=head_dim_v)
    tensors = draw(100, 4, head_dim), draw(4000, 2, head_dim, seed=1), draw(4000, 2, head_dim_v, seed=2)
    prepared = BACKEND.prepare(problem, DEVICE, packed=True)
    with_and_without_a_split(monkeypatch, lambda: prepared.forward(*tensors, Scores(0.125)))


def test_another_order_of_folds_gives_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    short_segments(monkeypatch)
    problem = problem_of((5, 4000), mask=Mask.full(), head_dim=64, dtype="float32")
    tensors = [draw(rows, heads, 64, dtype=torch.float32) for rows, heads in ((5, 4), (4000, 2), (4000, 2))]
    prepared = BACKEND.prepare(problem, DEVICE, packed=True)
    monkeypatch.setattr(split, "processors", lambda device: 10**6)
    wanted, _ = prepared.forward(*tensors, Scores(0.125))
    fold_backwards(monkeypatch)
    found, _ = prepared.forward(*tensors, Scores(0.125))
    torch.testing.assert_close(found, wanted)
    assert not same_bytes(found, wanted)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_query_of_131072_keys(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split by itself, not split, and in a chunk of a long sequence, which is not split."""
    length, chunk = 131_072, 2048
    q, k, v = (
        draw(1, rows, heads, head_dim, seed=heads) for rows, heads in ((chunk, 8), (length, 2), (length, 2))
    )
    v = v.flip(1)  # k and v were drawn alike
    how: dict[str, Any] = {"causal": True, "backend": "triton", "return_lse": True}
    folds = noted_folds(monkeypatch)
    whole = flash_attn_func(q, k, v, **how)
    assert not folds
    for end in (length, length - 5, length - 1000):
        at = chunk - (length - end)
        found = flash_attn_func(q[:, at - 1 : at], k[:, :end], v[:, :end], **how)
        assert folds.pop() == 16
        assert not folds
        assert_same_bytes(found[0], whole[0][:, at - 1 : at], "out")
        assert_same_bytes(found[1], whole[1][..., at - 1 : at], "lse")
    one = q[:, -1:]
    with_and_without_a_split(monkeypatch, lambda: flash_attn_func(one, k, v, **how))


def paged(length: int, batch: int, page_size: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    count = -(-length // page_size)
    table = torch.randperm(batch * count, generator=torch.Generator().manual_seed(0)).view(batch, count)
    k, v = (draw(batch * count, page_size, 2, 128, seed=1 + i) for i in range(2))
    return k, v, table.int().cuda()


@pytest.mark.parametrize("window", [(-1, 0), (10_000, 0)])
@pytest.mark.parametrize("rows", [1, 40])
def test_a_cache_with_lengths_on_the_device(
    rows: int, window: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also an empty sequence, fewer keys than rows, and a length out of range; dense and packed q."""
    k, v, table = paged(40_000, 5)
    used, q = int32(40_000, 0, 30, 16_385, 10**9), draw(5, rows, 8, 128, seed=5)
    how: dict[str, Any] = {"causal": True, "window_size": window, "page_table": table, "backend": "triton"}
    how |= {"return_lse": True, "learnable_sink": torch.linspace(-1, 3, 8, device="cuda")}

    def dense() -> Results:
        return flash_attn_with_kvcache(q, k, v, cache_seqlens=used, **how)

    out, lse = with_and_without_a_split(monkeypatch, dense)
    assert not out[1].any()
    ends = torch.arange(6, dtype=torch.int32, device="cuda") * rows

    def packed() -> Results:
        return flash_attn_varlen_func(q.flatten(0, 1), k, v, ends, seqused_k=used, **how)

    found = with_and_without_a_split(monkeypatch, packed)
    assert_same_bytes(found[0], out.flatten(0, 1), "out")
    assert_same_bytes(found[1], lse.transpose(0, 1).flatten(1), "lse")


def test_a_captured_graph_replays_lengths_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into another segment. The host reads nothing. The graph is split, the calls beside it are not."""
    k, v, table = paged(24_600, 3)
    q, at = draw(3, 1, 8, 128, seed=7), int32(0, 8185, 16_380)
    how: dict[str, Any] = {"causal": True, "page_table": table, "backend": "triton", "return_lse": True}
    monkeypatch.setattr(split, "processors", lambda device: 10**6)
    folds = noted_folds(monkeypatch)
    flash_attn_with_kvcache(q, k, v, cache_seqlens=at, **how)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = flash_attn_with_kvcache(q, k, v, cache_seqlens=at, **how)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert folds == [4, 4]
    monkeypatch.setattr(split, "processors", lambda device: 0)
    for step in range(20):
        q.copy_(draw(3, 1, 8, 128, seed=100 + step))
        graph.replay()
        wanted = flash_attn_with_kvcache(q, k, v, cache_seqlens=at, **how)
        for name, a, b in zip(("out", "lse"), found, wanted):
            assert_same_bytes(a, b, f"{name} of step {step}")
        at += 1
    assert folds == [4, 4]

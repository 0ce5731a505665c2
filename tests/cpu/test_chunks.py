"""Chunks of many rows over a cache, by the kernel of training: emulated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from emulator.backend import emulated

from dash_attn import flash_attn_func, flash_attn_with_kvcache
from dash_attn.backends.cached import CachedProblem, CachedTensors
from dash_attn.backends.sm90.cached import launch
from dash_attn.backends.sm90.cached.config import ChunkConfig
from dash_attn.backends.sm90.cached.launch import Cached, config_of
from dash_attn.backends.sm90.forward.config import forward_config
from dash_attn.backends.sm90.forward.launch import Forward
from dash_attn.problem import Mask, Problem
from dash_attn.scores import Scores
from dash_attn.testing import assert_same_bytes, same_bytes
from kvcache_cases import random_history

pytest.importorskip("cutlass", reason="the kernel compiler is not installed: pip install 'dash-attn[cuda]'")
pytest.importorskip("tvm_ffi", reason="the kernel compiler is not installed: pip install 'dash-attn[cuda]'")
slow = pytest.mark.slow
CPU = torch.device("cpu")
PROBLEM = CachedProblem(2, 8, 2, 128, 128, "bfloat16", (-1, 0), 512, 1024, 512, 64, 100, 20)


def test_chunks_are_sequences_whose_rows_fill_tiles() -> None:
    for rows, filled in ((512, True), (513, False), (588, True), (116, True), (115, False), (1, False)):
        problem = PROBLEM._replace(seqlen_q=rows, total_q=2 * rows, longest_q=rows)
        assert config_of(problem).by_head == filled, rows
    packed = PROBLEM._replace(seqlen_q=-1)
    for total, many in ((2048, True), (2047, False)):
        assert config_of(packed._replace(total_q=total, longest_q=total)).by_head == many
    assert config_of(PROBLEM._replace(head_dim=64, head_dim_v=64)).tile_m == 192
    config = config_of(PROBLEM)
    assert isinstance(config, ChunkConfig)
    for page_size, piece in ((16, 16), (32, 16), (64, 64), (128, 128), (256, 128)):
        assert config_of(PROBLEM._replace(page_size=page_size)).piece == piece
        few = config_of(PROBLEM._replace(page_size=page_size, seqlen_q=1, total_q=2, longest_q=1))
        assert few.piece == (128 if piece == 128 else 16)


@slow
@pytest.mark.parametrize(
    ("head_dims", "number"),
    [*(((64, 72, 128), n) for n in range(6)), ((96, (96, 48)), 0), ((192, 128), 1), ((256, (200, 240)), 2)],
)
def test_histories(head_dims: tuple[int, ...], number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of every call has the bytes of one forward, if each runs as a chunk, single rows, too."""
    if head_dims == (192, 128):
        head_dims = ((192, 128), (136, 40))  # type: ignore[assignment]
    monkeypatch.setattr(launch, "_fill_tiles", lambda *_: True)
    dtype = torch.bfloat16 if number % 3 else torch.float16
    with emulated(blocks=3, seed=number, late=bool(number % 2), races=number % 3 == 0):
        random_history(number, "cpu", dtype, 150, head_dims=head_dims, backend="sm90").run()


@slow
@pytest.mark.parametrize("page_size", [0, 16, 128])
def test_rows_of_a_chunk(page_size: int) -> None:
    """Three q heads per kv head, and a window. NaN lies behind the used keys, in the last used page, too."""
    generator = torch.Generator().manual_seed(0)
    used, rows, how = (300, 130), 120, {"causal": True, "window_size": (150, 0), "backend": "sm90"}
    q, k, v = (
        torch.randn(2, n, h, 128, generator=generator).bfloat16() for n, h in ((rows, 6), (384, 2), (384, 2))
    )
    table = None
    with emulated(blocks=3, races=True):
        alone = [
            flash_attn_func(q[i, None], k[i, None, :n], v[i, None, :n], **how) for i, n in enumerate(used)
        ]
        for x in (k, v):
            for i, n in enumerate(used):
                x[i, n:] = torch.nan
        if page_size:
            k, v = (x.reshape(-1, page_size, 2, 128) for x in (k, v))
            table = torch.arange(len(k), dtype=torch.int32).view(2, -1)
        lengths = torch.tensor(used, dtype=torch.int32)
        with mock.patch.object(launch, "program", wraps=launch.program) as program:
            found = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, page_table=table, **how)
        assert isinstance(program.call_args.args[0], ChunkConfig)
    assert_same_bytes(found, torch.cat(alone))


@slow
@pytest.mark.parametrize("places", [0, 1])
def test_segments_of_split_tiles_are_folded(places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiles of three segments each, by twelve blocks: all are split, or, without places, none is."""
    monkeypatch.setattr(launch, "MOST_PARTS", 4096 * places)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(1, n, h, 64, generator=generator).bfloat16() for n, h in ((192, 2), (700, 1), (700, 1))
    )
    problem = CachedProblem(1, 2, 1, 64, 64, "bfloat16", (-1, 0), 192, 192, 192, 700, 1, 1)
    lengths, table = torch.tensor([700], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    allocate, buffers = launch.allocate, []

    def kept(*sizes: Any) -> Any:
        buffers.extend(found := allocate(*sizes))
        return found

    monkeypatch.setattr(launch, "allocate", kept)
    with emulated(blocks=12):
        config = replace(config_of(problem), segment=256)
        cached = Cached(problem, CPU, blocks=12, config=config)
        out, lse = cached.forward(CachedTensors(q, k, v, lengths, table), Scores(0.1, 0.0))
        entries, folds = buffers[0].view(torch.int32)[:2].tolist()
        assert (entries, folds) == ((3, 1) if places else (1, 0))
        whole = Problem(((192, 700),), 2, 1, 64, Mask.causal(), "bfloat16")
        outs = [
            Forward(whole, CPU, blocks=2, config=replace(forward_config(64, "bf16"), segment=n))(q, k, v, 0.1)
            for n in (256, 512)
        ]
    assert_same_bytes(out, outs[0][0])
    assert_same_bytes(lse, outs[0][1])
    assert not same_bytes(outs[1][0], out), "the control: other segments have other bytes"

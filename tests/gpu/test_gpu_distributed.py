"""Attention that two GPUs share: the bytes of one. Needs two GPUs of one host."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from dash_attn.distributed import attention, shard
from dash_attn.testing import assert_same_bytes
from sharing_cases import Case, compared
from spawned import spawn

REPLAYS = int(os.environ.get("DASH_ATTN_REPLAYS", "50"))

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def _lengths(rank: int) -> None:
    for rows, q_segment in ((4096, 512), (8192, None), (32768, None), (65536, None), (131072, None)):
        for heads, head_dim in (((4, 2), 64), ((8, 2), 128), ((4, 1), 128)):
            for mask in ("causal", "full", "window"):
                for mode, layout in (
                    ("ulysses", "zigzag"),
                    ("gather", "zigzag"),
                    ("ring", "zigzag"),
                    ("ring", "contiguous"),
                ):
                    if (mode == "ulysses" and heads[1] % 2) or (rows > 32768 and mask == "full"):
                        continue
                    case = Case(heads, mask, mode, layout, rows, q_segment=q_segment, head_dim=head_dim)
                    compared(case, "cuda")


def test_8k_to_128k_tokens_have_the_bytes_of_one_gpu() -> None:
    spawn(_lengths, 2, backend="nccl")


def _features(rank: int) -> None:
    for mode in ("ulysses", "gather", "ring"):
        lengths = (4096, 0, 512, 33 * 4, 2048)
        compared(Case((4, 2), "causal", mode, "zigzag", lengths=lengths, q_segment=512, head_dim=64), "cuda")
        compared(Case((4, 2), "causal", mode, "zigzag", 1024, q_segment=256, head_dim=64, sink=True), "cuda")
        compared(Case((4, 2), "full", mode, "zigzag", 1024, q_segment=256, head_dim=80), "cuda")
        dropped = Case((4, 2), "causal", mode, "zigzag", 1024, q_segment=256, head_dim=64, extra="dropout")
        compared(dropped, "cuda")  # triton, like alibi
        for extra in ("alibi", "intervals"):
            compared(Case((4, 2), "causal", mode, "zigzag", 1024, head_dim=64, extra=extra), "cuda")
        compared(Case((4, 2), "causal", mode, "zigzag", 1024, q_segment=256, head_dim=192), "cuda")
        half = Case(
            (4, 2), "window", mode, "contiguous", 1024, q_segment=256, head_dim=128, dtype=torch.float16
        )
        compared(half, "cuda")


def test_features_and_backends() -> None:
    spawn(_features, 2, backend="nccl")


def _replays(rank: int, replays: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(1, 8192, 8, 128, generator=generator, device="cuda", dtype=torch.bfloat16)
    load, side = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    for mode in ("ulysses", "gather", "ring"):
        first: list[Tensor] = []
        for _ in range(replays):
            with torch.cuda.stream(side):
                load = (load @ load).clamp(-1, 1)
            leaves = [shard(x).requires_grad_() for x in (q, q[:, :, :2], q[:, :, 2:4])]
            out = attention(*leaves, causal=True, mode=mode, q_segment=2048)
            assert isinstance(out, Tensor)
            found = [out, *torch.autograd.grad(out, leaves, out.detach())]
            first = first or found
            for a, b in zip(found, first):
                assert_same_bytes(a, b)


def test_replays_under_load_have_one_hash() -> None:
    spawn(_replays, 2, REPLAYS, backend="nccl")

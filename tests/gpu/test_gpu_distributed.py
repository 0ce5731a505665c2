"""Attention that two GPUs share: the bytes of one. Needs two GPUs of one host."""

from __future__ import annotations

import os
import time
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from dash_attn.distributed import attention, attention_varlen, functional, opening, shard, transport, windows
from dash_attn.ops import calls
from dash_attn.testing import assert_same_bytes
from sharing_cases import Case, compared
from spawned import RankError, spawn

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
    assert transport() == "windows"


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


def _by_nccl(rank: int) -> None:
    """The mode that goes through windows goes without, too."""
    os.environ["DASH_ATTN_WINDOWS"] = "0"
    lengths = (4096, 0, 512, 33 * 4, 2048)
    compared(Case((4, 2), "causal", "ulysses", "zigzag", lengths=lengths, q_segment=512, head_dim=64), "cuda")
    compared(Case((8, 2), "window", "ulysses", "contiguous", 8192, head_dim=128, sink=True), "cuda")
    assert transport() == "collectives: rank 0: DASH_ATTN_WINDOWS=0"


def test_rows_that_nccl_moves_have_the_same_bytes() -> None:
    spawn(_by_nccl, 2, backend="nccl")


def _turns(rank: int) -> None:
    """Exchanges of several turns, calls on other streams, and a captured graph; windows of inference mode."""
    windows.REGION = 1 << 20
    with torch.inference_mode():
        attention(*[torch.randn(1, 256, 4, 64, device="cuda", dtype=torch.bfloat16)] * 3)
    assert transport() == "windows"
    compared(Case((8, 2), "causal", "ulysses", "zigzag", 8192, head_dim=128), "cuda")
    lengths = tuple(4 * n for n in (700, 1, 0, 33, 90, 512, 7))
    compared(Case((4, 2), "causal", "ulysses", "zigzag", lengths=lengths, head_dim=64), "cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    whole = torch.randn(4, 1, 4096, 4, 128, generator=generator, device="cuda", dtype=torch.bfloat16)
    parts = [shard(x) for x in whole]

    def called(x: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        out = attention(leaf, leaf, leaf, causal=True)
        assert isinstance(out, Tensor)
        return [out, *torch.autograd.grad(out, [leaf], out.detach())]

    wanted = [called(x) for x in parts]
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    torch.cuda.synchronize()
    for number in range(40):
        with torch.cuda.stream(streams[number % 3 % 2]):
            found.append(called(parts[number % 4]))
    torch.cuda.synchronize()
    graph, given = torch.cuda.CUDAGraph(), parts[0].clone()
    with torch.cuda.graph(graph):
        made = called(given)
    for number in range(40):
        given.copy_(parts[number % 4])
        graph.replay()
        found += [[x.clone() for x in made], called(parts[number % 4])]
    torch.cuda.synchronize()
    for number, each in enumerate(found):
        for a, b in zip(each, wanted[number % 4 if number < 40 else (number - 40) // 2 % 4]):
            assert_same_bytes(a, b)


def test_turns_streams_and_graphs() -> None:
    spawn(_turns, 2, backend="nccl")


def _ends(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def _places_outlive(rank: int) -> None:
    """Sequences so many that rows are found by indices. These stay where they are while a graph, or another
    stream, may read them, although calls of other lengths have pushed the call out of its cache."""

    def drawn(lengths: tuple[int, ...]) -> Tensor:
        generator = torch.Generator("cuda").manual_seed(len(lengths))
        x = torch.randn(sum(lengths), 4, 64, generator=generator, device="cuda", dtype=torch.bfloat16)
        return shard(x, dim=0, cu_seqlens=_ends(lengths))

    def called(x: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        out = attention_varlen(leaf, leaf, leaf, _ends(lengths), causal=True)
        assert isinstance(out, Tensor)
        return [out, *torch.autograd.grad(out, [leaf], out.detach())]

    def forgotten() -> list[Tensor]:
        """The call pushed out, and what memory is free taken: index 0 exists, so nothing would be noticed."""
        for rows in range(4, 280, 4):
            called(drawn((rows,)), (rows,))
        torch.cuda.synchronize()
        sizes = (2048, 4096, 6144, 8192, 12288, 16384)
        return [torch.zeros(n, dtype=torch.int64, device="cuda") for n in sizes for _ in range(100)]

    lengths = (512,) * 8
    x = drawn(lengths)
    wanted = called(x, lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = called(x, lengths)
    taken = forgotten()
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(made, wanted):
        assert_same_bytes(a, b)
    del taken
    streams = [torch.cuda.Stream() for _ in range(2)]
    with torch.cuda.stream(streams[0]):
        called(x, lengths)
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[1]):
        torch.cuda._sleep(2_000_000_000)
        found = called(x, lengths)
    functional._shared.cache_clear()
    with torch.cuda.stream(streams[0]):
        taken = [torch.zeros(n, dtype=torch.int64, device="cuda") for n in (4096, 12288) for _ in range(200)]
    torch.cuda.synchronize()
    assert len(taken) == 400
    for a, b in zip(found, wanted):
        assert_same_bytes(a, b)


def test_places_of_rows_outlive_graphs_and_streams() -> None:
    spawn(_places_outlive, 2, backend="nccl")


def _many_lengths(rank: int) -> None:
    """More shapes in a batch than calls are kept: a second call plans nothing anew."""
    lengths = tuple(range(2, 302, 2))
    x = torch.randn(sum(lengths) // 2, 4, 64, device="cuda", dtype=torch.bfloat16)
    for mode in ("gather", "ring"):
        made = []
        for _ in range(2):
            attention_varlen(x, x, x, _ends(lengths), causal=True, mode=mode, layout="contiguous")
            made.append(calls._shaped.cache_info().misses)
        assert made[0] == made[1]


def test_many_lengths_are_planned_once() -> None:
    spawn(_many_lengths, 2, backend="nccl")


def _other_order(rank: int) -> None:  # error 710 is that of an assertion
    leaf = torch.randn(1, 512, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    losses = [attention(leaf, leaf, leaf, causal=True).sum() for _ in range(2)]  # type: ignore[union-attr]
    assert transport() == "windows"
    for loss in losses[:: 1 - 2 * rank]:
        loss.backward()
    torch.cuda.synchronize()


def test_backwards_in_another_order_stop_the_gpu() -> None:
    with pytest.raises(RankError, match="device-side assert|CUDA Error Code: 710"):
        spawn(_other_order, 2, backend="nccl")


def _alone(rank: int) -> None:
    opening._seconds = lambda *_: 5.0
    x = torch.randn(1, 512, 4, 64, device="cuda", dtype=torch.bfloat16)
    attention(x, x, x, causal=True)
    torch.cuda.synchronize()
    if rank:
        time.sleep(40)
        return
    begin = time.monotonic()
    attention(x, x, x, causal=True)
    with pytest.raises(RuntimeError) as stopped:
        torch.cuda.synchronize()
    raise RuntimeError(f"stopped after {time.monotonic() - begin:02.0f} seconds: {stopped.value}")


def test_a_rank_that_does_not_come_stops_the_other_at_the_timeout() -> None:
    with pytest.raises(RankError, match=r"stopped after (0[4-9]|1\d) seconds: .*(launch failure|CUDA error)"):
        spawn(_alone, 2, backend="nccl")


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

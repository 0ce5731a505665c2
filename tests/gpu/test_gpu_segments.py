"""Sequences that are cut into segments of q rows, on the Hopper kernels: values and bytes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn import attention, flash_attn_varlen_func
from dash_attn.backends.sm90 import backend
from dash_attn.backends.sm90.segments import add_sums
from dash_attn.ops import segments as module
from dash_attn.problem import Mask, Problem
from dash_attn.testing import assert_same_bytes, same_bytes
from gpu_cases import Case, make_case, relative_error

REPLAYS = int(os.environ.get("DASH_ATTN_REPLAYS", "200"))
SIDES = {"full": (-1, -1), "causal": (-1, 0), "window": (300, 0)}


def gradients(tensors: list[Tensor], sides: tuple[int, int], **options: Any) -> list[Tensor]:
    """dq, dk, dv of dout, q, k and v."""
    dout, *qkv = tensors
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    out = attention(*leaves, window=sides, **{"q_segment": 256} | options)
    assert isinstance(out, Tensor)
    return list(torch.autograd.grad(out, leaves, dout))


def case_of(mask: str, head_dim: int, heads: tuple[int, int], **shape: Any) -> Case:
    sizes = {"seqlen": 1000} | shape
    return make_case(
        Problem.dense(
            batch=2,
            heads=heads[0],
            kv_heads=heads[1],
            head_dim=head_dim,
            mask=Mask.of_sides(*SIDES[mask]),
            **sizes,
        )
    )


@pytest.mark.parametrize("mask", SIDES)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 1)], ids=str)
def test_errors_are_those_of_whole_sequences(mask: str, head_dim: int, heads: tuple[int, int]) -> None:
    case = case_of(mask, head_dim, heads)
    tensors = list(case.inputs[:4])
    cut, whole = (gradients(tensors, SIDES[mask], q_segment=n) for n in (256, 1024))
    assert not all(same_bytes(a, b) for a, b in zip(cut, whole)), "nothing was cut"
    for name, a, b in zip(("dq", "dk", "dv"), cut, whole):
        exact = case.exact[name]
        assert relative_error(a, exact) <= 1.1 * relative_error(b, exact) + 1e-6, name


def test_unequal_lengths_and_both_dtypes() -> None:
    for shape in ({"seqlen": None, "seqlen_q": 700, "seqlen_k": 1100}, {"dtype": "float16", "seqlen": 900}):
        case = case_of("causal", 128, (4, 2), **shape)
        for name, a in zip(("dq", "dk", "dv"), gradients(list(case.inputs[:4]), (-1, 0))):
            assert relative_error(a, case.exact[name]) < 8e-3, name


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_sequence_has_its_bytes_in_any_batch_and_packed(head_dim: int) -> None:
    lengths, generator = (700, 100, 256, 1030), torch.Generator("cuda").manual_seed(0)
    sizes = [(sum(lengths), n, head_dim) for n in (4, 4, 2, 2)]
    dout, *qkv = (torch.randn(s, generator=generator, device="cuda", dtype=torch.bfloat16) for s in sizes)
    bounds = torch.tensor([0, 700, 800, 1056, 2086], dtype=torch.int32)
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = flash_attn_varlen_func(*leaves, bounds, bounds, causal=True, q_segment=256)
    assert isinstance(out, Tensor)
    found = torch.autograd.grad(out, leaves, dout)
    for first, last in zip(bounds.tolist(), bounds.tolist()[1:]):
        alone = [x[None, first:last] for x in (dout, *qkv)]
        twice = gradients([torch.cat([x, x]) for x in alone], (-1, 0))
        for a, b, c in zip(found, gradients(alone, (-1, 0)), twice):
            assert_same_bytes(a[first:last].contiguous(), b[0].contiguous())
            assert_same_bytes(c[1].contiguous(), b[0].contiguous())


@pytest.mark.parametrize("head_dim", [64, 128])
def test_replays_under_load_have_one_hash(head_dim: int) -> None:
    tensors = list(case_of("causal", head_dim, (8, 2), seqlen=2000).inputs[:4])
    load, side = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    first = gradients(tensors, (-1, 0))
    for _ in range(REPLAYS):
        with torch.cuda.stream(side):
            load = (load @ load).clamp(-1, 1)
        for a, b in zip(gradients(tensors, (-1, 0)), first):
            assert_same_bytes(a, b)


def test_in_a_cuda_graph_and_with_bounded_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = list(case_of("causal", 128, (4, 2)).inputs[:4])
    first = gradients(tensors, (-1, 0))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(tensors, (-1, 0))
    graph.replay()
    for a, b in zip(captured, first):
        assert_same_bytes(a, b)
    monkeypatch.setenv("DASH_ATTN_DEBUG", "bounded")
    backend._debug.cache_clear()
    try:
        for a, b in zip(gradients(tensors, (-1, 0)), first):
            assert_same_bytes(a, b)
    finally:
        backend._debug.cache_clear()


def test_the_order_of_segments_decides_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    tensors = list(case_of("causal", 128, (4, 4)).inputs[:4])
    right = gradients(tensors, (-1, 0))
    monkeypatch.setattr(module, "enumerate", lambda x: reversed(list(enumerate(x))), raising=False)
    other = gradients(tensors, (-1, 0))
    assert same_bytes(other[0], right[0])
    assert not same_bytes(other[1], right[1])


def test_sums_that_are_added_later_have_the_bytes_of_sums_added_at_once() -> None:
    """Small ones too: the hardware's addition to memory takes subnormal numbers for 0."""
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(4096, generator=generator, device="cuda") for _ in range(2))
    a[:4], b[:4] = torch.tensor([1e-39, 1e-38, -1.5e-38, 3.0]), torch.tensor([1e-39, 1e-38, 1.2e-38, 1.0])
    total = torch.zeros_like(a)
    add_sums(total, a)
    add_sums(total, b)
    plain = a + b
    assert torch.equal(total[3:], plain[3:])
    assert total[0] == 0, "adding keeps subnormal numbers after all: a plain addition would do"

"""Intervals of rows in the Hopper kernels, whose machine code is executed on the CPU (see emulator/)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from emulator.backend import emulated
from emulator.mutants import unnoticed
from torch import Tensor

from dash_attn import attention, flash_attn_varlen_func
from dash_attn.backends.base import RowIntervals
from dash_attn.backends.sm90.compile import variants
from dash_attn.schedule.constants import FORWARD_SEGMENT
from dash_attn.testing import assert_same_bytes
from interval_cases import ends_of_documents, random_intervals, random_tree, starts_of_prefix

pytest.importorskip("cutlass", reason="the kernel compiler is not installed: pip install 'dash-attn[cuda]'")
pytest.importorskip("tvm_ffi", reason="the kernel compiler is not installed: pip install 'dash-attn[cuda]'")

NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """Packed sequences and the intervals of their keys, and how they attend."""

    name: str
    lengths: tuple[int, ...]
    rows: tuple[RowIntervals, ...]
    heads: tuple[int, int] = (1, 1)
    head_dim: int = 64
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    policy: str = "auto"
    dtype: torch.dtype = torch.bfloat16

    def forward(self, backend: str) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
        """out, lse, q with k and v, and dout."""
        generator, total = torch.Generator().manual_seed(0), sum(self.lengths)
        q_heads, kv_heads = self.heads
        sizes = [(total, heads, self.head_dim) for heads in (q_heads, kv_heads, kv_heads, q_heads)]
        *tensors, dout = (torch.randn(size, generator=generator).to(self.dtype) for size in sizes)
        tensors = [x.requires_grad_() for x in tensors]
        ends = torch.tensor([0, *self.lengths]).cumsum(0).int()
        starts_ends = (torch.cat(side) for side in zip(*self.rows))
        out, lse = flash_attn_varlen_func(
            *tensors, ends, ends, max(self.lengths), max(self.lengths), causal=self.causal,
            window_size=self.window, policy=self.policy, backend=backend, return_lse=True,
            **dict(zip(("row_starts", "row_ends"), starts_ends)),
        )  # fmt: skip
        return out, lse, tensors, dout

    def run(self, backend: str) -> list[Tensor]:
        """out, lse, dq, dk and dv."""
        out, lse, tensors, dout = self.forward(backend)
        return [out.detach(), lse, *torch.autograd.grad(out, tensors, dout)]


def only_ends(ends: Tensor) -> RowIntervals:
    return RowIntervals(torch.zeros_like(ends), ends)


def of_all(length: int, end: int) -> RowIntervals:
    """Rows behind the first ``end`` see nothing."""
    return only_ends(torch.full((length,), end, dtype=torch.int32))


DOCUMENTS = only_ends(ends_of_documents(150, 250, 20, 180))
PREFIX = RowIntervals(starts_of_prefix(150, 400), torch.full((400,), 2**31 - 1).int())
CASES = [
    Case("documents-128", (600,), (DOCUMENTS,), (2, 2), 128),
    Case("documents-spt-fp16", (600,), (DOCUMENTS,), (1, 1), 128, policy="spt", dtype=torch.float16),
    Case("documents-symmetric", (512,), (only_ends(ends_of_documents(200, 312)),), policy="symmetric_shift"),
    Case("prefix-96", (400,), (PREFIX,), (2, 1), 96, causal=False),
    Case("prefix-80", (400,), (PREFIX,), (2, 1), 80, causal=False),
    Case("tree", (300,), (only_ends(random_tree(300, 1)[0]),), (4, 1)),
    Case("any-full-rings", (400,), (random_intervals(400, 400, 3),), (2, 2), causal=False),
    Case("any-80-fp16", (300,), (random_intervals(300, 300, 5),), (1, 1), 80, dtype=torch.float16),
    Case("rows-that-see-nothing", (500,), (of_all(500, 100),), (2, 1), 128),
    Case("nothing-at-all", (200,), (of_all(200, 0),), causal=False),
    Case(
        "window-head-after-head",
        (500,),
        (random_intervals(500, 500, 7),),
        (4, 1),
        window=(150, 0),
        policy="descending(by_head_from=2)",
    ),
    Case("packed", (150, 1, 270), tuple(random_intervals(n, n, n) for n in (150, 1, 270)), (2, 1), 128),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numbers_and_bytes(case: Case) -> None:
    """Near the CPU's; nothing that matters is left without an order; another interleaving, more blocks, and
    work that is done at once leave all bytes."""
    with emulated(blocks=4, seed=1, races=True):
        found = case.run("sm90")
    with emulated(blocks=7, seed=2, late=False):
        for name, x, y in zip(NAMES, case.run("sm90"), found):
            assert_same_bytes(x, y, name)
    for name, x, wanted in zip(NAMES, found, case.run("cpu")):
        assert torch.equal(x.isinf(), wanted.isinf()), name
        error = (x.double() - wanted.double()).nan_to_num(0.0).norm()
        assert error <= 0.01 * wanted.double().nan_to_num(0.0, 0.0, 0.0).norm(), name


@pytest.mark.slow
def test_a_dense_batch_has_intervals_of_its_own() -> None:
    """Each sequence of a batch has the bytes that it has alone."""
    generator, length = torch.Generator().manual_seed(0), 190
    sizes = [(2, length, heads, 64) for heads in (2, 1, 1, 2)]
    *tensors, dout = (torch.randn(size, generator=generator).bfloat16() for size in sizes)
    rows = [torch.stack(side) for side in zip(*(random_intervals(length, length, seed) for seed in (1, 2)))]

    def run(at: slice) -> list[Tensor]:
        leaves = [x[at].clone().requires_grad_() for x in tensors]
        starts, ends = (x[at].contiguous() for x in rows)
        out, lse = attention(
            *leaves, causal=True, row_starts=starts, row_ends=ends, backend="sm90", return_lse=True
        )
        return [out.detach(), lse, *torch.autograd.grad(out, leaves, dout[at])]

    with emulated(blocks=4, races=True):
        both, alone = run(slice(0, 2)), [run(slice(at, at + 1)) for at in range(2)]
    for name, x, *each in zip(NAMES, both, *alone):
        assert_same_bytes(x, torch.cat(each), name)


KEYS = FORWARD_SEGMENT + 186


def seen_by(*parts: tuple[slice, int, int]) -> RowIntervals:
    """Keys of a part are seen from its first row to before its second number; others by all rows."""
    starts, ends = torch.zeros(KEYS).int(), torch.full((KEYS,), 999).int()
    for keys, first, last in parts:
        starts[keys], ends[keys] = first, last
    return RowIntervals(starts, ends)


HIDDEN = FORWARD_SEGMENT
SEGMENTS = {
    # The first warpgroup sees no tile of the last segment, of which the second one sees one.
    "nothing of a segment": (128, seen_by((slice(HIDDEN, HIDDEN + 128), 0, 0)), True, 128),
    "a hole": (128, seen_by((slice(300, HIDDEN), 0, 0)), True, 64),
    "holes of some rows": (130, seen_by((slice(128, 4000), 0, 64), (slice(5000, HIDDEN), 0, 3)), False, 64),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SEGMENTS)
def test_several_segments(name: str) -> None:
    """kv tiles that nobody sees are left out within segments, and whole segments are; one block goes through
    all of them, or many blocks take one each: the same bytes."""
    length, rows, causal, head_dim = SEGMENTS[name]
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, n, 1, head_dim) for n in (length, KEYS, KEYS)]
    q, k, v = (torch.randn(size, generator=generator).bfloat16() for size in sizes)
    starts, ends = (x[None] for x in rows)

    def run(backend: str) -> tuple[Tensor, Tensor]:
        return attention(
            q, k, v, causal=causal, row_starts=starts, row_ends=ends, backend=backend, return_lse=True
        )

    with emulated(blocks=1, races=True):
        found = run("sm90")
    with emulated(blocks=6, seed=3):
        for x, y in zip(run("sm90"), found):
            assert_same_bytes(x, y)
    out, lse = run("cpu")
    assert (found[0].double() - out.double()).norm() <= 0.005 * out.double().norm()
    assert torch.allclose(found[1], lse, atol=1e-5)


@pytest.mark.slow
def test_every_fence_acquire_and_release_is_missed() -> None:
    """Those of the backward, each left out in turn, but for a look at how many items are claimed. Blocks wait
    for each other, and tickets are left out between others."""
    case = Case("mutants", (400,), (random_intervals(400, 400, 3),), (2, 2), causal=False)
    with emulated(blocks=3, seed=1):
        out, _, tensors, dout = case.forward("sm90")
    backward = partial(torch.autograd.grad, out, tensors, dout, retain_graph=True)
    places, missed = unnoticed(variants()["backward-d64-bf16-intervals"], backward, blocks=3)
    assert missed == ["ld.acquire.gpu.global.b32"]
    assert places >= 14

"""The public functions as training code meets them: operators, compilation, graphs, streams, devices."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from contract_cases import ENDS, WAYS, Way, all_same, attend, beside, gradients, leaves_of
from dash_attn import flash_attn_func, flash_attn_varlen_func, is_supported
from dash_attn.backends.base import NO_AUX
from dash_attn.backends.sm90 import resident
from dash_attn.errors import InputError
from dash_attn.ops import lengths
from dash_attn.ops.operators import DENSE, VARLEN
from dash_attn.ops.policies import forget
from dash_attn.spec import AttentionSpec
from dash_attn.testing import same_bytes

AUTO = Way()

ALL_WAYS = pytest.mark.parametrize("way", [pytest.param(way, id=name) for name, way in WAYS.items()])
BOTH_LAYOUTS = pytest.mark.parametrize("layout", ["dense", "packed"])


@pytest.fixture(autouse=True)
def _no_old_graphs():
    torch.compiler.reset()


def cu(*ends: int) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32, device="cuda")


def inputs(layout: str, seqlen: int = 600, seed: int = 0, way: Way = AUTO, **how: Any) -> list[Tensor]:
    """q, k, v, and a sink if the way has one; packed ones have the rows of ENDS."""
    return leaves_of(way, layout, "cuda", seqlen, seed, **how)


def causal(layout: str, way: Way = AUTO) -> Callable[..., Tensor]:
    """Causal attention of these in a layout."""
    rest = beside(way, layout, "cuda")
    if layout == "packed":
        rest.append(cu(*ENDS))
    return lambda *leaves: attend(way, *leaves, *rest)


@BOTH_LAYOUTS
def test_opcheck(layout):
    tensors = inputs(layout)
    functions, ends = (VARLEN, [cu(*ENDS)] * 2) if layout == "packed" else (DENSE, [])
    rest = (*NO_AUX, *ends, *AttentionSpec(0.1, -1, 0), *((500, -1) if layout == "packed" else ()))
    opcheck(functions.forward, (*tensors, *rest))
    out, lse = functions.forward(*tensors, *rest)
    saved = [x.detach() for x in (torch.ones_like(out), *tensors, out, lse)]
    opcheck(functions.backward, (*saved, *rest))


@ALL_WAYS
def test_compiled_dense_calls_have_the_same_bytes(way):
    def run(q, *rest):
        return attend(way, 2 * q, *rest)

    compiled = torch.compile(run, fullgraph=True)
    for seqlen in (600, 700, 801):  # the second length makes the shape dynamic
        tensors, rest = inputs("dense", seqlen, way=way), beside(way, "dense", "cuda", seqlen)
        assert all_same(gradients(compiled, tensors, *rest), gradients(run, tensors, *rest))


@ALL_WAYS
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_compiled_packed_calls_have_the_same_bytes(mode, where, way):
    """Under "reduce-overhead" too, where a replayed graph would hold the lengths of another batch."""

    def run(q, *rest):
        return attend(way, 2 * q, *rest)

    compiled = torch.compile(run, fullgraph=True, mode=mode)
    for middle in (300, 500, 300, 900, 17):
        ends = cu(0, middle, ENDS[-1]).to(where)
        tensors, rest = inputs("packed", seed=middle, way=way), (*beside(way, "packed", "cuda"), ends)
        assert all_same(gradients(compiled, tensors, *rest), gradients(run, tensors, *rest))


@ALL_WAYS
def test_compiled_graphs_of_pytorch_have_the_same_bytes(way):
    def run(q, *rest):
        return attend(way, 2 * q, *rest)

    compiled = torch.compile(run, fullgraph=True, mode="reduce-overhead")
    rest = beside(way, "dense", "cuda", 123)
    for seed in range(5):
        # No other test has these shapes: their plan is made while PyTorch watches what a graph allocates.
        tensors = inputs("dense", 123, seed, way)
        assert all_same(gradients(compiled, tensors, *rest), gradients(run, tensors, *rest))


@pytest.fixture(params=[False, True], ids=["waiting", "as_usual"])
def apart(request, monkeypatch):
    """Contributions to dQ wait for one another, or are kept apart where that is faster."""
    if not request.param:
        monkeypatch.setattr(resident, "_better_apart", lambda *_: False)
    forget()
    yield request.param
    forget()


@ALL_WAYS
@BOTH_LAYOUTS
def test_a_captured_graph_replays_the_same_bytes(layout, way, apart):
    leaves, run = inputs(layout, way=way), causal(layout, way)
    first, other = (inputs(layout, seed=seed, way=way) for seed in (0, 1))
    expected = [gradients(run, tensors) for tensors in (first, other)]

    def step() -> list[Tensor]:
        out = run(*leaves)
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    assert not same_bytes(expected[0][1], expected[1][1])
    for replay in range(100):
        with torch.no_grad():
            for leaf, x in zip(leaves, (first, other)[replay % 2]):
                leaf.copy_(x)
        graph.replay()
        assert all_same([x.detach() for x in results], expected[replay % 2]), f"replay {replay}"


def test_layers_and_backward_share_one_read_of_the_lengths(monkeypatch):
    reads, read = [], lengths._lengths
    monkeypatch.setattr(lengths._READS, "_make", lambda name, ends: reads.append(name) or read(name, ends))
    q, k, v = inputs("packed")
    ends, x = cu(*ENDS), q
    for _ in range(3):
        x = flash_attn_varlen_func(x, k, v, ends, ends, causal=True)
    x.sum().backward()
    assert reads == ["cu_seqlens_q"]
    ends[1] -= 1  # a write that PyTorch counts
    found = flash_attn_varlen_func(q, k, v, ends, ends, causal=True)
    assert reads == ["cu_seqlens_q"] * 2
    fresh = ends.clone()
    assert same_bytes(found, flash_attn_varlen_func(q, k, v, fresh, fresh, causal=True))


UNCOUNTED_WRITE = """
import torch
from dash_attn import flash_attn_varlen_func
q = torch.randn(20, 2, 64, device="cuda", dtype=torch.bfloat16)
ends = torch.tensor([0, 5, 20], dtype=torch.int32, device="cuda")
flash_attn_varlen_func(q, q, q, ends, ends)
torch.cuda.synchronize()
print("first call passed", flush=True)
ends.data[1] = 9
flash_attn_varlen_func(q, q, q, ends, ends)
torch.cuda.synchronize()
print("second call passed", flush=True)
"""


def test_lengths_changed_behind_pytorch_end_the_process():
    """Silently wrong results would be worse."""
    done = subprocess.run([sys.executable, "-c", UNCOUNTED_WRITE], capture_output=True, text=True)
    assert done.stdout == "first call passed\n"
    assert done.returncode
    assert "device-side assert" in done.stderr


def test_lengths_that_were_not_read_are_an_error_in_a_capture():
    q, k, v = (x.detach() for x in inputs("packed"))
    ends = cu(*ENDS)
    flash_attn_varlen_func(q, k, v, ends, ends)
    others = ends.clone()
    torch.cuda.synchronize()
    with (
        pytest.raises(
            InputError, match="cu_seqlens_q on cuda:0 cannot be read while a CUDA graph is captured"
        ),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        flash_attn_varlen_func(q, k, v, others, others)
    torch.cuda.synchronize()
    flash_attn_varlen_func(q, k, v, others, others)


@BOTH_LAYOUTS
def test_a_repeated_call_does_not_wait_for_the_device(layout):
    tensors, run = inputs(layout), causal(layout)
    others = cu(0, len(tensors[0]))
    gradients(run, tensors)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(run, tensors)
        if layout == "packed":  # the control: lengths that are new are read
            with pytest.raises(RuntimeError, match="synchronizing"):
                attend(AUTO, *tensors, others)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_sequence_has_the_bytes_it_has_alone():
    tensors = inputs("packed")
    together = gradients(causal("packed"), tensors)
    for start, end in pairwise(ENDS):
        if start < end:
            alone = gradients(causal("dense"), [x[None, start:end] for x in tensors])
            assert all_same([x[start:end] for x in together], [x[0] for x in alone])


@ALL_WAYS
@BOTH_LAYOUTS
def test_streams_share_nothing(layout, way, apart):
    run = causal(layout, way)
    tensors = [inputs(layout, seed=seed, way=way) for seed in range(3)]
    expected = [gradients(run, x) for x in tensors]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in tensors]
    results = []
    for _ in range(10):
        for stream, x, wanted in zip(streams, tensors, expected):
            with torch.cuda.stream(stream):
                results.append((gradients(run, x), wanted))
    torch.cuda.synchronize()
    assert all(all_same(found, wanted) for found, wanted in results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    tensors = inputs("dense", dtype=torch.float32)
    expected = gradients(causal("dense"), [x.to(dtype) for x in tensors])
    with torch.autocast("cuda", dtype=dtype):
        found = gradients(causal("dense"), tensors)
    assert all_same([found[0], *(x.to(dtype) for x in found[1:])], expected)
    assert [is_supported(*x).backend for x in (tensors, [y.to(dtype) for y in tensors])] == ["triton", "sm90"]


@ALL_WAYS
@BOTH_LAYOUTS
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_have_the_same_bytes(layout, use_reentrant, way):
    tensors, run = inputs(layout, way=way), causal(layout, way)
    found = gradients(lambda *x: checkpoint(run, *x, use_reentrant=use_reentrant), tensors)
    assert all_same(found, gradients(run, tensors))


# deterministic=False

CONTROL_RUNS = 10


def repeats(**options: object) -> bool:
    """Whether all of a few backwards have the same bytes as the default.

    They are long enough to race, and have more heads than take turns: those add in order even if nobody asks.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(2, 4096, 16, 64, generator=generator, device="cuda", dtype=torch.bfloat16)
        for _ in range(3)
    )
    wanted = gradients(lambda *x: flash_attn_func(*x, causal=True), [q, k, v])
    found = [
        gradients(lambda *x: flash_attn_func(*x, causal=True, **options), [q, k, v])
        for _ in range(CONTROL_RUNS)
    ]
    return all(all_same(wanted, other) for other in found)


def test_without_order_bytes_differ(monkeypatch):
    monkeypatch.delenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", raising=False)
    monkeypatch.delenv("FLASH_ATTENTION_DETERMINISTIC", raising=False)
    assert repeats()
    assert repeats(deterministic=True)
    assert not repeats(deterministic=False)


@pytest.mark.parametrize(
    ("name", "value"), [("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0"), ("FLASH_ATTENTION_DETERMINISTIC", "1")]
)
def test_the_environment_keeps_the_order(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert repeats(deterministic=False)


@pytest.mark.parametrize("warn_only", [False, True])
def test_deterministic_algorithms_keep_the_order(warn_only):
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        assert repeats(deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)

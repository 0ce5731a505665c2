"""The public functions by the Triton kernels, on any GPU: numbers beside the oracle's, and bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import dash_attn
from dash_attn.backends.base import NO_AUX, AuxTensors
from dash_attn.backends.cpu import plain_attention
from dash_attn.backends.cpu.oracle import Inputs, Results, sink_gradient
from dash_attn.integrations import sdpa
from dash_attn.scores import Scores
from dash_attn.testing import assert_same_bytes, same_bytes
from gpu_cases import CAUSAL, relative_error
from interval_cases import random_intervals
from triton_cases import GPU_BOUND, NAMES

pytest.importorskip("triton", reason="Triton is not installed")

DEVICE = torch.device("cuda", 0)
on_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="the sm90 backend is for Hopper",
)


def leaves_of(
    seqlen: int, head_dim: int, dtype: torch.dtype, heads: int = 4, kv_heads: int = 2
) -> tuple[list[Tensor], Tensor]:
    """q, k, v and the gradient of out, dense."""
    generator = torch.Generator("cuda").manual_seed(seqlen)
    sizes = [(2, seqlen, h, head_dim) for h in (heads, kv_heads, kv_heads, heads)]
    *leaves, dout = (torch.randn(s, generator=generator, device="cuda").to(dtype) for s in sizes)
    return [x.requires_grad_() for x in leaves], dout


def exactly(
    leaves: list[Tensor], dout: Tensor, softcap: float = 0.0, aux: AuxTensors = NO_AUX
) -> dict[str, Tensor]:
    """What :func:`trained` should give, by the oracle."""
    q, k, v = (x.detach() for x in leaves)
    scores = Scores(q.shape[3] ** -0.5, softcap)
    parts = [plain_attention(Inputs(*one), CAUSAL, scores, aux=aux) for one in zip(dout, q, k, v)]
    return {name: torch.stack([getattr(part, name) for part in parts]) for name in NAMES}


def trained(leaves: list[Tensor], dout: Tensor, **how: Any) -> dict[str, Tensor]:
    out, lse = dash_attn.flash_attn_func(*leaves, causal=True, return_lse=True, **how)
    return dict(zip(NAMES, (out, lse, *torch.autograd.grad(out, leaves, dout))))


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(32, torch.bfloat16), (24, torch.float16), (64, torch.float32)],
)
def test_auto_takes_triton_where_sm90_does_not_cover_a_call(head_dim: int, dtype: torch.dtype) -> None:
    leaves, dout = leaves_of(500, head_dim, dtype)
    assert dash_attn.is_supported(*leaves, causal=True).backend == "triton"
    first = trained(leaves, dout)
    exact = exactly(leaves, dout)
    for name, got in first.items():
        assert relative_error(got, exact[name]) < GPU_BOUND[str(dtype).removeprefix("torch.")], name
    for _ in range(5):
        for name, got in trained(leaves, dout).items():
            assert_same_bytes(got, first[name], name)


def test_compiled_and_checkpointed_calls_have_the_same_bytes() -> None:
    leaves, dout = leaves_of(300, 136, torch.bfloat16)

    def run(*tensors: Tensor) -> Tensor:
        return dash_attn.flash_attn_func(*tensors, causal=True)

    expected = torch.autograd.grad(run(*leaves), leaves, dout)
    for call in (torch.compile(run, fullgraph=True), lambda *x: checkpoint(run, *x, use_reentrant=False)):
        for got, wanted in zip(torch.autograd.grad(call(*leaves), leaves, dout), expected):
            assert_same_bytes(got, wanted)


def test_sdpa_runs_head_dims_that_sm90_does_not_have() -> None:
    leaves, dout = leaves_of(200, 136, torch.bfloat16, heads=2)
    turned = [x.transpose(1, 2) for x in leaves]
    with sdpa.enabled():
        out = F.scaled_dot_product_attention(*turned, is_causal=True).transpose(1, 2)
    assert_same_bytes(out, dash_attn.flash_attn_func(*leaves, causal=True))
    assert torch.autograd.grad(out, leaves, dout)[0].isfinite().all()


@on_hopper
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, "bfloat16"), (128, "float16"), (256, "bfloat16"), (64, "float32")]
)
def test_softcap(head_dim: int, dtype: str) -> None:
    """``auto`` runs it where the Hopper kernels do not; ``test_gpu_softcap.py`` is of those."""
    leaves, dout = leaves_of(500, head_dim, getattr(torch, dtype))
    how: dict[str, Any] = {"softcap": 2.0}
    reason = dash_attn.is_supported(*leaves, backend="sm90", **how).reason
    if dtype == "float32":
        assert reason == "dtype float32 is not supported by sm90; supported: bfloat16, float16"
    else:
        assert not reason
    assert dash_attn.is_supported(*leaves, **how).backend == ("triton" if reason else "sm90")
    how["backend"] = "triton"
    first = trained(leaves, dout, **how)
    exact = exactly(leaves, dout, softcap=2.0)
    for name, got in first.items():
        assert relative_error(got, exact[name]) < 2 * GPU_BOUND[dtype], name
    for name, got in trained(leaves, dout, **how).items():
        assert_same_bytes(got, first[name], name)
    assert not same_bytes(first["out"], trained(leaves, dout, backend="triton")["out"])


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, "bfloat16"), (128, "float16"), (256, "bfloat16"), (64, "float32")]
)
def test_sinks(head_dim: int, dtype: str) -> None:
    """With the gradient of the sink."""
    leaves, dout = leaves_of(500, head_dim, getattr(torch, dtype))
    sink = torch.tensor([-1.0, 0.5, 2.0, 4.0], device="cuda").requires_grad_()
    how: dict[str, Any] = {"learnable_sink": sink, "backend": "triton"}
    first, exact = trained(leaves, dout, **how), exactly(leaves, dout, aux=AuxTensors(sink.detach()))
    for name, got in first.items():
        assert relative_error(got, exact[name]) < 2 * GPU_BOUND[dtype], name
    out = dash_attn.flash_attn_func(*leaves, causal=True, **how)
    (dsink,) = torch.autograd.grad(out, sink, dout)
    wanted = torch.zeros(4, dtype=torch.float64, device="cuda")
    for at in range(2):
        one = Results(*(exact[name][at] for name in NAMES))
        wanted += sink_gradient(dout[at], one, sink.detach())
    assert relative_error(dsink, wanted) < 4 * GPU_BOUND[dtype]
    for _ in range(5):
        out = dash_attn.flash_attn_func(*leaves, causal=True, **how)
        assert_same_bytes(out, first["out"])
        assert_same_bytes(torch.autograd.grad(out, sink, dout)[0], dsink)


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, "bfloat16"), (128, "float16"), (256, "bfloat16"), (64, "float32")]
)
def test_alibi(head_dim: int, dtype: str) -> None:
    leaves, dout = leaves_of(500, head_dim, getattr(torch, dtype))
    slopes = torch.tensor([0.5, 0.1, 0.02, 0.0], device="cuda")
    how: dict[str, Any] = {"alibi_slopes": slopes}
    assert dash_attn.is_supported(*leaves, **how).backend == "triton"
    assert not dash_attn.is_supported(*leaves, backend="sm90", **how)
    first, exact = trained(leaves, dout, **how), exactly(leaves, dout, aux=AuxTensors(None, slopes))
    for name, got in first.items():
        assert relative_error(got, exact[name]) < 2 * GPU_BOUND[dtype], name
    for name, got in trained(leaves, dout, **how).items():
        assert_same_bytes(got, first[name], name)


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, "bfloat16"), (128, "float16"), (256, "bfloat16"), (64, "float32")]
)
def test_dropout(head_dim: int, dtype: str) -> None:
    """What the CPU drops. A seed that is drawn follows torch.manual_seed."""
    leaves, dout = leaves_of(500, head_dim, getattr(torch, dtype))
    how: dict[str, Any] = {"dropout_p": 0.2, "dropout_seed": 2**40 + 1}
    assert dash_attn.is_supported(*leaves, **how).backend == "triton"
    assert not dash_attn.is_supported(*leaves, backend="sm90", **how)
    first = trained(leaves, dout, **how)
    q, k, v = (x.detach() for x in leaves)
    scores, aux = Scores(head_dim**-0.5, dropout_p=0.2), AuxTensors(dropout_seed=torch.tensor(2**40 + 1))
    for at, one in enumerate(zip(dout, q, k, v)):
        exact = plain_attention(Inputs(*one), CAUSAL, scores, aux=aux, sequence=at)._asdict()
        for name, got in first.items():
            assert relative_error(got[at], exact[name]) < 2 * GPU_BOUND[dtype], name
    for name, got in trained(leaves, dout, **how).items():
        assert_same_bytes(got, first[name], name)
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append([trained(leaves, dout, dropout_p=0.2) for _ in range(2)])
    for one_run, other in zip(*runs):
        for name, got in one_run.items():
            assert_same_bytes(got, other[name], name)
    assert not same_bytes(runs[0][0]["out"], runs[0][1]["out"])


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "dtype"),
    [(64, 64, "bfloat16"), (128, 64, "float16"), (192, 128, "bfloat16"), (64, 24, "float32")],
)
def test_all_that_scores_take_at_once(head_dim: int, head_dim_v: int, dtype: str) -> None:
    """Softcap, sink, ALiBi, dropout and intervals of rows, and V with a head dim of its own; twice."""
    (q, k, v), dout = leaves_of(500, head_dim, getattr(torch, dtype))
    leaves = [q, k, v.detach()[..., :head_dim_v].contiguous().requires_grad_()]
    dout = dout[..., :head_dim_v].contiguous()
    sink = torch.tensor([-1.0, 0.5, 2.0, 4.0], device="cuda").requires_grad_()
    slopes = torch.tensor([[0.5, 0.1, 0.02, 0.0], [0.0, 0.3, 0.1, 0.2]], device="cuda")
    each = [[x.to(DEVICE) for x in random_intervals(500, 500, seed)] for seed in (1, 2)]
    starts, ends = (torch.stack(side) for side in zip(*each))
    how: dict[str, Any] = {"softcap": 2.0, "learnable_sink": sink, "alibi_slopes": slopes, "dropout_p": 0.2}
    how |= {"dropout_seed": 7, "row_starts": starts, "row_ends": ends}
    scores = Scores(head_dim**-0.5, 2.0, True, True, dropout_p=0.2, row_intervals=True)
    first, dsink = trained(leaves, dout, **how), torch.zeros(4, dtype=torch.float64, device="cuda")
    for at, one in enumerate(zip(dout, *(x.detach() for x in leaves))):
        aux = AuxTensors(sink.detach(), slopes[at], torch.tensor(7), starts[at], ends[at])
        exact = plain_attention(Inputs(*one), CAUSAL, scores, aux=aux, sequence=at)
        dsink += sink_gradient(one[0], exact, sink.detach())
        for name, got in first.items():
            assert relative_error(got[at], getattr(exact, name)) < 2 * GPU_BOUND[dtype], name
    out = dash_attn.flash_attn_func(*leaves, causal=True, **how)
    assert relative_error(torch.autograd.grad(out, sink, dout)[0], dsink) < 4 * GPU_BOUND[dtype]
    for name, got in trained(leaves, dout, **how).items():
        assert_same_bytes(got, first[name], name)

"""Learnable sinks in the Hopper kernels: accuracy, bytes, and a model that trains with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dash_attn
from dash_attn import attention, flash_attn_varlen_func
from dash_attn.backends.base import AuxTensors
from dash_attn.backends.cpu import plain_attention
from dash_attn.backends.cpu.oracle import Inputs, Results, sink_gradient
from dash_attn.problem import Mask
from dash_attn.scores import Scores
from dash_attn.testing import assert_same_bytes, same_bytes
from gpu_cases import relative_error

NAMES = ("out", "dq", "dk", "dv")
MASKS: dict[str, tuple[Mask, dict[str, Any]]] = {
    "full": (Mask.full(), {}),
    "causal": (Mask.causal(), {"causal": True}),
    "window": (Mask.window(100, 0), {"causal": True, "window": (100, 0)}),
}


def drawn(
    rows: int, keys: int, head_dim: int, dtype: torch.dtype = torch.bfloat16, batch: int = 2
) -> tuple[list[Tensor], Tensor]:
    """q, k, v and the sink, and the gradient of out."""
    generator = torch.Generator("cuda").manual_seed(rows)
    sizes = [(batch, n, h, head_dim) for n, h in ((rows, 4), (keys, 2), (keys, 2), (rows, 4))]
    q, k, v, dout = (torch.randn(s, generator=generator, device="cuda").to(dtype) for s in sizes)
    sink = torch.tensor([-1.0, 0.5, 2.0, 4.0], device="cuda").to(dtype)
    return [x.requires_grad_() for x in (q, k, v, sink)], dout


def run(tensors: list[Tensor], dout: Tensor, **how: Any) -> list[Tensor]:
    """out, lse, dq, dk, dv, dsink."""
    out, lse = attention(*tensors[:3], learnable_sink=tensors[3], return_lse=True, **how)
    return [out, lse, *torch.autograd.grad(out, tensors, dout)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.bfloat16), (128, torch.float16)])
@pytest.mark.parametrize(("rows", "keys"), [(500, 500), (130, 700), (300, 100)])
def test_accuracy(rows: int, keys: int, head_dim: int, dtype: torch.dtype, mask: str) -> None:
    """Beside float64, errors are at most twice those of plain PyTorch in the same dtype."""
    tensors, dout = drawn(rows, keys, head_dim, dtype)
    which, how = MASKS[mask]
    assert dash_attn.is_supported(*tensors[:3], learnable_sink=tensors[3], **how).backend == "sm90"
    out, lse, dq, dk, dv, dsink = run(tensors, dout, **how)
    q, k, v, sink = (x.detach() for x in tensors)
    both: list[list[Results]] = [
        [
            plain_attention(Inputs(*one), which, Scores(head_dim**-0.5), kind, aux=AuxTensors(sink))
            for one in zip(dout, q, k, v)
        ]
        for kind in (torch.float64, dtype)
    ]
    for name, got in zip(NAMES, (out, dq, dk, dv)):
        exact, plain = (torch.stack([getattr(x, name) for x in found]) for found in both)
        assert relative_error(got, exact) <= 2 * relative_error(plain.to(dtype), exact) + 1e-5, name
    exact_lse = torch.stack([x.lse for x in both[0]])
    torch.testing.assert_close(lse.double(), exact_lse, atol=2e-5, rtol=2e-5)
    wanted, rounded = (sum(sink_gradient(d, x, sink) for d, x in zip(dout, found)) for found in both)
    assert relative_error(dsink, wanted) <= 2 * relative_error(rounded.to(dtype), wanted) + 1e-2


@pytest.mark.parametrize("head_dim", [64, 128])
def test_bytes(head_dim: int) -> None:
    """Run by run, packed, chunk by chunk, and one query whose keys are split among blocks."""
    tensors, dout = drawn(20_000, 20_000, head_dim, batch=1)
    found = run(tensors, dout, causal=True)
    for got, again in zip(found, run(tensors, dout, causal=True)):
        assert_same_bytes(got, again)
    q, k, v, sink = (x.detach() for x in tensors)
    for first, last in ((0, 8_300), (16_300, 16_301), (19_999, 20_000)):
        part = attention(
            q[:, first:last], k[:, :last], v[:, :last], causal=True, learnable_sink=sink, return_lse=True
        )
        assert_same_bytes(part[0], found[0][:, first:last].contiguous())
        assert_same_bytes(part[1], found[1][..., first:last].contiguous())
    assert not same_bytes(found[0], attention(q, k, v, causal=True))
    ends = torch.tensor([0, 700, 1_000], dtype=torch.int32)
    rows = [x[0, :1_000].detach().requires_grad_() for x in tensors[:3]]
    packed = flash_attn_varlen_func(*rows, ends, ends, causal=True, learnable_sink=sink)
    assert_same_bytes(packed[:700], found[0][0, :700].contiguous())


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_gradient_of_a_sink_is_the_sum_over_sequences_in_their_order(head_dim: int) -> None:
    tensors, dout = drawn(1_300, 1_300, head_dim, torch.float16, batch=3)
    tensors[3] = tensors[3].detach().float().requires_grad_()
    whole = run(tensors, dout, causal=True)[5]
    parts = []
    for at in range(3):
        one = [*(x[at : at + 1].detach().requires_grad_() for x in tensors[:3]), tensors[3]]
        parts.append(run(one, dout[at : at + 1], causal=True)[5])
    assert_same_bytes(whole, parts[0] + parts[1] + parts[2])
    ends = torch.tensor([0, 1_300, 2_600, 3_900], dtype=torch.int32)
    q, k, v = (x.detach().flatten(0, 1) for x in tensors[:3])
    out = flash_attn_varlen_func(q, k, v, ends, ends, causal=True, learnable_sink=tensors[3])
    (packed,) = torch.autograd.grad(out, tensors[3], dout.flatten(0, 1))
    assert_same_bytes(packed, whole)


@pytest.mark.parametrize("backend", ["sm90", "triton"])
def test_the_gradient_of_a_sink_has_its_bytes_however_sequences_are_cut(backend: str) -> None:
    lengths = [700, 100, 0, 256, 1_030, 700]
    tensors, dout = drawn(sum(lengths), sum(lengths), 128, batch=1)
    q, k, v, sink = (x.detach() if x.ndim == 1 else x.detach()[0] for x in tensors)
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def of_sink(first: int, last: int, dense: bool, q_segment: int | None) -> Tensor:
        """Of the sequences from the first one to the one before the last."""
        leaf, rows = sink.clone().requires_grad_(), slice(int(ends[first]), int(ends[last]))
        how: dict[str, Any] = {"causal": True, "learnable_sink": leaf, "q_segment": q_segment}
        if dense:
            parts = [x[rows].unflatten(0, (last - first, -1)) for x in (q, k, v, dout[0])]
            out = attention(*parts[:3], backend=backend, **how)
            return torch.autograd.grad(out, leaf, parts[3])[0]
        bounds = ends[first : last + 1] - ends[first]
        out = flash_attn_varlen_func(q[rows], k[rows], v[rows], bounds, bounds, backend=backend, **how)
        return torch.autograd.grad(out, leaf, dout[0, rows])[0]

    for first, last, dense in ((0, 6, False), (4, 5, True)):
        whole = of_sink(first, last, dense, None)
        for q_segment in (128, 256, 512):
            assert_same_bytes(of_sink(first, last, dense, q_segment), whole)
    assert_same_bytes(of_sink(4, 5, True, 256), of_sink(4, 5, False, 256))


def test_it_is_like_tritons() -> None:
    tensors, dout = drawn(700, 700, 64)
    ours, theirs = (run(tensors, dout, causal=True, backend=name) for name in ("sm90", "triton"))
    for got, other in zip(ours, theirs):
        assert relative_error(got, other.double()) < 0.01


def test_rows_without_keys_and_no_rows() -> None:
    tensors, dout = drawn(300, 100, 64)
    out, lse, *grads = run(tensors, dout, causal=True)
    assert not out[:, :200].any()
    wanted = tensors[3].detach().float()[None, :, None].expand(2, 4, 200)
    torch.testing.assert_close(lse[..., :200], wanted, atol=1e-6, rtol=1e-6)
    assert all(x.isfinite().all() for x in grads)
    q, k, v, sink = (x.detach() for x in tensors)
    none = attention(q, k[:, :0], v[:, :0], learnable_sink=sink, return_lse=True)[1]
    assert_same_bytes(none, sink.float()[None, :, None].expand(2, 4, 300).contiguous())


@pytest.mark.parametrize("backend", ["sm90", "triton"])
def test_a_sink_that_takes_all_weight_has_a_gradient_of_0(backend: str) -> None:
    tensors, dout = drawn(300, 300, 64)
    for large in (1.1e11, 2.3e11, 7.7e15, 2.3e18):
        tensors[3] = torch.tensor([0.5, large, -large, large], device="cuda").requires_grad_()
        *others, dsink = run(tensors, dout, causal=True, backend=backend)
        assert [float(x) != 0 for x in dsink] == [True, False, False, False], dsink
        assert all(x.isfinite().all() for x in (*others, dsink))


def trained(implementation: str, steps: int = 3) -> tuple[list[float], list[Tensor]]:
    """Losses and weights of a gpt-oss-like model, whose heads have 64 values."""
    import transformers

    import dash_attn.integrations.transformers as integration

    integration.register()
    config = transformers.GptOssConfig(
        vocab_size=99, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, num_local_experts=2, num_experts_per_tok=1, sliding_window=70,
        attn_implementation=implementation,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config).to("cuda", torch.bfloat16).train()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        tokens = torch.randint(99, (2, 200), generator=torch.Generator().manual_seed(step)).cuda()
        loss = model(tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [x.detach() for x in model.parameters()]


def test_a_model_trains_as_in_eager_and_twice_to_the_same_bytes() -> None:
    pytest.importorskip("transformers")
    losses, weights = trained("dash")
    expected, _ = trained("eager")
    assert losses == pytest.approx(expected, rel=0.01)
    assert losses[-1] != losses[0]
    again = trained("dash")
    assert again[0] == losses
    for got, other in zip(again[1], weights):
        assert_same_bytes(got, other)

"""Head dims of 200 to 256, emulated: what the cases of test_emulated.py do not show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from emulator.backend import emulated
from torch import Tensor

from dash_attn import flash_attn_func
from dash_attn.backends.base import Tensors
from dash_attn.backends.cpu import fold_partials, plain_attention
from dash_attn.backends.cpu.oracle import Inputs
from dash_attn.backends.sm90.backend import BACKEND
from dash_attn.backends.sm90.forward.launch import Forward, config_of
from dash_attn.backends.sm90.launch import Debug, run_backward
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import Shift, build_plan
from dash_attn.scores import Scores
from dash_attn.testing import assert_same_bytes

pytest.importorskip("cutlass", reason="the kernel compiler is not installed: pip install 'dash-attn[cuda]'")
pytest.importorskip("tvm_ffi", reason="the kernel compiler is not installed: pip install 'dash-attn[cuda]'")

CPU = torch.device("cpu")


def drawn(*shapes: tuple[int, ...]) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)


@pytest.mark.slow
def test_segments_of_keys() -> None:
    """Here they have 128 keys. A block folds its own; where tiles are split, another kernel folds them."""
    q, k, v = drawn((1, 150, 2, 256), (1, 700, 1, 256), (1, 700, 1, 256))
    problem = Problem(((150, 700),), 2, 1, 256, Mask.causal(), tile_m=64, tile_n=64)
    exact = plain_attention(Inputs(q[0], q[0], k[0], v[0]), problem.mask, 256**-0.5, q_start=550)
    found = []
    for blocks in (1, 20):
        with emulated(blocks=blocks, seed=blocks, races=True):
            config = replace(config_of(problem), segment=128)
            forward = Forward(problem, CPU, blocks=blocks, config=config)
            assert (forward.plan().places > 0) == (blocks > 1)
            found.append(forward(q, k, v, 256**-0.5))
    out, lse = found[0]
    assert (out[0].double() - exact.out).norm() < 4e-3 * exact.out.norm()
    assert (lse[0].double() - exact.lse).abs().max() < 1e-4
    for x, again in zip(*found):
        assert_same_bytes(x, again)


@pytest.mark.slow
def test_dq_is_what_the_plan_says() -> None:
    """Contributions, which leave in pieces, are whole, and are added in the order of their tickets."""
    dout, q, k, v = drawn(*[(1, 250, 1, 256)] * 4)
    problem = Problem.dense(seqlen=250, head_dim=256, tile_m=64, tile_n=64)
    exact = plain_attention(Inputs(dout[0], q[0], k[0], v[0]), problem.mask, 256**-0.5)
    tensors = Tensors(dout, q, k, v, exact.out[None].bfloat16(), exact.lse[None].float())
    plan = build_plan(problem, Shift(ring=2))
    kinds = (Debug(), Debug(contributions=True), Debug(bounded=True), Debug(bounded=True, trace=True))
    with emulated(blocks=3, seed=4, races=True):
        plain, kept, bounded, traced = (run_backward(plan, tensors, 256**-0.5, debug=d) for d in kinds)
    for tile, by_ticket in enumerate(kept.dq_contributions):
        folded = fold_partials(list(by_ticket), 1.0, torch.float32)
        assert_same_bytes(folded, kept.dq_tiles[tile], f"dQ tile {tile}")
    for name in ("dq", "dk", "dv"):
        for other in (kept, bounded, traced):
            assert_same_bytes(getattr(plain, name), getattr(other, name), name)


@pytest.mark.slow
def test_fewer_columns_have_the_bytes_of_padded_tensors() -> None:
    tensors = list(drawn((1, 130, 2, 208), (1, 200, 1, 208), (1, 200, 1, 248), (1, 130, 2, 248)))
    columns = (208, 208, 248)

    def run(inputs: list[Tensor]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs[:3]]
        out = flash_attn_func(*leaves, softmax_scale=0.07, causal=True, backend="sm90")
        return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]

    with emulated(blocks=3):
        few = run(tensors)
        whole = run([F.pad(x, (0, 256 - x.shape[-1])) for x in tensors])
    for x, padded, there in zip(few, whole, (248, *columns)):
        assert_same_bytes(x, padded[..., :there].contiguous())


# What is chosen


def reason(head_dim: int, head_dim_v: int, **scores: float) -> str:
    problem = Problem(((10, 10),), 1, 1, head_dim, head_dim_v=head_dim_v, tile_m=64, tile_n=64)
    return BACKEND.why_not(problem, CPU, False, Scores(0.1, **scores))


def test_what_runs_on_them() -> None:
    with emulated():
        for pair in ((256, 256), (200, 248), (192, 136), (136, 192), (256, 8)):
            assert not reason(*pair)
            assert BACKEND.tiles(*pair) == (64, 64)
        assert BACKEND.tiles(192, 128) == (64, 128)
        for pair in ((264, 264), (256, 100), (204, 204)):
            assert "is not supported by sm90" in reason(*pair)
        assert reason(256, 256, softcap=30.0) == ""
        said = "softcap 30.0 is not supported by sm90 at head_dim 192 (V: 128)"
        assert reason(192, 128, softcap=30.0) == said


def test_out_has_a_fingerprint_of_its_tiles() -> None:
    with emulated():
        shown = []
        for head_dim in (128, 256):
            tiles = BACKEND.tiles(head_dim, head_dim)
            problem = Problem.dense(seqlen=300, head_dim=head_dim, tile_m=tiles[0], tile_n=tiles[1])
            plan = Forward(problem, CPU, blocks=2).plan()
            fingerprint = BACKEND.prepare(problem, CPU, False).forward_fingerprint
            assert fingerprint == plan.numerics.fingerprint
            shown.append(plan.numerics.tile)
    assert shown == [128, 64]

"""Random problems over all features, against float64; errors are at most twice those of plain PyTorch.

``DASH_ATTN_PROBLEMS`` problems in all, dealt to the kinds below: what a kernel is compiled for is fixed per
kind, what it is given is drawn.
"""

from __future__ import annotations

import os
import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dash_attn import attention, is_supported
from dash_attn.backends.base import AuxTensors
from dash_attn.backends.cpu.dropout import dropout_of
from dash_attn.scores import Scores
from dash_attn.testing import assert_same_bytes

PROBLEMS = int(os.environ.get("DASH_ATTN_PROBLEMS", "60"))
ALL = ("softcap", "sink", "alibi", "intervals", "dropout")


class Kind(NamedTuple):
    """Head dims of Q and V, dtype, features, and the backend that ``auto`` must take."""

    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    features: tuple[str, ...] = ()
    backend: str = "triton"


KINDS = (
    Kind(64, 64, torch.bfloat16, ("softcap",), "sm90"),
    Kind(128, 128, torch.float16, ("softcap", "sink"), "sm90"),
    Kind(40, 40, torch.bfloat16, ("softcap",), "sm90"),
    Kind(64, 64, torch.bfloat16, ("softcap", "alibi")),
    Kind(256, 256, torch.bfloat16, ("softcap",)),
    Kind(192, 128, torch.bfloat16, backend="sm90"),
    Kind(192, 128, torch.float16, ("intervals", "dropout")),
    Kind(96, 96, torch.bfloat16, ("alibi",)),
    Kind(32, 32, torch.float32, ("alibi", "dropout")),
    Kind(64, 64, torch.bfloat16, ("dropout",)),
    Kind(80, 80, torch.float16, ("intervals",)),
    Kind(16, 48, torch.float32, ("softcap", "sink", "intervals")),
    Kind(128, 128, torch.bfloat16, ALL),
    Kind(128, 64, torch.float16, ("sink", "intervals")),
    Kind(64, 64, torch.bfloat16, ("sink",), "sm90"),
    Kind(96, 96, torch.float16, ("sink",), "sm90"),
    Kind(120, 120, torch.bfloat16, (), "sm90"),
)


class Drawn(NamedTuple):
    """q, k, v and a sink if there is one; the gradient of out; keywords; which weights dropout keeps."""

    leaves: list[Tensor]
    dout: Tensor
    how: dict[str, Any]
    kept: Tensor | None


def drawn(kind: Kind, seed: int) -> Drawn:
    rng, generator = random.Random(seed), torch.Generator("cuda").manual_seed(seed)
    batch, kv_heads, group = rng.randint(1, 3), rng.randint(1, 3), rng.choice((1, 1, 2, 4))
    rows = rng.choice((1, rng.randint(2, 130), rng.randint(130, 500)))
    keys = rng.choice((rows, rng.randint(1, 600)))
    heads = kv_heads * group

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda").to(kind.dtype)

    q, dout = normal(batch, rows, heads, kind.head_dim), normal(batch, rows, heads, kind.head_dim_v)
    k, v = normal(batch, keys, kv_heads, kind.head_dim), normal(batch, keys, kv_heads, kind.head_dim_v)
    how: dict[str, Any] = rng.choice(
        ({}, {"causal": True}, {"causal": True, "window": (rng.randint(0, 200), 0)})
    )
    leaves, scores, kept = [q, k, v], Scores(1.0), None
    if "softcap" in kind.features:
        how = how | {"softcap": rng.choice((1.0, 5.0, 30.0))}
    if "alibi" in kind.features:
        per = () if rng.random() < 0.5 else (batch,)
        how = how | {"alibi_slopes": torch.rand(*per, heads, generator=generator, device="cuda") * 0.1}
    if "intervals" in kind.features:
        starts = torch.randint(-3, rows, (batch, keys), generator=generator, device="cuda", dtype=torch.int32)
        how = how | {"row_starts": starts, "row_ends": starts + rng.choice((1, 40, rows))}
    if "sink" in kind.features:
        leaves = [*leaves, torch.randn(heads, generator=generator, device="cuda") * 2]
    if "dropout" in kind.features:
        scores, seed_there = Scores(1.0, dropout_p=rng.choice((0.1, 0.5))), rng.randrange(2**62)
        how = how | {"dropout_p": scores.dropout_p, "dropout_seed": seed_there}
        aux = AuxTensors(dropout_seed=torch.tensor(seed_there))
        kept = torch.stack([
            torch.stack([dropout_of(scores, aux, b, h).kept(0, 0, rows, keys) for h in range(heads)])
            for b in range(batch)
        ]).cuda()  # fmt: skip
    return Drawn([x.requires_grad_() for x in leaves], dout, how, kept)


def plain(drawn: Drawn, dtype: torch.dtype) -> list[Tensor]:
    """out and the gradients by PyTorch, in a dtype."""
    how, leaves = drawn.how, [x.detach().to(dtype).requires_grad_() for x in drawn.leaves]
    q, k, v, *sink = leaves
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    if cap := how.get("softcap"):
        s = cap * torch.tanh(s / cap)
    row = torch.arange(s.shape[2], device="cuda")[:, None]
    column, position = torch.arange(s.shape[3], device="cuda"), row + s.shape[3] - s.shape[2]
    if (slopes := how.get("alibi_slopes")) is not None:
        s = s - slopes.to(dtype).view(-1, slopes.shape[-1], 1, 1) * (position - column).abs()
    hidden = torch.zeros(len(q), 1, *s.shape[2:], dtype=torch.bool, device="cuda")
    if how.get("causal"):
        hidden |= column > position
    if window := how.get("window"):
        hidden |= column < position - window[0]
    if (starts := how.get("row_starts")) is not None:
        starts, ends = (how[name][:, None, None] for name in ("row_starts", "row_ends"))
        hidden |= (row < starts) | (row >= ends)
    s = s.masked_fill(hidden, -torch.inf)
    if sink:
        s = torch.cat([s, sink[0].to(dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)], 3)
    wide = torch.promote_types(dtype, torch.float32)
    p = s.to(wide).softmax(3).nan_to_num(0.0).to(dtype)[..., : k.shape[1]]
    if drawn.kept is not None:
        p = p * drawn.kept / (1 - how["dropout_p"])
    out = torch.einsum("bhqk,bkhd->bqhd", p, v)
    return [out, *torch.autograd.grad(out, leaves, drawn.dout.to(dtype))]


def run(drawn: Drawn) -> list[Tensor]:
    """out and the gradients."""
    sink = {} if len(drawn.leaves) == 3 else {"learnable_sink": drawn.leaves[3]}
    out = attention(*drawn.leaves[:3], **drawn.how, **sink)
    return [out, *torch.autograd.grad(out, drawn.leaves, drawn.dout)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join((*map(str, kind[:3]), *kind.features)))
def test_errors_and_bytes(kind: Kind) -> None:
    for seed in range(-(-PROBLEMS // len(KINDS))):
        one = drawn(kind, seed)
        sink = {} if len(one.leaves) == 3 else {"learnable_sink": one.leaves[3]}
        assert is_supported(*one.leaves[:3], **one.how, **sink).backend == kind.backend
        found, exact, rounded = run(one), plain(one, torch.float64), plain(one, kind.dtype)
        for name, got, true, other in zip(("out", "dq", "dk", "dv", "dsink"), found, exact, rounded):
            error, allowed = ((x.double() - true).norm() for x in (got, other))
            # Of a row that sees one key dq is 0: what is left is the rounding of out, and of sums in float32.
            size = one.dout.double().norm() / (1 - one.how.get("dropout_p", 0.0))
            slack = torch.finfo(kind.dtype).eps * size + 1e-6 * (true.norm() + size)
            assert error <= 2 * allowed + slack, (
                seed,
                name,
                float(error),
                float(allowed),
                float(true.norm()),
            )
            assert got.isfinite().all(), (seed, name)
        for got, again in zip(found, run(one)):
            assert_same_bytes(got, again)

"""The forward kernel: how far it is from float64, and that a row's bytes depend on what it sees alone."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_gpu_accuracy import random_problem
from torch import Tensor

from dash_attn.backends.sm90.forward.config import forward_config
from dash_attn.backends.sm90.forward.launch import Forward
from dash_attn.backends.sm90.forward.traced import traced_forward
from dash_attn.backends.sm90.tiles import SHORT_DTYPES
from dash_attn.model.roofline import CLOCK_GHZ
from dash_attn.model.trace import measured_forward
from dash_attn.peers import fa4
from dash_attn.problem import Mask, Problem
from dash_attn.testing import same_bytes
from dash_attn.tools.cli import main
from gpu_cases import (
    any_case,
    dense,
    has_fa4,
    make_case,
    packed,
    relative_error,
)

PROBLEMS = int(os.environ.get("DASH_ATTN_PROBLEMS", "60"))
DEVICE = torch.device("cuda", 0)


def run(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: int | None = None,
    turns: bool | None = None,
    narrow: bool | None = None,
    **numbers: object,
) -> tuple[Tensor, Tensor]:
    config = replace(forward_config(problem.head_dim, SHORT_DTYPES[problem.dtype]), **numbers)
    return Forward(problem, DEVICE, blocks=blocks, config=config, turns=turns, narrow=narrow)(
        q, k, v, problem.head_dim**-0.5
    )


@pytest.mark.parametrize("number", range(PROBLEMS))
def test_error_is_no_worse_than_the_peers(number: int) -> None:
    problem = random_problem(number)
    outliers = number % 3 == 0
    case = make_case(problem, number, outliers)
    q, k, v = case.inputs[1:4]
    out, lse = run(problem, q, k, v)
    seen = case.exact["lse"] > -torch.inf
    assert torch.equal(lse == -torch.inf, ~seen)
    assert not out.transpose(-2, -3)[~seen].any()
    error = relative_error(out, case.exact["out"])
    allowed = 3e-3 if problem.dtype == "bfloat16" else 4e-4
    if has_fa4():
        peer = fa4.forward(q, k, v, case.scale, problem.mask)[0]
        # Where one key dominates a row, the peer's p of it is 1, and ours may be 1/32 to 32, rounded. In a
        # problem of few rows this is most of the error.
        factor = 2.0 if outliers else 1.1
        allowed = factor * relative_error(peer, case.exact["out"]) + 2e-5
    assert error <= allowed
    if seen.any():
        wrong = (lse.double() - case.exact["lse"])[seen].abs().max()
        assert float(wrong) <= 2e-5 * max(1.0, float(case.exact["lse"][seen].abs().max()))


def draw(rows: int, heads: int, head_dim: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(1, rows, heads, head_dim, generator=generator, device=DEVICE).bfloat16()


@pytest.mark.parametrize("number", range(PROBLEMS))
def test_a_rows_bytes_depend_on_what_it_sees_and_on_where_that_stands(number: int) -> None:
    rng = random.Random(number)
    head_dim, kv_heads, group = rng.choice((64, 96, 128)), rng.choice((1, 2)), rng.choice((1, 2, 4))
    length = rng.choice((rng.randint(1, 700), rng.randint(700, 3000), rng.randint(7000, 17_500)))
    mask = rng.choice((Mask.causal(), *(Mask.window(rng.randint(0, most), 0) for most in (31, 9000))))
    heads = kv_heads * group
    q = draw(length, heads, head_dim, number)
    k, v = (draw(length, kv_heads, head_dim, number + n) for n in (1000, 2000))
    # Scores that grow or fall along the keys: maxima rise late, again and again, and not in all rows alike.
    growth = torch.linspace(*rng.choice(((1, 1), (0.1, 9), (9, 0.1))), length, device=DEVICE)
    k = (k * growth[:, None, None]).bfloat16()

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask = mask, **how: int | bool):
        sizes = ((q.shape[1], k.shape[1]),) * q.shape[0]
        problem = Problem(sizes, q.shape[2], k.shape[2], head_dim, mask)
        return run(problem, q, k, v, **how)

    out, lse = attend(q, k, v)

    def check(
        found: tuple[Tensor, Tensor], start: int, end: int, what: str, heads: slice = slice(None)
    ) -> None:
        assert same_bytes(found[0], out[:, start:end, heads].contiguous()), f"out, {what}"
        assert same_bytes(found[1], lse[:, heads, start:end].contiguous()), f"lse, {what}"

    for turns in (False, True):
        check(attend(q, k, v, turns=turns), 0, length, f"products in turns: {turns}")
    check(attend(q, k, v, narrow=True), 0, length, "blocks of one warpgroup")
    start = rng.randrange(length)
    end = rng.randint(start + 1, length)
    check(attend(q[:, :end], k[:, :end], v[:, :end]), 0, end, "a prefix")
    check(attend(q[:, start:end], k[:, :end], v[:, :end]), start, end, "a chunk")
    check(attend(q[:, start:end], k[:, :end], v[:, :end], blocks=1), start, end, "a chunk, one worker")
    alone = q[:, end - 1 : end], k[:, :end], v[:, :end]
    check(attend(*alone), end - 1, end, "one query")
    check(attend(*alone, blocks=rng.randint(1, 132)), end - 1, end, "one query, other workers")
    if mask.is_causal:
        check(attend(*alone, Mask.full()), end - 1, end, "one query, full mask")
    one = attend(q[:, :, :group], k[:, :, :1], v[:, :, :1])
    check(one, 0, length, "fewer heads", slice(group))
    pair = attend(*(torch.cat([x, x.flip(1)]) for x in (q, k, v)))
    check((pair[0][:1], pair[1][:1]), 0, length, "a batch of two")
    other = (
        draw(77, heads, head_dim, 5)[0],
        draw(77, kv_heads, head_dim, 6)[0],
        draw(77, kv_heads, head_dim, 7)[0],
    )
    problem = Problem(((77, 77), (length, length)), heads, kv_heads, head_dim, mask)
    found = run(problem, *(torch.cat([a, b[0]]) for a, b in zip(other, (q, k, v))))
    check((found[0][None, 77:], found[1][None, :, 77:].contiguous()), 0, length, "packed")


TRACED = {
    "causal": (dense(seqlen=900, heads=8), None),
    "few blocks": (dense(seqlen=2000, head_dim=64), 3),
    "window": (dense(Mask.window(300, 0), seqlen=5000, batch=1, head_dim=64, dtype="float16"), None),
    "several segments": (dense(seqlen_q=200, seqlen_k=17_000, seqlen=None, batch=1), 2),
    "a fold": (dense(Mask.full(), seqlen_q=3, seqlen_k=17_000, seqlen=None, batch=1), None),
    "packed": (packed(300, 9000, 7), 20),
}


@pytest.mark.parametrize("name", TRACED)
def test_a_trace_says_when_and_where_every_item_ran(name: str) -> None:
    problem, blocks = TRACED[name]
    q, k, v = any_case(problem).inputs[1:4]
    out, lse = run(problem, q, k, v, blocks)
    found = traced_forward(problem, (q, k, v), blocks=blocks, runs=2)
    assert same_bytes(found.out, out)
    assert same_bytes(found.lse, lse)
    assert (len(found.plan.folds) > 0) == (name == "a fold")
    begin, end, sm = found.trace.cpu().T
    assert len(begin) == found.plan.items
    assert (begin > 0).all()
    assert (begin < end).all()
    assert ((sm >= 0) & (sm < torch.cuda.get_device_properties(0).multi_processor_count)).all()
    assert len(sm.unique()) <= (blocks or 1 << 30)
    for one in sm.unique():
        mine = torch.stack([begin[sm == one], end[sm == one]], 1)
        assert torch.equal(mine.flatten(), mine.flatten().sort().values), "in the order of claims, no overlap"
    measured = measured_forward(found.plan, found.trace.cpu().numpy(), CLOCK_GHZ)
    assert measured.makespan >= measured.lower_bound > 0


def test_the_command_draws_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "trace.svg"
    line = f"trace --pass forward --mask causal --seqlen 4096 --heads 8 --json --save {picture}"
    assert main(line.split()) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["measured_makespan"] >= facts["measured_bound"] > 0
    assert "forward, causal, measured: makespan" in picture.read_text()


def test_another_segment_gives_other_bytes() -> None:
    problem = dense(seqlen=3000)
    q, k, v = any_case(problem).inputs[1:4]
    assert not same_bytes(run(problem, q, k, v)[0], run(problem, q, k, v, segment=1024)[0])


def test_replays(replays: int) -> None:
    for problem in (dense(seqlen=2000), dense(Mask.full(), seqlen=900, head_dim=64), packed(300, 9000, 7)):
        q, k, v = any_case(problem).inputs[1:4]
        first = run(problem, q, k, v)
        for _ in range(replays):
            again = run(problem, q, k, v)
            assert all(same_bytes(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize("growth", [(0.1, 12.0), (12.0, 0.1)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_maxima_that_rise(head_dim: int, growth: tuple[float, float]) -> None:
    q, k, v = (draw(2500, 2, head_dim, seed) for seed in range(3))
    k = (k * torch.linspace(*growth, 2500, device=DEVICE)[:, None, None]).bfloat16()
    problem = dense(seqlen=2500, heads=2, kv_heads=2, head_dim=head_dim, batch=1)
    out, lse = run(problem, q, k, v)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * head_dim**-0.5
    scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    exact = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double())
    assert relative_error(out, exact) < 4e-3
    assert float((lse.double() - scores.logsumexp(-1)).abs().max()) < 2e-4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_hidden_in_q_and_k_may_be_anything(bad: float) -> None:
    for problem in (dense(seqlen=700), dense(Mask.window(100, 0), seqlen=700, head_dim=64)):
        q, k, v = any_case(problem).inputs[1:4]
        out, lse = run(problem, q, k, v)
        spoilt = k.clone()
        spoilt[:, 300] = bad
        found, other = run(problem, q, spoilt, v)
        assert same_bytes(found[:, :300].contiguous(), out[:, :300].contiguous())
        assert same_bytes(other[..., :300].contiguous(), lse[..., :300].contiguous())
        assert not other[..., 300].isfinite().any()
        spoilt = q.clone()
        spoilt[:, 300] = bad
        found, _ = run(problem, spoilt, k, v)
        assert same_bytes(found[:, 301:].contiguous(), out[:, 301:].contiguous())
        assert same_bytes(found[:, :300].contiguous(), out[:, :300].contiguous())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_neighbours_values_do_not_leak(bad: float) -> None:
    problem = packed(130, 300, 70)
    q, k, v = any_case(problem).inputs[1:4]
    out, lse = run(problem, q, k, v)
    for x in (q, k, v):
        spoilt = [y.clone() if y is x else y for y in (q, k, v)]
        next(y for y, z in zip(spoilt, (q, k, v)) if z is x)[130:430] = bad
        found, other = run(problem, *spoilt)
        for rows in (slice(130), slice(430, 500)):
            assert same_bytes(found[rows], out[rows])
            assert same_bytes(other[:, rows].contiguous(), lse[:, rows].contiguous())


def test_zeros_have_no_sign() -> None:
    """A product that underflows below 0 is 0, whether or not the row's neighbours see one more segment."""
    q, k, v = (torch.zeros(1, 16_393, 1, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
    q[..., 0], k[:, 8192:16_384, :, 0], v[:, :8192] = 1, 64, -1e-30
    problem = Problem(((101, 16_393),), 1, 1, 128, Mask.causal())
    chunk = Forward(problem, DEVICE)(q[:, 16_292:], k, v, 1.0)[0]
    alone = Problem(((1, 16_384),), 1, 1, 128, Mask.causal())
    one = Forward(alone, DEVICE)(q[:, :1], k[:, :16_384], v[:, :16_384], 1.0)[0]
    assert same_bytes(one[0, 0], chunk[0, 16_383 - 16_292])
    assert not torch.signbit(one).any()

"""Dropout by a counter-based generator, in the public functions on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from score_cases import MASKS, drawn, gradients
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dash_attn import attention, flash_attn_func, flash_attn_varlen_func, is_supported, plan_for
from dash_attn.api import apply_plan
from dash_attn.backends.base import AuxTensors
from dash_attn.backends.cpu import plain_attention
from dash_attn.backends.cpu.dropout import Dropout, dropout_of, philox
from dash_attn.backends.cpu.oracle import Inputs
from dash_attn.backends.sm90 import backend as sm90
from dash_attn.errors import InputError
from dash_attn.problem import Mask, Problem
from dash_attn.scores import Origin, Scores
from dash_attn.testing import assert_same_bytes, same_bytes

P, SEED = 0.3, 2**40 + 7


def dropped(
    q: Tensor, k: Tensor, v: Tensor, seed: int | Tensor | None = SEED, p: float = P, **how: Any
) -> Any:
    return attention(q, k, v, dropout_p=p, dropout_seed=seed, **how)


def pattern(batch: int, heads: int, rows: int, columns: int, seed: int = SEED, p: float = P) -> Tensor:
    """(batch, heads, rows, columns) bool: what is kept."""
    threshold = Scores(1.0, dropout_p=p).dropout_threshold
    each = [
        Dropout(seed, (head, sequence), threshold, 1.0).kept(0, 0, rows, columns)
        for sequence in range(batch)
        for head in range(heads)
    ]
    return torch.stack(each).view(batch, heads, rows, columns)


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window: Any = None) -> Tensor:
    """By PyTorch, for autograd."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    distance = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
    hidden = (distance < 0) if causal else torch.zeros(distance.shape, dtype=torch.bool)
    if window:
        hidden = hidden | (distance > window[0])
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    weights = weights * pattern(q.shape[0], q.shape[2], q.shape[1], k.shape[1]) / (1 - P)
    return torch.einsum("bhqk,bkhd->bqhd", weights.to(v.dtype), v)


# The generator


@pytest.mark.parametrize(
    ("counter", "seed", "words"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_numbers_of_its_authors(
    counter: tuple[int, ...], seed: int, words: tuple[int, ...]
) -> None:
    assert tuple(int(word) for word in philox(counter, seed)) == words


@pytest.mark.parametrize("p", [0.0, 0.01, 0.1, 0.5, 0.9])
def test_as_much_is_dropped_as_is_asked_for(p: float) -> None:
    kept = pattern(2, 2, 200, 200, p=p)
    assert abs(kept.double().mean() - (1 - p)) < 5 * (p * (1 - p) / kept.numel()) ** 0.5 + 1e-7
    one, other = kept[0, 0], kept[0, 1]
    if p:
        assert abs((one & other).double().mean() - (1 - p) ** 2) < 0.02  # heads are independent
        assert abs((one[1:] & one[:-1]).double().mean() - (1 - p) ** 2) < 0.02  # and so are rows,
        assert abs((one[:, 1:] & one[:, :-1]).double().mean() - (1 - p) ** 2) < 0.02  # and columns


def test_the_pattern_depends_on_no_tile() -> None:
    one = Dropout(SEED, (1, 2), 1 << 23, 2.0)
    whole = one.kept(0, 0, 50, 70)
    for top, left, rows, columns in ((10, 16, 7, 33), (0, 5, 50, 2), (49, 69, 1, 1), (3, 64, 20, 6)):
        part = one.kept(top, left, rows, columns)
        assert torch.equal(part, whole[top : top + rows, left : left + columns])
    others = [one._replace(seed=SEED + 1), one._replace(seed=7), one._replace(place=(2, 1))]
    for other in others:
        assert not torch.equal(other.kept(0, 0, 50, 70), whole)


def test_a_part_counts_from_its_origin() -> None:
    aux, scores = AuxTensors(dropout_seed=torch.tensor(SEED)), Scores(1.0, dropout_p=P)
    whole = pattern(3, 4, 50, 70)
    part = scores.at(Origin(sequence=1, head=1)).at(Origin(head=2, row=10, column=8))
    assert part.origin == Origin(1, 3, 10, 8)
    for sequence in range(2):
        found = dropout_of(part, aux, sequence, 0)
        assert found is not None
        assert torch.equal(found.kept(5, 16, 20, 30), whole[1 + sequence, 3, 15:35, 24:54])
    assert Scores(1.0).at(Origin(1, 2, 3, 4)) == Scores(1.0)  # nothing else counts


# Values


@pytest.mark.parametrize("how", MASKS, ids=str)
def test_values_and_gradients_are_those_of_pytorch(how: dict[str, Any]) -> None:
    tensors = drawn()
    found = gradients(dropped, tensors, **how)
    for got, exact in zip(found, gradients(plain, tensors, **how)):
        torch.testing.assert_close(got, exact, rtol=1e-9, atol=1e-9)
    assert (found[0] - attention(*tensors, **how)).abs().max() > 0.01
    _, lse = dropped(*tensors, return_lse=True, **how)
    assert_same_bytes(lse, attention(*tensors, return_lse=True, **how)[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_errors_are_those_of_plain_attention(dtype: torch.dtype) -> None:
    narrow = drawn(dtype=dtype)
    exact = gradients(plain, [x.double() for x in narrow], causal=True)
    theirs = gradients(plain, narrow, causal=True)
    for got, other, wanted in zip(gradients(dropped, narrow, causal=True), theirs, exact):
        assert (got - wanted).norm() <= 2 * (other - wanted).norm() + 1e-6 * wanted.norm()


def test_gradients_by_finite_differences() -> None:
    """Of the sink, too."""
    tensors = [x[:1, :4, :, :2].detach().requires_grad_() for x in drawn()]
    sink = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *x: dropped(*x[:3], causal=True, softcap=2.0, learnable_sink=x[3]), [*tensors, sink]
    )


def test_the_oracle_agrees() -> None:
    q, k, v = (x.detach() for x in drawn())
    out, lse = dropped(q, k, v, causal=True, return_lse=True)
    for at in range(2):
        one, aux = Inputs(q[at], q[at], k[at], v[at]), AuxTensors(dropout_seed=torch.tensor(SEED))
        found = plain_attention(one, Mask.causal(), Scores(0.25, dropout_p=P), aux=aux, sequence=at)
        torch.testing.assert_close(out[at], found.out)
        torch.testing.assert_close(lse[at], found.lse)


def test_dropout_drops_nothing_on_average() -> None:
    """With the weights that are left as they were, the error would be 0.09."""
    q, k, v = (x.detach()[:1, :20] for x in drawn(heads=(2, 1, 1)))
    mean = sum(dropped(q, k, v, seed) for seed in range(50)) / 50
    assert (mean - attention(q, k, v)).abs().mean() < 0.05


# Bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes(dtype: torch.dtype) -> None:
    """Two runs; packed and dense; by a plan of one's own; a chunk of keys. Another seed gives others."""
    tensors = drawn(200, 200, dtype)
    found = gradients(dropped, tensors, causal=True)
    ends = torch.tensor([0, 200, 400], dtype=torch.int32)
    how: dict[str, Any] = {"dropout_p": P, "dropout_seed": torch.tensor(SEED)}

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Any:
        rows = (x.flatten(0, 1) for x in (q, k, v))
        return flash_attn_varlen_func(*rows, ends, ends, causal=True, **how).view(q.shape)

    def planned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plan = plan_for(q, k, v, causal=True, dropout_p=P)
        return apply_plan(plan, q, k, v, 0.25, **how)[0]

    def flash(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn_func(q, k, v, causal=True, **how)

    for function in (lambda *x: dropped(*x, causal=True), packed, planned, flash):
        for got, wanted in zip(gradients(function, tensors), found):
            assert_same_bytes(got, wanted)
    q, k, v = (x.detach() for x in tensors)
    assert_same_bytes(dropped(q[:1], k[:1], v[:1], causal=True), found[0][:1])
    prefix = dropped(q[:, :90], k[:, :90], v[:, :90], causal=True)
    assert_same_bytes(prefix, found[0][:, :90])
    assert not same_bytes(dropped(q, k, v, SEED + 1, causal=True), found[0])
    assert not same_bytes(dropped(q[1:], k[1:], v[1:], causal=True), found[0][1:])  # it is number 0 there


def test_seeds_are_drawn_from_the_default_generator() -> None:
    """One number per call, as documented; none without dropout, with a seed, or where nothing runs."""
    q, k, v = drawn(30, 30, torch.float32)
    ends = torch.tensor([0, 30, 60], dtype=torch.int32)
    flat = [x.detach().flatten(0, 1) for x in (q, k, v)]
    for call in (
        lambda **how: attention(q, k, v, **how),
        lambda **how: flash_attn_varlen_func(*flat, ends, ends, **how).view(q.shape),
    ):
        for _ in range(2):  # a call that is new, and one that is known
            torch.manual_seed(5)
            first, second = call(dropout_p=P), call(dropout_p=P)
            after = torch.rand(1)
            torch.manual_seed(5)
            seeds = [torch.randint(2**63 - 1, ()) for _ in range(2)]
            assert torch.equal(after, torch.rand(1))
            for out, seed in zip((first, second), seeds):
                assert_same_bytes(out, call(dropout_p=P, dropout_seed=seed))
            assert not same_bytes(first, second)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    attention(q, k, v, dropout_p=0.0)
    dropped(q, k, v)
    assert is_supported(q, k, v, dropout_p=P)
    plan_for(q, k, v, dropout_p=P)
    assert not is_supported(q, k, v[:, :3], dropout_p=P)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_weight_a_seed_changes_nothing() -> None:
    tensors = drawn(dtype=torch.float32)
    assert_same_bytes(dropped(*tensors, p=0.0), attention(*tensors))


@pytest.mark.parametrize("seed", [SEED, None], ids=["given", "drawn"])
def test_compiled_and_checkpointed_calls_have_the_same_bytes(seed: int | None) -> None:
    tensors = drawn(40, 40, torch.float32)
    torch.compiler.reset()

    def run(*x: Tensor) -> Any:
        return dropped(*x, seed, causal=True)

    def checkpointed(*x: Tensor) -> Any:
        return checkpoint(run, *x, use_reentrant=False)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    wanted = gradients(run, tensors)
    for function in (compiled, checkpointed):
        torch.manual_seed(3)
        for got, exact in zip(gradients(function, tensors), wanted):
            assert_same_bytes(got, exact)


def test_transforms_of_torch_func() -> None:
    tensors = drawn(20, 20, torch.float32)

    def loss(*x: Tensor) -> Any:
        return dropped(*x).square().sum()

    grads = torch.func.grad(loss, argnums=(0, 1, 2))(*(x.detach() for x in tensors))
    for got, exact in zip(grads, torch.autograd.grad(loss(*tensors), tensors)):
        assert_same_bytes(got, exact)


# Refused

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "negative": ({"dropout_p": -0.1}, "dropout_p must be at least 0 and less than 1, got -0.1"),
    "all": ({"dropout_p": 1.0}, "dropout_p must be at least 0 and less than 1, got 1.0"),
    "nan": ({"dropout_p": float("nan")}, "dropout_p must be at least 0 and less than 1, got nan"),
    "text": ({"dropout_p": "0.1"}, "dropout_p must be at least 0 and less than 1, got '0.1'"),
    "negative seed": (
        {"dropout_p": P, "dropout_seed": -1},
        r"dropout_seed must be None, a tensor or an integer in 0..2\*\*63-1, got -1",
    ),
    "a seed for nothing": (
        {"dropout_p": 0.0, "dropout_seed": torch.zeros(3, dtype=torch.int64)},
        r"dropout_seed must have shape \(\), got shape \(3,\)",
    ),
    "a tensor for p": ({"dropout_p": torch.zeros(2)}, "dropout_p must be"),
    "seed": ({"dropout_p": P, "dropout_seed": 0.5}, r"dropout_seed must be None, .*, got 0.5"),
    "seed's shape": (
        {"dropout_p": P, "dropout_seed": torch.zeros(1, dtype=torch.int64)},
        r"dropout_seed must have shape \(\), got shape \(1,\)",
    ),
    "seed's dtype": (
        {"dropout_p": P, "dropout_seed": torch.tensor(3, dtype=torch.int32)},
        "dropout_seed must be torch.int64, got torch.int32",
    ),
    "seed's device": (
        {"dropout_p": P, "dropout_seed": torch.zeros((), dtype=torch.int64, device="meta")},
        "dropout_seed is on meta, q is on cpu",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_dropout_is_named(case: str) -> None:
    wrong, message = WRONG[case]
    q, k, v = drawn(10, 10, torch.bfloat16)
    ends = torch.tensor([0, 10, 20], dtype=torch.int32)
    for call in (attention, flash_attn_func):
        with pytest.raises(InputError, match=message) as raised:
            call(q, k, v, **wrong)
    with pytest.raises(InputError, match=message):
        flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), ends, ends, **wrong)
    assert is_supported(q, k, v, **wrong).reason == str(raised.value)


def test_sm90_does_not_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90, "_capability", lambda device: (9, 0))
    problem, device = Problem.dense(seqlen=256, head_dim=64), torch.device("cuda", 0)
    reason = sm90.BACKEND.why_not(problem, device, False, Scores(0.125, dropout_p=0.1))
    assert reason == "dropout_p 0.1 is not supported by sm90"

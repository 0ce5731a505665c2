"""What the Triton kernels make of scores: softcaps, sinks, ALiBi, dropout, scales.

``test_triton.py`` starts this file in processes, see ``triton_interpreted.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from attention_cases import SCALE, packed_tensors, split
from torch import Tensor
from triton_runs import CPU, MASKS, SCORES, SHORT, assert_accurate, few_keys, problem_of, run

import dash_attn
from dash_attn.backends.base import AuxTensors
from dash_attn.backends.cpu import forward as reference
from dash_attn.backends.cpu.dropout import Dropout
from dash_attn.backends.triton.backend import BACKEND
from dash_attn.backends.triton.parts import capped, kept
from dash_attn.backends.triton.tiles import forward_numerics
from dash_attn.errors import InputError
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import FA3, SPT, Descending, build_plan
from dash_attn.scores import Origin, Scores
from dash_attn.testing import assert_same_bytes, same_bytes
from triton_cases import NAMES

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in rows that see nothing


@pytest.mark.parametrize("softcap", [0.5, 30.0, 1e8])
@pytest.mark.parametrize("mask", [Mask.causal(), Mask.window(60, 0)], ids=lambda mask: mask.name)
def test_softcap(mask: Mask, softcap: float) -> None:
    """Cut tiles and whole ones; caps that all scores meet, few, and none."""
    problem = problem_of((160, 160), (20, 130), mask=mask, dtype="float16")
    tensors = packed_tensors(problem)
    plan = build_plan(problem, FA3())
    found = run(plan, tensors, Scores(SCALE, softcap))
    assert_accurate(problem, tensors, found, scores=Scores(SCALE, softcap))
    assert softcap > 1 or not same_bytes(found["out"], run(plan, tensors)["out"])


def test_capped_is_tanh() -> None:
    x = torch.cat([torch.linspace(-9, 9, 2001), torch.logspace(-20, 0, 400), torch.zeros(1)])
    exact = (x.double() / 7).tanh()
    found = torch.empty_like(x)

    @triton.jit
    def kernel(source, target, scale, n: tl.constexpr, size: tl.constexpr):
        at = tl.arange(0, size)
        tl.store(target + at, capped(tl.load(source + at, mask=at < n), scale), mask=at < n)

    kernel[(1,)](x, found, 1 / 7, len(x), 4096)
    assert ((found - exact).abs() <= 2e-6 * exact.abs()).all()


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
@pytest.mark.parametrize(("head_dim", "dtype"), [(16, "float32"), (64, "float16")])
def test_sinks(mask: Mask, head_dim: int, dtype: str) -> None:
    """Also rows without keys and sequences without rows; the gradient of the sink is summed over all."""
    lengths = SHORT[: 4 if head_dim == 16 else 1]
    problem = problem_of(*lengths, mask=mask, head_dim=head_dim, dtype=dtype)
    tensors, sink = packed_tensors(problem), torch.tensor([0.5, 3.0])
    plan, aux = build_plan(problem, Descending()), AuxTensors(sink)
    found = run(plan, tensors, Scores(SCALE, sink=True), aux)
    assert_accurate(problem, tensors, found, aux=aux)
    blind = found["out"].flatten(1).eq(0).all(1)
    assert head_dim != 16 or blind[33:73].all()  # of the sequence without keys
    torch.testing.assert_close(found["lse"][:, blind], sink[:, None].expand(-1, int(blind.sum())))
    for name, got in run(plan, tensors, Scores(SCALE, sink=True), aux).items():
        assert_same_bytes(got, found[name], name)


def test_a_sink_that_takes_all_weight_has_a_gradient_of_0() -> None:
    problem = problem_of(*SHORT[:1], mask=Mask.causal(), head_dim=16, dtype="float32")
    plan = build_plan(problem, Descending())
    for large in (1.1e11, 2.3e11, 7.7e15, 2.3e18):
        aux = AuxTensors(torch.tensor([0.5, large]))
        found = run(plan, packed_tensors(problem), Scores(SCALE, sink=True), aux)["dsink"]
        assert found[0] != 0
        assert found[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
@pytest.mark.parametrize(("head_dim", "dtype", "by_batch"), [(16, "float32", False), (64, "float16", True)])
def test_alibi(mask: Mask, head_dim: int, dtype: str, by_batch: bool) -> None:
    """Slopes of heads, or of heads of a sequence; with a softcap and a sink, which are not biased."""
    lengths = SHORT if head_dim == 16 else SHORT[::3]
    problem = problem_of(*lengths, mask=mask, head_dim=head_dim, dtype=dtype)
    tensors, slopes = packed_tensors(problem), torch.tensor([0.02, 0.3])
    by_sequence = slopes * torch.arange(1, len(lengths) + 1)[:, None]
    plan, sink = build_plan(problem, Descending()), torch.tensor([0.5, -1.0])
    scores = Scores(SCALE, 5.0, sink=True, alibi=True)
    aux = AuxTensors(sink, by_sequence if by_batch else slopes)
    found = run(plan, tensors, scores, aux)
    assert_accurate(problem, tensors, found, scores=scores, aux=aux)
    for name, got in run(plan, tensors, scores._replace(alibi=False), AuxTensors(sink)).items():
        assert not same_bytes(got, found[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS[:2], ids=lambda mask: mask.name)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_alibi_that_grows_with_the_distance(mask: Mask, dtype: str) -> None:
    """Slopes below 0. A last q tile of 72 rows: what the bias makes of the others must not be infinite."""
    problem = problem_of((200, 200), mask=mask, dtype=dtype)
    tensors, scores = packed_tensors(problem), SCORES._replace(alibi=True)
    aux = AuxTensors(None, torch.tensor([-0.2, -1.0]))
    found = run(build_plan(problem, Descending()), tensors, scores, aux)
    assert_accurate(problem, tensors, found, slack=8, scores=scores, aux=aux)


@pytest.mark.slow
def test_alibi_in_the_public_functions() -> None:
    """Dense and packed have the same bytes, which are those of the prepared call."""
    problem = problem_of((90, 90), (90, 90), mask=Mask.causal(), head_dim=40, dtype="float16")
    tensors = packed_tensors(problem)
    slopes, ends = torch.tensor([[0.1, 0.5], [0.2, 0.0]]), torch.tensor([0, 90, 180], dtype=torch.int32)
    how: dict[str, Any] = {
        "causal": True,
        "softmax_scale": SCALE,
        "backend": "triton",
        "alibi_slopes": slopes,
    }
    dense = dash_attn.attention(*(x.unflatten(0, (2, 90)) for x in tensors[1:]), **how)
    packed = dash_attn.flash_attn_varlen_func(*tensors[1:], ends, ends, **how)
    found = run(build_plan(problem, SPT()), tensors, Scores(SCALE, alibi=True), AuxTensors(None, slopes))
    assert_same_bytes(packed, found["out"])
    assert_same_bytes(dense.flatten(0, 1), found["out"])


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
@pytest.mark.parametrize(("head_dim", "head_dim_v", "dtype"), [(24, 16, "float32"), (8, 136, "float16")])
def test_head_dims_of_v_with_a_sink_and_alibi(mask: Mask, head_dim: int, head_dim_v: int, dtype: str) -> None:
    """With a softcap, too; several head groups. Delta is a sum over the columns of v."""
    problem = problem_of((70, 90), (33, 20), mask=mask, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype)
    tensors, scores = packed_tensors(problem), Scores(SCALE, 5.0, sink=True, alibi=True)
    aux = AuxTensors(torch.tensor([0.5, 3.0]), torch.tensor([[0.02, 0.3], [0.1, 0.0]]))
    for head_groups in (1, 2):
        plan = build_plan(problem, Descending(), head_groups=head_groups)
        found = run(plan, tensors, scores, aux)
        assert list(found) == [*NAMES, "dsink"]
        assert_accurate(problem, tensors, found, scores=scores, aux=aux)


@triton.jit
def kept_kernel(
    out, seed, record, threshold, sequence0, head0, row0, quarter0, head, top, begin,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    rows = top + tl.arange(0, ROWS)
    origin = (sequence0, head0, row0, quarter0)
    keep = kept(tl.load(seed), threshold, origin, record, head.to(tl.int64), rows, begin, KEYS)
    tl.store(out + tl.arange(0, ROWS)[:, None] * KEYS + tl.arange(0, KEYS)[None, :], keep.to(tl.int8))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("seed", [0, 7, 2**40 + 3, 2**63 - 1])
def test_dropout_keeps_what_the_cpu_keeps(p: float, seed: int) -> None:
    """Bit for bit, at any tile."""
    record, found = torch.zeros(16, dtype=torch.int32), torch.empty(32, 64, dtype=torch.int8)
    threshold = Scores(1.0, dropout_p=p).dropout_threshold
    share = 0.0
    for sequence, head, top, begin in ((0, 0, 0, 0), (3, 1, 64, 192), (70000, 127, 100000, 1 << 20)):
        wanted = Dropout(seed, (head, sequence), threshold, 1.0).kept(top, begin, 32, 64)
        for part in (0, 1):  # a call of its own, and a part that begins elsewhere
            record[14] = sequence - part * (sequence // 2)
            origin = [part * (x // 2) for x in (sequence, head, top, begin // 4)]
            here = head - origin[1], top - origin[2], begin - 4 * origin[3]
            kept_kernel[(1,)](found, torch.tensor(seed), record, threshold, *origin, *here, 32, 64)
            assert torch.equal(found.bool(), wanted)
        share += wanted.float().mean().item() / 3
    assert abs(share - (1 - p)) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
@pytest.mark.parametrize(("head_dim", "dtype"), [(16, "float32"), (64, "float16")])
def test_dropout(mask: Mask, head_dim: int, dtype: str) -> None:
    """In float16 with a sink, a softcap and ALiBi: out, lse and all gradients; one or two head groups."""
    both = head_dim == 64
    problem = problem_of(*SHORT, mask=mask, head_dim=head_dim, dtype=dtype)
    tensors, sink, seed = packed_tensors(problem), torch.tensor([0.5, 2.0]), torch.tensor(11)
    scores = Scores(SCALE, 5.0, True, True, 0.4) if both else Scores(SCALE, dropout_p=0.2)
    aux = AuxTensors(sink, torch.tensor([0.02, 0.2]), seed) if both else AuxTensors(dropout_seed=seed)
    plan = build_plan(problem, Descending(), head_groups=2 if both else 1)
    assert_accurate(problem, tensors, run(plan, tensors, scores, aux), 2, scores=scores, aux=aux)


@pytest.mark.slow
def test_another_seed_of_dropout_gives_other_bytes() -> None:
    """But of lse. Two runs with one seed have the same."""
    problem = problem_of((33, 150))
    tensors, plan = packed_tensors(problem), build_plan(problem, SPT())
    scores = Scores(SCALE, dropout_p=0.2)
    one, again, other = (
        run(plan, tensors, scores, AuxTensors(dropout_seed=torch.tensor(seed))) for seed in (11, 11, 12)
    )
    for name in NAMES:
        assert_same_bytes(one[name], again[name], name)
        assert same_bytes(one[name], other[name]) == (name == "lse"), name


@pytest.mark.slow
def test_a_part_of_a_call_drops_what_the_whole_call_drops() -> None:
    """To the byte, by its origin: q heads of one kv head, a sequence, and in the forward rows."""
    problem = problem_of((40, 40), (70, 90), mask=Mask.causal(), heads=4, kv_heads=2)
    tensors, aux = packed_tensors(problem), AuxTensors(dropout_seed=torch.tensor(11))
    scores = Scores(SCALE, dropout_p=0.4)
    whole = run(build_plan(problem, SPT()), tensors, scores, aux)

    def part(of: Problem, mine: list[Tensor], origin: Origin) -> dict[str, Tensor]:
        return run(build_plan(of, SPT()), [x.contiguous() for x in mine], scores.at(origin), aux)

    heads = part(
        replace(problem, heads=2, kv_heads=1),
        [x[:, x.shape[1] // 2 :] for x in tensors],
        Origin(head=2),
    )
    second = part(replace(problem, sequences=((70, 90),)), [x[40:] for x in tensors], Origin(sequence=1))
    for name in NAMES:
        x = whole[name]
        of_heads = x[2:] if name == "lse" else x[:, x.shape[1] // 2 :]
        assert_same_bytes(heads[name], of_heads.contiguous(), name)
        of_second = x[:, 40:] if name == "lse" else x[40:]
        assert_same_bytes(second[name], of_second.contiguous(), name)
    _, q, k, v = tensors
    chunk = BACKEND.prepare(replace(problem, sequences=((37, 90),)), CPU, packed=True)
    given, origin = (q[73:], k[40:], v[40:]), Origin(1, 0, 33)
    assert_same_bytes(chunk.forward(*given, scores.at(origin), aux)[0], whole["out"][73:])
    for lost in ("sequence", "row"):  # the control: counted from 0
        other = chunk.forward(*given, scores.at(origin._replace(**{lost: 0})), aux)[0]
        assert not same_bytes(other, whole["out"][73:]), lost
    local = part(replace(problem, heads=2, kv_heads=1), [x[:, x.shape[1] // 2 :] for x in tensors], Origin())
    assert not same_bytes(local["dq"], heads["dq"])


@pytest.mark.slow
def test_dropout_counts_keys_from_the_first_one_of_the_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows behind a window, whose keys begin at another segment of keys."""
    few_keys(monkeypatch, 128)
    problem = problem_of(300, mask=Mask.window(40, 0))
    (_, q, k, v), aux = packed_tensors(problem), AuxTensors(dropout_seed=torch.tensor(11))
    scores = Scores(SCALE, dropout_p=0.4)
    out, lse = BACKEND.prepare(problem, CPU, packed=True).forward(q, k, v, scores, aux)
    prepared = BACKEND.prepare(replace(problem, sequences=((100, 172),)), CPU, packed=True)
    given = q[200:], k[128:], v[128:]
    found = prepared.forward(*given, scores.at(Origin(row=200, column=128)), aux)
    assert_same_bytes(found[0], out[200:])
    assert_same_bytes(found[1], lse[:, 200:].contiguous())
    assert not same_bytes(prepared.forward(*given, scores.at(Origin(row=200)), aux)[0], out[200:])
    with pytest.raises(InputError, match="column 130 of .* is no multiple of 4"):
        prepared.forward(*given, scores.at(Origin(row=200, column=130)), aux)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, (40, 0)])
def test_dropout_in_segments_of_rows(window: tuple[int, int] | None) -> None:
    """The same weights are dropped as in whole sequences: of packed ones only the second one is cut."""
    generator = torch.Generator().manual_seed(0)
    lengths = (40, 300, 50)
    ends = torch.tensor([0, 40, 340, 390], dtype=torch.int32)
    leaves = [torch.randn(sum(lengths), n, 16, generator=generator).requires_grad_() for n in (2, 1, 1)]
    how: dict[str, Any] = {"causal": True, "backend": "triton", "dropout_p": 0.3, "dropout_seed": 5}
    how["window_size"] = window or (-1, -1)
    found = []
    for q_segment in (128, None):
        out = dash_attn.flash_attn_varlen_func(*leaves, ends, ends, q_segment=q_segment, **how)
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    assert_same_bytes(found[0][0], found[1][0])
    for cut, whole in zip(*found):
        torch.testing.assert_close(cut, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_dropout_in_the_public_functions() -> None:
    """A seed given as a number or a tensor at any place, or drawn; dense and packed have the same bytes."""
    problem = problem_of((90, 90), (90, 90), mask=Mask.causal(), head_dim=40, dtype="float16")
    tensors = packed_tensors(problem)
    dout, *leaves = (x.unflatten(0, (2, 90)) for x in tensors)
    leaves = [x.requires_grad_() for x in leaves]
    how: dict[str, Any] = {"causal": True, "softmax_scale": SCALE, "backend": "triton", "dropout_p": 0.3}
    found = run(
        build_plan(problem, SPT()),
        tensors,
        Scores(SCALE, dropout_p=0.3),
        AuxTensors(dropout_seed=torch.tensor(5)),
    )
    for seed in (5, torch.tensor([1, 5])[1]):
        out = dash_attn.attention(*leaves, dropout_seed=seed, **how)
        grads = torch.autograd.grad(out, leaves, dout)
        for name, got in zip(("out", "dq", "dk", "dv"), (out, *grads)):
            assert_same_bytes(got.flatten(0, 1), found[name], name)
    ends = torch.tensor([0, 90, 180], dtype=torch.int32)
    packed = dash_attn.flash_attn_varlen_func(*tensors[1:], ends, ends, dropout_seed=5, **how)
    assert_same_bytes(packed, found["out"])


@pytest.mark.slow
def test_the_gradient_of_a_sink_is_that_of_each_sequence_added_in_the_order_of_the_batch() -> None:
    """To the byte, whatever the plan."""
    problem = problem_of(20, 130, 30, mask=Mask.causal(), heads=4)
    tensors, sink = packed_tensors(problem), torch.linspace(0.5, 3.0, 4)
    scores = Scores(SCALE, sink=True)
    found = run(build_plan(problem, SPT()), tensors, scores, AuxTensors(sink))["dsink"]
    assert_same_bytes(run(build_plan(problem, FA3()), tensors, scores, AuxTensors(sink))["dsink"], found)
    total, others = torch.zeros(4), torch.zeros(4)
    parts = []
    for (length, _), one in zip(problem.sequences, split(problem, tensors)):
        plan = build_plan(problem_of(length, mask=Mask.causal(), heads=4), SPT())
        parts.append(run(plan, one, scores, AuxTensors(sink))["dsink"])
    for part, other in zip(parts, reversed(parts)):
        total, others = total + part, others + other
    assert_same_bytes(total, found)
    assert not same_bytes(others, found), "the example shows nothing"


@pytest.mark.slow
def test_the_gradient_of_a_sink_has_its_bytes_in_segments_of_rows() -> None:
    """Segments of two tiles of 128 rows: a sum of each of them would be another number."""
    generator = torch.Generator().manual_seed(0)
    lengths_q, lengths_k = (520, 30, 300), (20, 9, 17)
    q, dout = (torch.randn(sum(lengths_q), 2, 16, generator=generator) for _ in range(2))
    k = torch.randn(sum(lengths_k), 2, 16, generator=generator)
    ends = [
        torch.tensor([0, *x], dtype=torch.int32).cumsum(0, dtype=torch.int32) for x in (lengths_q, lengths_k)
    ]
    found = []
    for q_segment in (2**30, 256, 128):
        sink = torch.tensor([0.5, 1.5], requires_grad=True)
        how = {"backend": "triton", "q_segment": q_segment, "learnable_sink": sink}
        out = dash_attn.flash_attn_varlen_func(q, k, k, *ends, **how)
        found += torch.autograd.grad(out, sink, dout)
    assert_same_bytes(found[1], found[0])
    assert_same_bytes(found[2], found[0])


@pytest.mark.slow
def test_a_sink_without_weight_changes_no_byte() -> None:
    problem = problem_of((70, 70), (33, 150), (90, 4), mask=Mask.causal())
    tensors, plan = packed_tensors(problem), build_plan(problem, SPT())
    found = run(plan, tensors, Scores(SCALE, sink=True), AuxTensors(torch.full((2,), -torch.inf)))
    for name, wanted in run(plan, tensors).items():
        assert_same_bytes(found[name], wanted, name)
    assert not found["dsink"].any()


def test_a_large_sink_has_a_gradient_where_rows_end_within_a_tile() -> None:
    q, k, v = (torch.randn(1, 100, 1, 16) for _ in range(3))
    sink = torch.tensor([100.0], requires_grad=True)
    out = dash_attn.attention(q, k, v, causal=True, learnable_sink=sink, backend="triton")
    assert torch.autograd.grad(out.sum(), sink)[0].isfinite()


@pytest.mark.slow
def test_sinks_in_the_public_functions() -> None:
    """The bytes of the prepared call; a sink that is no contiguous fp32; dense."""
    problem = problem_of((90, 90), (90, 90), mask=Mask.causal(), head_dim=40, dtype="float16")
    dout, q, k, v = (x.unflatten(0, (2, 90)) for x in packed_tensors(problem))
    sink = torch.tensor([[1.0, 9.0], [2.0, 9.0]]).half()[:, 0].requires_grad_()
    leaves = [*(x.requires_grad_() for x in (q, k, v)), sink]
    how: dict[str, Any] = {
        "causal": True,
        "softmax_scale": SCALE,
        "backend": "triton",
        "learnable_sink": sink,
    }
    out = dash_attn.attention(q, k, v, **how)
    grads = torch.autograd.grad(out, leaves, dout)
    plan = dash_attn.plan_for(q, k, v, causal=True, backend="triton", learnable_sink=sink)
    found = run(plan, [x.detach() for x in (dout, q, k, v)], Scores(SCALE, sink=True), AuxTensors(sink))
    for name, got in zip(("out", "dq", "dk", "dv", "dsink"), (out, *grads)):
        assert_same_bytes(got, found[name], name)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_that_are_not_positive(scale: float) -> None:
    """The largest product is then not the largest score."""
    problem = problem_of((40, 300), mask=Mask.causal(), head_dim=16, heads=1)
    _, q, k, v = packed_tensors(problem)
    wanted = reference(problem, q, k, v, scale, numerics=forward_numerics(problem))
    found = BACKEND.prepare(problem, CPU, packed=True).forward(q, k, v, Scores(scale))
    for x, y in zip(found, wanted):
        torch.testing.assert_close(x, y, rtol=0, atol=2e-5)


def test_a_scale_that_is_0_in_float32() -> None:
    q, k, v = (torch.randn(1, 20, 1, 16) for _ in range(3))
    out, wanted = (dash_attn.attention(q, k, v, softmax_scale=s, backend="triton") for s in (1e-46, 0.0))
    assert_same_bytes(out, wanted)

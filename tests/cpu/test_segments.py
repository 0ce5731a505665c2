"""Sequences that are cut into segments of q rows: how, and that sums are added in the order that it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dash_attn import attention, fingerprints, flash_attn_varlen_func, is_supported, plan_for
from dash_attn.backends.base import NO_AUX, AuxTensors, Tensors
from dash_attn.backends.cpu import executor
from dash_attn.errors import InputError, TableError, UnsupportedMaskError
from dash_attn.ops import segments as module
from dash_attn.ops.calls import dense_call
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import POLICIES, build_plan, to_table
from dash_attn.schedule.defaults import choose_policy_of_segment
from dash_attn.schedule.layout import HEADER_WORDS, ITEM, ITEM_WORDS
from dash_attn.schedule.segments import Segment, can_be_cut, segments_of
from dash_attn.schedule.table import shared_sums
from dash_attn.scores import Scores
from dash_attn.spec import AttentionSpec
from dash_attn.testing import assert_same_bytes

MASKS: list[dict[str, Any]] = [{}, {"causal": True}, {"causal": True, "window": (150, 0)}]
CUT = {"q_segment": 128}


def drawn(
    rows: int = 400, keys: int | None = None, heads: tuple[int, int] = (4, 2), dtype: Any = torch.bfloat16
) -> list[Tensor]:
    """q, k, v and dout of two sequences."""
    generator = torch.Generator().manual_seed(0)
    keys = rows if keys is None else keys
    sizes = [
        (2, n, h, 32) for n, h in ((rows, heads[0]), (keys, heads[1]), (keys, heads[1]), (rows, heads[0]))
    ]
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def gradients(tensors: list[Tensor], **options: Any) -> list[Tensor]:
    *qkv, dout = tensors
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    return list(torch.autograd.grad(attention(*leaves, **options), leaves, dout))


@given(
    st.integers(0, 700),
    st.integers(0, 700),
    st.sampled_from([Mask.full(), Mask.causal(), Mask.of_sides(37, 0), Mask.of_sides(200, 0)]),
    st.sampled_from([128, 256]),
)
def test_segments_have_all_rows_once_and_all_keys_that_these_see(
    seqlen_q: int, seqlen_k: int, mask: Mask, q_segment: int
) -> None:
    found = segments_of(seqlen_q, seqlen_k, mask, 128, q_segment)
    assert [row for s in found for row in range(*s.rows)] == list(range(seqlen_q))
    rows, columns = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, np.arange(seqlen_k)
    left, right = mask.sides
    seen = np.ones((seqlen_q, seqlen_k), dtype=bool)
    if right >= 0:
        seen &= columns <= rows + right
    if left >= 0:
        seen &= columns >= rows - left
    for segment in found:
        whole = seen[slice(*segment.rows)]
        first, last = segment.keys
        assert not whole[:, :first].any()
        assert not whole[:, last:].any()
        assert first % 128 == 0
        if len(found) > 1 and first < last:  # aligned bottom-right, as the problem of the segment will be
            n, m = segment.rows[1] - segment.rows[0], last - first
            own = np.arange(n)[:, None] + m - n
            again = np.ones((n, m), dtype=bool)
            if right >= 0:
                again &= np.arange(m) <= own + right
            if left >= 0:
                again &= np.arange(m) >= own - left
            assert (again == whole[:, first:last]).all()


def test_masks_that_cannot_be_cut_leave_sequences_whole() -> None:
    mask = Mask.of_sides(100, 100)
    assert not can_be_cut(mask)
    assert segments_of(1000, 1000, mask, 128, 128) == (Segment((0, 1000), (0, 1000)),)


@pytest.mark.parametrize("mask", MASKS, ids=["full", "causal", "window"])
@pytest.mark.parametrize("lengths", [(300, 300), (200, 330), (330, 200)], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)], ids=str)
def test_gradients_are_those_of_whole_sequences(
    mask: dict[str, Any], lengths: tuple[int, int], heads: tuple[int, int]
) -> None:
    tensors = drawn(*lengths, heads, torch.float64)
    for a, b in zip(gradients(tensors, **mask, **CUT), gradients(tensors, **mask, q_segment=1024)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("mask", [*MASKS[:2], {"causal": True, "window": (40, 0)}], ids=str)
def test_dropout_drops_what_it_drops_of_whole_sequences(
    mask: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = drawn(200, 330, (2, 1), torch.float64)
    how = {**mask, "dropout_p": 0.3, "dropout_seed": 2**40 + 7}
    whole = gradients(tensors, **how)
    for a, b in zip(gradients(tensors, **how, **CUT), whole):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    for a, b in zip(gradients(tensors, **how, q_segment=1024), whole):
        assert_same_bytes(a, b)
    at = Scores.at
    for lost in ("row", "column"):  # the control: every segment counts from 0
        if lost == "column" and "window" not in mask:
            continue
        monkeypatch.setattr(
            Scores, "at", lambda self, origin, lost=lost: at(self, origin._replace(**{lost: 0}))
        )
        assert max((a - b).abs().max() for a, b in zip(gradients(tensors, **how, **CUT), whole)) > 0.01


def test_dropout_of_packed_sequences_counts_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind sequences that are cut, and behind empty ones."""
    lengths = [60, 300, 0, 128, 129, 50]
    ends = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    q, k, v, dout = (x[0] for x in drawn(sum(lengths), dtype=torch.float64))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def run(**cut: int) -> list[Tensor]:
        out = flash_attn_varlen_func(*leaves, ends, ends, causal=True, dropout_p=0.3, dropout_seed=3, **cut)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    whole = run()
    for a, b in zip(run(**CUT), whole):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    at = Scores.at
    monkeypatch.setattr(Scores, "at", lambda self, origin: at(self, origin._replace(sequence=0)))
    assert max((a - b).abs().max() for a, b in zip(run(**CUT), whole)) > 0.01


def test_one_segment_is_what_it_was() -> None:
    tensors = drawn()
    for a, b in zip(gradients(tensors, causal=True), gradients(tensors, causal=True, q_segment=512)):
        assert_same_bytes(a, b)


def test_segments_are_other_bits_and_runs_repeat() -> None:
    tensors = drawn()
    cut, again, whole = (gradients(tensors, causal=True, q_segment=n) for n in (128, 128, 1024))
    for a, b in zip(cut, again):
        assert_same_bytes(a, b)
    assert not torch.equal(cut[1], whole[1])


def test_a_sequence_has_its_bytes_in_any_batch() -> None:
    tensors = drawn()
    together = gradients(tensors, causal=True, **CUT)
    for at in range(2):
        alone = gradients([x[at : at + 1] for x in tensors], causal=True, **CUT)
        for a, b in zip(together, alone):
            assert_same_bytes(a[at : at + 1].contiguous(), b)


@pytest.mark.parametrize("mask", MASKS, ids=["full", "causal", "window"])
def test_packed_sequences_have_the_bytes_that_they_have_alone(mask: dict[str, Any]) -> None:
    lengths = [60, 300, 0, 128, 129, 50]
    ends = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    q, k, v, dout = (x[0] for x in drawn(sum(lengths)))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = flash_attn_varlen_func(
        *leaves, ends, ends, causal=mask.get("causal", False), window_size=mask.get("window", (-1, -1)), **CUT
    )
    found = torch.autograd.grad(out, leaves, dout)
    for first, last in zip(ends[:-1].tolist(), ends[1:].tolist()):
        if first < last:
            alone = gradients([x[None, first:last] for x in (q, k, v, dout)], **mask, **CUT)
            for a, b in zip(found, alone):
                assert_same_bytes(a[first:last].contiguous(), b[0].contiguous())


def of_sink(lengths: list[int], packed: bool, q_segment: int | None) -> Tensor:
    """The gradient of a sink. Segments of several tiles of 128 rows tell a chain from a sum of sums."""
    q, k, v, dout = (x[0] for x in drawn(sum(lengths)))
    sink = torch.randn(4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    how: dict[str, Any] = {"causal": True, "learnable_sink": sink, "q_segment": q_segment}
    if packed:
        ends = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
        out = flash_attn_varlen_func(q, k, v, ends, ends, **how)
    else:
        q, k, v, dout = (x.unflatten(0, (len(lengths), -1)) for x in (q, k, v, dout))
        out = attention(q, k, v, **how)
    return torch.autograd.grad(out, sink, dout)[0]


def test_the_gradient_of_a_sink_has_the_bytes_of_whole_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = of_sink([1100, 1100], False, None)
    for packed, q_segment in ((False, 128), (False, 256), (False, 384), (True, None), (True, 512)):
        assert_same_bytes(of_sink([1100, 1100], packed, q_segment), whole)
    mixed = [60, 700, 0, 128, 257, 50, 900]  # cut are those of 700, 257 and 900
    wanted = of_sink(mixed, True, None)
    assert_same_bytes(of_sink(mixed, True, 256), wanted)
    assert not torch.equal(of_sink(mixed[::-1], True, 256), wanted)
    add = executor.sink_gradient

    def apart(problem: Problem, tensors: Tensors, aux: AuxTensors, sums: Tensor) -> None:
        """Sums of segments, added."""
        mine = torch.zeros_like(sums)
        add(problem, tensors, aux, mine)
        sums += mine

    monkeypatch.setattr(executor, "sink_gradient", apart)
    assert not torch.equal(of_sink([1100, 1100], False, 256), whole)


def test_a_fingerprint_of_segments_is_on_record() -> None:
    """It changes with what a cut call's bits depend on: see CHANGELOG.md."""
    q = torch.zeros(1, 600, 2, 64, dtype=torch.bfloat16)
    found = fingerprints(q, q, q, causal=True, q_segment=256).backward
    assert found.startswith("e31de660c72d5739"), found


def test_the_gradient_of_a_sink_in_float64_is_float64() -> None:
    q = torch.randn(1, 300, 2, 16, dtype=torch.float64)
    found = []
    for n in (None, 128):
        sink = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        attention(q, q, q, causal=True, learnable_sink=sink, q_segment=n).sum().backward()
        found.append(sink.grad)
    assert found[0] is not None
    assert (found[0] != found[0].float()).any()
    assert_same_bytes(found[1], found[0])


def test_sums_are_added_in_ascending_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """And in another order they would be others: the negative control of all byte comparisons here."""
    tensors = drawn(rows=600)
    right = gradients(tensors, causal=True, **CUT)
    backward = module.CutSequence.backward
    done: list[int] = []

    def noted(self: Any, index: int, *rest: Any) -> Any:
        done.append(index)
        return backward(self, index, *rest)

    monkeypatch.setattr(module.CutSequence, "backward", noted)
    assert torch.equal(gradients(tensors, causal=True, **CUT)[1], right[1])
    assert done == [0, 1, 2, 3, 4]
    monkeypatch.setattr(module, "enumerate", lambda x: reversed(list(enumerate(x))), raising=False)
    other = gradients(tensors, causal=True, **CUT)
    assert done[5:] == [4, 3, 2, 1, 0]
    assert torch.equal(other[0], right[0])
    assert not torch.equal(other[1], right[1])


def test_under_the_operators_and_torch_compile() -> None:
    *qkv, dout = drawn()
    leaves = [x.clone().requires_grad_() for x in qkv]

    def call(*x: Tensor) -> Tensor:
        return attention(*x, causal=True, **CUT)  # type: ignore[return-value]

    eager = torch.autograd.grad(call(*leaves), leaves, dout)
    compiled = torch.autograd.grad(torch.compile(call, backend="aot_eager")(*leaves), leaves, dout)
    for a, b in zip(eager, compiled):
        assert_same_bytes(a, b)


def test_what_is_not_cut() -> None:
    """Named policies, windows and dropout, unless the segment is named too; ALiBi and intervals, which count
    rows."""
    spec = AttentionSpec(1.0, right=0)
    assert spec.rows_per_segment == 16384
    assert spec._replace(policy="spt").rows_per_segment == 0
    assert spec._replace(left=4096).rows_per_segment == 0
    assert spec._replace(left=4096, q_segment=256).rows_per_segment == 256
    assert spec._replace(policy="spt", q_segment=256).rows_per_segment == 256
    for field in ("alibi", "row_intervals"):
        assert spec._replace(**{field: True}).rows_per_segment == 0
        assert spec._replace(**{field: True}, q_segment=256).rows_per_segment == 0
    assert spec._replace(dropout_p=0.1).rows_per_segment == 0
    assert spec._replace(dropout_p=0.1, q_segment=256).rows_per_segment == 256


@pytest.mark.parametrize("value", [0, -128, 100, 128.0, True, "128", 2**31])
def test_a_segment_must_be_whole_tiles(value: Any) -> None:
    x = torch.zeros(1, 8, 2, 32)
    with pytest.raises(InputError, match=f"q_segment must be a multiple of 128.*got {value!r}"):
        attention(x, x, x, q_segment=value)


@pytest.mark.parametrize("value", [np.int64(128), np.int8(1)])
def test_a_segment_may_be_an_integer_of_numpy(value: Any) -> None:
    good = int(value) % 128 == 0
    assert is_supported(*[torch.zeros(1, 8, 2, 32)] * 3, q_segment=value).ok is good


def test_plans_and_fingerprints() -> None:
    q, k, v, _ = drawn()
    with pytest.raises(InputError, match="segments of 128 rows of q, each with a plan"):
        plan_for(q, k, v, causal=True, **CUT)
    names = [fingerprints(q, k, v, causal=True, q_segment=n) for n in (128, 256, 512, 1024)]
    assert len({name.backward for name in names}) == 3
    assert names[2] == names[3] == fingerprints(q, k, v, causal=True)
    assert len({name.forward for name in names}) == 1


@pytest.mark.parametrize(
    ("heads", "mask", "pinned"),
    [
        ((4, 1), {"causal": True}, True),
        ((2, 2), {}, True),
        ((2, 2), {"causal": True}, False),
    ],
)
def test_what_auto_chose_can_be_pinned_where_segments_have_one_policy(
    heads: tuple[int, int], mask: dict[str, bool], pinned: bool
) -> None:
    q, k = (torch.zeros(1, 1200, n, 32) for n in heads)
    cut = {"q_segment": 512}
    policy = plan_for(q, k, k, **mask, q_segment=2**30).policy
    auto = fingerprints(q, k, k, **mask, **cut)
    assert (fingerprints(q, k, k, **mask, **cut, policy=policy) == auto) is pinned
    assert fingerprints(q, k, k, **mask, policy=policy) != auto
    for name in () if pinned else POLICIES:
        if name not in ("shift", "symmetric_shift"):  # they do not cover all segments
            assert fingerprints(q, k, k, **mask, **cut, policy=name) != auto


@pytest.mark.parametrize(
    ("head_dim", "of_v", "pinned"), [(64, 64, False), (72, 72, True), (192, 128, False), (256, 256, True)]
)
def test_what_auto_chose_for_long_causal_sequences_can_be_pinned_at_some_head_dims(
    head_dim: int, of_v: int, pinned: bool
) -> None:
    q, v = (torch.zeros(1, 33_000, 1, n, dtype=torch.bfloat16) for n in (head_dim, of_v))
    pin = {"policy": plan_for(q, q, v, causal=True, q_segment=2**30).policy, "q_segment": 16_384}
    assert (fingerprints(q, q, v, causal=True, **pin) == fingerprints(q, q, v, causal=True)) is pinned


@pytest.mark.parametrize("policy", ["symmetric_shift", "shift", "shift(ring=4, stride=2)"])
def test_a_policy_that_does_not_cover_a_segment_fails_the_forward(policy: str) -> None:
    q = torch.zeros(1, 1024, 2, 16)
    mask = {"causal": "ring" not in policy}
    how: dict[str, Any] = {"policy": policy, "q_segment": 384, **mask}
    assert not is_supported(q, q, q, **how)
    with pytest.raises(UnsupportedMaskError, match=r": (causal|full) of 384 x \d+"):
        attention(q, q, q, **how)


def test_causal_rows_behind_many_keys_do_not_begin_on_the_diagonal() -> None:
    square = Problem.dense(seqlen=1024, head_dim=64, mask=Mask.causal())
    behind = Problem.dense(seqlen_q=1024, seqlen_k=4096, head_dim=64, mask=Mask.causal())
    assert str(choose_policy_of_segment(square)) == "spt"
    assert str(choose_policy_of_segment(behind)) == "descending + lpt"


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_every_item_has_a_place_of_its_own_among_shared_sums(groups: int) -> None:
    problem = Problem.dense(batch=3, heads=8, kv_heads=2, seqlen=700, mask=Mask.causal())
    plan = build_plan(problem, "descending", head_groups=groups)
    table = shared_sums(to_table(plan), plan)
    items = table[HEADER_WORDS : HEADER_WORDS + ITEM_WORDS * len(plan.items)].reshape(-1, ITEM_WORDS)
    assert sorted(items[:, ITEM.group_sum].tolist()) == list(range(len(plan.items)))
    for item in items:
        kv_tile, sequence, kv_head = (int(item[i]) for i in (ITEM.kv_tile, ITEM.sequence, ITEM.kv_head))
        part = (int(item[ITEM.q_head_first]) % 4) * groups // 4
        assert item[ITEM.group_sum] == ((kv_tile * 3 + sequence) * 2 + kv_head) * groups + part


def test_sums_of_unlike_sequences_have_no_common_place() -> None:
    problem = Problem.varlen([256, 16384], heads=4, kv_heads=1, mask=Mask.causal())
    plan = build_plan(problem, "descending")
    with pytest.raises(TableError, match="head groups"):
        shared_sums(to_table(plan), plan)


def test_rows_without_keys_have_no_gradient() -> None:
    """More rows than keys, bottom-right: the first segments see nothing."""
    tensors = drawn(600, 100)
    dq, dk, dv = gradients(tensors, causal=True, **CUT)
    assert not dq[:, :500].any()
    assert dk.isfinite().all()
    assert dv.any()
    assert dense_call(*tensors[:3], AttentionSpec(1.0, right=0, q_segment=128)).parts[0].cut.plan(0) is None  # type: ignore[union-attr]


def test_disorder_is_not_cut() -> None:
    """Without order there is nothing to keep: whole sequences run, as they always did."""
    q, k, v, dout = drawn()
    call = dense_call(q, k, v, AttentionSpec(32**-0.5, right=0, ordered=False, q_segment=128))
    out, lse = call.forward(q, k, v)
    whole = gradients([q, k, v, dout], causal=True, q_segment=1024)
    for a, b in zip(call.backward(Tensors(dout, q, k, v, out, lse), NO_AUX), whole):
        assert a is not None
        assert_same_bytes(a, b)

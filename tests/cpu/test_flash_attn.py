"""``flash_attn_func`` and ``flash_attn_varlen_func``: conventions, packed batches, and refused arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from attention_cases import SCALE, expected, packed_tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_attn import attention, flash_attn_func, flash_attn_varlen_func, is_supported, plan_for
from dash_attn.api import Support
from dash_attn.backends.base import Gradients
from dash_attn.backends.cpu import backend
from dash_attn.errors import InputError, UnsupportedMaskError
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import FA3, Shift
from dash_attn.testing import assert_same_bytes, same_bytes


def cu(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def dense(seqlen: int = 20, batch: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, seqlen, heads, 8, generator=generator) for heads in (4, 2, 2)]


def packed(total: int = 20) -> list[torch.Tensor]:
    return [x[0] for x in dense(total, 1)]


def gradients(function, tensors, *arguments, **options):
    """out, lse, dq, dk, dv of the sum of squares."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = function(*leaves, *arguments, return_lse=True, **options)
    out.square().sum().backward()
    return [out.detach(), lse, *(x.grad for x in leaves)]


# flash_attn_func


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({}, {}),
        ({"causal": True, "softmax_scale": 0.3}, {"causal": True, "softmax_scale": 0.3}),
        ({"window_size": (5, 3)}, {"window": (5, 3)}),
        ({"window_size": (None, None)}, {}),
        ({"window_size": (5, -1), "causal": True}, {"window": (5, 0)}),
        ({"policy": FA3()}, {"policy": "fa3"}),
        ({"deterministic": False}, {}),
    ],
    ids=str,
)
def test_it_is_attention_under_other_names(options, same):
    for a, b in zip(gradients(flash_attn_func, dense(), **options), gradients(attention, dense(), **same)):
        assert_same_bytes(a, b)


def test_arguments_that_ask_for_nothing_are_accepted():
    q, k, v = dense()
    for options in (
        {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None, "return_attn_probs": False},
        {"dropout_p": 0, "num_splits": 1, "pack_gqa": True, "qv": None, "sm_margin": 0, "attention_chunk": 0},
        {"learnable_sink": None, "score_mod": None, "mask_mod": None, "s_aux": None},
    ):
        assert_same_bytes(flash_attn_func(q, k, v, **options), attention(q, k, v))
        assert is_supported(q, k, v, **options)


def test_other_layouts_of_lse():
    q, k, v = packed()
    assert flash_attn_varlen_func(q, k, v, cu(0, 5, 20), cu(0, 5, 20), return_lse=True)[1].shape == (4, 20)
    assert flash_attn_func(q[None], k[None], v[None], return_lse=True)[1].shape == (1, 4, 20)


# flash_attn_varlen_func

LENGTHS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), min_size=1, max_size=5)


@settings(max_examples=25)
@given(LENGTHS, st.booleans(), st.sampled_from([(-1, -1), (30, 10), (0, 0)]))
def test_random_packed_batches_agree_with_the_oracle(pairs, causal, window):
    left, right = (None if side < 0 else side for side in window)
    mask = Mask(left, 0 if causal else right)
    problem = Problem.varlen(pairs, heads=4, kv_heads=2, head_dim=4, mask=mask, dtype="float64")
    dout, q, k, v = packed_tensors(problem)
    ends = [cu(0, *torch.tensor([pair[side] for pair in pairs]).cumsum(0)) for side in (0, 1)]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_varlen_func(
        *leaves, *ends, softmax_scale=SCALE, causal=causal, window_size=window, return_lse=True
    )
    out.backward(dout)
    results = {"out": out.detach(), "lse": lse, **{f"d{n}": x.grad for n, x in zip("qkv", leaves)}}
    for name, exact in expected(problem, [dout, q.detach(), k.detach(), v.detach()]).items():
        torch.testing.assert_close(results[name], exact, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (40, 9)}], ids=str)
def test_a_sequence_has_the_bytes_it_has_alone(options):
    ends = [0, 7, 7, 200, 333]
    tensors = packed(333)
    together = gradients(flash_attn_varlen_func, tensors, cu(*ends), cu(*ends), **options)
    for start, end in pairwise(ends):
        alone = gradients(flash_attn_func, [x[None, start:end] for x in tensors], **options)
        for index, (a, b) in enumerate(zip(together, alone)):
            assert_same_bytes(a[:, start:end] if index == 1 else a[start:end], b[0])


def test_another_packing_gives_other_bytes():
    tensors = packed(333)
    a, b = (gradients(flash_attn_varlen_func, tensors, ends, ends) for ends in (cu(0, 100, 333), cu(0, 333)))
    assert not same_bytes(a[0], b[0])


def test_slices_of_one_projection_are_fine():
    qkv = torch.randn(30, 3, 2, 8, generator=torch.Generator().manual_seed(1))
    ends = cu(0, 11, 30)
    views = gradients(flash_attn_varlen_func, qkv.unbind(1), ends, ends)
    copies = gradients(flash_attn_varlen_func, [x.contiguous() for x in qkv.unbind(1)], ends, ends)
    for a, b in zip(views, copies):
        assert_same_bytes(a, b)


def test_longest_lengths_are_checked_and_not_trusted():
    q, k, v = packed()
    ends = cu(0, 5, 20)
    expected_out = flash_attn_varlen_func(q, k, v, ends, ends)
    for longest in (None, 15, 4096, torch.tensor(15), torch.tensor(3)):
        assert_same_bytes(flash_attn_varlen_func(q, k, v, ends, ends, longest, longest), expected_out)


# Lengths on the host


@pytest.mark.parametrize("write", ["counted", "data", "numpy"])
def test_lengths_on_the_cpu_are_what_they_are_now(write):
    """Also after a write that PyTorch does not count, as a collective's into a buffer."""
    q, k, v = packed()
    ends = cu(0, 5, 20)
    flash_attn_varlen_func(q, k, v, ends, ends)
    {"counted": ends, "data": ends.data, "numpy": ends.numpy()}[write][1] = 9
    assert_same_bytes(flash_attn_varlen_func(q, k, v, ends, ends)[:9], attention(*dense_of(q, k, v, 9))[0])


def dense_of(q, k, v, rows):
    return q[None, :rows], k[None, :rows], v[None, :rows]


@pytest.mark.parametrize("write", ["counted", "data"])
def test_the_backward_has_the_lengths_of_its_forward(write):
    leaves = [x.requires_grad_() for x in packed()]
    ends = cu(0, 5, 20)
    wanted = torch.autograd.grad(flash_attn_varlen_func(*leaves, ends, ends).sum(), leaves)
    out = flash_attn_varlen_func(*leaves, ends, ends)
    {"counted": ends, "data": ends.data}[write][1] = 9
    for found, value in zip(torch.autograd.grad(out.sum(), leaves), wanted):
        assert_same_bytes(found, value)


def test_plans_of_packed_batches_are_cached():
    q, k, v = packed()
    plan = plan_for(q, k, v, cu(0, 5, 20), cu(0, 5, 20), causal=True)
    assert plan_for(q, k, v, cu(0, 5, 20), cu(0, 5, 20), causal=True) is plan
    assert plan_for(q, k, v, cu(0, 6, 20), cu(0, 6, 20), causal=True) is not plan
    assert plan.problem.sequences == ((5, 5), (15, 15))


# deterministic=False


@pytest.fixture
def fast(monkeypatch):
    """A backend whose fast backward can be told apart: its dq is all NaN."""

    slow = backend._Prepared.backward

    def backward(self, plan, tensors, *of_scores, ordered=True, **how):
        dq, dk, dv, _ = slow(self, plan, tensors, *of_scores, **how)
        return Gradients(dq if ordered else dq * math.nan, dk, dv)

    monkeypatch.setattr(backend._Prepared, "backward", backward)
    for name in ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.delenv(name, raising=False)


def fast_runs(**options) -> bool:
    ends = cu(0, 5, 20)
    dense_dq = gradients(flash_attn_func, dense(), **options)[2]
    packed_dq = gradients(flash_attn_varlen_func, packed(), ends, ends, **options)[2]
    assert dense_dq.isnan().all() == packed_dq.isnan().all()
    return bool(dense_dq.isnan().all())


@pytest.mark.usefixtures("fast")
def test_it_permits_the_fast_backward_and_nothing_else_does():
    assert fast_runs(deterministic=False)
    assert not fast_runs(deterministic=True)
    assert not fast_runs()


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    ("name", "value", "forbidden"),
    [
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0", True),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1", False),
        ("FLASH_ATTENTION_DETERMINISTIC", "1", True),
        ("FLASH_ATTENTION_DETERMINISTIC", "0", False),
    ],
)
def test_the_environment_can_forbid_it(monkeypatch, name, value, forbidden):
    monkeypatch.setenv(name, value)
    assert fast_runs(deterministic=False) != forbidden


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("warn_only", [False, True])
def test_deterministic_algorithms_forbid_it(warn_only):
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        assert not fast_runs(deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert fast_runs(deterministic=False)


# Policies as objects


class LikeFA3(FA3):
    """Another policy that prints like FA3."""


@dataclass(frozen=True)
class Mine(FA3):
    """A policy of a user, under a name of its own."""

    name: ClassVar[str] = "mine"
    marks: tuple[int, ...] = ()


def test_a_policy_of_ones_own():
    tensors = dense(400, 1)
    a, b = (gradients(flash_attn_func, tensors, policy=policy) for policy in (Mine(), "fa3"))
    for x, y in zip(a, b):
        assert_same_bytes(x, y)
    assert plan_for(*tensors, policy=Mine((1,))).policy == "mine(marks=(1,))"


def test_two_policies_of_one_name_are_refused():
    q, k, v = dense()
    with pytest.raises(InputError, match=r"policy LikeFA3\(\) prints as 'fa3', like another policy"):
        flash_attn_func(q, k, v, policy=LikeFA3())

    @dataclass(frozen=True)
    class Mine(FA3):
        name: ClassVar[str] = "mine"

    flash_attn_func(q, k, v, policy=globals()["Mine"](None))
    with pytest.raises(InputError, match=r"prints as 'mine', like another policy"):
        flash_attn_func(q, k, v, policy=Mine())


@pytest.mark.parametrize(
    "name",
    ["fa4", "shift(", "shift(ring=x)", "shift(ring=2, )", "shift(rung=2)", "shift(ring=02)", "auto()", ""],
)
def test_names_of_no_policy(name):
    with pytest.raises(InputError, match=r"unknown policy .*; known: auto, fa3, .* shift\(ring=64\)"):
        flash_attn_func(*dense(), policy=name)


def test_policies_with_parameters():
    tensors = dense(400, 1)
    by_two, by_three = (gradients(flash_attn_func, tensors, policy=Shift(ring=ring)) for ring in (2, 3))
    assert not same_bytes(by_two[2], by_three[2])
    assert_same_bytes(by_two[2], gradients(flash_attn_func, tensors, policy="shift(ring=2)")[2])


# Refused

Q, K, V = packed()
DENSE = dense()
ENDS = cu(0, 5, 20)


FLASH = {
    "dropout": ({"dropout_p": 1}, "dropout_p must be at least 0 and less than 1, got 1"),
    "a function": ({"score_mod": abs}, "score_mod=abs is not supported, only None"),
    "block table": ({"block_table": [1]}, r"block_table=\[1\] is not supported, only None"),
    "probabilities": ({"return_attn_probs": True}, "return_attn_probs=True is .*; use return_lse"),
    "sinks": ({"s_aux": torch.ones(4)}, "s_aux=a tensor .*; learnable_sink is its name here"),
    "splits": ({"num_splits": 4}, "num_splits=4 is not supported, only 0 or 1"),
    "causal": ({"causal": None}, "causal must be True or False, got None"),
    "deterministic": ({"deterministic": 1}, "deterministic must be True or False, got 1"),
    "return_lse": ({"return_lse": 1}, "return_lse must be True or False, got 1"),
    "window sign": ({"window_size": (-2, 0)}, r"window left must be .*, got \(-2, 0\)"),
    "window right sign": ({"window_size": (3, -7)}, r"window right must be .*, got \(3, -7\)"),
    "scale": ({"softmax_scale": math.nan}, "softmax_scale must be a finite float32, got nan"),
    "large scale": (
        {"softmax_scale": -2.4e38},
        r"softmax_scale must be at most 2\.359e\+38 .*got -2\.4e\+38",
    ),
    "policy": ({"policy": "fa4"}, "unknown policy 'fa4'"),
}


@pytest.mark.parametrize("case", FLASH)
def test_what_cannot_be_honoured_is_refused(case):
    options, message = FLASH[case]
    with pytest.raises(InputError, match=message) as error:
        flash_attn_func(*DENSE, **options)
    if case == "block table":  # there is a function for it
        message = "page_table needs seqused_k"
    else:
        assert is_supported(*DENSE, **options).reason == str(error.value)
    with pytest.raises(InputError, match=message) as error:
        flash_attn_varlen_func(Q, K, V, ENDS, ENDS, **options)
    assert is_supported(Q, K, V, ENDS, ENDS, **options).reason == str(error.value)


def test_what_comes_after_the_tensors_is_given_by_keyword():
    with pytest.raises(InputError, match=r"by keyword; the next one, 0.0, would be dropout_p"):
        flash_attn_func(*DENSE, 0.0, causal=True)
    with pytest.raises(InputError, match=r"the next one, 0.5, would be"):
        flash_attn_varlen_func(Q, K, V, ENDS, ENDS, 20, 20, 0.5)


def test_unknown_arguments_are_type_errors():
    for call in (
        lambda: flash_attn_func(*DENSE, casual=True),
        lambda: flash_attn_varlen_func(Q, K, V, ENDS, ENDS, casual=True),
    ):
        with pytest.raises(TypeError, match="unexpected keyword argument 'casual'"):
            call()
    reason = "is_supported() got an unexpected keyword argument 'casual'"
    assert is_supported(*DENSE, casual=True) == Support(False, reason)


@pytest.mark.parametrize("causal", [False, True])
def test_an_empty_batch_has_an_empty_result_and_empty_gradients(causal):
    leaves = [x[:0].clone().requires_grad_() for x in DENSE]
    out, lse = flash_attn_func(*leaves, causal=causal, return_lse=True)
    assert (out.shape, lse.shape) == ((0, 20, 4, 8), (0, 4, 20))
    assert [g.shape for g in torch.autograd.grad(out.sum(), leaves)] == [x.shape for x in leaves]
    assert is_supported(*leaves, causal=causal)


def test_a_packed_batch_of_no_sequence():
    leaves = [x[:0].clone().requires_grad_() for x in (Q, K, V)]
    out, lse = flash_attn_varlen_func(*leaves, cu(0), cu(0), return_lse=True)
    assert (out.shape, lse.shape) == ((0, 4, 8), (4, 0))
    assert [g.shape for g in torch.autograd.grad(out.sum(), leaves)] == [x.shape for x in leaves]
    with pytest.raises(InputError, match="cu_seqlens_q has no sequence, q has 20 rows"):
        flash_attn_varlen_func(Q, K, V, cu(0), cu(0))


def test_an_empty_batch_is_refused_where_one_sequence_would_be():
    """Otherwise the first batch that is not empty would be the first error."""
    for keep in (0, 1):
        q, k, v = (x[:keep] for x in DENSE)
        with pytest.raises(InputError, match="the sm90 backend does not run on cpu"):
            flash_attn_func(q, k, v, backend="sm90")
        assert not is_supported(q, k, v, backend="sm90")
    with pytest.raises(InputError, match="the sm90 backend does not run on cpu"):
        flash_attn_varlen_func(Q[:0], K[:0], V[:0], cu(0), cu(0), backend="sm90")


def test_arguments_that_are_equal_but_of_another_type_are_checked_again():
    assert flash_attn_func(*DENSE, causal=True) is not None
    with pytest.raises(InputError, match="causal must be True or False, got 1"):
        flash_attn_func(*DENSE, causal=1)
    assert flash_attn_func(*DENSE, softmax_scale=1) is not None
    with pytest.raises(InputError, match="softmax_scale must be a finite float32, got True"):
        flash_attn_func(*DENSE, softmax_scale=True)
    assert flash_attn_func(*DENSE, window_size=(1, 0)) is not None
    with pytest.raises(InputError, match="window right must be"):
        flash_attn_func(*DENSE, window_size=(1, False))


def varlen(q=Q, k=K, v=V, cu_q=ENDS, cu_k=ENDS, max_q=None, max_k=None):
    return q, k, v, cu_q, cu_k, max_q, max_k


PACKED = {
    "dense tensors": (varlen(q=DENSE[0]), r"q must have 3 dimensions .* got shape \(2, 20, 4, 8\)"),
    "list": (varlen(cu_q=[0, 20]), "cu_seqlens_q must be a torch.Tensor, got list"),
    "int64": (varlen(cu_k=ENDS.long()), "cu_seqlens_k must be torch.int32, got torch.int64"),
    "2-D": (varlen(cu_q=ENDS[None]), r"cu_seqlens_q must have shape \(batch \+ 1,\), got \(1, 3\)"),
    "no sequence": (varlen(cu_q=ENDS[:0], cu_k=ENDS[:0]), r"\(batch \+ 1,\), got \(0,\)"),
    "batch": (varlen(cu_k=cu(0, 20)), "cu_seqlens_k has 1 sequences, cu_seqlens_q has 2"),
    "start": (varlen(cu_q=cu(1, 5, 20)), "cu_seqlens_q must start at 0, got 1"),
    "decrease": (varlen(cu_k=cu(0, 25, 20)), "cu_seqlens_k must not decrease, got 25, 20 at 1, 2"),
    "total": (varlen(cu_q=cu(0, 5, 19)), "cu_seqlens_q ends at 19, q has 20 rows"),
    "total of k": (varlen(cu_k=cu(0, 5, 21)), "cu_seqlens_k ends at 21, k has 20 rows"),
    "device": (varlen(cu_q=ENDS.to("meta")), "cu_seqlens_q is on meta, q is on cpu; it may be there or"),
    "tensors' devices": (varlen(k=K.to("meta")), "k is on meta, q is on cpu"),
    "dtypes": (varlen(v=V.half()), "v has dtype torch.float16, q has torch.float32"),
    "head_dim": (varlen(k=K[..., :4]), "k has head_dim 4, q has 8"),
    "k and v": (varlen(v=V[:, :1]), r"k has shape \(20, 2, 8\), v has \(20, 1, 8\)"),
    "heads": (varlen(q=Q[:, :3]), r"heads \(3\) must be a multiple of kv_heads \(2\)"),
    "short": (varlen(max_q=14), "max_seqlen_q is 14, the longest sequence has 15"),
    "short k": (varlen(max_k=0), "max_seqlen_k is 0, the longest sequence has 15"),
    "negative": (varlen(max_q=-1), "max_seqlen_q must be None, a tensor or an integer >= 0, got -1"),
    "float": (varlen(max_k=15.0), "max_seqlen_k must be None, a tensor or an integer >= 0, got 15.0"),
}  # fmt: skip


@pytest.mark.parametrize("case", PACKED)
def test_refused_packed_batches_name_what_is_wrong(case):
    arguments, message = PACKED[case]
    with pytest.raises(InputError, match=message) as error:
        flash_attn_varlen_func(*arguments)
    support = is_supported(*arguments)
    assert not support
    assert support.reason == str(error.value)


def test_the_two_ways_to_say_one_thing():
    assert is_supported(*DENSE, window=(1, 0), window_size=(1, 0)).reason.startswith("give window or")
    one = "give cu_seqlens_q and cu_seqlens_k, or neither; got "
    assert is_supported(Q, K, V, ENDS).reason == f"{one}a Tensor and None"
    assert is_supported(Q, K, V, cu_seqlens_k=ENDS).reason == f"{one}None and a Tensor"


def test_masks_a_policy_does_not_cover():
    q, k, v = packed(300)
    ends = cu(0, 300)
    with pytest.raises(UnsupportedMaskError, match="shift needs a mask that .* causal of 300 x 300"):
        flash_attn_varlen_func(q, k, v, ends, ends, causal=True, policy="shift")


def test_sparse_lengths_and_sinks_are_refused_whatever_calls_came_before() -> None:
    x, ends, sink = torch.randn(70, 2, 8), torch.tensor([0, 9, 70], dtype=torch.int32), torch.zeros(2)
    for bounds, sinks, name in (
        (ends.to_sparse(), sink, "cu_seqlens_q"),
        (ends, sink.to_sparse(), "learnable_sink"),
    ):
        flash_attn_varlen_func(x, x, x, ends, ends, learnable_sink=sink)
        with pytest.raises(InputError, match=f"{name} must be a dense tensor"):
            flash_attn_varlen_func(x, x, x, bounds, bounds, learnable_sink=sinks)

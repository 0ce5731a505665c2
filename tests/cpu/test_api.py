"""``attention`` and ``is_supported``: gradients, conventions, and every input that must be refused."""

from __future__ import annotations

import ast
import inspect
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from attention_cases import SCALE
from hypothesis import given, settings
from hypothesis import strategies as st

import dash_attn
import dash_attn.api as api
from dash_attn.api import Support, attention, fingerprints, is_supported, plan_for
from dash_attn.backends.cpu import oracle_backward, oracle_forward
from dash_attn.errors import InputError, UnsupportedMaskError
from dash_attn.problem import Mask
from dash_attn.schedule import FA3, POLICIES, SPT, Descending, Policy, Shift
from dash_attn.testing import assert_same_bytes, same_bytes
from dash_attn.values import scale_of


def tensors(
    batch=2, seqlen_q=20, seqlen_k=None, heads=4, kv_heads=2, head_dim=8, dtype=torch.float32, seed=0
):
    """q, k, v, dout."""
    generator = torch.Generator().manual_seed(seed)
    q = (batch, seqlen_q, heads, head_dim)
    k = (batch, seqlen_q if seqlen_k is None else seqlen_k, kv_heads, head_dim)
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in (q, k, k, q)]


def run(q, k, v, dout, **options):
    """out, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, **options)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in leaves)]


# Results


@settings(max_examples=40)
@given(
    st.integers(0, 300), st.integers(0, 300), st.integers(1, 2), st.integers(1, 3), st.booleans(),
    st.none() | st.tuples(st.none() | st.integers(-1, 300), st.none() | st.integers(-1, 300)),
)  # fmt: skip
def test_random_calls_agree_with_the_oracle(seqlen_q, seqlen_k, kv_heads, group, causal, window):
    q, k, v, dout = tensors(1, seqlen_q, seqlen_k, kv_heads * group, kv_heads, 4, torch.float64)
    left, right = window or (None, None)
    sides = [None if side in (None, -1) else side for side in (left, right)]
    mask = Mask(sides[0], 0 if causal else sides[1])
    results = run(q, k, v, dout, causal=causal, window=window, softmax_scale=SCALE)
    exact = [oracle_forward(q, k, v, mask, SCALE)[0], *oracle_backward(dout, q, k, v, mask, SCALE)]
    for got, wanted in zip(results, exact):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("policy", ["auto", *POLICIES, FA3(), Shift(ring=2)], ids=str)
def test_every_policy_agrees_with_the_oracle(policy):
    causal = policy == "symmetric_shift"
    q, k, v, dout = tensors(1, 400, dtype=torch.float64)
    results = run(q, k, v, dout, causal=causal, policy=policy)
    mask = Mask.causal() if causal else Mask.full()
    exact = [oracle_forward(q, k, v, mask, 8**-0.5)[0], *oracle_backward(dout, q, k, v, mask, 8**-0.5)]
    for got, wanted in zip(results, exact):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (2, 1)}], ids=str)
def test_gradcheck(options):
    q, k, v, _ = (x.requires_grad_() for x in tensors(1, 5, 7, 2, 1, 3, torch.float64))
    assert torch.autograd.gradcheck(lambda *x: attention(*x, **options), (q, k, v))


def test_the_same_call_gives_the_same_bytes():
    arguments = tensors(seqlen_q=300)
    for a, b in zip(run(*arguments, causal=True), run(*arguments, causal=True)):
        assert_same_bytes(a, b)


def test_the_bytes_of_one_sequence_do_not_depend_on_the_batch():
    q, k, v, dout = tensors(batch=3, seqlen_q=290)
    together = run(q, k, v, dout, causal=True)
    for b in range(3):
        alone = run(*(x[b : b + 1] for x in (q, k, v, dout)), causal=True)
        for one, all_of_them in zip(alone, together):
            assert_same_bytes(one, all_of_them[b : b + 1])


def test_another_policy_is_another_order_and_other_bytes():
    arguments = tensors(1, 512)
    a, b = (run(*arguments, policy=policy) for policy in (FA3(), SPT()))
    assert_same_bytes(a[0], b[0])
    assert not same_bytes(a[1], b[1])


def test_a_policy_and_its_name_are_the_same():
    arguments = tensors(1, 400)
    for a, b in zip(run(*arguments, causal=True, policy="spt"), run(*arguments, causal=True, policy=SPT())):
        assert_same_bytes(a, b)


def strided(x):
    """The same values in memory of another order and alignment."""
    wide = (
        torch.zeros(*x.shape[:3], 2 * x.shape[3] + 1, dtype=x.dtype)
        .transpose(1, 2)
        .contiguous()
        .transpose(1, 2)
    )
    wide[..., 1::2] = x
    return wide[..., 1::2]


def test_non_contiguous_inputs_give_the_bytes_of_their_copies():
    arguments = tensors(seqlen_q=150)
    views = [strided(x) for x in arguments]
    assert not any(x.is_contiguous() for x in views)
    for a, b in zip(run(*arguments, causal=True), run(*views, causal=True)):
        assert_same_bytes(a, b)


def test_expanded_gradients_are_fine():
    q, k, v, _ = tensors()
    leaf = q.clone().requires_grad_()
    attention(leaf, k, v).sum().backward()  # its gradient is a single number, expanded
    assert_same_bytes(leaf.grad, run(q, k, v, torch.ones_like(q))[1])


# Conventions


def test_lse_and_scale():
    q, k, v, _ = tensors(2, 6, 9)
    out, lse = attention(q, k, v, softmax_scale=2, return_lse=True)
    _, exact = oracle_forward(q, k, v, Mask.full(), 2.0)
    torch.testing.assert_close(lse, exact.float())
    assert lse.shape == (2, 4, 6)
    assert lse.is_contiguous()
    assert not lse.requires_grad
    assert_same_bytes(out, attention(q, k, v, softmax_scale=2.0))
    assert_same_bytes(attention(q, k, v), attention(q, k, v, softmax_scale=8**-0.5))
    assert math.copysign(1.0, scale_of(-0.0, 8)) == 1.0  # it finds what was prepared for 0.0


def test_causal_is_aligned_bottom_right():
    q, k, v, _ = tensors(1, 2, 5, 1, 1)
    out = attention(q, k, v, causal=True)
    assert_same_bytes(out[:, 1], attention(q[:, 1:], k, v)[:, 0])
    torch.testing.assert_close(out[:, 0], attention(q[:, :1], k[:, :4], v[:, :4])[:, 0])


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"window": (-1, -1)}, {}),
        ({"window": (None, None)}, {}),
        ({"window": [-1, 0]}, {"causal": True}),
        ({"window": (3, 5), "causal": True}, {"window": (3, 0)}),
        ({"window": (-1, 5), "causal": True}, {"causal": True}),
        ({"window": (2**31 - 1, 0)}, {"causal": True}),
    ],
)
def test_windows_that_mean_the_same(options, same):
    q, k, v, _ = tensors()
    assert_same_bytes(attention(q, k, v, **options), attention(q, k, v, **same))
    assert plan_for(q, k, v, **options).fingerprint == plan_for(q, k, v, **same).fingerprint


def test_without_grad_and_in_inference_mode():
    q, k, v, _ = tensors()
    expected = attention(q, k, v)
    assert not expected.requires_grad
    with torch.no_grad():
        assert not attention(q.clone().requires_grad_(), k, v).requires_grad
    with torch.inference_mode():
        assert_same_bytes(attention(q, k, v).clone(), expected)


@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1)])
def test_only_some_gradients(wanted):
    q, k, v, dout = tensors()
    everything = run(q, k, v, dout)[1:]
    leaves = [x.clone().requires_grad_(bool(w)) for x, w in zip((q, k, v), wanted)]
    attention(*leaves).backward(dout)
    for leaf, w, expected in zip(leaves, wanted, everything):
        if w:
            assert_same_bytes(leaf.grad, expected)
        else:
            assert leaf.grad is None


def test_the_second_derivative_is_an_error():
    q, k, v, dout = (x.requires_grad_() for x in tensors())
    for gradient in (dout, dout.detach()):
        (dq,) = torch.autograd.grad(attention(q, k, v), q, gradient, create_graph=True)
        with pytest.raises(RuntimeError, match="attention has no second derivative"):
            dq.sum().backward()


def test_plans_are_cached_and_the_fingerprint_ignores_the_batch():
    q, k, v, _ = tensors()
    plan = plan_for(q, k, v, causal=True)
    assert plan_for(q + 1, k, v, causal=True) is plan
    assert plan_for(q, k, v, causal=True, policy="fa3") is not plan
    one = plan_for(q[:1], k[:1], v[:1], causal=True)
    assert one is not plan
    assert one.fingerprint == plan.fingerprint
    assert len({plan_for(q, k, v, policy=policy).fingerprint for policy in ("fa3", "descending")}) == 2
    both = fingerprints(q, k, v, causal=True)
    assert both.backward == plan.fingerprint
    assert both.forward == fingerprints(q, k[:, :50], v[:, :50]).forward
    assert both.forward != fingerprints(q.double(), k.double(), v.double()).forward


# Hostile inputs that have a right answer


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (3, 3)}], ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 5), (5, 0), (0, 0)])
def test_zero_length_sequences(seqlen_q, seqlen_k, options):
    q, k, v, dout = tensors(2, seqlen_q, seqlen_k)
    assert is_supported(q, k, v, **options)
    results = run(q, k, v, dout, **options)
    for got, like in zip(results, (q, q, k, v)):
        assert got.shape == like.shape
        assert (got == 0).all()
    assert attention(q, k, v, return_lse=True, **options)[1].shape == (2, 4, seqlen_q)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(3, 200), (200, 3), (1, 1), (129, 130)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unequal_lengths(seqlen_q, seqlen_k, dtype):
    q, k, v, dout = tensors(1, seqlen_q, seqlen_k, dtype=dtype)
    results = run(q, k, v, dout, causal=True)
    exact = [
        oracle_forward(q, k, v, Mask.causal(), 8**-0.5)[0],
        *oracle_backward(dout, q, k, v, Mask.causal(), 8**-0.5),
    ]
    bound = 12 * torch.finfo(dtype).eps
    for got, wanted in zip(results, exact):
        assert (got - wanted).abs().max() <= bound * max(float(wanted.abs().max()), 1.0)


@pytest.mark.parametrize("of", ["flash_attn_func", "flash_attn_varlen_func", "attention"])
def test_the_arguments_of_a_call_can_be_passed_on(of):
    """To what says which plan and which numerics the call has."""
    call, options = getattr(dash_attn, of), {"causal": True, "dropout_p": 0.5, "dropout_seed": 3}
    q, k, v, _ = tensors(2, 10)
    if of == "flash_attn_varlen_func":
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        ends = torch.tensor([0, 10, 20], dtype=torch.int32)
        options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 10, "max_seqlen_k": 10}
    kinds = inspect.signature(call).parameters.values()
    plain = {x.name: x.default for x in kinds if x.kind is x.KEYWORD_ONLY}
    options = plain | options | {"deterministic": False, "return_lse": True} | {"q_segment": 128}
    if of == "attention":
        del options["deterministic"]
    else:
        options["num_splits"] = 1
    unknown = {"seqused_k", "page_table"}  # they have no backward
    call(q, k, v, **options)
    options = {name: value for name, value in options.items() if name not in unknown}
    assert plan_for(q, k, v, **options).fingerprint == fingerprints(q, k, v, **options).backward
    assert is_supported(q, k, v, **options)
    for function in (plan_for, fingerprints):
        with pytest.raises(TypeError, match=f"^{function.__name__}.* unexpected keyword argument 'nonsense'"):
            function(q, k, v, nonsense=1)


def test_a_packed_batch_without_a_sequence_has_no_plan():
    ends = torch.tensor([0], dtype=torch.int32)
    with pytest.raises(InputError, match="a problem needs at least one sequence, got none"):
        plan_for(*(x[0, :0] for x in tensors()[:3]), ends, ends)


def test_head_dim_one_and_large():
    for head_dim in (1, 3, 320):
        q, k, v, _ = tensors(1, 10, head_dim=head_dim)
        exact, _ = oracle_forward(q, k, v, Mask.full(), head_dim**-0.5)
        torch.testing.assert_close(attention(q, k, v), exact.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", [0, 1, 2, 3], ids=["q", "k", "v", "dout"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_spread_as_in_the_oracle(which, value):
    arguments = tensors(2, 20, heads=2, kv_heads=2)
    arguments[which][1, 7, 1, 2] = value
    results = run(*arguments)
    q, k, v, dout = arguments
    exact = [
        oracle_forward(q, k, v, Mask.full(), 8**-0.5)[0],
        *oracle_backward(dout, q, k, v, Mask.full(), 8**-0.5),
    ]
    assert any(wanted.isnan().any() or wanted.isinf().any() for wanted in exact)
    for got, wanted in zip(results, exact):
        if math.isnan(value):
            assert torch.equal(got.isfinite(), wanted.isfinite())
        assert not got.isfinite()[~wanted.isfinite()].any()
        assert got[0].isfinite().all()  # the other sequence
        assert got[:, :, 0].isfinite().all()  # the other head


def test_nan_reaches_every_row_that_sees_it():
    q, k, v, _ = tensors(1, 300, heads=1, kv_heads=1)
    k[0, 200] = math.nan
    out = attention(q, k, v, causal=True)
    assert out[0, 200:].isnan().all()
    assert not out[0, :200].isnan().any()


# Hostile inputs that are errors


@dataclass(frozen=True)
class Unhashable(FA3):
    marks: list | None = None


def bad(q=None, k=None, v=None, **options):
    """Arguments of a call in which one thing is wrong."""
    good = tensors()
    return [x if given is None else given for x, given in zip(good, (q, k, v))], options


Q, K, V, _ = tensors()
REFUSED = {
    "type": (bad(q=[1.0]), "q must be a torch.Tensor, got list"),
    "layout": (bad(k=K.to_sparse()), "k must be a dense tensor, got layout torch.sparse_coo"),
    "dimensions": (bad(v=V[0]), r"v must have 4 dimensions .* got shape \(20, 2, 8\)"),
    "integers": (bad(q=Q.int()), "q must be one of bfloat16, .* got torch.int32"),
    "float8": (bad(k=K.to(torch.float8_e5m2)), "k must be one of .* got torch.float8_e5m2"),
    "dtypes": (bad(v=V.half()), "v has dtype torch.float16, q has torch.float32"),
    "devices": (bad(k=K.to("meta")), "k is on meta, q is on cpu"),
    "meta": (bad(*(x.to("meta") for x in (Q, K, V))), "device 'meta' is not supported; supported: cpu"),
    "batch": (bad(k=K[:1]), "k has batch 1 and head_dim 8, q has 2 and 8"),
    "head_dim": (bad(k=K[..., :4]), "k has batch 2 and head_dim 4, q has 2 and 8"),
    "k and v": (bad(v=V[:, :9]), r"k has shape \(2, 20, 2, 8\), v has \(2, 9, 2, 8\)"),
    "no heads": (bad(q=Q[:, :, :0]), "heads must be an integer >= 1, got 0"),
    "no kv heads": (bad(k=K[:, :, :0], v=V[:, :, :0]), "kv_heads must be an integer >= 1, got 0"),
    "no head_dim": (bad(Q[..., :0], K[..., :0], V[..., :0]), "head_dim must be an integer >= 1, got 0"),
    "heads": (bad(q=Q[:, :, :3]), r"heads \(3\) must be a multiple of kv_heads \(2\)"),
    "causal": (bad(causal=1), "causal must be True or False, got 1"),
    "window type": (bad(window=5), r"window must be None or \(left, right\), got 5"),
    "window length": (bad(window=(1, 2, 3)), r"window must be None or \(left, right\), got \(1, 2, 3\)"),
    "window string": (bad(window="ab"), r"window must be None or \(left, right\), got 'ab'"),
    "window side": (bad(window=(-2, 0)), r"window left must be .*, got \(-2, 0\)"),
    "window float": (bad(window=(0, 1.0)), r"window right must be .*, got \(0, 1.0\)"),
    "window bool": (bad(window=(True, 0)), r"window left must be .*, got \(True, 0\)"),
    "window huge": (bad(window=(2**31, 0)), r"window left must be .*, got \(2147483648, 0\)"),
    "policy name": (bad(policy="fa4"), "unknown policy 'fa4'; known: auto, fa3, "),
    "policy type": (bad(policy=FA3), "policy must be a name, a Policy or a Schedule, got <class"),
    "policy hash": (bad(policy=Unhashable([1])), r"policy fa3\(marks=\[1\]\) cannot be hashed"),
    "scale nan": (bad(softmax_scale=math.nan), "softmax_scale must be a finite float32, got nan"),
    "scale inf": (bad(softmax_scale=-math.inf), "softmax_scale must be a finite float32, got -inf"),
    "scale type": (bad(softmax_scale="1"), "softmax_scale must be a finite float32, got '1'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_inputs_name_what_is_wrong(case):
    (arguments, options), message = REFUSED[case]
    with pytest.raises(InputError, match=message) as error:
        attention(*arguments, **options)
    assert is_supported(*arguments, **options) == Support(False, str(error.value), None)


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("shift", {"causal": True}, "leaves every task, this one leaves 6 of 9: causal of 300 x 300"),
        ("symmetric_shift", {}, "symmetric_shift needs a causal mask"),
        ("symmetric_shift", {"window": (5, 0)}, r"needs a causal mask and .*: window\(5,0\) of 300 x 300"),
        (
            Shift(ring=4, stride=2),
            {},
            r"ring of 3 with stride 2 needs 6 q tiles, .* has 3: full of 300 x 300",
        ),
    ],
)
def test_masks_a_policy_does_not_cover(policy, options, message):
    q, k, v, _ = tensors(1, 300)
    with pytest.raises(UnsupportedMaskError, match=message) as error:
        attention(q, k, v, policy=policy, **options)
    support = is_supported(q, k, v, policy=policy, **options)
    assert not support
    assert support.reason == str(error.value)


def test_a_parameter_out_of_range_is_not_taken_for_a_policy_of_ones_own():
    q, k, v, _ = tensors(1, 300)
    message = r"^shift: ring must be an integer >= 1, got 0$"
    with pytest.raises(InputError, match=message) as error:
        attention(q, k, v, policy="shift(ring=0)")
    assert is_supported(q, k, v, policy="shift(ring=0)").reason == str(error.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ["learnable_sink", "alibi_slopes", "dropout_seed", "row_ends"])
def test_tensors_beside_the_inputs_must_be_dense(name):
    nested = torch.nested.nested_tensor([torch.randn(2)])
    for x, layout in ((nested, "nested"), (torch.ones(2, 20).to_sparse(), "torch.sparse_coo")):
        message = f"{name} must be a dense tensor, got layout {layout}"
        assert is_supported(Q, K, V, dropout_p=0.1, **{name: x}).reason == message
    ends = torch.tensor([0, 20], dtype=torch.int32)
    with pytest.raises(InputError, match="cu_seqlens_k must be a dense tensor, got layout nested"):
        dash_attn.flash_attn_varlen_func(Q[0], K[0], V[0], ends, nested)


def test_return_lse_must_be_a_boolean():
    with pytest.raises(InputError, match="return_lse must be True or False, got 1"):
        attention(Q, K, V, return_lse=1)


def test_a_device_that_is_not_there():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(InputError, match="device 'cuda:0' is not supported; supported: cpu, and cuda where"):
        api.backend_for(torch.device("cuda", 0))


def test_dtensors_are_refused_by_name():
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        q = distribute_tensor(Q, mesh, [Shard(2)])
        for name, given in {"q": (q, K, V), "v": (Q, K, distribute_tensor(V, mesh, [Shard(2)]))}.items():
            message = f"{name} is a DTensor: give {name}.to_local(), or use dash_attn.distributed"
            with pytest.raises(InputError, match=re.escape(message)) as error:
                attention(*given)
            assert is_supported(*given) == Support(False, str(error.value))
            with pytest.raises(InputError, match="is a DTensor: give "):
                api.flash_attn_with_kvcache(*given)
    finally:
        torch.distributed.destroy_process_group()


def test_supported_says_where():
    support = is_supported(Q, K, V, causal=True)
    assert support
    assert support == Support(True, "", "cpu")
    assert isinstance(Descending(), Policy)


def test_what_is_asked_is_passed_on_by_name():
    """Nine values, several of one type: a place that is wrong would ask for something else in silence."""
    found = 0
    for path in Path(dash_attn.__file__).parent.rglob("*.py"):
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        for call in calls:
            if isinstance(call.func, ast.Name) and call.func.id == "Asked":
                assert not call.args, f"{path}:{call.lineno}"
                found += len(call.keywords) >= 7
    assert found >= 7

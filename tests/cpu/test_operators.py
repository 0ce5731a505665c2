"""The torch operators: opcheck, torch.compile, autocast, checkpoints, and transforms of torch.func."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import dash_attn
from dash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from dash_attn.api import apply_plan
from dash_attn.backends.base import NO_AUX, AuxTensors
from dash_attn.errors import InputError
from dash_attn.ops.calls import Call
from dash_attn.ops.operators import DENSE, VARLEN
from dash_attn.schedule import Shift
from dash_attn.spec import AttentionSpec
from dash_attn.testing import assert_same_bytes

OPTIONS = AttentionSpec(0.3, -1, 0)
ENDS = torch.tensor([0, 7, 7, 20], dtype=torch.int32)


def inputs(seqlen: int = 20, batch: int | None = 2, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q, k, v; without a batch packed."""
    generator = torch.Generator().manual_seed(0)
    shape = (seqlen,) if batch is None else (batch, seqlen)
    tensors = [torch.randn(*shape, heads, 8, generator=generator) for heads in (4, 2, 2)]
    return [x.to(dtype).requires_grad_() for x in tensors]


def gradients(function, tensors, *arguments):
    """out, dq, dk, dv of the sum of squares."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves, *arguments)
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in leaves)]


def assert_all_same(results, others):
    for a, b in zip(results, others):
        assert_same_bytes(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sink", [False, True])
def test_opcheck(packed, dtype, sink):
    tensors = inputs(batch=None if packed else 2, dtype=dtype)
    functions, extra = (VARLEN, (ENDS, ENDS)) if packed else (DENSE, ())
    aux = AuxTensors(torch.linspace(-1, 1, 4, dtype=dtype).requires_grad_()) if sink else NO_AUX
    rest = (*aux, *extra, *OPTIONS._replace(sink=sink), *((13, -1) if packed else ()))
    # Gradients of bfloat16 leave the tolerance of float32 when they are compared through another graph.
    opcheck(functions.forward, (*tensors, *rest), rtol=1e-2, atol=1e-2)
    out, lse = functions.forward(*tensors, *rest)
    saved = [x.detach() for x in (torch.ones_like(out), *tensors, out, lse)]
    rest = (*(x.detach() if isinstance(x, torch.Tensor) else x for x in rest),)
    opcheck(functions.backward, (*saved, *rest), rtol=1e-2, atol=1e-2)


SLOPES, SEED = torch.linspace(0.1, 1, 4), torch.tensor(2**62 + 1)
OF_SCORES = {
    "softcap": (NO_AUX, {"softcap": 2.0}),
    "alibi": (AuxTensors(alibi_slopes=SLOPES), {"alibi": True}),
    "alibi of each sequence": (AuxTensors(alibi_slopes=torch.stack([SLOPES, 2 * SLOPES])), {"alibi": True}),
    "dropout": (AuxTensors(dropout_seed=SEED), {"dropout_p": 0.3}),
    "all": (
        AuxTensors(torch.linspace(-1, 1, 4), SLOPES, SEED),
        {"sink": True, "alibi": True, "dropout_p": 0.3, "softcap": 2.0},
    ),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("what", OF_SCORES)
def test_opcheck_of_what_becomes_of_scores(what, packed):
    """Forward and backward, and that each asks for something: another out than without it."""
    aux, options = OF_SCORES[what]
    tensors, ends = inputs(batch=None if packed else 2), ENDS
    if packed and what == "alibi of each sequence":
        ends = torch.tensor([0, 7, 20], dtype=torch.int32)
    functions, extra, longest = (VARLEN, (ends, ends), (13, -1)) if packed else (DENSE, (), ())
    if aux.learnable_sink is not None:
        aux = aux._replace(learnable_sink=aux.learnable_sink.clone().requires_grad_())
    rest = (*aux, *extra, *OPTIONS._replace(**options), *longest)
    opcheck(functions.forward, (*tensors, *rest))
    out, lse = functions.forward(*tensors, *rest)
    assert not torch.equal(out, functions.forward(*tensors, *NO_AUX, *extra, *OPTIONS, *longest)[0])
    saved = [x.detach() for x in (torch.ones_like(out), *tensors, out, lse)]
    rest = (*(x.detach() if isinstance(x, torch.Tensor) else x for x in rest),)
    opcheck(functions.backward, (*saved, *rest))


@pytest.mark.parametrize("policy", ["auto", Shift(ring=2), "shift(ring=2, stride=1)"], ids=str)
def test_compiled_dense_calls_have_the_same_bytes(policy):
    def run(q, k, v):
        return flash_attn_func(2 * q, k, v, policy=policy, window_size=(-1, -1), dropout_p=0.0)

    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for seqlen in (33, 40, 51):  # the second length makes the shape dynamic
        tensors = inputs(seqlen)
        assert_all_same(gradients(compiled, tensors), gradients(run, tensors))


def test_a_batch_whose_size_the_compiler_does_not_know():
    """That of what a model has chosen, such as the rows of a mask."""

    def run(x):
        return flash_attn_func(*x.unbind(2), causal=True)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for batch in (3, 2):
        x = torch.randn(batch, 20, 3, 4, 8).requires_grad_()
        torch._dynamo.decorators.mark_unbacked(x, 0)
        found, wanted = compiled(x), run(x)
        assert_same_bytes(found, wanted)
        assert_all_same(*(torch.autograd.grad(out.sum(), [x]) for out in (found, wanted)))


def test_every_size_and_the_scale_may_be_dynamic():
    def run(q, k, v, scale):
        return flash_attn_func(q, k, v, softmax_scale=scale, causal=True)

    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch, seqlen, scale in ((2, 20, 0.1), (3, 31, 0.2), (5, 17, 0.4)):
        tensors = inputs(seqlen, batch)
        assert_all_same(gradients(compiled, tensors, scale), gradients(run, tensors, scale))


def test_compiled_packed_calls_have_the_same_bytes():
    def run(q, k, v, cu_seqlens, longest):
        for _ in range(2):
            q = flash_attn_varlen_func(2 * q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True)
        return q

    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for last in (20, 31, 44):
        ends = torch.tensor([0, 7, 7, last], dtype=torch.int32)
        tensors, arguments = inputs(last, None), (ends, last - 7)
        assert_all_same(gradients(compiled, tensors, *arguments), gradients(run, tensors, *arguments))


def test_compiled_packed_calls_take_the_longest_length_from_the_lengths():
    def run(q, k, v, cu_seqlens):
        longest = cu_seqlens.diff().max().item()
        return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True)

    torch.compiler.reset()
    tensors = inputs(20, None)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        found = gradients(compiled, tensors, ENDS)
    assert_all_same(found, gradients(run, tensors, ENDS))
    with pytest.raises(InputError, match="max_seqlen_q must be None, a tensor or an integer >= 0, got -3"):
        flash_attn_varlen_func(*tensors, ENDS, ENDS, -3, -3)


def test_no_check_of_an_argument_needs_a_newer_pytorch():
    """torch.compile of PyTorch 2.9 cannot trace isinstance(x, int | float), and a tuple says the same."""
    for path in Path(dash_attn.__file__).parent.rglob("*.py"):
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        for call in calls:
            if isinstance(call.func, ast.Name) and call.func.id == "isinstance":
                assert not isinstance(call.args[1], ast.BinOp), f"{path}:{call.lineno}"


def test_a_compiled_graph_has_one_operator_a_call():
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    def run(q, k, v):
        return flash_attn_func(q, k, v, causal=True)

    torch.compiler.reset()
    torch.compile(run, fullgraph=True, backend=keep)(*inputs())
    (graph,) = graphs
    calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert [name for name in calls if "dash_attn" in name] == ["dash_attn.forward.default"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_it_does_for_attention_of_pytorch(dtype):
    q, k, v = inputs()
    cast = [x.to(dtype) for x in (q, k, v)]
    expected = flash_attn_func(*cast)
    with torch.autocast("cpu", dtype=dtype):
        out = flash_attn_func(q, cast[1], v)
        packed = flash_attn_varlen_func(*(x[0] for x in (q, k, v)), ENDS, ENDS)
        double = flash_attn_func(*(x.double() for x in (q, k, v)))
    assert_same_bytes(out, expected)
    assert packed.dtype == dtype
    assert double.dtype == torch.float64
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_have_the_same_bytes(use_reentrant):
    def run(q, k, v):
        return flash_attn_varlen_func(q, k, v, ENDS, ENDS)

    def in_checkpoint(q, k, v):
        return checkpoint(run, q, k, v, use_reentrant=use_reentrant)

    tensors = inputs(batch=None)
    assert_all_same(gradients(in_checkpoint, tensors), gradients(run, tensors))


# torch.func and other derivatives


def loss(q, k, v):
    return flash_attn_func(q, k, v).square().sum()


class Nothing(torch.autograd.Function):
    """The identity, without a gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dout):
        return None


@pytest.mark.parametrize("direct", [True, False])
def test_nobody_makes_zeros_for_the_gradient_of_lse(direct, monkeypatch):
    """They would be a launch per backward on a GPU."""
    if not direct:
        monkeypatch.setattr("dash_attn.dispatch.call_directly", lambda *_: False)
    leaves = inputs()
    out, lse = flash_attn_func(*leaves, return_lse=True)
    assert not lse.requires_grad
    found = []

    def backward(ctx, *grads):
        found.append(grads)
        return (None,) * len(ctx.needs_input_grad)

    monkeypatch.setattr(type(out.grad_fn)._forward_cls, "backward", backward)
    out.sum().backward()
    assert [x is None for x in found[0]] == [False, True]


@pytest.mark.parametrize("direct", [True, False])
def test_a_gradient_that_nobody_makes_is_none(direct, monkeypatch):
    if not direct:
        monkeypatch.setattr("dash_attn.dispatch.call_directly", lambda *_: False)
    leaves = inputs()
    Nothing.apply(flash_attn_func(*leaves)).sum().backward()
    assert [x.grad for x in leaves] == [None] * 3


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as what a collective returns before it is done: any operator makes
    a plain one of it. `Stays` does not."""

    @staticmethod
    def __new__(cls, x):
        how = {"strides": x.stride(), "dtype": x.dtype, "device": x.device}
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, **how)

    def __init__(self, x):
        self.x = x

    def __tensor_flatten__(self):
        return ["x"], None

    __tensor_unflatten__ = None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*(x.x if isinstance(x, Wrapped) else x for x in args), **(kwargs or {}))


class Stays(Wrapped):
    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return cls(super().__torch_dispatch__(function, types, args, kwargs))


class GradientIs(torch.autograd.Function):
    """The identity, whose gradient is such a tensor."""

    @staticmethod
    def forward(ctx, x, kind):
        ctx.kind = kind
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dout):
        return ctx.kind(dout.contiguous()), None


def test_a_gradient_without_memory_of_its_own_is_waited_for(monkeypatch):
    """A kernel would read address 0."""
    tensors, seen = inputs(), []
    expected = gradients(flash_attn_func, tensors)
    compute = Call.backward
    monkeypatch.setattr(Call, "backward", lambda *x: seen.append(type(x[1].dout)) or compute(*x))
    assert_all_same(gradients(lambda *x: GradientIs.apply(flash_attn_func(*x), Wrapped), tensors), expected)
    assert seen == [torch.Tensor]
    with pytest.raises(InputError, match="got a gradient, or a saved tensor, that is a Stays"):
        gradients(lambda *x: GradientIs.apply(flash_attn_func(*x), Stays), tensors)


def test_plans_are_for_plain_tensors():
    q, k, v = (x.detach() for x in inputs())
    plan = dash_attn.plan_for(q, k, v)
    with pytest.raises(InputError, match="k is a Wrapped: a plan is for plain tensors"):
        apply_plan(plan, q, Wrapped(k), v, None)
    with pytest.raises(InputError, match="disorder must be None or a random.Random, got True"):
        apply_plan(plan, q, k, v, None, disorder=True)


def test_func_grad_has_the_same_bytes():
    tensors = [x.detach() for x in inputs()]
    grads = torch.func.grad(loss, argnums=(0, 1, 2))(*tensors)
    assert_all_same(grads, gradients(flash_attn_func, tensors)[1:])
    _, backward = torch.func.vjp(flash_attn_func, *tensors)
    assert_all_same(backward(2 * flash_attn_func(*tensors)), grads)


def test_autograd_outside_of_func_grad_is_not_cut():
    q, k, v = inputs()
    dq, value = torch.func.grad_and_value(lambda q: loss(q, k, v))(q.detach())
    value.backward()
    assert_same_bytes(k.grad, gradients(flash_attn_func, (q, k, v))[2])
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()


@pytest.mark.parametrize("of", [loss, lambda *qkv: flash_attn_func(*qkv).sum()])
def test_second_derivatives_are_errors(of):
    q, k, v = (x.detach() for x in inputs())
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.func.grad(lambda q: torch.func.grad(of)(q, k, v).sum())(q)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")  # PyTorch's own jvp does it
def test_forward_derivatives_are_errors():
    q, k, v = (x.detach() for x in inputs())
    out = flash_attn_func(q, k, v)
    with pytest.raises(RuntimeError, match="attention has no forward derivative"):
        torch.func.jvp(lambda q: flash_attn_func(q, k, v), (q,), (q,))
    with forward_ad.dual_level():
        with pytest.raises(RuntimeError, match="attention has no forward derivative"):
            flash_attn_func(forward_ad.make_dual(q, q), k, v)
        assert_same_bytes(flash_attn_func(q, k, v), out)  # nothing of it is asked here
        flash_attn_with_kvcache(q, k, v)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_of_torch_jit_is_an_error(packed):
    q, k, v = (x.detach().flatten(0, 1) if packed else x.detach() for x in inputs())
    ends = torch.tensor([0, len(q)], dtype=torch.int32)
    call = (lambda q: flash_attn_varlen_func(q, k, v, ends, ends)) if packed else (
        lambda q: flash_attn_func(q, k, v))  # fmt: skip
    call(q)
    with pytest.raises(InputError, match=r"torch\.jit\.trace is not supported: use torch\.export"):
        torch.jit.trace(call, (q,))


TRANSFORMS = {
    "vmap": lambda call, q: torch.vmap(call)(q[None]),
    "grad": lambda call, q: torch.func.grad(call)(q),
    "jvp": lambda call, q: torch.func.jvp(call, (q,), (q,)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of PyTorch's first jvp
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_plan_is_not_applied_under_a_transform(transform):
    """vmap would lose the gradient."""
    q, k, v = (x.detach() for x in inputs())
    plan = dash_attn.plan_for(q, k, v)
    with pytest.raises(InputError, match=r"apply_plan is not supported under the transforms of torch\.func"):
        TRANSFORMS[transform](lambda q: apply_plan(plan, q, k, v, None)[0].sum(), q)


def test_vmap_is_an_error():
    q, k, v = (torch.stack([x.detach()] * 2) for x in inputs())
    with pytest.raises(RuntimeError, match="no rule for torch.vmap; use its batch dimension"):
        torch.vmap(flash_attn_func)(q, k, v)

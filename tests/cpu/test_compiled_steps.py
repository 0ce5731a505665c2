"""torch.compile of more than attention: whole steps with their backward, and batches of unknown size."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from dash_attn import flash_attn_func, flash_attn_varlen_func
from dash_attn.errors import InputError
from dash_attn.integrations import sdpa
from dash_attn.ops.policies import forget
from dash_attn.testing import assert_same_bytes

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # PyTorch itself looks at it
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
]
ENDS = torch.tensor([0, 7, 7, 20], dtype=torch.int32)


def dense(x):
    return flash_attn_func(*x.unbind(2), causal=True)


def cut(x):
    return flash_attn_func(*x.repeat(1, 10, 1, 1, 1).unbind(2), causal=True, q_segment=128)


def packed(x):
    return flash_attn_varlen_func(*x.flatten(0, 1).unbind(1), 2 * ENDS, 2 * ENDS, causal=True)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


def gradient(finish, attend, x):
    """Of x, if `finish` makes the backward of what `attend` returned outside of it."""
    x = x.detach().requires_grad_()
    finish(attend(x))
    return x.grad


@pytest.mark.parametrize(
    ("attend", "backend"), [(dense, "eager"), (cut, "eager"), (packed, "eager"), (dense, "inductor")]
)
def test_a_compiled_backward_of_an_eager_forward_is_not_traced(attend, backend):
    """The plan is made in it: PyTorch would trace that, and the sums of tiles."""
    forget()
    torch.compiler.reset()
    x = drawn(2, 20, 3, 4, 8)

    def finish(out):
        out.square().sum().backward()

    found = gradient(torch.compile(finish, backend=backend), attend, x)
    assert_same_bytes(found, gradient(finish, attend, x))


def test_compiled_autograd_does_not_trace_the_backward():
    forget()
    torch.compiler.reset()
    x = drawn(2, 20, 3, 4, 8)

    def step(x):
        torch.compiler.disable(dense)(x).square().sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="aot_eager")(x)
    other = x.detach().requires_grad_()
    step(other)
    assert_same_bytes(x.grad, other.grad)


def test_a_compiled_step_with_checkpoints_of_sdpa():
    forget()
    torch.compiler.reset()
    x = drawn(2, 4, 20, 8)

    def attend(x):
        y = x.tanh()
        return F.scaled_dot_product_attention(y, y, y, is_causal=True).square().exp()

    def step(x):
        checkpoint(attend, x, use_reentrant=False).square().sum().backward()

    other = x.detach().requires_grad_()
    with sdpa.enabled():
        torch.compile(step, backend="eager")(x)
        step(other)
    assert_same_bytes(x.grad, other.grad)


@pytest.mark.parametrize("used", [False, True])
def test_a_batch_that_turns_out_to_be_empty(used):
    """As many sequences as a mask chooses."""

    def run(x, chosen):
        q, k, v = x[chosen].unbind(2)
        if used:
            lengths = torch.full_like(q[:, 0, 0, 0], 5, dtype=torch.int32)
            return flash_attn_varlen_func(q, k, v, seqused_k=lengths, causal=True)
        return flash_attn_func(q, k, v, causal=True)

    torch.compiler.reset()
    x = drawn(3, 20, 3, 4, 8)
    x = x.detach() if used else x
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        for chosen in ([1, 1, 0], [0, 0, 0], [0, 1, 0]):
            mask = torch.tensor(chosen, dtype=torch.bool)
            found, wanted = compiled(x, mask), run(x, mask)
            assert_same_bytes(found, wanted)
            if not used:
                assert_same_bytes(*(torch.autograd.grad(out.sum(), x)[0] for out in (found, wanted)))


def test_as_many_packed_sequences_as_position_ids_say():
    def run(x, position_ids):
        starts = (position_ids == 0).nonzero().squeeze(1)
        ends = torch.cat([starts, torch.full((1,), x.shape[0])]).int()
        return flash_attn_varlen_func(*x.unbind(1), ends, ends, causal=True)

    torch.compiler.reset()
    x = drawn(20, 3, 4, 8)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        for ends in ([20], [7, 20], [3, 9, 20]):
            lengths = torch.tensor(ends).diff(prepend=torch.zeros(1, dtype=torch.int64))
            position_ids = torch.cat([torch.arange(int(n)) for n in lengths])
            found, wanted = compiled(x, position_ids), run(x, position_ids)
            assert_same_bytes(found, wanted)
            assert_same_bytes(*(torch.autograd.grad(out.sum(), x)[0] for out in (found, wanted)))


def test_a_packed_batch_that_turns_out_to_be_empty():
    def run(x, lengths):
        ends = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
        return flash_attn_varlen_func(*x.unbind(1), ends, ends, causal=True)

    def unknown(rows, lengths):
        x, lengths = drawn(rows, 3, 4, 8), torch.tensor(lengths, dtype=torch.int32)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        torch._dynamo.decorators.mark_unbacked(lengths, 0)
        return x, lengths

    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for rows, lengths in ((20, [7, 13]), (0, []), (5, [5])):
        given = unknown(rows, lengths)
        found, wanted = compiled(*given), run(*given)
        assert_same_bytes(found, wanted)
        assert_same_bytes(*(torch.autograd.grad(out.sum(), given[0])[0] for out in (found, wanted)))
    with pytest.raises(InputError, match="cu_seqlens_q has no sequence, q has 5 rows"):
        compiled(*unknown(5, []))


def test_used_keys_are_compiled_once_for_all_batches():
    graphs = CompileCounter()

    def run(q, k, lengths):
        return flash_attn_varlen_func(q, k, k, seqused_k=lengths, causal=True)

    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend=graphs)
    for batch in range(2, 7):
        q, k = drawn(batch, 6, 4, 16).detach(), drawn(batch, 9, 2, 16).detach()
        lengths = torch.full((batch,), 4, dtype=torch.int32)
        assert_same_bytes(compiled(q, k, lengths), run(q, k, lengths))
    assert graphs.frame_count <= 2


def test_operators_that_are_called_between_graphs_are_not_traced():
    """func.grad needs the operator, and breaks the graph."""
    forget()
    torch.compiler.reset()
    x = drawn(1, 8, 3, 2, 16).detach()
    gradient = torch.func.grad(lambda x: dense(x).square().sum())
    assert_same_bytes(torch.compile(gradient, backend="inductor")(x), gradient(x))

"""F.scaled_dot_product_attention and models of transformers whose rows are spread over two ranks of gloo."""

from __future__ import annotations

import contextvars
import importlib
import threading
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dash_attn
from dash_attn.distributed import LAYOUTS, context, positions, shard, unshard
from dash_attn.errors import CommunicationError, InputError
from dash_attn.integrations import sdpa
from dash_attn.ops.spread import current_spread, spread_by
from dash_attn.testing import assert_same_bytes
from sharing_cases import refused
from spawned import RankError, spawn

SEQLEN, SEGMENT = 512, 128
CASES = [(layout, causal) for layout in LAYOUTS for causal in (True, False)]


def qkv_of(heads=4, kv_heads=2, seqlen=SEQLEN):
    """q, k, v and dout as SDPA takes them, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, h, seqlen, 16) for h in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def whole(q, k, v, dout, causal=True, q_segment=SEGMENT, **how):
    """out, dq, dk and dv of one process, as SDPA has them."""
    given = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
    out = dash_attn.attention(*given, causal=causal, q_segment=q_segment, **how)
    out.backward(dout.transpose(1, 2))
    return [x.transpose(1, 2) for x in (out.detach(), *(x.grad for x in given))]


def mine(tensors, layout="zigzag"):
    return [shard(x, dim=2, layout=layout) for x in tensors]


def call(q, k, v, **how):
    return F.scaled_dot_product_attention(q, k, v, **{"is_causal": True, "enable_gqa": True, **how})


def run(tensors, function=call, **how):
    """out and gradients of tensors of this rank."""
    *given, dout = (x.detach().clone() for x in tensors)
    for x in given:
        x.requires_grad_()
    out = function(*given, **how)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in given)]


@contextmanager
def inside(**how):
    with sdpa.enabled(), context(**{"q_segment": SEGMENT, **how}):
        yield


def check(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert_same_bytes(x.contiguous(), y.contiguous())


# On every rank


def on_sdpa():
    tensors = qkv_of()
    for layout, causal in CASES:
        with inside(layout=layout):
            found = run(mine(tensors, layout), is_causal=causal)
        check(found, mine(whole(*tensors, causal=causal), layout))


def on_dropout():
    """The weights that one process drops with the seed of rank 0."""
    tensors = qkv_of()
    torch.manual_seed(7)
    expected = [whole(*tensors, dropout_p=0.3) for _ in range(2)]
    assert not torch.equal(expected[0][0], expected[1][0])
    torch.manual_seed(7 + dist.get_rank())
    with inside():
        for one in expected:
            check(run(mine(tensors), dropout_p=0.3), mine(one))


def on_nested_contexts():
    tensors = qkv_of()
    with inside(layout="zigzag"):
        with context(layout="contiguous", q_segment=SEGMENT):
            check(run(mine(tensors, "contiguous")), mine(whole(*tensors), "contiguous"))
        check(run(mine(tensors)), mine(whole(*tensors)))
    assert current_spread() is None
    with sdpa.enabled():  # local again
        check(run(mine(tensors)), whole(*mine(tensors), q_segment=None))


def on_backward_elsewhere():
    """Outside of the context, in another thread."""
    tensors = qkv_of()
    *given, dout = mine(tensors)
    for x in given:
        x.requires_grad_()
    with inside():
        out = call(*given)
    thread = threading.Thread(target=out.backward, args=(dout,))
    thread.start()
    thread.join()
    check([out.detach(), *(x.grad for x in given)], mine(whole(*tensors)))


def on_other_threads():
    """A context counts in its own thread only, as sdpa.enabled does."""
    found = []
    with inside():
        thread = threading.Thread(target=lambda: found.append(current_spread()))
        thread.start()
        thread.join()
        assert current_spread() is not None
    assert found == [None]


def on_checkpoints():
    """A layer is run again where the mode is known, but no context is: as in autograd's threads for GPUs."""

    def layer(*given):
        return contextvars.Context().run(call, *given) if again else call(*given)

    again, tensors = [], qkv_of()
    *given, dout = mine(tensors)
    for x in given:
        x.requires_grad_()
    with inside():
        out = checkpoint(layer, *given, use_reentrant=False)
        again.append(True)
        out.backward(dout)
    check([out.detach(), *(x.grad for x in given)], mine(whole(*tensors)))


def on_compiled_calls():
    """What was compiled outside is not used inside, and the other way round."""
    tensors = qkv_of()
    compiled = torch.compile(call, backend="aot_eager")
    for _ in range(2):
        with sdpa.enabled():
            check(run(mine(tensors), compiled), whole(*mine(tensors), q_segment=None))
        with inside():
            check(run(mine(tensors), compiled), mine(whole(*tensors)))


def on_multi_head_attention():
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(32, 2, batch_first=True)
    x = torch.randn(1, SEQLEN, 32)
    with sdpa.enabled():
        expected, _ = layer(x, x, x, need_weights=False)
    local = shard(x)
    with inside():
        found, _ = layer(local, local, local, need_weights=False)
    torch.testing.assert_close(found, shard(expected))


def on_errors():
    q, k, v, _ = mine(qkv_of())
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    for change, message in [
        ({"dropout_p": 1.0}, "dropout_p must be at least 0 and less than 1, got 1.0"),
        ({"attn_mask": mask, "is_causal": False}, r"attn_mask is not supported .* shape \(256, 256\)"),
    ]:
        with inside(), refused(message):
            call(q, k, v, **change)
    with inside(), refused("query has 256 rows and key 128"):
        call(q, k[:, :, :128], v[:, :, :128], is_causal=False)
    for change, message in [
        ({"layout": "stripes"}, "layout must be one of zigzag, contiguous, got 'stripes'"),
        ({"mode": "tree"}, "mode must be one of .*, got 'tree'"),
        ({"q_segment": 100}, "q_segment must be a multiple of 128.*got 100"),
    ]:
        with refused(message), context(**change):
            pass
    with (
        pytest.raises(InputError, match="group must be a process group or a DeviceMesh, got int"),
        context(3),
    ):
        pass
    sdpa.activate()
    try:
        with context(), refused("use sdpa.enabled"):
            F.scaled_dot_product_attention(q, q, q)
    finally:
        sdpa.restore()


def on_refused_layers():
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.zeros(2, 16, 32)
    with inside(), refused("need_weights=True"):
        layer(x, x, x)
    with inside(), refused("_native_multi_head_attention hides an attention"):
        torch._native_multi_head_attention(x, x, x, 32, 4, *[x[0]] * 4)
    with inside(), refused(r"query must have 4 dimensions .*got \(2, 16, 32\)"):
        call(x, x, x)
    with inside(), refused("query has 4 heads, key 2, and enable_gqa is False"):
        call(torch.zeros(1, 4, 16, 32), *[torch.zeros(1, 2, 16, 32)] * 2, enable_gqa=False)


def on_context_parallel():
    """PyTorch spreads the tensors, and would compute; we take over its call."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = qkv_of()
    expected = mine(whole(*tensors))
    buffers = [x.clone() for x in tensors]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4), inside(group=mesh):
        found = run(buffers)
    check(found, expected)
    for x, buffer in zip(tensors, buffers):
        assert_same_bytes(x, buffer)
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
        importlib.reload(sdpa)  # as if it were imported only now, when F has PyTorch's wrapper
        with inside(group=mesh):
            check(run(buffers), expected)
        assert buffers[0].shape[2] == SEQLEN // dist.get_world_size()
        alone = dist.new_group([0], use_local_synchronization=True) if dist.get_rank() == 0 else None
        if alone is not None:
            with (
                inside(group=alone),
                pytest.raises(InputError, match="over the group of distributed.context"),
            ):
                call(*buffers[:3])


def on_failure(rank):
    assert rank != 1, "rank 1 does not want to"
    dist.barrier()


@pytest.mark.parametrize(
    "functions",
    [
        (
            on_sdpa,
            on_dropout,
            on_nested_contexts,
            on_backward_elsewhere,
            on_other_threads,
            on_checkpoints,
            on_errors,
            on_refused_layers,
        ),
        pytest.param(
            (on_compiled_calls, on_multi_head_attention, on_context_parallel), marks=pytest.mark.slow
        ),
    ],
    ids=["plain", "beside others"],
)
def test_two_ranks(functions):
    spawn(in_turns, 2, [function.__name__ for function in functions])


def on_a_mask(rank):
    """One rank alone gives a mask, and goes on behind the error: the other one is told, and no batch is taken
    for another."""
    store = dist.group.WORLD.get_group_store()
    store.set_timeout(timedelta(seconds=3))
    q = torch.zeros(1, 4, 64, 16)
    with sdpa.enabled(), context(dist.new_group([0, 1], timeout=timedelta(seconds=3))):
        F.scaled_dot_product_attention(q, q, q)
        if rank:
            with pytest.raises(InputError, match="attn_mask is not supported"):
                F.scaled_dot_product_attention(q, q, q, torch.ones(64, 64))
        told = (
            "could not be compared" if rank else "failed: rank 1 of 2 refused its arguments: attn_mask is not"
        )
        with pytest.raises(CommunicationError, match=told):
            F.scaled_dot_product_attention(q, q, q)


@pytest.mark.slow
def test_a_mask_that_one_rank_gives():
    spawn(on_a_mask, 2)


def in_turns(rank, names):
    for name in names:
        globals()[name]()


@pytest.mark.slow
def test_the_error_of_a_rank_is_raised():
    with pytest.raises(RankError, match="rank 1 does not want to"):
        spawn(on_failure, 2)


def test_a_context_needs_torch_distributed():
    with pytest.raises(InputError, match="torch.distributed is not initialised"), context():
        pass


def test_positions_and_rows_agree():
    assert spawn(on_positions, 2) == [True, True]


def on_positions(rank):
    rows = torch.arange(16)
    return bool(
        torch.equal(shard(rows, dim=0), positions(16)) and torch.equal(unshard(positions(16), dim=0), rows)
    )


def test_contexts_that_are_closed_out_of_order_leave_nothing():
    """As generators may do; elsewhere a context is open all the while."""
    first, second, third = (object() for _ in range(3))

    def holding(spread):
        with spread_by(spread):
            yield

    elsewhere, task = holding(third), contextvars.copy_context()
    task.run(next, elsewhere)
    a, b = holding(first), holding(second)
    next(a)
    next(b)
    assert current_spread() is second
    a.close()
    assert current_spread() is second
    b.close()
    assert current_spread() is None
    task.run(elsewhere.close)

"""The executor: right numbers, and bytes that depend on the plan's numerics and on nothing else."""

from __future__ import annotations

import random

import pytest
import torch
from attention_cases import SCALE, executed, expected, packed_tensors, shuffled_placement, split
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import plans
from torch.nn.functional import scaled_dot_product_attention

from dash_attn.backends.base import Tensors
from dash_attn.backends.cpu import backward, dq_partials, fold_partials, forward
from dash_attn.errors import InputError, TooFewWorkersError
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import FA3, SPT, Descending, Shift, SymmetricShift, build_plan, prove
from dash_attn.testing import assert_same_bytes, same_bytes

GRADS = ("dq", "dk", "dv")
DTYPES = ("bfloat16", "float16", "float32", "float64")


def small(mask=None, dtype="float32", seqlen=64, heads=2, kv_heads=1, batch=1, head_dim=8, tile=8) -> Problem:
    """Tiles of 8 x 8: at length 64 most q tiles have several contributions."""
    return Problem.dense(
        batch=batch, heads=heads, kv_heads=kv_heads, seqlen=seqlen, head_dim=head_dim, mask=mask,
        dtype=dtype, tile_m=tile, tile_n=tile,
    )  # fmt: skip


def assert_same(a, b, names=("out", "lse", *GRADS)):
    for name in names:
        assert_same_bytes(a[name], b[name], name)


def assert_close_to_oracle(problem, tensors, results):
    """Error bounds in the unit roundoff of the dtype, relative to the largest element; dQ and dK, whose terms
    cancel where rows see one key, also to that of dV."""
    unit = max(torch.finfo(getattr(torch, problem.dtype)).eps, 1e-15)
    all_exact = expected(problem, tensors)
    for name, exact in all_exact.items():
        got = results[name].double()
        assert got.shape == exact.shape
        hidden = exact == -torch.inf
        assert torch.equal(got == -torch.inf, hidden)
        error, sizes = (got - exact)[~hidden].abs(), [exact[~hidden].abs()]
        if name in ("dq", "dk"):
            sizes.append(all_exact["dv"].abs())
        if error.numel():
            assert error.max() <= 12 * unit * max(1.0, *(size.max() for size in sizes if size.numel())), name


# Numbers


@settings(max_examples=60)
@given(plans(), st.integers(0, 2**20))
def test_every_plan_agrees_with_the_oracle(plan, seed):
    tensors = packed_tensors(plan.problem, seed)
    assert_close_to_oracle(plan.problem, tensors, executed(plan, tensors))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [Mask.full(), Mask.causal(), Mask.window(20, 5)], ids=lambda m: m.name)
def test_every_dtype_agrees_with_the_oracle(dtype, mask):
    problem = small(mask, dtype, seqlen=60)
    tensors = packed_tensors(problem)
    results = executed(build_plan(problem, SPT()), tensors)
    assert {results[name].dtype for name in ("out", *GRADS)} == {getattr(torch, dtype)}
    assert results["lse"].dtype == (torch.float64 if dtype == "float64" else torch.float32)
    assert_close_to_oracle(problem, tensors, results)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_errors_are_like_those_of_pytorch(dtype, causal):
    """PyTorch's own attention in the same dtype is the peer: at most 1.5 times its error."""
    mask = Mask.causal() if causal else Mask.full()
    problem = small(mask, dtype, seqlen=256, heads=2, kv_heads=2, head_dim=32)
    tensors = packed_tensors(problem)
    dout, *leaves = (x[None].transpose(1, 2).clone() for x in tensors)
    q, k, v = (x.requires_grad_() for x in leaves)
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=SCALE)
    out.backward(dout)
    peer = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    ours = executed(build_plan(problem, FA3()), tensors)
    exact = expected(problem, tensors)
    for name, theirs in peer.items():
        own = (ours[name].double() - exact[name]).pow(2).mean().sqrt()
        other = (theirs.transpose(1, 2)[0].double() - exact[name]).pow(2).mean().sqrt()
        assert own <= 1.5 * other, f"{name}: {own:.3g} against {other:.3g}"


def test_kv_tiles_and_q_tiles_without_a_task_have_zero_gradients():
    problem = Problem.dense(
        seqlen_q=40, seqlen_k=16, head_dim=8, mask=Mask.window(0, 0), dtype="float32", tile_m=8, tile_n=8
    )
    results = executed(build_plan(problem, FA3()), packed_tensors(problem))
    assert (results["dq"][:24] == 0).all()
    assert (results["out"][:24] == 0).all()
    assert (results["dv"] != 0).any(-1).all()
    problem = Problem.dense(
        seqlen_q=8, seqlen_k=32, head_dim=8, mask=Mask.window(0, 0), dtype="float32", tile_m=8, tile_n=8
    )
    results = executed(build_plan(problem, FA3()), packed_tensors(problem))
    assert (results["dk"][:24] == 0).all()
    assert (results["dv"][:24] == 0).all()
    assert (results["dv"][24:] != 0).any(-1).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_p_and_ds_are_rounded_before_their_second_products(dtype):
    problem = small(dtype=dtype, seqlen=32, heads=1, head_dim=16, tile=32)  # one task: no sum of tiles
    tensors = packed_tensors(problem)
    dout, q, k, v = (x[:, 0].float().contiguous() for x in tensors)
    narrow = getattr(torch, dtype)
    results = executed(build_plan(problem, FA3()), tensors)
    p = (q @ k.T * SCALE - results["lse"][0, :, None]).exp()
    delta = (dout * results["out"][:, 0].float()).sum(1, keepdim=True)
    ds = p * (dout @ v.T - delta)
    assert_same_bytes(results["dv"][:, 0], (p.to(narrow).float().T @ dout).to(narrow), "dv")
    assert_same_bytes(results["dk"][:, 0], (ds.to(narrow).float().T @ q * SCALE).to(narrow), "dk")
    assert_same_bytes(results["dq"][:, 0], (ds.to(narrow).float() @ k * SCALE).to(narrow), "dq")


# Bytes


@settings(max_examples=40)
@given(plans(), st.integers(0, 2**20))
def test_placement_leaves_every_byte_alone(plan, seed):
    tensors = packed_tensors(plan.problem)
    other = prove(shuffled_placement(plan, seed))
    assert other.fingerprint == plan.fingerprint
    assert_same(executed(plan, tensors), executed(other, tensors))


@pytest.mark.parametrize("policy", [FA3(), Descending(), SPT(), SymmetricShift()], ids=str)
def test_named_placements_leave_every_byte_alone(policy):
    problem = small(Mask.causal(), "bfloat16", batch=2, heads=4, kv_heads=2)
    tensors = packed_tensors(problem)
    a, b = (executed(build_plan(problem, policy, placement), tensors) for placement in ("policy", "lpt"))
    assert_same(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("mask", "one", "other"),
    [(Mask.causal(), FA3(), SPT()), (Mask.causal(), FA3(), SymmetricShift()), (Mask.full(), FA3(), Shift())],
    ids=["spt", "symmetric_shift", "shift"],
)
def test_other_tickets_give_other_bytes(mask, one, other, dtype):
    # Rounding to 16 bits hides most differences of the fp32 sums, so let there be many elements.
    problem = small(mask, dtype, seqlen=400, head_dim=256, tile=32)
    a, b = build_plan(problem, one), build_plan(problem, other)
    assert problem.grid(0).contributions.max() >= 3  # two contributions commute
    assert a.fingerprint != b.fingerprint
    tensors = packed_tensors(problem)
    ours, theirs = executed(a, tensors), executed(b, tensors)
    assert not same_bytes(ours["dq"], theirs["dq"])
    assert_same(ours, theirs, ("out", "lse"))


def test_the_order_of_q_tiles_in_an_item_is_the_order_of_dk_and_dv():
    problem = small(Mask.causal())
    tensors = packed_tensors(problem)
    up, down = (executed(build_plan(problem, policy), tensors) for policy in (FA3(), Descending()))
    assert_same(up, down, ("dq",))  # both sum dQ from the first kv tile to the last
    assert not same_bytes(up["dk"], down["dk"])
    assert not same_bytes(up["dv"], down["dv"])


def test_without_order_dq_depends_on_chance_and_nothing_else_does():
    problem = small(Mask.full())
    plan, tensors = build_plan(problem, Shift()), packed_tensors(problem)
    runs = [executed(plan, tensors, rng=random.Random(seed), ordered=False) for seed in range(4)]
    assert len({bytes(run["dq"].view(torch.uint8).numpy()) for run in runs}) > 1
    for run in runs[1:]:
        assert_same(runs[0], run, ("out", "lse", "dk", "dv"))
    again = executed(plan, tensors, rng=random.Random(0), ordered=False)
    assert_same(runs[0], again)


def test_two_contributions_commute_so_order_cannot_show_there():
    problem = small(Mask.full(), seqlen=16)
    assert problem.grid(0).contributions.max() == 2
    plan, tensors = build_plan(problem, FA3()), packed_tensors(problem)
    runs = [executed(plan, tensors, rng=random.Random(seed), ordered=False) for seed in range(4)]
    for run in runs:
        assert_same(executed(plan, tensors), run)


@pytest.mark.parametrize("dtype", DTYPES)
def test_partials_folded_in_ticket_order_are_dq(dtype):
    problem = small(Mask.causal(), dtype, seqlen=40, heads=4, kv_heads=2, batch=2)
    plan, (dout, q, k, v) = build_plan(problem, SymmetricShift()), packed_tensors(problem)
    out, lse = forward(plan, q, k, v, SCALE)
    dq, *_ = backward(plan, Tensors(dout, q, k, v, out, lse), SCALE)
    folded = torch.zeros_like(dq)
    partials = dq_partials(plan, Tensors(dout, q, k, v, out, lse), SCALE)
    assert len(partials) == 2 * 4 * 5
    for (sequence, head, q_tile), tiles in partials.items():
        assert len(tiles) == problem.grid(sequence).contributions[q_tile]
        first = sequence * 40 + q_tile * 8
        folded[first : first + 8, head] = fold_partials(tiles, SCALE, dq.dtype)
    assert_same_bytes(folded, dq)
    backwards = fold_partials(partials[0, 0, 4][::-1], SCALE, torch.float64)
    assert not same_bytes(backwards, fold_partials(partials[0, 0, 4], SCALE, torch.float64))


# One sequence, whatever is around it


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("policy", [FA3(), SPT(), Shift(ring=2)], ids=str)
def test_bytes_of_a_sequence_do_not_depend_on_its_batch(policy, dtype):
    mask = Mask.full() if isinstance(policy, Shift) else Mask.window(30, 0)
    lengths = [(50, 50), (33, 47), (50, 50), (1, 9), (64, 40)]
    shape = {
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 12,
        "mask": mask,
        "dtype": dtype,
        "tile_m": 8,
        "tile_n": 8,
    }
    problem = Problem.varlen(lengths, **shape)
    tensors = packed_tensors(problem)
    together = executed(build_plan(problem, policy), tensors)
    alone = []
    for pair, part in zip(lengths, split(problem, tensors)):
        alone.append(executed(build_plan(Problem.varlen([pair], **shape), policy), part))
    for name in ("out", "dq", "dk", "dv"):
        assert_same_bytes(together[name], torch.cat([one[name] for one in alone]), name)
    assert_same_bytes(together["lse"], torch.cat([one["lse"] for one in alone], 1), "lse")


def test_bytes_of_a_sequence_do_not_depend_on_its_index():
    shape = {
        "heads": 2,
        "kv_heads": 2,
        "head_dim": 5,
        "mask": Mask.causal(),
        "dtype": "float32",
        "tile_m": 8,
        "tile_n": 8,
    }
    lengths = [(31, 31), (7, 7), (45, 45), (3, 3)]
    problem = Problem.varlen(lengths, **shape)
    tensors = packed_tensors(problem)
    forwards = executed(build_plan(problem, SPT()), tensors)
    turned = Problem.varlen(lengths[::-1], **shape)
    backwards = executed(
        build_plan(turned, SPT()), [torch.cat(p[::-1]) for p in zip(*split(problem, tensors))]
    )
    for name in ("out", "dq", "dk", "dv"):
        parts = backwards[name].split([pair[0] for pair in lengths[::-1]])
        assert_same_bytes(forwards[name], torch.cat(parts[::-1]), name)


def test_bytes_of_a_head_do_not_depend_on_the_other_heads():
    problem = small(Mask.causal(), heads=6, kv_heads=3, head_dim=7)
    tensors = packed_tensors(problem)
    together = executed(build_plan(problem, SPT()), tensors)
    dout, q, k, v = tensors
    last = [dout[:, 4:], q[:, 4:], k[:, 2:], v[:, 2:]]
    alone = executed(build_plan(small(Mask.causal(), heads=2, kv_heads=1, head_dim=7), SPT()), last)
    for name, heads in (("out", slice(4, 6)), ("dq", slice(4, 6)), ("dk", slice(2, 3)), ("dv", slice(2, 3))):
        assert_same_bytes(together[name][:, heads].contiguous(), alone[name], name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_autocast_and_the_number_of_threads_leave_every_byte_alone(dtype):
    problem = Problem.dense(heads=1, seqlen=300, head_dim=64, mask=Mask.causal(), dtype=dtype)
    plan, tensors = build_plan(problem, Descending()), packed_tensors(problem)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = executed(plan, tensors)
        torch.set_num_threads(2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            two = executed(plan, tensors)
    finally:
        torch.set_num_threads(before)
    assert_same(one, two)


# Errors


def test_too_few_workers_is_an_error_before_anything_runs():
    problem = small(Mask.full())
    plan, (dout, q, k, v) = build_plan(problem, Shift()), packed_tensors(problem)
    out, lse = forward(plan, q, k, v, SCALE)
    assert plan.min_workers == 8
    with pytest.raises(TooFewWorkersError, match="needs 8 resident workers"):
        backward(plan, Tensors(dout, q, k, v, out, lse), SCALE, workers=7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[:-1], k, v), r"q has shape \(63, 2, 8\), the problem says \(64, 2, 8\)"),
        (lambda q, k, v: (q, k[:, :0], v), r"k has shape \(64, 0, 8\), the problem says \(64, 1, 8\)"),
        (lambda q, k, v: (q, k, v.half()), "v has dtype torch.float16, the problem says torch.float32"),
        (lambda q, k, v: (q.to("meta"), k, v), "q is on meta, this backend runs on cpu"),
    ],
)
def test_tensors_that_do_not_fit_the_problem(change, message):
    problem = small()
    _, q, k, v = packed_tensors(problem)
    with pytest.raises(InputError, match=message):
        forward(problem, *change(q, k, v), SCALE)


def test_lse_of_another_shape():
    problem = small()
    dout, q, k, v = packed_tensors(problem)
    out, lse = forward(problem, q, k, v, SCALE)
    with pytest.raises(InputError, match=r"lse has shape \(64, 2\), not \(2, 64\)"):
        backward(build_plan(problem, FA3()), Tensors(dout, q, k, v, out, lse.T), SCALE)

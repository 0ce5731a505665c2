"""Attention that several processes share, over gloo: the bytes of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate, cycle, product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import all_reduce
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import dash_attn
from dash_attn.distributed import attention, attention_varlen, passes, positions, shard, unshard
from dash_attn.distributed import autograd as shared_autograd
from dash_attn.distributed.shared import Shared
from dash_attn.errors import InputError
from dash_attn.ops import calls
from dash_attn.problem import Mask
from dash_attn.schedule.sharing import Cut, Layout, Rows, deal, routes, teams_of
from dash_attn.scores import Origin
from dash_attn.testing import assert_same_bytes
from sharing_cases import LAYOUTS, MASKS, MODES, Case, compared
from spawned import spawn

HEADS = ((4, 4), (4, 2), (3, 1))


def _all_modes(rank: int, ranks: int) -> None:
    rows = {2: 512, 3: 384, 4: 512, 8: 1024}[ranks]
    every = {4: 5, 8: 11}.get(ranks, 1)  # of the cases; it divides no number of modes or layouts
    done, names = set(), set()
    for heads, mask, mode, layout in list(product(HEADS, MASKS, MODES, LAYOUTS))[::every]:
        if mode == "ulysses" and heads[1] % ranks:
            heads = (2 * ranks, ranks)
        same = heads, mask, layout, teams_of(mode, ranks, heads[1])  # several modes may be one
        if same not in done or mode not in names:
            compared(Case(heads, mask, mode, layout, rows))
        done.add(same)
        names.add(mode)
    assert names == set(MODES)
    for mode in MODES:
        lengths = tuple(n * 2 * ranks for n in (40, 0, 3, 64, 1))
        if mode != "ulysses" or ranks == 2:
            compared(Case((4, 2), "causal", mode, "zigzag", lengths=lengths))
    compared(Case((4, 2), "causal", "gather", "zigzag", rows, sink=True))
    compared(Case((2 * ranks, ranks), "causal", "ulysses", "zigzag", rows, sink=True))
    compared(Case((4, 2), "causal", "ring", "zigzag", lengths=(64 * ranks, 192 * ranks), sink=True))
    for lengths in ((), (64 * ranks, 32 * ranks)):
        compared(Case((4, 4), "causal", "ring", "zigzag", rows, lengths, extra="one tensor"))
    for extra, mode in product(("alibi", "intervals"), ("ulysses+gather", "ring")):
        compared(Case((4, 2), "causal", mode, "zigzag", rows, extra=extra))
        compared(Case((4, 2), "full", mode, "zigzag", lengths=(4 * ranks, 20 * ranks), extra=extra))
    compared(Case((4, 2), "window", "ring", "contiguous", rows, dtype=torch.float64))
    compared(Case((4, 2), "causal", "gather", "zigzag", rows, q_segment=None))


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4, 8))])
def test_any_number_of_ranks_has_the_bytes_of_one(ranks: int) -> None:
    spawn(_all_modes, ranks, ranks)


def _dropout(rank: int, ranks: int) -> None:
    """Every mode, once each: heads, masks and layouts go round. Without a segment, sequences stay whole."""
    rows = {2: 512, 3: 384, 4: 512}[ranks]
    others = cycle(product(HEADS, MASKS, LAYOUTS))
    for mode, (heads, mask, layout) in zip(MODES * 2, others):
        if mode == "ulysses" and heads[1] % ranks:
            heads = (ranks * 2, ranks)
        compared(Case(heads, mask, mode, layout, rows, extra="dropout"))
    for mode in MODES:
        lengths = tuple(n * 2 * ranks for n in (30, 0, 3, 48, 1))
        heads = (2 * ranks, ranks) if mode == "ulysses" else (4, 2)
        compared(Case(heads, "causal", mode, "zigzag", lengths=lengths, extra="dropout"))
    for mode in ("gather", "ulysses+ring"):
        compared(Case((4, 2), "causal", mode, "zigzag", rows, q_segment=None, extra="dropout"))
    compared(
        Case((4, 2), "window", "ring", "contiguous", rows, sink=True, extra="dropout", dtype=torch.float64)
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_dropout_drops_what_one_process_drops(ranks: int) -> None:
    spawn(_dropout, ranks, ranks)


def _counted_otherwise(rank: int) -> None:
    """Heads, rows or sequences that each rank counts from 0, or another seed: other bytes."""
    right = Shared.origin
    lengths = (256, 512)
    for field, mode in (("head", "ulysses"), ("row", "gather"), ("sequence", "gather")):

        def local(self: Any, *given: Any, lost: str = field) -> Origin:
            return right(self, *given)._replace(**{lost: 0})

        case = Case((4, 2), "causal", mode, "contiguous", lengths=lengths, extra="dropout")
        compared(case)
        Shared.origin = local  # type: ignore[method-assign]
        try:
            assert _differs(case), f"{field} decides nothing: these comparisons show nothing"
        finally:
            Shared.origin = right  # type: ignore[method-assign]
    q = torch.randn(1, 64, 4, 32, generator=torch.Generator().manual_seed(rank))
    one, again, other = (attention(q, q, q, dropout_p=0.3, dropout_seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, again)  # type: ignore[arg-type]
    assert not torch.equal(one, other)  # type: ignore[arg-type]


def _differs(case: Case) -> bool:
    """Whether some rank has other bytes than one process."""
    found = torch.zeros(1)
    try:
        compared(case)
    except AssertionError:
        found += 1
    dist.all_reduce(found)
    return bool(found)


@pytest.mark.slow
def test_patterns_that_each_rank_counts_for_itself_are_others() -> None:
    spawn(_counted_otherwise, 2)


def _seeds(rank: int) -> None:
    """None: what rank 0 draws, whatever others would, and one number per call on every rank."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 128, 4, 32, generator=generator) for _ in range(3))
    mine = [shard(x) for x in (q, k, v)]
    for call in range(2):
        torch.manual_seed(5 + 10 * call)
        whole = [dash_attn.attention(q, k, v, dropout_p=0.3) for _ in range(2)]
        torch.manual_seed(5 + 10 * call + rank)
        found = [attention(*mine, dropout_p=0.3) for _ in range(2)]
        for one, part in zip(whole, found):
            assert_same_bytes(part, shard(one))
        after = torch.rand(1)
        torch.manual_seed(5 + 10 * call + rank)
        for _ in range(2):
            torch.randint(2**63 - 1, ())
        assert torch.equal(after, torch.rand(1))
    given = torch.tensor(3)
    assert_same_bytes(
        attention(*mine, dropout_p=0.3, dropout_seed=given),
        shard(dash_attn.attention(q, k, v, dropout_p=0.3, dropout_seed=3)),
    )
    # Later calls of a kind are not compared: then all have that of rank 0.
    given += rank
    assert_same_bytes(
        attention(*mine, dropout_p=0.3, dropout_seed=given),
        shard(dash_attn.attention(q, k, v, dropout_p=0.3, dropout_seed=3)),
    )
    assert int(given) == 3 + rank
    leaves = [x.clone().requires_grad_() for x in mine]
    grads = []
    for again in (False, True):
        torch.manual_seed(rank)
        call_of = partial(attention, dropout_p=0.3)
        out = (
            torch.utils.checkpoint.checkpoint(call_of, *leaves, use_reentrant=False)
            if again
            else call_of(*leaves)
        )
        grads.append(torch.autograd.grad(out.square().sum(), leaves))  # type: ignore[union-attr]
    for one, other in zip(*grads):
        assert_same_bytes(one, other)


def test_without_a_seed_that_of_rank_0_counts() -> None:
    spawn(_seeds, 2)


def _seed_of_a_group(rank: int) -> None:
    group = dist.new_group([1, 2])
    if rank:
        q = torch.randn(1, 128, 4, 32, generator=torch.Generator().manual_seed(0))
        torch.manual_seed(1)
        whole = dash_attn.attention(q, q, q, dropout_p=0.3)
        torch.manual_seed(rank)
        x = shard(q, group)
        assert_same_bytes(attention(x, x, x, group=group, dropout_p=0.3), shard(whole, group))


@pytest.mark.slow
def test_the_first_rank_is_that_of_the_group() -> None:
    spawn(_seed_of_a_group, 3)


def _in_rank_order(rank: int) -> None:
    """Sums of dK and dV that are added as the ranks come, not as the segments: other bytes."""
    from dash_attn.distributed import leaving

    right = leaving.Leaving._finish

    def by_rank(self: Any, rows: Rows, offset: int, heads: Any, parts: list[Any]) -> None:
        right(self, rows, offset, heads, list(reversed(parts)))

    case = Case((4, 2), "full", "gather", "contiguous", 768)
    compared(case)
    leaving.sorted = lambda parts, key: parts  # type: ignore[attr-defined]
    leaving.Leaving._finish = by_rank  # type: ignore[method-assign]
    differs = torch.zeros(1)
    try:
        compared(case)
    except AssertionError:
        differs += 1
    dist.all_reduce(differs)
    assert differs, "the order of the sums decides nothing: this comparison shows nothing"


def test_sums_in_rank_order_are_others() -> None:
    spawn(_in_rank_order, 2)


def _rows_and_positions(rank: int) -> None:
    x = torch.arange(24.0).view(1, 24, 1)
    bounds = torch.tensor([0, 8, 8, 24], dtype=torch.int32)
    for layout, cu_seqlens in product(LAYOUTS, (None, bounds)):
        mine = shard(x, layout=layout, cu_seqlens=cu_seqlens)
        assert mine.shape == (1, 12, 1)
        assert torch.equal(unshard(mine, layout=layout, cu_seqlens=cu_seqlens), x)
        starts = torch.zeros(24) if cu_seqlens is None else torch.tensor([0] * 8 + [8] * 16)
        there = shard((x[0, :, 0] - starts), dim=0, layout=layout, cu_seqlens=cu_seqlens)
        assert torch.equal(positions(24, layout=layout, cu_seqlens=cu_seqlens), there.long())
    for dtype in (torch.int16, torch.uint16, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.float64):
        whole = torch.arange(1, 73).remainder(5).view(3, 8, 3).to(dtype)
        again = unshard(shard(whole.view(torch.uint8), dim=1).view(dtype), dim=-2)
        assert again.shape == whole.shape
        assert_same_bytes(again, whole)
    assert unshard(x[:, :, :0]).shape == (1, 48, 0)
    leaf = x.clone().requires_grad_()
    shard(leaf).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.sum() == 12
    with pytest.raises(InputError, match="unshard carries no gradient"):
        unshard(leaf[:, :12])


def test_rows_come_and_go() -> None:
    spawn(_rows_and_positions, 2)


class _Reduced(torch.autograd.Function):
    """Its gradient is a collective that nobody has waited for, like those of tensor parallelism."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return all_reduce(grad.contiguous(), "max", dist.group.WORLD)


def _pending(x: Any) -> None:
    """Results of collectives are waited for before a backend reads them."""
    seen: list[type] = []

    def noted(shared: Any, meeting: Any, *tensors: Any) -> Any:
        seen.extend(type(x) for x in tensors if isinstance(x, torch.Tensor))
        return next(run)(shared, meeting, *tensors)

    run = iter((passes.forward, passes.backward))
    with (
        mock.patch.object(shared_autograd, "forward", noted),
        mock.patch.object(shared_autograd, "backward", noted),
    ):
        q = all_reduce(x, "max", dist.group.WORLD)
        assert type(q) is not torch.Tensor, "the control"
        leaf = x.clone().requires_grad_()
        out = attention(leaf, q, q, causal=True, mode="gather")
        _Reduced.apply(out).sum().backward()  # type: ignore[no-untyped-call]
    assert seen == [torch.Tensor] * 4


def _features(rank: int) -> None:
    q = torch.randn(1, 64, 4, 32, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    mesh = dist.init_device_mesh("cpu", (2,))
    out = attention(q, q, q, group=mesh, causal=True)
    compiled = torch.compile(lambda x: attention(x, x, x, causal=True) * 2, backend="aot_eager")
    assert torch.equal(compiled(q), out * 2)  # type: ignore[operator]
    again = torch.utils.checkpoint.checkpoint(
        lambda x: attention(x, x, x, causal=True), q, use_reentrant=False
    )
    found = [torch.autograd.grad(x.sum(), q)[0] for x in (out, again)]  # type: ignore[union-attr]
    assert torch.equal(*found)
    policy = partial(
        create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.bmm.default]
    )
    chosen = torch.utils.checkpoint.checkpoint(
        lambda x: attention(x, x, x, causal=True), q, use_reentrant=False, context_fn=policy
    )
    assert torch.equal(torch.autograd.grad(chosen.sum(), q)[0], found[0])  # type: ignore[union-attr]
    _pending(q.detach())
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q, q, q).dtype == torch.bfloat16  # type: ignore[union-attr]
    sink = torch.zeros(4, requires_grad=True)
    attention(q, q, q, learnable_sink=sink, mode="ulysses").sum().backward()  # type: ignore[union-attr]
    assert sink.grad is not None
    assert bool(sink.grad[2 * rank : 2 * rank + 2].any())
    assert not sink.grad[2 - 2 * rank : 4 - 2 * rank].any()


@pytest.mark.slow
def test_with_what_pytorch_has() -> None:
    spawn(_features, 2)


def _nothing_to_do(rank: int) -> None:
    """Batches without sequences have results and gradients without rows, as on one GPU."""
    q = torch.zeros(0, 64, 4, 32, requires_grad=True)
    out, lse = attention(q, q[:, :, :2], q[:, :, :2], causal=True, return_lse=True)
    assert (out.shape, lse.shape) == ((0, 64, 4, 32), (0, 4, 64))
    out.sum().backward()
    assert q.grad is not None
    assert q.grad.shape == q.shape
    none, bounds = torch.zeros(0, 4, 32), torch.zeros(1, dtype=torch.int32)
    out, lse = attention_varlen(none, none, none, bounds, return_lse=True)
    assert (out.shape, lse.shape) == ((0, 4, 32), (4, 0))


@pytest.mark.slow
def test_no_sequence_is_no_error() -> None:
    spawn(_nothing_to_do, 2)


def _of_inference(rank: int) -> None:
    with torch.inference_mode():
        slopes, starts = torch.rand(4), torch.zeros(1, 32, dtype=torch.int32)
    q = torch.randn(1, 32, 4, 16).requires_grad_()
    for aux in ({"alibi_slopes": slopes}, {"row_starts": starts}):
        (dq,) = torch.autograd.grad(attention(q, q, q, causal=True, **aux).sum(), q)
        assert dq.isfinite().all()


def test_tensors_made_in_inference_mode_may_stand_beside_a_training_call() -> None:
    spawn(_of_inference, 2)


def _many_lengths(rank: int) -> None:
    """More shapes in a batch than calls are kept: a second call makes none anew."""
    lengths = range(2, 302, 2)
    x = torch.randn(sum(lengths) // 2, 2, 8).requires_grad_()
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    for mode in ("gather", "ring"):
        made = []
        for _ in range(2):
            out = attention_varlen(x, x, x, ends, causal=True, mode=mode, layout="contiguous")
            out.sum().backward()  # type: ignore[union-attr]
            made.append(calls._shaped.cache_info().misses)
        assert made[0] == made[1]


def test_many_lengths_are_planned_once() -> None:
    spawn(_many_lengths, 2)


def _alone(rank: int) -> None:
    compared(Case((4, 2), "causal", "auto", "zigzag", 300))


def test_one_rank_is_one_process() -> None:
    spawn(_alone, 1)


# How rows are dealt


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=5),
    st.sampled_from([(2, 1), (2, 2), (3, 1), (4, 2), (8, 4)]),
    st.sampled_from(LAYOUTS),
    st.sampled_from([0, 128, 256]),
)
def test_every_row_is_computed_once_and_comes_from_where_it_lies(
    parts: list[int], teams: tuple[int, int], kind: str, q_segment: int
) -> None:
    ranks, head_ranks = teams
    layout = Layout(tuple(16 * ranks * n for n in parts), ranks, kind)
    held = sorted(c.rows for chunks in layout.chunks for c in chunks)
    whole = [(s, row) for s, n in enumerate(layout.lengths) for row in range(n)]
    assert [(r.sequence, row) for r in held for row in range(r.first, r.last)] == whole
    cut = Cut(Mask.causal(), 128, q_segment)
    work = deal(layout, cut, 8, head_ranks)
    for head in range(8):
        mine = sorted(r for w in work if w.heads[0] <= head < w.heads[1] for r in w.rows)
        assert [(r.sequence, row) for r in mine for row in range(r.first, r.last)] == whole
    for w in work:
        for rows in w.rows:  # whole segments
            ends = {s.rows[1] for s in cut.segments(layout.lengths[rows.sequence])} | {0}
            assert {rows.first, rows.last} <= ends
    blocks = [w.rows for w in work]
    for worker, w in enumerate(work):
        wanted = [(r.sequence, row) for r in w.rows for row in range(r.first, r.last)]
        got: dict[int, tuple[int, int]] = {}
        for route in (r for r in routes(layout, blocks, worker) if r.worker == worker):
            same = [r for r in routes(layout, blocks, route.owner) if r[:2] == route[:2]]
            assert [r.at.tolist() for r in same] == [route.at.tolist()]  # as the owner sees it
            lying = [(c.rows.sequence, row) for c in layout.chunks[route.owner] for row in range(*c.rows[1:])]
            for local, at in route.runs:
                for k in range(at.stop - at.start):
                    got[at.start + k] = lying[local.start + k]
        assert [got[at] for at in range(len(wanted))] == wanted
        assert len(got) == len(wanted)


def test_under_a_causal_mask_zigzag_gives_all_ranks_the_same_work() -> None:
    layout = Layout((8192,), 4, "zigzag")
    work = deal(layout, Cut(Mask.causal(), 128, 1024), 4, 1)
    assert [sum(r.last**2 - r.first**2 for r in w.rows) for w in work] == [8192**2 // 4] * 4
    assert work[0].rows == (Rows(0, 0, 1024), Rows(0, 7168, 8192))


def _saves_everything(rank: int) -> None:
    """What a selective checkpoint has saved of other calls is not taken for what ranks exchange."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(1, 64, 4, 32, generator=generator).requires_grad_()

    def attend(x: Tensor, mode: str, p: float) -> Tensor:
        torch.manual_seed(4)
        return attention(2 * x, x, x, causal=True, mode=mode, dropout_p=p, q_segment=128)  # type: ignore

    def gathered(x: Tensor, *_: object) -> Tensor:
        return (x * unshard(x.detach() + rank)[:, :64]).sin()

    policies: list[Callable[..., CheckpointPolicy]] = [
        lambda *_, **__: CheckpointPolicy.MUST_SAVE,
        lambda _, op, *__, **___: (
            CheckpointPolicy.MUST_SAVE if "all" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE
        ),
    ]
    for policy, function in product(policies, (attend, gathered)):
        contexts = partial(create_selective_checkpoint_contexts, policy)
        for mode, p in (("ulysses", 0.0), ("gather", 0.0), ("ring", 0.5)):
            out = torch.utils.checkpoint.checkpoint(
                function, x, mode, p, use_reentrant=False, context_fn=contexts
            )
            found = [torch.autograd.grad(y.sum(), x)[0] for y in (out, function(x, mode, p))]
            assert torch.equal(*found), (mode, p, function.__name__)


@pytest.mark.slow
def test_a_selective_checkpoint_may_save_everything() -> None:
    spawn(_saves_everything, 2)


def _traced(rank: int) -> None:
    x = torch.randn(1, 64, 4, 32)
    refused = pytest.raises(InputError, match=r"cannot be traced \(make_fx, torch.export\)")
    for function in (lambda x: attention(x, x, x) * 2, lambda x: unshard(x) * 2):  # type: ignore
        with refused:
            make_fx(function)(x)
        with refused, FakeTensorMode() as mode:
            function(mode.from_tensor(x))
        function(x)  # the group is as good as before
    compiled = torch.compile(lambda x: shard(x) + unshard(x).shape[1] + positions(128)[0], backend="eager")
    assert torch.equal(compiled(x), shard(x) + 128 + positions(128)[0])


@pytest.mark.slow
def test_what_would_record_the_exchange_is_refused() -> None:
    spawn(_traced, 2)

"""What ranks of a group are told when arguments, ranks or calls do not go together, over gloo."""

from __future__ import annotations

import gc
import re
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dash_attn.backends.base import backend_named
from dash_attn.distributed import (
    attention,
    attention_varlen,
    functional,
    notes,
    passes,
    positions,
    shard,
    unshard,
)
from dash_attn.distributed.agreement import agree, telling
from dash_attn.distributed.team import team_of
from dash_attn.errors import CommunicationError, InputError, UnsupportedMaskError
from spawned import spawn


def _second_derivatives(rank: int) -> None:
    """Errors, never missing terms: also where the gradient of the output is a constant, and for an input that
    the backward has not saved."""
    generator = torch.Generator().manual_seed(rank)
    for mode in ("ulysses", "gather"):
        q, k, v = (torch.randn(1, 64, 4, 32, generator=generator).requires_grad_() for _ in range(3))
        for power in (1, 2):
            for wanted in (q, k, v):
                out = attention(q, k, v, mode=mode)
                first = torch.autograd.grad(out.pow(power).sum(), (q, k, v), create_graph=True)  # type: ignore[union-attr]
                for x in first:
                    with pytest.raises(RuntimeError, match="no second derivative"):
                        torch.autograd.grad(x.square().sum(), wanted, retain_graph=True)
                with pytest.raises(RuntimeError, match="no second derivative"):
                    (out.sum() + first[0].square().sum()).backward()  # type: ignore[union-attr]
        out = attention(q, k, v, mode=mode)
        with pytest.raises(RuntimeError, match=r"no rule for torch\.vmap"):
            torch.autograd.grad(out, q, torch.ones(3, *out.shape), is_grads_batched=True)  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_second_derivative_is_an_error() -> None:
    spawn(_second_derivatives, 2)


def _refused(rank: int) -> None:
    x = torch.zeros(1, 64, 4, 32)
    for arguments, said in [
        ({"mode": "torus"}, "mode must be one of auto, .*got 'torus'"),
        ({"layout": "spiral"}, "layout must be one of zigzag, contiguous, got 'spiral'"),
        ({"group": "world"}, "group must be a process group or a DeviceMesh, got str"),
        ({"policy": "none"}, "none"),
        ({"q_segment": 100}, "q_segment must be a multiple of 128"),
        ({"backend": "sm90"}, "sm90"),
        ({"dropout_p": 1.0}, "dropout_p must be at least 0 and less than 1, got 1.0"),
        ({"dropout_p": 0.1, "dropout_seed": -1}, "dropout_seed must be None, a tensor .*got -1"),
        ({"dropout_p": 0.1, "dropout_seed": torch.zeros(2)}, r"dropout_seed must have shape \(\)"),
    ]:
        with pytest.raises(InputError, match=said):
            attention(x, x, x, **arguments)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="not supported under the transforms of torch.func"):
        torch.func.grad(lambda q: attention(q, x, x).sum())(x)  # type: ignore[union-attr]
    with pytest.raises(InputError, match="only self-attention can be shared"):
        attention(x, x[:, :32], x[:, :32])
    with pytest.raises(InputError, match="sequence 0 has 66 rows, no multiple of 4"):
        attention(x[:, :33], x[:, :33], x[:, :33])
    with pytest.raises(InputError, match="1 kv heads are no multiple of 2 ranks"):
        attention(x, x[:, :, :1], x[:, :, :1], mode="ulysses")
    with pytest.raises(InputError, match="q must have 3 dimensions"):
        attention_varlen(x, x, x, torch.tensor([0, 128], dtype=torch.int32))
    with pytest.raises(InputError, match="cu_seqlens ends at 100, all ranks together have 128 rows"):
        attention_varlen(x[0], x[0], x[0], torch.tensor([0, 100], dtype=torch.int32))
    with pytest.raises(InputError, match=r"k must have at least one head, got shape \(1, 64, 0, 32\)"):
        attention(x, x[:, :, :0], x[:, :, :0])
    for bounds, got in [
        (torch.tensor([0, 128]), r"\(2,\) torch.int64"),
        (torch.tensor([[0, 128]], dtype=torch.int32), r"\(1, 2\) torch.int32"),
        (torch.zeros((), dtype=torch.int32), r"\(\) torch.int32"),
        (torch.zeros(0, dtype=torch.int32), r"\(0,\)"),
        ([0, 128], r"\[0, 128\]"),
    ]:
        for call in (
            partial(attention_varlen, x[0], x[0], x[0], bounds),
            partial(shard, x, cu_seqlens=bounds),
            partial(positions, 128, cu_seqlens=bounds),
        ):
            with pytest.raises(InputError, match=f"cu_seqlens must .*{got}$"):
                call()
    with pytest.raises(InputError, match="cu_seqlens must be a torch.Tensor, got None"):
        attention_varlen(x[0], x[0], x[0], None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="ends at 128, .* have 64 rows in dimension 1, which dim says"):
        shard(x, cu_seqlens=torch.tensor([0, 128], dtype=torch.int32))
    for dim in (3, -4, 1.0, None):
        for function in (shard, unshard):
            with pytest.raises(InputError, match=f"dim must be one of the 3 dimensions of x, got {dim}"):
                function(x[0], dim=dim)  # type: ignore[arg-type]
    for x, said in (
        (torch.zeros(2, 8).to_sparse(), "x must be a dense tensor, got layout torch.sparse_coo"),
        (torch.zeros(2, 8, device="meta"), r"x of shape \(2, 8\) is a meta tensor"),
    ):
        for function in (shard, unshard):
            with pytest.raises(InputError, match=said):
                function(x)
    with pytest.raises(InputError, match="x must be a torch.Tensor, got list"):
        shard([1, 2])  # type: ignore[arg-type]
    for seqlen in (-8, 8.0, "8", True):
        with pytest.raises(InputError, match=f"seqlen must be an integer >= 0, got {seqlen!r}"):
            positions(seqlen)  # type: ignore[arg-type]


def test_bad_arguments_are_named() -> None:
    spawn(_refused, 2)


def _disagreeing(rank: int) -> None:
    x = torch.zeros(1, 64, 4, 32)
    with pytest.raises(CommunicationError, match=r"rank [01] has right \(causal, window\)=") as caught:
        attention(x, x, x, causal=rank == 1)
    assert "different arguments" in str(caught.value)
    for seed in (4 + rank, torch.tensor(4 + rank)):
        with pytest.raises(
            CommunicationError, match="rank [01] has dropout_seed=[45], rank [01] has dropout_seed=[45]"
        ):
            attention(x, x, x, dropout_p=0.1, dropout_seed=seed)
    with pytest.raises(CommunicationError, match="rank [01] has a seed given=(True|False)"):
        attention(x, x, x, dropout_p=0.1, dropout_seed=rank or None)
    attention(x, x, x, softcap=0.0 if rank else -0.0)
    with pytest.raises(CommunicationError, match=r"rank [01] has dropout_p=0\.[12]"):
        attention(x, x, x, dropout_p=0.1 + 0.1 * rank, dropout_seed=1)
    with pytest.raises((CommunicationError, InputError), match="dropout_p must be at least 0"):
        attention(x, x, x, dropout_p=0.1 + rank)
    rows = 64 - 32 * rank
    for cut in (16 + 16 * rank, 400 + 16 * rank):  # short and long lists
        bounds = torch.tensor([0, cut, 1024, *range(1028, 1428, 4)], dtype=torch.int32)
        with pytest.raises(CommunicationError, match=r"rank [01] has lengths of sequences=\(.*rank [01] has"):
            attention_varlen(*[torch.zeros(712, 4, 32)] * 3, bounds)
    with pytest.raises(CommunicationError, match=r"different arguments: rank . has q=.*(32|64), 4, 32"):
        attention(x[:, :rows], x[:, :rows], x[:, :rows])
    # By what is installed, "auto" may be another backend on another machine.
    other = mock.patch.object(type(backend_named("cpu")), "name", ("cpu", "another")[rank])
    with other, pytest.raises(CommunicationError, match="has the backend that runs it=(cpu|another), rank"):
        attention(x[:, :48], x[:, :48], x[:, :48])
    # Only one of them is wrong: it says what, and the other one says who.
    kind, said = (CommunicationError, "rank 1 of 2 refused its arguments: mode must be") if rank == 0 else (
        InputError, "mode must be one of"
    )  # fmt: skip
    with pytest.raises(kind, match=said):
        attention(x, x, x, mode="auto" if rank == 0 else "torus")
    attention(x, x, x)  # and they still can
    empty = x[: 1 - rank]  # only one rank has sequences
    with pytest.raises(CommunicationError, match=r"rank . has q=\(\([01], 64.*, rank . has q=\(\([01], 64"):
        attention(empty, empty, empty, softcap=2.0)


def test_ranks_that_disagree_are_all_told() -> None:
    spawn(_disagreeing, 2)


def _short(seconds: float = 3) -> Any:
    """A group whose exchanges and comparisons end soon."""
    time_out = timedelta(seconds=seconds)
    dist.group.WORLD.get_group_store().set_timeout(time_out)
    return dist.new_group([0, 1], timeout=time_out)


def _refused_later(rank: int) -> None:
    """A kind of call is known, and one rank refuses its next one: it says why at once, and the others know
    when their exchange fails."""
    group, x = _short(), torch.zeros(1, 64, 4, 32)
    attention(x, x, x, group=group)
    dist.barrier()
    start = time.monotonic()
    if rank == 1:
        with pytest.raises(InputError, match=r"softcap must be 0 or in .*got -1\.0"):
            attention(x, x, x, group=group, softcap=-1.0)
        assert time.monotonic() - start < 2
        # What it does next is no part of the call that the other one still makes.
        with pytest.raises(CommunicationError, match="rank 1 of 2: .* could not be compared: not all ranks"):
            attention(x, x, x, group=group)
    else:
        with pytest.raises(CommunicationError, match="failed: rank 1 of 2 refused its arguments: softcap"):
            attention(x, x, x, group=group)
    dist.barrier()


def test_a_rank_that_refuses_a_known_call_says_why_at_once() -> None:
    spawn(_refused_later, 2)


def _fails_on_the_way(rank: int) -> None:
    """What a rank meets behind its checks, such as no memory, is told to those who wait for it."""
    x, group = torch.zeros(1, 64, 4, 32), _short()
    attention(x, x, x, group=group)
    fails = mock.patch.object(functional, "completed", side_effect=MemoryError("none is left"))
    with fails if rank else nullcontext():
        expected = "none is left" if rank else "rank 1 of 2 .*none is left"
        with pytest.raises(MemoryError if rank else CommunicationError, match=expected):
            attention(x, x, x, group=group)
    dist.barrier()


def test_an_error_on_the_way_to_an_exchange_is_told() -> None:
    spawn(_fails_on_the_way, 2)


def _refused_before(rank: int) -> None:
    """What one rank refuses before it makes a call, the others know when their exchange fails; its next call
    is not taken for the one that they make."""
    x = torch.zeros(1, 64, 4, 32)
    for refused, said in (
        (lambda group: attention_varlen(*[x[0]] * 3, None, group=group), "cu_seqlens must be"),
        (lambda group: unshard(x.clone().requires_grad_(), group), "unshard carries no gradient"),
    ):
        group = _short()
        attention(x, x, x, group=group)
        if rank:
            with pytest.raises(InputError, match=said):
                refused(group)
        expected = "could not be compared" if rank else f"failed: rank 1 of 2 refused its arguments: {said}"
        with pytest.raises(CommunicationError, match=expected):
            attention(x, x, x, group=group)
        dist.barrier()
    none = x[:0]
    attention(none, none, none)
    with pytest.raises(InputError if rank else CommunicationError, match=r"softcap must be 0 or in"):
        attention(none, none, none, softcap=-1.0 * rank)
    attention(none, none, none)


@pytest.mark.slow
def test_what_a_rank_refuses_before_a_call_is_told() -> None:
    spawn(_refused_before, 2)


def _policies_refuse(rank: int) -> None:
    """The policy refuses what one rank would compute: all raise, before any exchange."""
    group = _short()
    dense = torch.zeros(1, 256, 4, 32)
    packed = torch.zeros(512, 4, 32)
    bounds = torch.tensor([0, 512, 1024], dtype=torch.int32)
    for mode, said in product(("ulysses", "gather", "ring"), ("of 512 x 512",)):
        for policy in ("shift", "shift + lpt"):
            with pytest.raises(UnsupportedMaskError, match=said):
                attention(dense, dense, dense, group=group, causal=True, policy=policy, mode=mode)
            with pytest.raises(UnsupportedMaskError, match=said):  # as dash_attn.attention
                attention(*[dense[:0]] * 3, group=group, causal=True, policy=policy, mode=mode)
            with pytest.raises(UnsupportedMaskError, match=said):
                attention_varlen(*[packed] * 3, bounds, group=group, causal=True, policy=policy, mode=mode)
        attention(dense, dense, dense, group=group, causal=True, policy="symmetric_shift", mode=mode)
    for mode in ("gather", "ring"):  # a segment behind keys that it sees
        with pytest.raises(UnsupportedMaskError, match="seqlen_q == seqlen_k: causal of 256 x 512"):
            attention(
                dense, dense, dense, group=group, causal=True, policy="symmetric_shift", mode=mode,
                layout="contiguous", q_segment=256,
            )  # fmt: skip


def test_a_policy_that_refuses_a_mask_does_so_on_every_rank() -> None:
    spawn(_policies_refuse, 2)


def _another_kind_later(rank: int) -> None:
    group, x = _short(), torch.zeros(1, 64, 4, 32)
    attention(x, x, x, group=group)
    said = (
        "failed: rank 1 of 2 makes a call of a kind that is new there: "
        r"rank 1 has right \(causal, window\)=0, the last forward of rank 0 had right \(causal, window\)=-1"
        if rank == 0
        else "rank 1 of 2: the arguments of a call that is new here could not be compared: not all ranks"
    )
    with pytest.raises(CommunicationError, match=said):
        attention(x, x, x, group=group, causal=rank == 1)
    dist.barrier()


def test_a_rank_that_makes_another_kind_of_call_is_named() -> None:
    spawn(_another_kind_later, 2)


def _fails_within(rank: int, name: str) -> None:
    """The kernel of a rank fails, as for want of memory, while the other one waits; it catches that."""
    group, x = _short(), torch.randn(1, 64, 4, 32).requires_grad_()
    out = attention(x, x, x, group=group, mode="ulysses")
    kind, said = MemoryError if rank else CommunicationError, "no room"
    if not rank:
        said = "exchange failed: rank 1 of 2 has failed in the middle of a call: MemoryError: no room"
    no_room = mock.patch.object(passes, name, side_effect=MemoryError("no room")) if rank else nullcontext()
    again = partial(attention, x, x, x, group=group, mode="ulysses")
    failing = again if name == "_forward_step" else partial(torch.autograd.backward, out, out)
    with no_room, pytest.raises(kind, match=said):
        failing()
    why = "MemoryError: no room" if rank else "an exchange failed"
    for call in (
        again,
        partial(attention, x, x, x, group=group, causal=True),
        partial(unshard, x.detach(), group),
        partial(torch.autograd.backward, out, out),
    ):
        start = time.monotonic()
        with pytest.raises(CommunicationError, match=rf"failed here \({why}\).* make a new group"):
            call()
        assert time.monotonic() - start < 1
    dist.barrier()
    attention(x, x, x)  # of another group


@pytest.mark.slow
@pytest.mark.parametrize("name", ["_forward_step", "_backward_step"])
def test_a_rank_that_fails_within_a_call_is_named_and_its_group_is_not_used_again(name: str) -> None:
    spawn(_fails_within, 2, name)


def _changed_behind(rank: int) -> None:
    """What a backward needs was changed on one rank, or is gone there."""
    x = torch.randn(1, 64, 4, 32)
    for number, spoilt in enumerate(
        ("modified by an inplace operation", "backward through the graph a second")
    ):
        group, sink, q = _short(), torch.zeros(4), x.clone().requires_grad_()
        out = attention(q, x, x, group=group, learnable_sink=sink, mode="ulysses")
        if rank and not number:
            sink.add_(1)
        if number:
            torch.autograd.backward(out, out.detach(), retain_graph=not rank)
        kind, said = RuntimeError if rank else CommunicationError, spoilt
        if not rank:
            said = f"rank 1 of 2 has failed in the middle of a call: RuntimeError: .*{spoilt}"
        with pytest.raises(kind, match=said):
            torch.autograd.backward(out, out.detach())
        dist.barrier()


@pytest.mark.slow
def test_what_autograd_refuses_on_one_rank_is_told() -> None:
    spawn(_changed_behind, 2)


class _Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


def _told(rank: int) -> None:
    """What a rank says of its error reaches the other one, whatever it is, and no later group of the name."""
    group = _short()
    team = team_of(group)
    for number, (error, said) in enumerate(
        (
            (InputError("no \udc80 such thing"), "rank 1 of 2 refused its arguments: no [?] such thing"),
            (_Unspeakable(), "rank 1 of 2 refused its arguments: _Unspeakable"),
            (KeyboardInterrupt(), "rank 1 of 2 refused its arguments: "),
        )
    ):
        agree(team, (("known", number),), ())
        if rank:
            with pytest.raises(type(error)), telling(team):
                raise error
        else:
            with pytest.raises(CommunicationError, match=said):
                agree(team, (("new", number),), ())
        dist.barrier()
    if rank:
        with pytest.raises(InputError), telling(team):
            raise InputError("that nobody reads")
    dist.barrier()
    notes._NOTES.clear()  # as if the group were made anew
    for number in range(9):
        agree(team, (("later", number),), ())


@pytest.mark.slow
def test_whatever_an_error_is_it_is_told_and_only_to_its_group() -> None:
    spawn(_told, 2)


def _one_deadline(rank: int) -> None:
    """Who waits for two notes does not wait twice."""
    dist.group.WORLD.get_group_store().set_timeout(timedelta(seconds=4))
    x, start = torch.zeros(1, 96, 4, 32), time.monotonic()
    time.sleep((3.2, 0, 12)[rank])
    with pytest.raises(CommunicationError):
        attention(x, x, x)
    if rank == 1:
        assert time.monotonic() - start < 6


@pytest.mark.slow
def test_a_comparison_has_one_deadline() -> None:
    spawn(_one_deadline, 3)


def _late(rank: int) -> None:
    """Who comes when another rank has waited in vain need not wait, too."""
    group, x = _short(), torch.zeros(1, 64, 4, 32)
    if rank:
        time.sleep(4)
    start = time.monotonic()
    said = "rank 0 of 2 has waited" if rank else "could not be compared: not all ranks have come within 3 s"
    with pytest.raises(CommunicationError, match=said):
        attention(x, x, x, group=group)
    assert (time.monotonic() - start < 2) == bool(rank)
    attention(x, x, x, group=group)


@pytest.mark.slow
def test_who_comes_too_late_is_told_at_once() -> None:
    spawn(_late, 2)


def _out_of_step(rank: int) -> None:
    """Ranks that are not at the same call know it before anything moves: no size differs here."""
    x = torch.randn(1, 64, 4, 32).requires_grad_()
    bounds = torch.tensor([[0, 64, 128], [0, 40, 128], [0, 88, 128]], dtype=torch.int32)
    one, two = (attention(x, x, x).sum() for _ in range(2))  # type: ignore[union-attr]
    attention(x, x, x, causal=True)
    attention_varlen(*[x[0]] * 3, bounds[0], mode="ulysses")
    unshard(x.detach())

    def calls(function: Callable[[], object]) -> list[tuple[str, ...]]:
        with pytest.raises(CommunicationError, match="all ranks make the same calls") as caught:
            function()
        found = re.findall(r"rank (\d)(?: of 2 is)? in the (\w+) of call (\d+)", str(caught.value))
        assert len(found) == 2, caught.value
        return sorted(found)

    another_order = calls(lambda: (two if rank else one).backward(retain_graph=True))
    assert another_order == [("0", "backward", "1"), ("1", "backward", "2")]
    for number, function in enumerate(
        (
            lambda: attention(x, x, x, causal=rank == 1),
            lambda: attention_varlen(*[x[0]] * 3, bounds[1 + rank], mode="ulysses"),
            lambda: unshard(x.detach()[:, : 64 - 32 * rank]),
        ),
        start=6,
    ):
        assert calls(function) == [("0", "forward", f"{number}"), ("1", "forward", f"{number}")]
    two.backward()  # and they still can
    left_out = calls(lambda: one.backward() if rank else attention(x, x, x))
    assert left_out == [("0", "forward", "9"), ("1", "backward", "1")]
    assert calls(lambda: attention(x, x, x)) == [("0", "forward", "10"), ("1", "forward", "9")]


def test_ranks_at_different_calls_are_told_before_anything_moves() -> None:
    spawn(_out_of_step, 2)


def _outside(rank: int) -> None:
    x = torch.zeros(1, 64, 4, 32)
    for one in (dist.new_group([0]), dist.DeviceMesh("cpu", [0])):
        if rank:
            with pytest.raises(InputError, match="this process is not in the group"):
                attention(x, x, x, group=one)
        else:
            attention(x, x, x, group=one)
    both = dist.new_group([0, 1])
    dist.destroy_process_group(both)
    with pytest.raises(InputError, match="the process group was destroyed"):
        attention(x, x, x, group=both)


@pytest.mark.slow
def test_groups_that_cannot_be_used_are_named() -> None:
    spawn(_outside, 2)


def _groups_come_and_go(rank: int) -> None:
    """What a group has agreed on goes with it, and no later group begins with that."""
    x = torch.zeros(1, 64, 4, 32)
    group = dist.new_group([0, 1])
    attention(x, x, x, group=group)
    gone = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert gone() is None
    for time_ in range(2):
        attention(x, x, x, causal=bool(time_))
        store = dist.group.WORLD.get_group_store().underlying_store
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.PrefixStore(f"{time_}", store), rank=rank, world_size=2)
        if rank == 1:
            notes._NOTES.clear()  # as in a process that was started anew
        attention(x, x, x, causal=bool(time_))


def test_a_new_group_has_agreed_on_nothing() -> None:
    spawn(_groups_come_and_go, 2)


def _dying(rank: int) -> None:
    x = torch.zeros(1, 64, 4, 32)
    attention(x, x, x, mode="gather")
    if rank == 1:
        return  # its process ends
    time.sleep(1)
    with pytest.raises(CommunicationError, match="rank 0 of 2: exchange failed"):
        attention(x, x, x, mode="gather")


def test_a_rank_that_died_is_an_error() -> None:
    spawn(_dying, 2)


def test_without_a_group() -> None:
    x = torch.zeros(1, 8, 2, 32)
    with pytest.raises(InputError, match="torch.distributed is not initialised"):
        attention(x, x, x)

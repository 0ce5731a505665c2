"""Windows: rows that one process writes where another reads them. Files stand for the memory of GPUs."""

from __future__ import annotations

import itertools
import weakref
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from window_cases import Group, opened

from dash_attn.distributed import attention, functional, rows, transport, unshard, windows
from dash_attn.distributed.exchange import Move, copy_rows, write
from dash_attn.distributed.meeting import Meeting, Step
from dash_attn.distributed.team import OutOfStep, Team, team_of
from dash_attn.distributed.windows import Window, window_of
from dash_attn.errors import CommunicationError, InputError
from sharing_cases import LAYOUTS, MASKS, Case, compared
from spawned import spawn

TIMES = 4

SMALL = 24 << 10
"""Bytes of a region: an exchange takes several turns."""


def _all_cases(rank: int, ranks: int, folder: Path) -> None:
    windows.REGION = SMALL
    window = opened(folder)
    assert isinstance(window, Window)
    assert transport() == "windows"
    rows, heads = 128 * ranks, (2 * ranks, ranks)
    with mock.patch.object(Window, "turn", autospec=True, side_effect=Window.turn) as turn:
        for mask, layout in product(MASKS, LAYOUTS):
            before = turn.call_count
            compared(Case(heads, mask, "ulysses", layout, rows))
            assert turn.call_count >= before + 8, "this took no several turns"
        for lengths in (tuple(n * 2 * ranks for n in (40, 0, 3, 64, 1, 2, 9, 1)), (2 * ranks,)):
            compared(Case(heads, "causal", "ulysses", "zigzag", lengths=lengths))
        compared(Case(heads, "causal", "ulysses", "contiguous", rows, sink=True, dtype=torch.float64))
        compared(Case(heads, "full", "ulysses", "zigzag", 64 * ranks, head_dim=21, extra="one tensor"))
        for extra in ("alibi", "intervals", "dropout"):
            compared(Case(heads, "causal", "ulysses", "zigzag", lengths=(4 * ranks, 20 * ranks), extra=extra))
        before = turn.call_count
        compared(Case((4, 2), "causal", "ring", "zigzag", rows))
        compared(Case(heads, "causal", "ulysses+ring", "zigzag", rows))
        assert turn.call_count == before, "what comes while others compute takes no windows"


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_rows_through_windows_have_the_bytes_of_one_process(ranks: int, tmp_path: Path) -> None:
    spawn(_all_cases, ranks, ranks, tmp_path)


def _late(rank: int, folder: Path) -> None:
    """Rank 1 reads only when rank 0 has written what comes next. With one region in place of two, or with
    tags in one place, it reads that."""
    windows.REGION = SMALL
    window = opened(folder)
    assert isinstance(window, Window)
    store, barrier, passed = team_of(None).group.get_group_store(), window.barrier, itertools.count(1)

    def and_late() -> None:
        number = next(passed)
        if rank == 0:
            store.set(f"written {number}", "")
        barrier()
        if rank == 1 and number % TIMES:
            store.wait([f"written {number + 1}"])

    window.barrier = and_late

    def exchanged(size: int) -> bool:
        """Whether each of some exchanges has brought what the other rank sent."""
        right = True
        for number in range(TIMES):
            sent, found = torch.full((size,), 10 * rank + number), torch.zeros(size, dtype=torch.int64)
            there, back = (
                Move(r, 1 - r, (size,), torch.int64, partial(torch.clone, sent), partial(copy_rows, found))
                for r in range(2)
            )
            write(window, [[there, back]])
            right &= bool((found == 10 * (1 - rank) + number).all())
        return right

    def met() -> bool:
        """Whether each of some meetings has heard what the other rank said."""
        right = True
        for call in range(TIMES):
            try:
                Meeting(team_of(None), Step(call, 0), torch.device("cpu")).end()
            except OutOfStep:
                right = False
        return right

    assert exchanged(1000)
    assert met()
    with mock.patch.object(Window, "_region", property(lambda _: 0, lambda *_: None), create=True):
        assert exchanged(1000) == (rank == 0), "a late rank shows nothing"
    window._tags = [x[:1].expand(2, -1) for x in window._tags]
    assert met() == (rank == 0), "a late rank shows nothing"


def test_a_late_rank_reads_its_rows_because_regions_take_turns(tmp_path: Path) -> None:
    spawn(_late, 2, tmp_path)


def _out_of_step(rank: int, folder: Path) -> None:
    """Backwards in another order, and calls of another kind, which exchange without windows."""
    assert isinstance(opened(folder), Window)
    q = torch.randn(1, 8, 2, 32, requires_grad=True)

    def called(mode: str) -> Tensor:
        out = attention(q, q, q, mode=mode)
        assert isinstance(out, Tensor)
        return out

    for mode in ("ulysses", "ulysses", "gather"):
        called(mode)
    unshard(q.detach())
    outs = [called("ulysses") for _ in range(2)]
    for other in (
        lambda: outs[1 - rank].sum().backward(),
        lambda: called(("gather", "ulysses")[rank]),
        lambda: unshard(q.detach()) if rank else called("ulysses"),
    ):
        with pytest.raises(OutOfStep, match=r"rank \d of 2 is in the \w+ward of call \d+ .*, rank \d in the"):
            other()


def test_ranks_at_different_calls_raise_before_anything_moves(tmp_path: Path) -> None:
    spawn(_out_of_step, 2, tmp_path)


def _failed(rank: int, folder: Path) -> None:
    """What fails at a window ends the use of the group, as a collective that fails does."""
    assert isinstance(opened(folder), Window)
    q = torch.randn(1, 8, 2, 32)
    call = partial(attention, q, q, q, mode="ulysses")
    call()
    with (
        mock.patch.object(Window, "say", side_effect=RuntimeError("no such memory")),
        pytest.raises(CommunicationError, match=f"rank {rank} of 2: exchange failed: .*no such memory"),
    ):
        call()
    with pytest.raises(CommunicationError, match="make a new group"):
        call()


def test_after_a_failure_at_a_window_the_group_is_not_used_again(tmp_path: Path) -> None:
    spawn(_failed, 2, tmp_path)


def _other_device(rank: int) -> None:
    """Refused before ranks meet, and told."""

    def refuses(*_: Any) -> None:
        raise InputError("of another one")

    q = torch.randn(1, 8, 2, 32)
    error, said = (
        (InputError, "of another") if rank else (CommunicationError, "rank 1 of 2 refused .* of another")
    )
    for module, call in ((functional, partial(attention, q, q, q)), (rows, partial(unshard, q))):
        patch = mock.patch.object(module, "window_of", refuses) if rank else nullcontext()
        with patch, pytest.raises(error, match=said):
            call()


def test_tensors_on_another_device_are_refused_for_all() -> None:
    spawn(_other_device, 2)
    team = Team(weakref.ref(group := Group()), 0, 2)
    window = Window(team, [torch.zeros(4096, dtype=torch.uint8)] * 2, lambda: None)
    window.device = torch.device("cuda", 0)
    windows.WINDOWS[group] = window
    assert window_of(team, torch.device("cuda", 0)) is window
    assert window_of(team, torch.device("cpu")) is None
    with pytest.raises(InputError, match="tensors are on cuda:1, but rank 0 of this group .* of cuda:0"):
        window_of(team, torch.device("cuda", 1))


def test_what_is_copied_beside_has_ended_where_its_memory_is_used_again() -> None:
    """Before a barrier, for then others may write there; and at the end, after an error, too."""
    team = Team(weakref.ref(group := Group()), 0, 2)
    window = Window(team, [torch.zeros(windows.window_bytes(), dtype=torch.uint8)] * 2, lambda: None)
    done: list[str] = []
    window.barrier = partial(done.append, "barrier")
    one = torch.ones(4)
    moves = [
        Move(source, target, (4,), one.dtype, partial(_noted, done, f"{source}{target}", one), copy_to)
        for source, target in ((0, 0), (0, 1), (1, 0))
        for copy_to in (lambda value, name=f"to {source}{target}": done.append(name),)
    ]
    with mock.patch.object(Window, "join", side_effect=partial(done.append, "join")):
        write(window, [moves, moves])
        turn = ["00", "to 00", "01", "join", "barrier", "to 10"]
        assert done == [*turn, *turn, "join"]
        done.clear()
        window.barrier = fails = mock.Mock(side_effect=MemoryError)
        with pytest.raises(MemoryError):
            write(window, [moves, moves])
        assert done == ["00", "to 00", "01", "join", "join"]
    assert fails.call_count == 1
    assert group is not None


def _noted(done: list[str], name: str, value: Tensor) -> Tensor:
    done.append(name)
    return value

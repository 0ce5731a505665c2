"""Windows: rows that one process writes where another reads them. Files stand for the memory of GPUs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from dash_attn.distributed import attention, transport, unshard, windows
from dash_attn.distributed.exchange import Move, copy_rows, write
from dash_attn.distributed.meeting import Meeting, Step
from dash_attn.distributed.team import OutOfStep, team_of
from dash_attn.distributed.windows import Window
from dash_attn.testing import assert_same_bytes
from sharing_cases import LAYOUTS, MASKS, Case, compared
from spawned import spawn

SMALL = 24 << 10
"""Bytes of a region: an exchange takes several turns."""


class _Handle(NamedTuple):
    """As of symmetric memory. A rank is late after each barrier: others go on meanwhile."""

    folder: Path
    late: bool

    def get_buffer(self, rank: int, sizes: tuple[int], dtype: torch.dtype) -> Tensor:
        return torch.from_file(str(self.folder / str(rank)), shared=True, size=sizes[0], dtype=dtype)

    def barrier(self, channel: int, timeout_ms: int) -> None:
        assert (channel, timeout_ms) == (0, 60_000)
        dist.barrier()
        if self.late:
            time.sleep(0.003)


def _opened(
    folder: Path, late: int = 0, failing: dict[str, Callable[..., Any]] | None = None
) -> Window | str:
    """The windows of all processes, as :func:`.windows.open_window` has them on GPUs."""
    team = team_of(None)

    def empty(size: int, **options: Any) -> Tensor:
        (folder / str(team.rank)).write_bytes(bytes(size))
        return torch.empty(0)

    def rendezvous(mine: Tensor, name: str) -> _Handle:
        assert name == team.group.group_name
        return _Handle(folder, team.rank == late)

    with ExitStack() as patched:
        for name, function in ({"empty": empty, "rendezvous": rendezvous} | (failing or {})).items():
            patched.enter_context(mock.patch.object(symmetric, name, function))
        of_this_one = windows._Here("", "host", str(team.rank), team.rank)
        patched.enter_context(mock.patch.object(windows, "_here", return_value=of_this_one))
        patched.enter_context(mock.patch.object(windows, "_gpu", str))
        for name, answer in (("device_count", team.size), ("can_device_access_peer", True)):
            patched.enter_context(mock.patch.object(torch.cuda, name, return_value=answer))
        found = windows._opened(team, torch.device("cpu"))
    windows._WINDOWS[team.group] = found
    return found


def _small() -> None:
    windows.REGION, windows.WINDOW_BYTES = SMALL, 2 * SMALL + windows._TAGS


def _all_cases(rank: int, ranks: int, folder: Path) -> None:
    _small()
    window = _opened(folder)
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


def _broken(rank: int, folder: Path) -> None:
    """One region in place of two, and tags in one place: a late rank reads what comes next."""
    _small()
    window = _opened(folder, late=1)
    assert isinstance(window, Window)

    def exchanged(size: int) -> bool:
        """Whether each of four exchanges has brought what the other rank sent."""
        right = True
        for number in range(4):
            sent, found = torch.full((size,), 10 * rank + number), torch.zeros(size, dtype=torch.int64)
            there, back = (
                Move(r, 1 - r, (size,), torch.int64, partial(torch.clone, sent), partial(copy_rows, found))
                for r in range(2)
            )
            write(window, [[there, back]])
            right &= bool((found == 10 * (1 - rank) + number).all())
        return right

    def met() -> bool:
        """Whether each of four meetings has heard what the other rank said."""
        right = True
        for call in range(4):
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
    spawn(_broken, 2, tmp_path)


def _out_of_step(rank: int, folder: Path) -> None:
    """Backwards in another order, and calls of another kind, which exchange without windows."""
    assert isinstance(_opened(folder), Window)
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


def _refused(rank: int, folder: Path) -> None:
    """What one rank lacks keeps all from having windows, with the reason, and no rank waits."""
    assert transport() == "not decided"
    q = torch.randn(1, 8, 2, 32)
    attention(q, q, q, mode="gather")
    assert transport() == "not decided"
    attention(q, q, q, mode="ulysses")
    assert transport() == "collectives: the tensors are on cpu"

    def fails(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("out of memory\nand so on")

    mine = {"empty": fails} if rank else {}
    assert _opened(folder, failing=mine) == "rank 1 has no memory for a window: out of memory"
    mine = {} if rank else {"rendezvous": fails}
    assert _opened(folder, failing=mine) == "rank 0 cannot map the windows of others: out of memory"
    with mock.patch.object(_Handle, "barrier", fails):
        assert _opened(folder) == "rank 0 cannot write to windows of others: out of memory"
    with mock.patch.object(Window, "heard", lambda self: torch.tensor([0, windows._TRIAL][rank])):
        assert _opened(folder) == "rank 0 does not find in its window what others wrote"


def test_what_one_rank_lacks_is_said_by_all(tmp_path: Path) -> None:
    spawn(_refused, 2, tmp_path)


HERE = windows._Here("", "host", "a", 0)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (HERE._replace(gpu="b", number=1), ""),
        (HERE._replace(why="DASH_ATTN_WINDOWS=0"), "rank 1: DASH_ATTN_WINDOWS=0"),
        (HERE._replace(host="other"), "ranks 0 and 1 are on different hosts, or in different containers"),
        (HERE, "ranks 0 and 1 have one GPU"),
        (HERE._replace(gpu="b", number=3), "rank 0 does not see the GPU of rank 1 as that one does"),
        (HERE._replace(gpu="z", number=1), "rank 0 does not see the GPU of rank 1 as that one does"),
        (HERE._replace(gpu="c", number=2), "the GPU of rank 0 cannot reach the memory of that of rank 1"),
    ],
    ids=["can", "switched off", "two hosts", "one GPU", "hidden", "other numbers", "no link"],
)
def test_who_can_have_windows(theirs: windows._Here, message: str) -> None:
    with (
        mock.patch.object(torch.cuda, "device_count", return_value=3),
        mock.patch.object(torch.cuda, "can_device_access_peer", lambda mine, other: {mine, other} == {0, 1}),
        mock.patch.object(windows, "_gpu", "abc".__getitem__),
    ):
        found = windows._why_not([HERE, theirs], 0)
    assert re.match(re.escape(message), found)
    assert bool(found) == bool(message)


def test_a_rank_says_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with mock.patch.object(windows, "_gpu", str):
        monkeypatch.delenv("DASH_ATTN_WINDOWS", raising=False)
        here = windows._here(torch.device("cuda", 1))
        assert here == windows._here(torch.device("cuda", 1))
        assert (here.why, here.gpu, here.number) == ("", "1", 1)
        for asked in ("0", "no"):
            monkeypatch.setenv("DASH_ATTN_WINDOWS", asked)
            assert windows._here(torch.device("cuda", 1)).why == f"DASH_ATTN_WINDOWS={asked}"


def _one(rank: int) -> None:
    q = torch.randn(1, 8, 2, 32)
    out = attention(q, q, q, mode="ulysses")
    assert isinstance(out, Tensor)
    assert_same_bytes(out, attention(q, q, q))  # type: ignore[arg-type]
    assert transport() == "collectives: the group has one rank"


def test_one_rank_needs_none() -> None:
    spawn(_one, 1)

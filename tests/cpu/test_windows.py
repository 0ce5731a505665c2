"""Windows: rows that one process writes where another reads them. Files stand for the memory of GPUs."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dash_attn.distributed import attention, functional, opening, rows, transport, unshard, windows
from dash_attn.distributed.exchange import Move, copy_rows, write
from dash_attn.distributed.meeting import Meeting, Step
from dash_attn.distributed.team import OutOfStep, Team, team_of
from dash_attn.distributed.windows import Window, window_of
from dash_attn.errors import CommunicationError, InputError
from dash_attn.testing import assert_same_bytes
from sharing_cases import LAYOUTS, MASKS, Case, compared
from spawned import spawn

TIMES = 4

SMALL = 24 << 10
"""Bytes of a region: an exchange takes several turns."""


class _Handle(NamedTuple):
    """As of symmetric memory."""

    folder: Path
    mine: Tensor
    rank: int
    world_size: int

    def get_buffer(self, rank: int, sizes: torch.Size, dtype: torch.dtype) -> Tensor:
        if rank == self.rank:
            return self.mine
        return torch.from_file(str(self.folder / str(rank)), shared=True, size=sizes[0], dtype=dtype)

    def barrier(self, channel: int, timeout_ms: int) -> None:
        assert channel == 0
        dist.barrier()


def _opened(
    folder: Path, patches: Mapping[tuple[Any, str], Any] | None = None, seconds: int = 30
) -> Window | str:
    """The windows of all processes, as :func:`.opening.open_window` has them on GPUs; seconds: that a
    rendezvous waits."""
    team, multicast = team_of(None), os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST")

    def empty(size: int, **options: Any) -> Tensor:
        place = folder / str(team.rank)
        place.write_bytes(bytes(size))
        return torch.from_file(str(place), shared=True, size=size, dtype=torch.uint8)

    def rendezvous(mine: Tensor, name: str) -> _Handle:
        assert name == team.group.group_name
        assert team.group.get_group_store().timeout == timedelta(seconds=seconds)
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        return _Handle(folder, mine, team.rank, team.size)

    of_this_one = opening._Here("", "host", str(team.rank), team.rank, opening._rendezvous)
    every: dict[tuple[Any, str], Any] = {
        (symmetric, "empty"): empty, (symmetric, "rendezvous"): rendezvous,
        (opening, "_here"): lambda *_: of_this_one, (opening, "_gpu"): str,
        (opening, "_has_atomics"): lambda *_: True, (torch.cuda, "device_count"): lambda: team.size,
        (torch.cuda, "can_device_access_peer"): lambda *_: True,
        (torch.cuda, "is_current_stream_capturing"): lambda: False,
    }  # fmt: skip
    with ExitStack() as patched:
        for (where, name), function in (every | dict(patches or {})).items():
            patched.enter_context(mock.patch.object(where, name, function))
        found = opening._opened(team, torch.device("cpu"))
    windows.WINDOWS[team.group] = found
    assert os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") == multicast
    assert team.group.get_group_store().timeout == timedelta(seconds=60)
    return found


def _all_cases(rank: int, ranks: int, folder: Path) -> None:
    windows.REGION = SMALL
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


def _late(rank: int, folder: Path) -> None:
    """Rank 1 reads only when rank 0 has written what comes next. With one region in place of two, or with
    tags in one place, it reads that."""
    windows.REGION = SMALL
    window = _opened(folder)
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


def _failed(rank: int, folder: Path) -> None:
    """What fails at a window ends the use of the group, as a collective that fails does."""
    assert isinstance(_opened(folder), Window)
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


def _refused(rank: int, folder: Path) -> None:
    """What one rank lacks keeps all from having windows, with the reason."""
    nothing = "collectives: no call on GPUs in this mode so far"
    assert transport() == nothing
    attention(*[torch.randn(1, 8, 2, 32)] * 3, mode="ulysses")
    assert transport() == nothing

    def fails(*_: Any, **__: Any) -> Tensor:
        raise ValueError("no room\nand so on")

    def refused(who: int, where: Any, name: str, other: Any = fails) -> str:
        found = _opened(folder, patches={(where, name): other} if rank == who else {})
        assert isinstance(found, str)
        assert transport() == f"collectives: {found}"
        return found

    assert refused(0, opening, "_why_not", lambda every, rank: f"of {rank}") == "of 0"
    assert refused(1, opening, "_why_not", lambda every, rank: f"of {rank}") == "of 1"
    assert refused(1, symmetric, "empty") == "rank 1 has no memory for a window: no room"
    assert refused(0, symmetric, "rendezvous") == "rank 0 cannot map the windows of others: no room"
    assert opening._numbers_differ
    opening._rendezvous += rank
    before = opening._rendezvous - rank
    found = _opened(folder)
    assert found == f"rank 0 has had {before} windows before, rank 1 {before + 1}: PyTorch counts them"
    opening._rendezvous = 0
    other = _Handle(folder, torch.zeros(8), 0, 2)
    for handle, why in (
        (other._replace(rank=1 - rank), f"PyTorch takes this for rank {1 - rank} of 2"),
        (other._replace(rank=rank, world_size=3), f"PyTorch takes this for rank {rank} of 3"),
        (other._replace(rank=rank), "the window does not begin where its memory does"),
    ):
        found = refused(rank, symmetric, "rendezvous", lambda *_, handle=handle: handle)
        assert found.startswith("rank 0 cannot map the windows of others: ")
        with pytest.raises(ValueError, match=why):
            _map(handle)
    said = "rank 1 does not find in its window what others wrote"
    assert refused(1, Window, "heard", _heard_nothing) == said
    assert refused(1, Window, "say") == "rank 1 cannot write to windows of others: no room"
    assert refused(rank, _Handle, "barrier") == "rank 0 cannot wait for others: no room"


def _map(handle: _Handle) -> None:
    with mock.patch.object(symmetric, "rendezvous", return_value=handle):
        opening._mapped(team_of(None), torch.zeros(8), 60.0)


def _heard_nothing(window: Window) -> Tensor:
    window.barrier()
    return torch.zeros(2)


def test_what_one_rank_lacks_is_said_by_all(tmp_path: Path) -> None:
    spawn(_refused, 2, tmp_path)


def _timeouts(rank: int, folder: Path) -> None:
    """A barrier waits as long as the group, and not as its store. A rendezvous waits for a part of that."""
    waits: list[int] = []
    late = mock.patch.object(_Handle, "barrier", lambda self, _, ms: (waits.append(ms), dist.barrier()))
    with late:
        assert isinstance(_opened(folder), Window)
    assert waits == [60_000]
    options = SimpleNamespace(_timeout=timedelta(hours=2))
    team = Team(weakref.ref(group := _Group()), 0, 2)
    group._get_backend = lambda _: SimpleNamespace(options=options)
    assert opening._seconds(team, torch.device("cpu")) == 7200
    with late, mock.patch.object(opening, "_seconds", return_value=timedelta.max.total_seconds()):
        assert isinstance(_opened(folder, seconds=60), Window)
    assert waits[1:] == [2**43]


def test_barriers_wait_as_long_as_their_group(tmp_path: Path) -> None:
    spawn(_timeouts, 2, tmp_path)


def _modes(rank: int, folder: Path) -> None:
    """Windows that are made in inference mode, inside a checkpoint for instance, are for all calls."""
    seen: list[Any] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    right, team = opening._opened, team_of(None)
    with mock.patch.object(opening, "_opened", side_effect=lambda *_: _opened_by(right, folder)):
        with torch.inference_mode(), Watching():
            capturing = mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True)
            with capturing:
                opening.open_window(team, torch.device("cuda", 0))
            assert team.group not in windows.WINDOWS
            with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False):
                opening.open_window(team, torch.device("cpu"))
                assert team.group not in windows.WINDOWS
                opening.open_window(team, torch.device("cuda", 0))
        assert not seen
    assert transport() == "windows"
    compared(Case((2, 2), "causal", "ulysses", "zigzag", 64))
    with torch.inference_mode():
        attention(*[torch.randn(1, 8, 2, 32)] * 3, mode="ulysses")


def _opened_by(right: Callable[..., Window | str], folder: Path) -> Window | str:
    with mock.patch.object(opening, "_opened", right):
        return _opened(folder)


def test_windows_made_in_any_mode_are_for_all_calls(tmp_path: Path) -> None:
    spawn(_modes, 2, tmp_path)


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
    team = Team(weakref.ref(group := _Group()), 0, 2)
    window = Window(team, [torch.zeros(4096, dtype=torch.uint8)] * 2, lambda: None)
    window.device = torch.device("cuda", 0)
    windows.WINDOWS[group] = window
    assert window_of(team, torch.device("cuda", 0)) is window
    assert window_of(team, torch.device("cpu")) is None
    with pytest.raises(InputError, match="tensors are on cuda:1, but rank 0 of this group .* of cuda:0"):
        window_of(team, torch.device("cuda", 1))


class _Group(SimpleNamespace):
    """There are weak references to it."""

    __hash__ = object.__hash__


def test_what_is_copied_beside_has_ended_where_its_memory_is_used_again() -> None:
    """Before a barrier, for then others may write there; and at the end, after an error, too."""
    team = Team(weakref.ref(group := _Group()), 0, 2)
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


HERE = opening._Here("", "host", "a", 0, 2)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (HERE._replace(gpu="b", number=1), ""),
        (HERE._replace(why="DASH_ATTN_WINDOWS=0"), "rank 1: DASH_ATTN_WINDOWS=0"),
        (HERE._replace(host="other"), "ranks 0 and 1 are on different hosts, or in different containers"),
        (HERE._replace(rendezvous=1), "rank 0 has had 2 windows before, rank 1 1: PyTorch counts them"),
        (HERE, "both have one GPU"),
        (HERE._replace(gpu="b", number=4), "the GPU has another number there, or is not seen here"),
        (HERE._replace(gpu="z", number=1), "the GPU has another number there, or is not seen here"),
        (HERE._replace(gpu="c", number=2), "the GPU cannot reach the other one's memory"),
        (HERE._replace(gpu="d", number=3), "the link between the GPUs has no atomic operations"),
    ],
    ids=["can", "off", "hosts", "other groups", "one GPU", "hidden", "other numbers", "no link", "PCIe"],
)
def test_who_can_have_windows(theirs: opening._Here, message: str) -> None:
    with (
        mock.patch.object(torch.cuda, "device_count", return_value=4),
        mock.patch.object(torch.cuda, "can_device_access_peer", lambda mine, other: other != 2),
        mock.patch.object(opening, "_has_atomics", lambda mine, other: other != 3),
        mock.patch.object(opening, "_gpu", "abcd".__getitem__),
    ):
        found = opening._why_not([HERE, theirs], 0)
    assert message in found
    assert bool(found) == bool(message)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[[], opening._Here]:
    """What a rank says of itself, with a GPU that can have windows."""
    for name in ("DASH_ATTN_WINDOWS", "NCCL_P2P_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", "/tmp")
    monkeypatch.setattr(opening, "_gpu", str)
    monkeypatch.setattr(opening, "_DRIVER", "json")
    monkeypatch.setattr(symmetric, "get_backend", lambda device: "CUDA")
    group = _Group(group_name="cp")
    team = Team(weakref.ref(group), 0, 2)
    return lambda: opening._here(team._replace(known=lambda: group), torch.device("cuda", 1))


def test_a_rank_says_what_it_has(
    here: Callable[[], opening._Here], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = here()
    assert found == here()
    assert (found.why, found.gpu, found.number) == ("", "1", 1)
    assert len(found.host.split()) == 5
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert here().host.split()[:4] == found.host.split()[:4]
    assert here().host != found.host


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("DASH_ATTN_WINDOWS", "0", "DASH_ATTN_WINDOWS=0"),
        ("DASH_ATTN_WINDOWS", "no", "DASH_ATTN_WINDOWS=no"),
        ("NCCL_P2P_DISABLE", "1", "NCCL_P2P_DISABLE=1"),
        ("TMPDIR", "", "PyTorch makes sockets in '': it must be writable"),
        ("TMPDIR", "/no/such/folder", "PyTorch makes sockets in '/no/such/folder': it must be writable"),
        ("TMPDIR", "/tmp/" + 80 * "x", "PyTorch makes sockets in '/tmp/xx"),
    ],
)
def test_the_environment_may_forbid_windows(
    here: Callable[[], opening._Here], monkeypatch: pytest.MonkeyPatch, name: str, value: str, why: str
) -> None:
    if len(value) > 80:
        monkeypatch.setattr("os.access", lambda *_: True)
    monkeypatch.setenv(name, value)
    assert here().why.startswith(why)


def test_what_fails_is_why_not(here: Callable[[], opening._Here], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a package, with other symmetric memory, or where the system does not say what it is."""
    monkeypatch.setattr(symmetric, "get_backend", lambda device: "NVSHMEM")
    assert here().why == "PyTorch's symmetric memory is that of NVSHMEM"
    monkeypatch.setattr(symmetric, "get_backend", lambda device: "CUDA")
    monkeypatch.setattr(symmetric, "_group_name_to_store", {"cp": None}, raising=False)
    assert here().why == "a group of this name has had symmetric memory before"
    monkeypatch.setattr(symmetric, "_group_name_to_store", {"other": None})
    assert here().why == ""
    monkeypatch.setattr(opening, "_numbers_differ", True)
    assert here().why == "an earlier group of this process could not map its windows"
    monkeypatch.setattr(opening, "_numbers_differ", False)
    monkeypatch.setattr("os.readlink", lambda place: {}[place])
    assert here().why == "KeyError: '/proc/self/ns/net'"
    monkeypatch.setattr(opening, "_DRIVER", "no_such_package")
    assert here().why == "ModuleNotFoundError: No module named 'no_such_package'"


def _one(rank: int) -> None:
    q = torch.randn(1, 8, 2, 32)
    out = attention(q, q, q, mode="ulysses")
    assert isinstance(out, Tensor)
    assert_same_bytes(out, attention(q, q, q))  # type: ignore[arg-type]
    assert transport() == "collectives: the group has one rank"


def test_one_rank_needs_none() -> None:
    spawn(_one, 1)

"""Which groups have windows, and why others have none."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from window_cases import Group, Handle, opened

from dash_attn.distributed import attention, opening, transport, windows
from dash_attn.distributed.team import Team, team_of
from dash_attn.distributed.windows import Window
from dash_attn.testing import assert_same_bytes
from sharing_cases import Case, compared
from spawned import spawn


def _refused(rank: int, folder: Path) -> None:
    """What one rank lacks keeps all from having windows, with the reason."""
    nothing = "collectives: no call on GPUs in this mode so far"
    assert transport() == nothing
    attention(*[torch.randn(1, 8, 2, 32)] * 3, mode="ulysses")
    assert transport() == nothing

    def fails(*_: Any, **__: Any) -> Tensor:
        raise ValueError("no room\nand so on")

    def refused(who: int, where: Any, name: str, other: Any = fails) -> str:
        found = opened(folder, patches={(where, name): other} if rank == who else {})
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
    found = opened(folder)
    assert found == f"rank 0 has had {before} windows before, rank 1 {before + 1}: PyTorch counts them"
    opening._rendezvous = 0
    other = Handle(folder, torch.zeros(8), 0, 2)
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
    assert refused(rank, Handle, "barrier") == "rank 0 cannot wait for others: no room"


def _map(handle: Handle) -> None:
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
    late = mock.patch.object(Handle, "barrier", lambda self, _, ms: (waits.append(ms), dist.barrier()))
    with late:
        assert isinstance(opened(folder), Window)
    assert waits == [60_000]
    options = SimpleNamespace(_timeout=timedelta(hours=2))
    team = Team(weakref.ref(group := Group()), 0, 2)
    group._get_backend = lambda _: SimpleNamespace(options=options)
    assert opening._seconds(team, torch.device("cpu")) == 7200
    with late, mock.patch.object(opening, "_seconds", return_value=timedelta.max.total_seconds()):
        assert isinstance(opened(folder, seconds=60), Window)
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
        return opened(folder)


def test_windows_made_in_any_mode_are_for_all_calls(tmp_path: Path) -> None:
    spawn(_modes, 2, tmp_path)


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
    group = Group(group_name="cp")
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

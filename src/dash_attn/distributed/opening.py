"""Making windows: whether the ranks of a group can have them, decided by all of them together."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..backends.base import as_current
from .team import Team, errors_of
from .windows import WINDOWS, Window, window_bytes

__all__ = ["open_window"]

_VARIABLE = "DASH_ATTN_WINDOWS"
"""Another value than 1 on any rank: NCCL moves all rows."""

_TRIAL = 0x5EED
"""What ranks say when they try their windows."""

_RENDEZVOUS_SECONDS = 60.0
"""So long PyTorch's rendezvous waits for what each other rank puts in the store. Nothing bounds the rest."""

_rendezvous = 0
"""How many this process has begun. PyTorch numbers them per process, and not per group."""

_numbers_differ = False
"""Ranks may have other numbers after one that has failed."""


def open_window(team: Team, device: torch.device) -> None:
    """Give a group windows, once, if its GPUs can have them. All ranks are at this call.

    Raises:
        CommunicationError: a rank is not here.
    """
    if device.type != "cuda" or team.size == 1 or team.group in WINDOWS:
        return
    if torch.cuda.is_current_stream_capturing():
        return  # ranks could not tell each other; a later call may
    # What is made here is for all calls, also of other modes than this one's.
    with torch.inference_mode(False), _disable_current_modes():
        WINDOWS[team.group] = _opened(team, device)


class _NoWindows(Exception):
    """Why a group has none."""


_T = TypeVar("_T")


def _opened(team: Team, device: torch.device) -> Window | str:
    """The windows, or why there are none. After each step ranks tell each other whether they have done it: so
    all decide alike, and none goes on alone. An error of any kind is a reason."""
    global _numbers_differ

    def told(mine: Any) -> list[Any]:
        every: list[Any] = [None] * team.size
        with errors_of(team), as_current(device):
            dist.all_gather_object(every, mine, group=team.group)
        return every

    def done(step: Callable[[], _T], if_not: str) -> _T:
        """What a step makes, if it makes it on all ranks. if_not: what is said of one where it does not."""
        made: Any = None
        why = ""
        try:
            made = step()
        except _NoWindows as error:
            why = str(error)
        except Exception as error:
            why = f"rank {team.rank} {if_not}: {_first_line(error)}"
        if why := next(filter(None, told(why)), ""):
            raise _NoWindows(why)
        return cast(_T, made)

    every = told(_here(team, device))
    try:
        done(lambda: _check(every, team.rank), "cannot compare")
        mine = done(lambda: _own(device), "has no memory for a window")
        try:
            window = done(
                lambda: _mapped(team, mine, _seconds(team, device)), "cannot map the windows of others"
            )
        except _NoWindows:
            _numbers_differ = True
            raise
        done(lambda: _say(window), "cannot write to windows of others")
        done(lambda: _hear(window), "cannot wait for others")
    except _NoWindows as why:
        return str(why)
    return window


def _check(every: list[_Here], rank: int) -> None:
    if why := _why_not(every, rank):
        raise _NoWindows(why)


def _own(device: torch.device) -> Tensor:
    mine: Tensor = import_module(_SYMMETRIC).empty(window_bytes(), dtype=torch.uint8, device=device)
    return mine


def _say(window: Window) -> None:
    window.say(_TRIAL)
    if window.device.type == "cuda":
        torch.cuda.synchronize(window.device)


def _hear(window: Window) -> None:
    if not bool((window.heard() == _TRIAL).all()):
        raise _NoWindows(f"rank {window.team.rank} does not find in its window what others wrote")


def _mapped(team: Team, mine: Tensor, seconds: float) -> Window:
    """The windows of all ranks, of which this one has made its own. Barriers wait so many seconds."""
    global _rendezvous
    symmetric, store = import_module(_SYMMETRIC), team.group.get_group_store()
    _rendezvous += 1
    before = store.timeout
    store.set_timeout(min(before, timedelta(seconds=min(seconds / 2, _RENDEZVOUS_SECONDS))))
    multicast = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        handle = symmetric.rendezvous(mine, team.group.group_name)
    finally:
        store.set_timeout(before)
        os.environ.pop(_NO_MULTICAST)
        if multicast is not None:
            os.environ[_NO_MULTICAST] = multicast
    if (handle.rank, handle.world_size) != (team.rank, team.size):
        raise ValueError(f"PyTorch takes this for rank {handle.rank} of {handle.world_size}")
    memory = [handle.get_buffer(rank, mine.shape, torch.uint8) for rank in range(team.size)]
    if memory[team.rank].data_ptr() != mine.data_ptr():
        raise ValueError("the window does not begin where its memory does")
    wait_ms = max(1, min(round(1000 * seconds), _MOST_MS))
    return Window(team, memory, lambda: handle.barrier(0, wait_ms), owned=mine)


_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
"""PyTorch reads it in a rendezvous. Windows need no multicast, and to set it up may take for ever."""

_MOST_MS = 2**43
"""In nanoseconds the GPU still counts so many."""


def _seconds(team: Team, device: torch.device) -> float:
    """The timeout of a group."""
    try:
        found = team.group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # not every backend says it
        found = team.group.get_group_store().timeout
    return float(found.total_seconds())


class _Here(NamedTuple):
    """Of a rank: what decides whether it can have a window.

    Attributes:
        why: it cannot, whatever the others have.
        host: the same on ranks that can map each other's memory.
        gpu: of all GPUs, this one.
        number: of the GPU in this process.
        rendezvous: how many this process has begun.
    """

    why: str
    host: str = ""
    gpu: str = ""
    number: int = 0
    rendezvous: int = 0


_SYMMETRIC = "torch.distributed._symmetric_memory"
_DRIVER = "cuda.bindings.driver"


def _here(team: Team, device: torch.device) -> _Here:
    """An error of any kind is why not."""
    try:
        if why := _why_none():
            return _Here(why)
        import_module(_DRIVER)
        symmetric = import_module(_SYMMETRIC)
        if (backend := symmetric.get_backend(device)) != "CUDA":
            return _Here(f"PyTorch's symmetric memory is that of {backend}")
        if team.group.group_name in getattr(symmetric, "_group_name_to_store", ()):  # before PyTorch 2.11
            return _Here("a group of this name has had symmetric memory before")
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "mnt", "pid")]  # of a container
        host = [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *spaces, _sockets()]
        return _Here("", " ".join(host), _gpu(device.index), device.index, _rendezvous)
    except Exception as error:
        return _Here(f"{type(error).__name__}: {_first_line(error)}")


def _why_none() -> str:
    if _numbers_differ:
        return "an earlier group of this process could not map its windows"
    if (asked := os.environ.get(_VARIABLE) or "1") != "1":
        return f"{_VARIABLE}={asked}"
    if (asked := os.environ.get("NCCL_P2P_DISABLE") or "0") != "0":
        return f"NCCL_P2P_DISABLE={asked}"
    if len(place := _sockets()) > _LONGEST or not os.access(place, os.W_OK):
        return f"PyTorch makes sockets in {place!r}: it must be writable, and have at most {_LONGEST} bytes"
    return ""


_LONGEST = 80
"""The name of a socket has 108 bytes, with PyTorch's part."""


def _sockets() -> str:
    """The folder of PyTorch's sockets, by which ranks give each other their memory."""
    return next((os.environ[n] for n in ("TMPDIR", "TMP", "TEMP", "TEMPDIR") if n in os.environ), "/tmp")


def _gpu(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)


def _why_not(every: list[_Here], rank: int) -> str:
    """Why this rank cannot map what the others have; "" if it can."""
    mine = every[rank]
    for other, theirs in enumerate(every):
        if theirs.why:
            return f"rank {other}: {theirs.why}"
        if theirs.host != mine.host:
            return f"ranks {rank} and {other} are on different hosts, or in different containers"
        if theirs.rendezvous != mine.rendezvous:
            return (
                f"rank {rank} has had {mine.rendezvous} windows before, rank {other} {theirs.rendezvous}: "
                "PyTorch counts them"
            )
        if other != rank and (why := _why_no_link(mine, theirs)):
            return f"from rank {rank} to rank {other}: {why}"
    return ""


def _why_no_link(mine: _Here, theirs: _Here) -> str:
    if theirs.gpu == mine.gpu:
        return "both have one GPU"
    try:
        if theirs.number >= torch.cuda.device_count() or _gpu(theirs.number) != theirs.gpu:
            return "the GPU has another number there, or is not seen here (CUDA_VISIBLE_DEVICES)"
        if not torch.cuda.can_device_access_peer(mine.number, theirs.number):
            return "the GPU cannot reach the other one's memory"
        if not _has_atomics(mine.number, theirs.number):
            return "the link between the GPUs has no atomic operations (NVLink has)"
    except Exception as error:
        return f"{type(error).__name__}: {_first_line(error)}"
    return ""


def _has_atomics(mine: int, theirs: int) -> bool:
    """Whether one GPU can do atomic operations on the other one's memory: barriers are made of them."""
    driver = import_module(_DRIVER)
    asked = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    status, found = driver.cuDeviceGetP2PAttribute(asked, *(driver.cuDeviceGet(n)[1] for n in (mine, theirs)))
    return int(status) == 0 and bool(found)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]

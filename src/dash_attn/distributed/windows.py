"""Windows: memory of each rank of a host into which the others write, without NCCL.

NCCL takes rows that are packed, SMs, and some 40 us for 8 bytes. Between GPUs of one host a copy writes rows
of some of the heads to where another GPU reads them. Nothing is packed, and the bytes are the same. What
others wrote is read behind a barrier.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..backends.base import as_current
from ..errors import InputError
from .team import Team, errors_of, team_of

__all__ = ["WINDOW_BYTES", "Window", "open_window", "transport", "window_of"]

REGION = 128 << 20
"""Bytes that others may write to a rank in a turn: 0.35 ms by NVLink. The host takes up to 0.3 ms for it."""

_TAGS = 4096
"""Bytes before the first region."""

WINDOW_BYTES = _TAGS + 2 * REGION

_TRIAL = 0x5EED
"""What ranks say when they try their windows."""

_VARIABLE = "DASH_ATTN_WINDOWS"
"""0 on any rank: NCCL moves all rows."""


class Window:
    """The windows of a group: those of the others are mapped here.

    A window has two regions, and a place in each for every other rank. Exchanges take turns with them. Who
    writes to a region for the second time has passed the barrier of the exchange between, so its owner has
    read what the first one brought. A pass begins with the tags of all ranks, behind a barrier of their own.

    Args:
        team: the group.
        memory: of each rank, as it is seen from this one: (WINDOW_BYTES,) uint8.
        barrier: returns when all ranks have come; on a GPU, nothing behind it runs before.
    """

    def __init__(self, team: Team, memory: list[Tensor], barrier: Callable[[], None]) -> None:
        self.team, self.device = team, memory[team.rank].device
        self.barrier = barrier
        self._memory = memory
        tags = 2 * 8 * team.size
        self._tags = [x[:tags].view(torch.int64).view(2, team.size) for x in memory]
        self._turn = self._region = 0
        self._stream: torch.cuda.Stream | None = None
        self._beside: torch.cuda.Stream | None = None
        if self.device.type == "cuda":  # its blocks go first: those that write to others wait for links
            self._beside = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]

    def say(self, tag: int) -> None:
        """Begin a pass: give all ranks 63 bits."""
        self._in_order()
        self._turn, self._region = 1 - self._turn, 0
        for rank in self._ranks():
            self._tags[rank][self._turn, self.team.rank].fill_(tag)

    def heard(self) -> Tensor:
        """(ranks,) int64: what all have said in this pass."""
        self.barrier()
        return self._tags[self.team.rank][self._turn]

    def turn(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Begin an exchange: where this rank writes, by rank, and where it reads behind the barrier."""
        self._region = 1 - self._region
        me, others = self.team.rank, [rank for rank in self._ranks() if rank != self.team.rank]
        into = {rank: self._place(rank, me) for rank in others}
        return into, {rank: self._place(me, rank) for rank in others}

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Inside, copies run beside what this rank writes: behind all given so far, up to :meth:`join`."""
        if self._beside is None:
            yield
            return
        self._beside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._beside):
            yield

    def join(self) -> None:
        """Wait for copies that run beside."""
        if self._beside is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._beside)

    def _ranks(self) -> Iterator[int]:
        """All, each rank from itself on: so no two begin with the same one."""
        for step in range(self.team.size):
            yield (self.team.rank + step) % self.team.size

    def _place(self, target: int, source: int) -> Tensor:
        begin = _TAGS + self._region * REGION + (source - (source > target)) * self.room
        return self._memory[target][begin : begin + self.room]

    @property
    def room(self) -> int:
        """Bytes that a rank may write to another one in a turn."""
        return REGION // (self.team.size - 1) // 512 * 512

    def _in_order(self) -> None:
        """Passes of a group come one after the other, on whichever streams."""
        if self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        stream, before = torch.cuda.current_stream(self.device), self._stream
        if before is not None and before != stream:
            stream.wait_stream(before)
        self._stream = stream


_WINDOWS: WeakKeyDictionary[Any, Window | str] = WeakKeyDictionary()
"""By process group: its windows, or why it has none."""


def window_of(team: Team, device: torch.device) -> Window | None:
    """The windows of a group, None if it has none.

    Raises:
        InputError: they are of another device.
    """
    found = _WINDOWS.get(team.group)
    if not isinstance(found, Window) or found.device.type != device.type:
        return None
    if found.device != device:
        raise InputError(
            f"tensors are on {device}, but rank {team.rank} of this group exchanges through memory of "
            f"{found.device}: use one device per rank"
        )
    return found


def transport(group: Any = None) -> str:
    """What carries rows of the mode "ulysses" between the ranks of a group. It decides no bit.

    Args:
        group: a process group, a DeviceMesh of one dimension, or None for all processes.

    Returns:
        "windows" (memory that GPUs of one host write to); "collectives: ..." with the reason (NCCL, gloo); or
        "not decided", before the first such call.
    """
    team = team_of(group)
    if team.size == 1:
        return "collectives: the group has one rank"
    found = _WINDOWS.get(team.group, "not decided")
    return "windows" if isinstance(found, Window) else found


def open_window(team: Team, device: torch.device) -> None:
    """Give a group windows, once, if its GPUs can have them. All ranks are at this call.

    Raises:
        CommunicationError: a rank is not here.
    """
    if team.size == 1 or team.group in _WINDOWS:
        return
    found = _opened(team, device) if device.type == "cuda" else f"the tensors are on {device.type}"
    _WINDOWS[team.group] = f"collectives: {found}" if isinstance(found, str) else found


def _opened(team: Team, device: torch.device) -> Window | str:
    """The windows, or why there are none. After each step ranks tell each other whether they have done it, so
    none waits for one that has not."""

    def told(mine: Any) -> list[Any]:
        every: list[Any] = [None] * team.size
        with errors_of(team), as_current(device):
            dist.all_gather_object(every, mine, group=team.group)
        return every

    def first_of(why: str) -> str:
        return next(filter(None, told(why)), "")

    if why := first_of(_why_not(told(_here(device)), team.rank)):
        return why
    import torch.distributed._symmetric_memory as symmetric

    memory: list[Tensor] = []
    failed = ""
    try:
        mine = symmetric.empty(WINDOW_BYTES, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        failed = f"rank {team.rank} has no memory for a window: {_first_line(error)}"
    if why := first_of(failed):
        return why
    try:
        handle = symmetric.rendezvous(mine, team.group.group_name)
        memory = [handle.get_buffer(rank, (WINDOW_BYTES,), torch.uint8) for rank in range(team.size)]
    except RuntimeError as error:
        failed = f"rank {team.rank} cannot map the windows of others: {_first_line(error)}"
    if why := first_of(failed):
        return why
    wait_ms = max(1, round(1000 * team.group.get_group_store().timeout.total_seconds()))
    window = Window(team, memory, lambda: handle.barrier(0, wait_ms))
    try:
        window.say(_TRIAL)
        if not bool((window.heard() == _TRIAL).all()):
            failed = f"rank {team.rank} does not find in its window what others wrote"
    except RuntimeError as error:
        failed = f"rank {team.rank} cannot write to windows of others: {_first_line(error)}"
    return first_of(failed) or window


class _Here(NamedTuple):
    """Of a rank: what decides whether it can have a window. why: it cannot, whatever the others have."""

    why: str
    host: str
    gpu: str
    number: int


def _here(device: torch.device) -> _Here:
    why = ""
    if (asked := os.environ.get(_VARIABLE, "1")) != "1":
        why = f"{_VARIABLE}={asked}"
    elif importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
        why = f"PyTorch {torch.__version__} has no symmetric memory"
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "mnt", "pid")]  # of a container
    host = " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *spaces])
    return _Here(why, host, _gpu(device.index), device.index)


def _gpu(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _why_not(every: list[_Here], rank: int) -> str:
    """Why this rank cannot map what the others have; "" if it can."""
    mine = every[rank]
    for other, theirs in enumerate(every):
        if theirs.why:
            return f"rank {other}: {theirs.why}"
        if theirs.host != mine.host:
            return f"ranks {rank} and {other} are on different hosts, or in different containers"
        if other == rank:
            continue
        if theirs.gpu == mine.gpu:
            return f"ranks {rank} and {other} have one GPU"
        if theirs.number >= torch.cuda.device_count() or _gpu(theirs.number) != theirs.gpu:
            return f"rank {rank} does not see the GPU of rank {other} as that one does (CUDA_VISIBLE_DEVICES)"
        if not torch.cuda.can_device_access_peer(mine.number, theirs.number):
            return f"the GPU of rank {rank} cannot reach the memory of that of rank {other}"
    return ""


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]

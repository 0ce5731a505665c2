"""Windows: memory of each rank of a group into which the others write, without NCCL.

NCCL takes rows that are packed, SMs, and some 40 us for 8 bytes. Between GPUs of one host a copy writes rows
of some of the heads to where another GPU reads them. Nothing is packed, and the bytes are the same. What
others wrote is read behind a barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..errors import InputError
from .team import Team, team_of

__all__ = ["WINDOWS", "Window", "transport", "window_bytes", "window_of"]

REGION = 128 << 20
"""Bytes that others may write to a rank in a turn: 0.35 ms by NVLink. The host takes up to 0.3 ms for it."""

_TAGS = 4096
"""Bytes before the first region."""


def window_bytes() -> int:
    """Of each rank."""
    return _TAGS + 2 * REGION


class Window:
    """The windows of a group: those of the others are mapped here.

    A window has two regions, and a place in each for every other rank. Exchanges take turns with them. Who
    writes to a region for the second time has passed the barrier of the exchange between, so its owner has
    read what the first one brought. A pass begins with the tags of all ranks, behind a barrier of their own.

    Args:
        team: the group.
        memory: of each rank, as it is seen from this one: (:func:`window_bytes`,) uint8.
        barrier: returns when all ranks have come; on a GPU, nothing behind it runs before.
        owned: what must live as long as the memory.
    """

    def __init__(
        self, team: Team, memory: list[Tensor], barrier: Callable[[], None], owned: object = None
    ) -> None:
        self.team, self.device = team, memory[team.rank].device
        self.barrier = barrier
        self._memory, self._owned = memory, owned
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


WINDOWS: WeakKeyDictionary[Any, Window | str] = WeakKeyDictionary()
"""By process group: its windows, or why it has none."""


def window_of(team: Team, device: torch.device) -> Window | None:
    """The windows of a group, None if it has none.

    Raises:
        InputError: they are of another GPU.
    """
    found = WINDOWS.get(team.group)
    if not isinstance(found, Window) or found.device.type != device.type:
        return None
    if found.device != device:
        raise InputError(
            f"tensors are on {device}, but rank {team.rank} of this group exchanges through memory of "
            f"{found.device}: use one device per rank"
        )
    return found


@torch.compiler.disable  # type: ignore[untyped-decorator]
def transport(group: Any = None) -> str:
    """What carries rows between the ranks of a group where each has all rows of some heads (mode "ulysses",
    and others that come to the same). It decides no bit.

    Args:
        group: a process group, a DeviceMesh of one dimension, or None for all processes.

    Returns:
        "windows": memory that GPUs of one host write to. Or "collectives: ..." (NCCL, gloo), with the reason.
        Before the first such call on GPUs the reason is that there was none; tensors on the CPU never use
        windows.

    Raises:
        InputError: there is no such group.
    """
    team = team_of(group)
    if team.size == 1:
        return "collectives: the group has one rank"
    found = WINDOWS.get(team.group, "no call on GPUs in this mode so far")
    return "windows" if isinstance(found, Window) else f"collectives: {found}"

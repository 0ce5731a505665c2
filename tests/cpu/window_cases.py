"""Windows of processes on the CPU: files stand for the memory of GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from dash_attn.distributed import opening, windows
from dash_attn.distributed.team import team_of
from dash_attn.distributed.windows import Window


class Handle(NamedTuple):
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


def opened(
    folder: Path, patches: Mapping[tuple[Any, str], Any] | None = None, seconds: int = 30
) -> Window | str:
    """The windows of all processes, as :func:`.opening.open_window` has them on GPUs; seconds: that a
    rendezvous waits."""
    team, multicast = team_of(None), os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST")

    def empty(size: int, **options: Any) -> Tensor:
        place = folder / str(team.rank)
        place.write_bytes(bytes(size))
        return torch.from_file(str(place), shared=True, size=size, dtype=torch.uint8)

    def rendezvous(mine: Tensor, name: str) -> Handle:
        assert name == team.group.group_name
        assert team.group.get_group_store().timeout == timedelta(seconds=seconds)
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        return Handle(folder, mine, team.rank, team.size)

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


class Group(SimpleNamespace):
    """There are weak references to it."""

    __hash__ = object.__hash__

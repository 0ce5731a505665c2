"""Moving rows between processes: the bytes that are copied, and the buffers."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dash_attn.distributed.exchange import Move, Moving, copy_rows
from dash_attn.distributed.team import team_of
from dash_attn.testing import assert_same_bytes
from spawned import spawn


class _Copies(TorchDispatchMode):
    """The dtypes in which PyTorch copied."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("heads", "columns", "begin", "by_units"),
    [(2, 64, 0, True), (2, 64, 1, False), (3, 21, 0, False)],
    ids=["whole units", "the storage begins within a unit", "heads begin within a unit"],
)
def test_copies_of_some_heads_keep_all_bytes(
    dtype: torch.dtype, heads: int, columns: int, begin: int, by_units: bool
) -> None:
    """NaN and their payloads, too. Where both tensors are made of units of 16 bytes, these are copied."""
    size, width = dtype.itemsize, 2 * heads * columns
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(256, ((10 * width + begin) * size,), generator=generator, dtype=torch.uint8)
    rows = random.view(dtype)[begin:].view(1, 10, 2 * heads, columns)
    some = rows[:, 2:9:3, heads:]
    found = torch.zeros_like(some, memory_format=torch.contiguous_format)
    with _Copies() as copies:
        copy_rows(found, some)
    assert copies.dtypes == [torch.complex128 if by_units else dtype]
    assert_same_bytes(found, some.contiguous())
    back = torch.zeros_like(rows)
    copy_rows(back[:, 2:9:3, heads:], found)
    assert_same_bytes(back[:, 2:9:3, heads:].contiguous(), found)
    assert not back[:, :2].any()
    assert not back[:, :, :heads].any()


def _buffers(rank: int) -> None:
    """A move that has ended keeps no buffer, though the object itself is kept while a step is computed."""
    found = torch.zeros(8)
    move = Move(0, 1, (8,), torch.float32, lambda: torch.ones(8), found.copy_)
    moving = Moving(team_of(None), [move], found.device)
    buffers = [weakref.ref(moving._received), weakref.ref(moving._sent)]
    assert None not in [buffer() for buffer in buffers]
    moving.end()
    assert found.tolist() == [float(rank)] * 8
    end = time.monotonic() + 10  # gloo's thread lets go of them a little later
    while any(buffer() is not None for buffer in buffers) and time.monotonic() < end:
        time.sleep(0.01)
    assert [buffer() for buffer in buffers] == [None, None]


def test_buffers_go_when_a_move_ends() -> None:
    spawn(_buffers, 2)

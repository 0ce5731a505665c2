"""Running a function in several processes of one group, for tests."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=60)


def spawn(function: Callable[..., None], ranks: int, *args: Any, backend: str = "gloo") -> None:
    """Run ``function(rank, *args)`` in ``ranks`` processes. An error of one of them is raised here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_run, (ranks, port, backend, function, args), ranks)


def _run(
    rank: int, ranks: int, port: int, backend: str, function: Callable[..., None], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    options: dict[str, Any] = {}
    if backend == "nccl":
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device("cuda", rank)
    dist.init_process_group(
        backend, f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks, timeout=TIMEOUT, **options
    )
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()

"""Running a function in several processes of one group, for tests."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["RankError", "spawn"]

TIMEOUT = timedelta(seconds=60)


class RankError(AssertionError):
    """A rank has failed; the message has its traceback."""


def spawn(
    function: Callable[..., Any], ranks: int, *args: Any, backend: str = "gloo", timeout: float = 1800
) -> list[Any]:
    """What ``function(rank, *args)`` returns on every rank, in their order.

    Args:
        function: of a module, not a local one: new processes import it. Inside, ``torch.distributed`` is
            initialised, and PyTorch has one thread.
        ranks: how many processes.
        args: they are pickled, and what the function returns is, too.
        backend: "gloo", or "nccl": then every rank has a GPU.
        timeout: seconds until all must be done. An exchange between ranks has a minute.

    Raises:
        RankError: a rank has raised, has ended, or is not done in time. All others are ended.
    """
    # The store listens on a port that the system has chosen; nobody can take it in between.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = _context("spawn" if backend == "nccl" else "forkserver")
    processes, answers = [], []
    try:
        for rank in range(ranks):
            mine, theirs = context.Pipe(duplex=False)
            given = (function, args, (rank, ranks, store.port, backend), dict(os.environ), theirs)
            processes.append(context.Process(target=_run, args=given, daemon=True))
            processes[-1].start()
            theirs.close()
            answers.append(mine)
        return _collected(answers, time.monotonic() + timeout, function.__name__)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
            process.join()
        for mine in answers:
            mine.close()


@cache
def _context(method: str) -> Any:
    """How processes begin. Those of a fork server have PyTorch imported already, which takes five seconds."""
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["pytest", "dash_attn.distributed", "torch.utils.checkpoint"])
    return context


def _collected(answers: list[Connection], end: float, name: str) -> list[Any]:
    found: dict[int, Any] = {}
    while len(found) < len(answers):
        left = {answers[rank]: rank for rank in range(len(answers)) if rank not in found}
        ready = wait(list(left), max(end - time.monotonic(), 0))
        if not ready:
            raise RankError(f"{name}: ranks {sorted(left.values())} of {len(answers)} are not done in time")
        for answer in ready:
            rank = left[answer]
            try:
                error, found[rank] = answer.recv()
            except EOFError:
                error = "the process has ended"
            if error:
                raise RankError("\n".join([f"{name}, rank {rank}:\n{error}", *_other_errors(left, answer)]))
    return [found[rank] for rank in range(len(answers))]


def _other_errors(left: dict[Connection, int], first: Connection) -> list[str]:
    """What other ranks say soon after: the first error to come may follow from theirs."""
    time.sleep(1)
    found = []
    for answer, rank in left.items():
        if answer is not first and answer.poll():
            with suppress(EOFError):
                found.append(f"rank {rank}:\n{answer.recv()[0] or 'done'}")
    return found


def _run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    place: tuple[int, int, int, str],
    environment: dict[str, str],
    answer: Any,
) -> None:
    rank, ranks, port, backend = place
    os.environ.clear()  # that of the fork server is older
    os.environ.update(environment)
    options: dict[str, Any] = {}
    try:
        torch.set_num_threads(1)
        if backend == "nccl":
            torch.cuda.set_device(rank)
            options["device_id"] = torch.device("cuda", rank)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT, **options)
        result = function(rank, *args)
        dist.destroy_process_group()
    except BaseException:
        answer.send((traceback.format_exc(), None))
    else:
        answer.send((None, result))

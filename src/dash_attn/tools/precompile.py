"""Compiling what calls of a kind can launch, before there is a call."""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

from ..backends.cuda.cache import NOT_KEPT, cache_folder, examine_folder
from ..backends.sm90.backend import why_no_kernel
from ..backends.sm90.compile import Config, program
from ..backends.sm90.kinds import programs_of
from ..errors import DashError
from ..problem import Problem
from ..scores import Scores

__all__ = ["compiled", "default_jobs", "programs_for", "require_cache"]

_MOST_JOBS = 16
"""By default. A process takes 1 GB."""


def programs_for(args: argparse.Namespace) -> dict[str, Config]:
    """The programs that the flags of ``dash-attn precompile`` ask for, by name.

    Raises:
        DashError: there is no Hopper kernel for such calls, or no compiler; the message says why.
    """
    of_v = args.head_dim if args.head_dim_v is None else args.head_dim_v
    problem = Problem.dense(seqlen=1, head_dim=args.head_dim, head_dim_v=of_v, dtype=args.dtype)
    scores = Scores(1.0, softcap=float(args.softcap), sink=args.sink, row_intervals=args.intervals)
    if reason := why_no_kernel(problem, scores):
        raise DashError(reason)
    return programs_of(problem, scores, cached=args.cache)


def require_cache() -> str:
    """The folder in which programs are kept.

    Raises:
        DashError: none can be kept there.
    """
    folder = cache_folder()
    _, reason = examine_folder(folder)
    if reason:
        raise DashError(
            f"kernels cannot be kept in {folder}: {reason}; DASH_ATTN_CACHE_DIR names another folder"
        )
    return str(folder)


def default_jobs() -> int:
    """How many programs are compiled at the same time if nobody says it."""
    return min(len(os.sched_getaffinity(0)), _MOST_JOBS)


def compiled(programs: dict[str, Config], jobs: int) -> Iterator[tuple[str, float]]:
    """Compile programs, and keep them on disk; what is there already is left as it is.

    Args:
        programs: by name.
        jobs: how many at the same time, each in a process of its own.

    Yields:
        The name of each, and the seconds that it took, as they are done.

    Raises:
        MissingCompilerError: nvidia-cutlass-dsl or apache-tvm-ffi is not installed.
        CompilationError: the compiler failed.
        DashError: a program cannot be kept, or a process that compiled was killed.
    """
    workers = max(1, min(jobs, len(programs)))
    # "spawn": a forked child of a process with threads may hang.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(_seconds, config): name for name, config in programs.items()}
        try:
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        except BrokenProcessPool as error:
            raise DashError(
                f"one of {workers} processes that compiled was killed, which happens where memory is short: "
                "--jobs says how many there are"
            ) from error
        except RuntimeWarning as warning:
            raise DashError(str(warning)) from warning
        finally:
            pool.shutdown(cancel_futures=True)


def _seconds(config: Config) -> float:
    """Seconds until a program is compiled, or found to be there."""
    begin = time.perf_counter()
    with warnings.catch_warnings():
        for message in NOT_KEPT:
            warnings.filterwarnings("error", message, RuntimeWarning)
        program(config)
    return time.perf_counter() - begin

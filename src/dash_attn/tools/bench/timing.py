"""Timing several implementations of one thing against one another, in one run on one GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from ...peers.registry import Backward
from ...testing import same_bytes

__all__ = ["REPLAYS", "Contender", "measure", "order_of_round"]

T = TypeVar("T")
REPLAYS = 4
HEAD_START = 2_000_000
"""Cycles that the GPU pauses before a round for each of its calls, about 1 ms: all calls queue up behind it,
so that the time between two events is the GPU's and not the host's, however short calls are."""


@dataclass
class Contender:
    """One implementation.

    Attributes:
        make: compiles or prepares it and gives the call that is timed.
        reason: why it did not run, empty if it did.
        repeatable: replays gave the same bytes; None if it did not run.
        times: milliseconds of each timed call.
    """

    make: Callable[[], Backward]
    reason: str = ""
    repeatable: bool | None = None
    times: list[float] = field(default_factory=list)

    @property
    def ms(self) -> float:
        """Median time."""
        return statistics.median(self.times)

    @property
    def spread(self) -> float:
        """Distance of the quartiles, as a share of the median."""
        if len(self.times) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.times, n=4)
        return (high - low) / self.ms


def measure(contenders: Sequence[Contender], rounds: int, replays: int = REPLAYS) -> None:
    """Time all contenders that run, ``rounds`` calls each, in interleaved rounds.

    Before that each is called once and replayed ``replays`` times, which compares the bytes and warms up.
    The order is another one in every round (:func:`order_of_round`). All kernels and allocations of a call
    count. A contender that fails keeps the error as its reason.
    """
    calls = []
    for contender in contenders:
        if not contender.reason and (call := _prepared(contender, replays)):
            calls.append((contender, call))
    for number in range(rounds):
        torch.cuda._sleep(HEAD_START * len(calls))  # type: ignore[no-untyped-call]
        events = [_timed(contender, call) for contender, call in order_of_round(calls, number, rounds)]
        torch.cuda.synchronize()
        for contender, start, end in events:
            contender.times.append(start.elapsed_time(end))


def order_of_round(calls: Sequence[T], number: int, rounds: int) -> list[T]:
    """The order of round ``number``: which call is first moves on, and every other round goes backwards.

    Under the power limit the clock of a call depends on what ran before it. So none is always first, or last,
    or behind the same one.
    """
    first, step = number * len(calls) // rounds, -1 if number % 2 else 1
    return [calls[(first + step * place) % len(calls)] for place in range(len(calls))]


def _prepared(contender: Contender, replays: int) -> Backward | None:
    """Compile, and compare replays with the first call."""
    try:
        call = contender.make()
        first = [x.clone() for x in call()]
        contender.repeatable = all(same_bytes(a, b) for _ in range(replays) for a, b in zip(first, call()))
        torch.cuda.synchronize()
    except Exception as error:  # a library that fails is a row of the table
        lines = str(error).strip().splitlines() or [""]
        contender.reason = f"{type(error).__name__}: {lines[0]}"[:300]
        contender.repeatable = None
        return None
    return call


def _timed(contender: Contender, call: Backward) -> tuple[Contender, torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    return contender, start, end

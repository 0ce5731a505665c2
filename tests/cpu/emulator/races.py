"""Which accesses to memory are ordered, by vector clocks: what is not is a race, whether it did harm or not.

Agents are warps, and what works beside them: copies of a barrier, copies and products of a warp. An access is
ordered behind another one if a chain of program order, barriers, releases and acquires leads from one to the
other. The chain to what the copy engine or wgmma reads must also have a proxy fence behind a write by a
warp, and behind an acquire: ``proxy`` is what a warp knows by such chains. Sums in memory (cp.reduce, red of
floats) are writes here: without order they are the same races, and they decide bits.

Lanes of a warp are one agent, so what they do to each other is not seen. Nor is what another kernel did.

Copies write over what warps have read. A load of shared memory may be under way until its value is used, or
until a proxy fence (``loads``), even where its warp has arrived at a barrier meanwhile: an H200 does so.

A product may read what nothing orders if nobody uses it. Such products are kept in ``doubtful``. Whoever runs
the launch again, with NaN in their place, sees whether that is so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

WORD = 4
PRODUCTS = "products of "


NEVER = np.iinfo(np.int64).max


class RaceError(Exception):
    """Two accesses, one of them a write, of which nothing says which one comes first."""


@dataclass
class Clock:
    """What an agent knows of all agents: ``seen`` by whatever chain, ``proxy`` by one with proxy fences."""

    seen: np.ndarray
    proxy: dict[str, np.ndarray]

    @classmethod
    def start(cls, agents: int) -> Clock:
        return cls(np.zeros(agents, np.int64), {s: np.zeros(agents, np.int64) for s in ("shared", "global")})

    def copy(self) -> Clock:
        return Clock(self.seen.copy(), {space: known.copy() for space, known in self.proxy.items()})

    def learn(self, other: Clock) -> None:
        np.maximum(self.seen, other.seen, out=self.seen)
        for space, known in self.proxy.items():
            np.maximum(known, other.proxy[space], out=known)


@dataclass
class Meeting:
    """What a barrier passes on: ``given`` by those who came in this phase, ``over`` by those of the last."""

    given: Clock
    over: Clock

    def end(self) -> None:
        self.over = self.given.copy()


@dataclass
class Shadow:
    """Of each word who wrote it last, when each agent read it, and when each warp had what it read."""

    writer: np.ndarray
    written: np.ndarray
    read: dict[int, np.ndarray] = field(default_factory=dict)
    had: dict[int, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, words: int) -> Shadow:
        return cls(np.zeros(words, np.int32), np.zeros(words, np.int64))


@dataclass(frozen=True)
class Load:
    """A load of shared memory that is under way: where to, of which words."""

    registers: tuple[int, ...]
    shadow: Shadow
    at: np.ndarray


class Races:
    """Watches a launch.

    Args:
        agents: names of the warps; what works beside them gets names when it first does.
    """

    MOST_BESIDE = 512

    def __init__(self, warps: list[str]):
        self.names = list(warps)
        self.most = len(warps) + self.MOST_BESIDE
        self.clocks = {number: Clock.start(self.most) for number in range(len(warps))}
        self.numbers: dict[str, int] = {}
        self.counts = np.zeros(self.most, np.int64)
        for number in range(len(warps)):
            self._tick(number)
        self.shadows: dict[object, Shadow] = {}
        self.meetings: dict[object, Meeting] = {}
        self.released: dict[int, Clock] = {}
        self.doubtful: set[tuple[int, int]] = set()
        self.loads: dict[int, dict[int, Load]] = {number: {} for number in range(len(warps))}

    # Agents

    def beside(self, name: str) -> int:
        """The agent of this name, which has no program of its own."""
        if name not in self.numbers:
            self.numbers[name] = len(self.names)
            self.names.append(name)
            assert len(self.names) <= self.most, "too many agents"
        return self.numbers[name]

    def _tick(self, warp: int) -> None:
        self.counts[warp] += 1
        self.clocks[warp].seen[warp] = self.counts[warp]

    def begin(self, warp: int, name: str) -> tuple[int, int, Clock]:
        """Something that a warp starts beside it: its agent, its time, and what it knows."""
        agent = self.beside(name)
        self.counts[agent] += 1
        known = self.clocks[warp].copy()
        self._tick(warp)
        return agent, int(self.counts[agent]), known

    def done(self, warp: int, agent: int, time: int) -> None:
        """A warp waited for something beside it."""
        seen = self.clocks[warp].seen
        seen[agent] = max(seen[agent], time)

    # Accesses

    def _shadow(self, region: object, words: int) -> Shadow:
        if region not in self.shadows:
            self.shadows[region] = Shadow.of(words)
        return self.shadows[region]

    def read(self, warp: int, region: object, words: int, places: np.ndarray) -> None:
        self._read(warp, int(self.counts[warp]), self.clocks[warp].seen, (region, words), places)

    def load(self, warp: int, to: tuple[int, ...], region: object, words: int, places: np.ndarray) -> None:
        """A warp reads shared memory to registers."""
        self.read(warp, region, words, places)
        self.use(warp, to)  # nobody has asked for what was there
        load = Load(to, self._shadow(region, words), places)
        load.shadow.had.setdefault(warp, np.zeros(words, np.int64))[places] = NEVER
        self.loads[warp] |= dict.fromkeys(to, load)

    def use(self, warp: int, registers: Iterable[int]) -> None:
        """A warp has what it has loaded to these."""
        under_way = self.loads[warp]
        for register in registers:
            if (load := under_way.get(register)) is not None:
                load.shadow.had[warp][load.at] = self.counts[warp]
                for each in load.registers:
                    del under_way[each]

    def write(self, warp: int, region: object, words: int, places: np.ndarray) -> None:
        self._write(warp, int(self.counts[warp]), self.clocks[warp].seen, (region, words), places)

    def read_beside(
        self, by: tuple[int, int, Clock], space: str, region: object, words: int, places: np.ndarray
    ) -> None:
        agent, time, known = by
        self._read(agent, time, known.proxy[space], (region, words), places)

    def write_beside(
        self, by: tuple[int, int, Clock], space: str, region: object, words: int, places: np.ndarray
    ) -> None:
        """In global memory what is behind other copies' writes must be so by a proxy fence."""
        agent, time, known = by
        seen = known.seen if space == "shared" else known.proxy[space]
        self._write(agent, time, seen, (region, words), places)
        for reader, times in self._shadow(region, words).had.items():
            if (late := times[places] > seen[reader]).any():
                first = places[np.argmax(late)]
                raise RaceError(self._said(agent, "writes", region, first, reader, "may still be reading"))

    def _read(self, agent: int, time: int, known: np.ndarray, of: tuple[object, int], at: np.ndarray) -> None:
        shadow = self._shadow(*of)
        late = (shadow.written[at] > known[shadow.writer[at]]) & (shadow.writer[at] != agent)
        if late.any() and self._is_product(agent):
            self.doubtful.add((agent, time))
        elif late.any():
            first = at[np.argmax(late)]
            raise RaceError(self._said(agent, "reads", of[0], first, int(shadow.writer[first]), "wrote"))
        if agent not in shadow.read:
            shadow.read[agent] = np.zeros(len(shadow.writer), np.int64)
        shadow.read[agent][at] = time

    def _write(
        self, agent: int, time: int, known: np.ndarray, of: tuple[object, int], at: np.ndarray
    ) -> None:
        shadow = self._shadow(*of)
        warp = agent in self.clocks
        late = shadow.written[at] > known[shadow.writer[at]]
        if warp:
            late &= shadow.writer[at] != agent
        if late.any():
            first = at[np.argmax(late)]
            raise RaceError(self._said(agent, "writes", of[0], first, int(shadow.writer[first]), "wrote"))
        for reader, times in shadow.read.items():
            late = times[at] > known[reader]
            if self._is_product(reader):
                self.doubtful |= {(reader, int(time)) for time in times[at[late]]}
            elif late.any() and (reader != agent or not warp):
                raise RaceError(self._said(agent, "writes", of[0], at[np.argmax(late)], reader, "read"))
        shadow.writer[at], shadow.written[at] = agent, time

    def _is_product(self, agent: int) -> bool:
        return self.names[agent].startswith(PRODUCTS)

    def _said(self, agent: int, does: str, region: object, at: int, other: int, did: str) -> str:
        return (
            f"{self.names[agent]} {does} byte {WORD * int(at)} of {region}, which {self.names[other]} {did}"
        )

    # Orders

    def fence(self, warp: int, spaces: tuple[str, ...]) -> None:
        clock = self.clocks[warp]
        for space in spaces:
            np.maximum(clock.proxy[space], clock.seen, out=clock.proxy[space])
        if "shared" in spaces:
            self.use(warp, list(self.loads[warp]))
        self._tick(warp)

    def meeting(self, at: object) -> Meeting:
        if at not in self.meetings:
            self.meetings[at] = Meeting(Clock.start(self.most), Clock.start(self.most))
        return self.meetings[at]

    def arrive(self, warp: int, at: object) -> None:
        self.meeting(at).given.learn(self.clocks[warp])
        self._tick(warp)

    def arrive_beside(self, by: tuple[int, int, Clock], at: object) -> None:
        """Copies tell a barrier that they are done: no fence is needed to go on with what they wrote."""
        agent, time, known = by
        given = self.meeting(at).given
        given.learn(known)
        for each in (given.seen, *given.proxy.values()):
            each[agent] = max(each[agent], time)

    def leave(self, warp: int, at: object) -> None:
        self.clocks[warp].learn(self.meeting(at).over)

    def release(self, warp: int, address: int, replaces: bool) -> None:
        if replaces or address not in self.released:
            self.released[address] = Clock.start(self.most)
        self.released[address].learn(self.clocks[warp])
        self._tick(warp)

    def acquire(self, warp: int, address: int) -> None:
        if address in self.released:
            # What others fenced they fenced for themselves: this warp's copies need a fence of its own.
            seen = self.clocks[warp].seen
            np.maximum(seen, self.released[address].seen, out=seen)

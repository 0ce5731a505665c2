"""The kernels' protocol as a machine that takes one event at a time and refuses what cannot happen.

Independent of the verifier and of ``schedule/interleave.py``: it knows the items of a plan and their tickets
and nothing of dependences. A worker claims the next item of the list; its tasks are granted, in item order,
when as many contributions to their dQ tile are performed as their tickets say, and performed later, in the
same order. At most ``slots`` contributions of a worker are granted and not yet performed. A worker claims
again once all tasks of its last item are granted. It may claim ahead, once all but ``ahead`` are and one at
least, if every item up to the ``needs`` of its last one is claimed ("Claiming" in
backends/sm90/backward/reduce.py). It may then hold several items, and handles them strictly in the order in
which it claimed them.

A kernel's block looks once whether it may claim ahead; a worker here may at any time until the last grant, so
it can do all that blocks do. Nor does it miss the deadlock of a block that looked too early: what a waiting
worker claims lets nobody move, so the machine ends in that deadlock, too.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dash_attn.schedule import Plan
from dash_attn.schedule.interleave import item_tasks

Tile = tuple[int, int, int]
"""(sequence, q head, q tile)"""


Kind = Literal["perform", "grant", "claim"]
KINDS: tuple[Kind, ...] = ("perform", "grant", "claim")


AT_ONCE = sys.maxsize
"""An ``ahead`` with which a worker claims whenever it likes."""


def left_at_claim(tasks: int, ahead: int) -> int:
    """So many tasks of a worker's last item may wait for their tickets when it claims another item."""
    return ahead if ahead == AT_ONCE else min(ahead, tasks - 1)


def may_claim_ahead(last: int, claimed: int, needs: Needs) -> bool:
    """Whether a worker may claim while tasks of its last item wait for their tickets."""
    return needs is None or claimed > needs[last]


class Contribution(NamedTuple):
    """A task, by what matters to others: its item, its dQ tile and its ticket."""

    item: int
    tile: Tile
    ticket: int


class Event(NamedTuple):
    """What a worker does."""

    kind: Kind
    worker: int


Order = list[list[Contribution]]
Needs = list[int] | None


def contributions(plan: Plan) -> Order:
    """Those of every item, in the order of the item."""
    return [
        [Contribution(t.item, (t.sequence, t.q_head, t.q_tile), t.ticket) for t in item_tasks(plan, item)]
        for item in range(len(plan.items))
    ]


class IllegalEventError(Exception):
    """The machine cannot do this now."""


@dataclass
class Machine:
    """Some workers in the middle of a plan.

    Attributes:
        items: the plan, by :func:`contributions`.
        workers: how many there are.
        slots: contributions of a worker that may be granted and not yet performed.
        ahead: tasks of an item that may wait for tickets when its worker claims another one.
        needs: for each item, the last one that must be claimed before its worker claims ahead; without it
            workers claim ahead unconditionally.
        claimed: items claimed so far, the first ones of the list.
        granting: for each worker, what is left of its items to be granted.
        claim_at: for each worker, how much of that may be left when it claims again.
        performing: for each worker, what is granted and not performed.
        counters: performed contributions of every dQ tile.
    """

    items: Order
    workers: int
    slots: int = 8
    ahead: int = 0
    needs: Needs = None
    claimed: int = 0
    granting: list[list[Contribution]] = field(default_factory=list)
    claim_at: list[int] = field(default_factory=list)
    performing: list[list[Contribution]] = field(default_factory=list)
    counters: Counter[Tile] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.granting = [[] for _ in range(self.workers)]
        self.claim_at = [0] * self.workers
        self.performing = [[] for _ in range(self.workers)]

    def why_not(self, event: Event) -> str:
        """Why the event cannot happen now; empty if it can."""
        kind, worker = event
        granting, performing = self.granting[worker], self.performing[worker]
        if kind == "claim":
            if len(granting) > self.claim_at[worker]:
                return f"worker {worker} still waits for tickets of item {granting[0].item}"
            if granting and not may_claim_ahead(granting[-1].item, self.claimed, self.needs):
                return f"item {granting[-1].item} depends on one that nobody has claimed"
            return "" if self.claimed < len(self.items) else "no item is left"
        if kind == "perform":
            return "" if performing else f"worker {worker} holds no granted contribution"
        if not granting:
            return f"worker {worker} has no task"
        if len(performing) == self.slots:
            return f"worker {worker} holds {self.slots} granted contributions"
        _, tile, ticket = granting[0]
        seen = self.counters[tile]
        return "" if seen == ticket else f"tile {tile} is at {seen}, worker {worker} has ticket {ticket}"

    def possible(self, worker: int) -> list[Event]:
        """Every event of a worker that can happen now."""
        return [event for kind in KINDS if not self.why_not(event := Event(kind, worker))]

    def next_of(self, worker: int) -> Event | None:
        """One of them, if there is one."""
        return next(iter(self.possible(worker)), None)

    def apply(self, event: Event) -> None:
        """Let an event happen.

        Raises:
            IllegalEventError: it cannot.
        """
        if reason := self.why_not(event):
            raise IllegalEventError(f"{event}: {reason}")
        granting, performing = self.granting[event.worker], self.performing[event.worker]
        if event.kind == "claim":
            if tasks := self.items[self.claimed]:
                granting.extend(tasks)
                self.claim_at[event.worker] = left_at_claim(len(tasks), self.ahead)
            self.claimed += 1
        elif event.kind == "grant":
            performing.append(granting.pop(0))
        else:
            self.counters[performing.pop(0).tile] += 1

    def waiting_items(self) -> list[int]:
        """Claimed items of which a task is not granted."""
        return sorted({task.item for left in self.granting for task in left})

    @property
    def finished(self) -> bool:
        """Whether every task of the plan is performed."""
        return self.counters.total() == sum(map(len, self.items)) and self.claimed == len(self.items)


def run(
    items: Order, workers: int, slots: int = 8, ahead: int = 0, needs: Needs = None
) -> tuple[Machine, list[Event]]:
    """Events until none is possible, each worker in turn as far as it can; and where the machine stands."""
    machine, events = Machine(items, workers, slots, ahead, needs), []
    moved = True
    while moved:
        before = len(events)
        for worker in range(workers):
            while event := machine.next_of(worker):
                machine.apply(event)
                events.append(event)
        moved = len(events) > before
    return machine, events


def run_randomly(
    items: Order, workers: int, slots: int, rng: random.Random, ahead: int = 0, needs: Needs = None
) -> Machine:
    """A random one of the possible events at a time, until there is none.

    Each run has preferences of its own among workers and among kinds of events, so that some workers or
    some kinds lag far behind others.
    """
    machine = Machine(items, workers, slots, ahead, needs)
    weights = {kind: 10 ** rng.uniform(-2, 0) for kind in KINDS}
    speeds = [10 ** rng.uniform(-2, 0) for _ in range(workers)]
    while possible := [event for w in range(workers) for event in machine.possible(w)]:
        likely = [weights[event.kind] * speeds[event.worker] for event in possible]
        machine.apply(rng.choices(possible, likely)[0])
    return machine


def replay(
    items: Order, workers: int, slots: int, events: list[Event], ahead: int = 0, needs: Needs = None
) -> Machine:
    """Where a fresh machine stands after these events.

    Raises:
        IllegalEventError: one of them cannot happen when its turn comes.
    """
    machine = Machine(items, workers, slots, ahead, needs)
    for event in events:
        machine.apply(event)
    return machine


def deepest_item(items: Order) -> list[int]:
    """For each item the last one of the list on which its tasks depend, through tickets and item order."""
    owner = {(task.tile, task.ticket): (task.item, at) for item in items for at, task in enumerate(item)}
    reach = [[task.item for task in item] for item in items]
    changed = True
    while changed:
        changed = False
        for item in items:
            for at, task in enumerate(item):
                needs = [reach[task.item][at - 1]] if at else []
                if task.ticket:
                    other, place = owner[task.tile, task.ticket - 1]
                    needs.append(reach[other][place])
                deepest = max([reach[task.item][at], *needs])
                changed |= deepest != reach[task.item][at]
                reach[task.item][at] = deepest
    return [max(of_item, default=item) for item, of_item in enumerate(reach)]


class _Worker(NamedTuple):
    """A worker in :func:`deadlock_is_possible`: its items that are not finished, and of their tasks, taken
    together, how many are granted and how many performed."""

    items: tuple[int, ...] = ()
    granted: int = 0
    performed: int = 0

    def trimmed(self, items: Order) -> _Worker:
        """The same without its finished items."""
        if self.items and self.performed >= (length := len(items[self.items[0]])):
            return _Worker(self.items[1:], self.granted - length, self.performed - length).trimmed(items)
        return self


def deadlock_is_possible(items: Order, workers: int, slots: int, ahead: int = 0, needs: Needs = None) -> bool:
    """Whether some order of events ends with tasks left. Explores every order of all events; workers are
    interchangeable."""
    start = (0, (_Worker(),) * workers)  # items claimed, workers
    seen, frontier = {start}, [start]
    while frontier:
        claimed, states = frontier.pop()
        following = []
        for at, new in _steps(items, claimed, states, slots, ahead, needs):
            count = claimed + (len(new.items) > len(states[at].items))
            trimmed = new.trimmed(items)
            following.append((count, tuple(sorted((*states[:at], trimmed, *states[at + 1 :])))))
        if not following and (claimed < len(items) or any(worker.items for worker in states)):
            return True
        for state in following:
            if state not in seen:
                seen.add(state)
                frontier.append(state)
    return False


def _steps(
    items: Order, claimed: int, states: tuple[_Worker, ...], slots: int, ahead: int, needs: Needs
) -> Iterator[tuple[int, _Worker]]:
    """(worker, what it becomes) of every event that can happen."""
    tasks = [[task for item in worker.items for task in items[item]] for worker in states]
    unfinished = {item for worker in states for item in worker.items}
    finished = [task for item in range(claimed) if item not in unfinished for task in items[item]]
    counters = Counter(task.tile for task in finished)
    for own, worker in zip(tasks, states):
        counters.update(task.tile for task in own[: worker.performed])
    for at, (own, worker) in enumerate(zip(tasks, states)):
        if at and worker == states[at - 1]:
            continue  # sorted: the same events with the same worker
        mine, granted, performed = worker
        if performed < granted:
            yield at, _Worker(mine, granted, performed + 1)
        left = len(own) - granted
        may_claim = left == 0 or (
            left <= left_at_claim(len(items[own[-1].item]), ahead)
            and may_claim_ahead(own[-1].item, claimed, needs)
        )
        if claimed < len(items) and may_claim:
            yield at, _Worker((*mine, claimed), granted, performed)
        if granted < min(len(own), performed + slots):
            _, tile, ticket = own[granted]
            if counters[tile] == ticket:
                yield at, _Worker(mine, granted + 1, performed)

"""The queue of complete dQ tiles (backends/sm90/backward/finish.py): every order of events of small plans.

Who performs the last contribution to a tile takes the next place of the queue and then writes the tile there.
A block that gets no more items takes AHEAD places of the queue, and always AHEAD more before it waits for the
tiles of all of those and converts them; it leaves the GPU after the last ones. The first blocks to arrive get
items, the others none.

Where there are few tiles and all of them get contributions, nobody takes a place: a tile has its own, and a
block has AHEAD tiles of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from machine import Contribution, Order, Tile, contributions

from dash_attn.problem import Mask, Problem
from dash_attn.schedule import Plan, Shift, build_plan, policy_by_name

AHEAD = 2


class Block(NamedTuple):
    """A resident block: whether it may claim, its tasks, what it has performed and not handed over, the place
    of the queue that the first of these has taken, the first of every AHEAD places it holds, and whether it
    converts no more."""

    claims: bool
    tasks: tuple[Contribution, ...] = ()
    performed: tuple[Contribution, ...] = ()
    place: int = -1
    held: tuple[int, ...] = ()
    converted: bool = False


class Launch(NamedTuple):
    """A launch: blocks to come with and without items, items claimed, places taken, the queue (None: a place
    that is taken and not written), contributions handed over, tiles converted, resident blocks, and where
    blocks have tiles of their own, the numbers of the blocks to come."""

    coming: tuple[int, int]
    claimed: int = 0
    taken: int = 0
    queue: tuple[Tile | None, ...] = ()
    handed_over: tuple[Tile, ...] = ()
    done: tuple[Tile, ...] = ()
    blocks: tuple[Block, ...] = ()
    numbers: tuple[int, ...] = ()

    def having(self, at: int, *blocks: Block, **changes: object) -> Launch:
        """With other blocks, or none, instead of one."""
        rest = self.blocks[:at] + self.blocks[at + 1 :]
        return self._replace(blocks=tuple(sorted((*rest, *blocks))), **changes)


class Model(NamedTuple):
    """What does not change: items, when a tile counts as complete, blocks that fit, who gets items, whether
    tiles and blocks belong together."""

    items: Order
    totals: Counter[Tile]
    fit: int
    by_arrival: bool = True
    by_place: bool = False

    def outcomes(self, workers: int, finishers: int) -> set[str]:
        """How launches end, over every order of events: "ended", or what went wrong."""
        start = Launch((workers, finishers))
        if self.by_place:
            assert len(self.totals) <= AHEAD * (workers + finishers)
            places, numbers = (None,) * len(self.totals), tuple(range(workers + finishers))
            start = start._replace(queue=places, numbers=numbers)
        seen, frontier, found = {start}, [start], set()
        while frontier:
            launch = frontier.pop()
            following = [*self._arrivals(launch)]
            for at, block in enumerate(launch.blocks):
                if not at or block != launch.blocks[at - 1]:  # of equal ones the first
                    following += self._steps(launch, at, block)
            wrong = self._wrong(launch, bool(following))
            if wrong or not following:
                found.add(wrong or "ended")
                continue
            new = set(following) - seen
            seen |= new
            frontier += new
        return found

    def _wrong(self, launch: Launch, goes_on: bool) -> str:
        handed_over, real = Counter(launch.handed_over), Counter(t.tile for i in self.items for t in i)
        if any(handed_over[tile] < real[tile] for tile in launch.done):
            return "a tile was converted before it was complete"
        if len(set(launch.done)) < len(launch.done):
            return "a tile was converted twice"
        if not goes_on and (launch.blocks or any(launch.coming)):
            return "nobody can move"
        if not goes_on and len(launch.done) < len(real):
            return "a tile was not converted"
        return ""

    def _arrivals(self, launch: Launch) -> Iterator[Launch]:
        for which, claims in enumerate((True, False)):
            first = which == 0 or not self.by_arrival or not launch.coming[0]
            if launch.coming[which] and first and len(launch.blocks) < self.fit:
                coming = tuple(n - (which == i) for i, n in enumerate(launch.coming))
                for number in launch.numbers or (-1,):
                    held = (AHEAD * number,) if self.by_place else ()
                    blocks = tuple(sorted((*launch.blocks, Block(claims, held=held))))
                    left = tuple(n for n in launch.numbers if n != number)
                    yield launch._replace(coming=coming, blocks=blocks, numbers=left)

    def _steps(self, launch: Launch, at: int, block: Block) -> Iterator[Launch]:
        if block.claims and not block.tasks:
            tasks = self.items[launch.claimed : launch.claimed + 1]
            new = block._replace(claims=bool(tasks), tasks=tuple(tasks[0]) if tasks else ())
            yield launch.having(at, new, claimed=launch.claimed + len(tasks))
        if block.tasks and launch.handed_over.count(block.tasks[0].tile) == block.tasks[0].ticket:
            performed = (*block.performed, block.tasks[0])
            yield launch.having(at, block._replace(tasks=block.tasks[1:], performed=performed))
        if block.performed:
            yield self._hand_over(launch, at, block)
        if not block.claims and not block.converted:
            yield from self._convert(launch, at, block)
        if not block.claims and not block.tasks and not block.performed and block.converted:
            yield launch.having(at)

    def _hand_over(self, launch: Launch, at: int, block: Block) -> Launch:
        first, rest = block.performed[0], block.performed[1:]
        if block.place >= 0:
            queue = (*launch.queue[: block.place], first.tile, *launch.queue[block.place + 1 :])
            return launch.having(at, block._replace(performed=rest, place=-1), queue=queue)
        handed_over = tuple(sorted((*launch.handed_over, first.tile)))
        if first.ticket + 1 < self.totals[first.tile]:
            return launch.having(at, block._replace(performed=rest), handed_over=handed_over)
        if self.by_place:
            own = sorted(self.totals).index(first.tile)
            queue = (*launch.queue[:own], first.tile, *launch.queue[own + 1 :])
            new = block._replace(performed=rest)
            return launch.having(at, new, handed_over=handed_over, queue=queue)
        new = block._replace(place=len(launch.queue))
        return launch.having(at, new, handed_over=handed_over, queue=(*launch.queue, None))

    def _convert(self, launch: Launch, at: int, block: Block) -> Iterator[Launch]:
        if not self.by_place and len(block.held) < 2:
            new = block._replace(held=(*block.held, launch.taken))
            yield launch.having(at, new, taken=launch.taken + AHEAD)
            return
        tiles = len(self.totals)
        first = block.held[0] if block.held else tiles
        keys = launch.queue[first : min(first + AHEAD, tiles)]
        if first >= tiles:
            yield launch.having(at, block._replace(held=(), converted=True))
        elif len(keys) == min(AHEAD, tiles - first) and None not in keys:
            done = tuple(sorted((*launch.done, *(key for key in keys if key is not None))))
            yield launch.having(at, block._replace(held=block.held[1:]), done=done)


def totals_of(items: Order) -> Counter[Tile]:
    return Counter(task.tile for item in items for task in item)


def ring() -> Plan:
    """Two kv tiles that wait for each other: two workers at least."""
    plan = build_plan(Problem(((2, 2),), 1, 1, 1, tile_m=1, tile_n=1), Shift())
    assert plan.min_workers == 2
    return plan


def triangle() -> Plan:
    """Causal, three tasks: no item depends on a later one."""
    problem = Problem(((2, 2),), 1, 1, 1, Mask.causal(), tile_m=1, tile_n=1)
    return build_plan(problem, policy_by_name("descending"))


def with_gaps() -> Plan:
    """Two heads; q tile 0 gets no contribution, and two items have no task."""
    problem = Problem(((2, 1), (0, 1)), 2, 2, 1, Mask.causal(), tile_m=1, tile_n=1)
    plan = build_plan(problem, policy_by_name("descending"))
    assert [len(tasks) for tasks in contributions(plan)] == [1, 1, 0, 0]
    assert len(totals_of(contributions(plan))) == 2 < 2 * 2
    return plan


def two_heads() -> Plan:
    problem = Problem(((2, 2),), 2, 2, 1, Mask.causal(), tile_m=1, tile_n=1)
    return build_plan(problem, policy_by_name("spt"))


def outcomes(
    plan: Plan, workers: int, finishers: int, fit: int, by_arrival: bool = True, by_place: bool = False
) -> set[str]:
    items = contributions(plan)
    return Model(items, totals_of(items), fit, by_arrival, by_place).outcomes(workers, finishers)


@pytest.mark.parametrize(
    ("make", "workers", "finishers", "fit"),
    [
        (ring, 2, 0, 2),
        (ring, 2, 1, 2),
        (ring, 2, 1, 3),
        (triangle, 1, 0, 1),
        (triangle, 1, 1, 1),
        (triangle, 1, 1, 2),
        (triangle, 2, 0, 1),
        (triangle, 2, 1, 2),
        (triangle, 2, 1, 3),
        (with_gaps, 1, 1, 2),
        (with_gaps, 2, 1, 3),
        (two_heads, 1, 1, 2),
        (two_heads, 2, 1, 2),
    ],
)
def test_every_tile_is_converted_once_and_the_launch_ends(make, workers, finishers, fit) -> None:
    """Every order of events, wherever ``min_workers`` blocks fit; a tile is complete when it is converted."""
    plan = make()
    assert plan.min_workers <= min(workers, fit)
    assert outcomes(plan, workers, finishers, fit) == {"ended"}


@pytest.mark.parametrize(
    ("make", "workers", "finishers", "fit"),
    [(ring, 2, 0, 2), (ring, 2, 1, 2), (ring, 2, 1, 3), (triangle, 1, 1, 1), (triangle, 1, 1, 2),
     (triangle, 2, 0, 1), (triangle, 2, 1, 3), (two_heads, 1, 1, 2), (two_heads, 2, 1, 2)],
)  # fmt: skip
def test_with_tiles_of_their_own_blocks_end_too(make, workers, finishers, fit) -> None:
    """A block that waits for its tiles has no item, and those who complete them are there or will be."""
    assert outcomes(make(), workers, finishers, fit, by_place=True) == {"ended"}


@pytest.mark.parametrize(("workers", "finishers", "fit"), [(1, 1, 2), (2, 1, 1)])
def test_too_few_workers_do_not_end(workers, finishers, fit) -> None:
    assert outcomes(ring(), workers, finishers, fit) == {"nobody can move"}


def test_finishers_may_take_the_place_of_workers_unless_those_who_come_first_work() -> None:
    """Why blocks count arrivals: by place in the grid, finishers could come first and hold all that fits."""
    assert outcomes(ring(), 2, 1, 2, by_arrival=False) == {"ended", "nobody can move"}
    assert outcomes(triangle(), 1, 1, 1, by_arrival=False) == {"ended", "nobody can move"}
    # Beside all finishers there is room for min_workers workers:
    assert outcomes(ring(), 2, 1, 3, by_arrival=False) == {"ended"}
    assert outcomes(triangle(), 2, 1, 2, by_arrival=False) == {"ended"}


@pytest.mark.parametrize(
    ("error", "found"),
    [(-1, "a tile was converted before it was complete"), (1, "nobody can move")],
)
@pytest.mark.parametrize("by_place", [False, True])
def test_tiles_queued_too_early_or_never_are_found(error, found, by_place) -> None:
    items = contributions(ring())
    totals = Counter({tile: total + error for tile, total in totals_of(items).items()})
    assert found in Model(items, totals, 2, by_place=by_place).outcomes(2, 0)

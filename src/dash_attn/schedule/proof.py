"""The verifier: it runs the plan, without the arithmetic, before anything else may.

For each distinct head pattern it proves, exactly and for every task,

* coverage: every task of the problem belongs to one item, once;
* tickets: those of a q tile are 0, 1, ..., contributions - 1;
* progress: item order and ticket order have no cycle;

and for the placement it computes ``min_workers``, the smallest number of resident workers under which
it cannot deadlock. A contribution enables others and disables none, so whatever order the workers run
in, the same tasks get done: executing one greedy order decides all of them. Runs are executed as array
slices, so a million tokens take a fraction of a second.

``min_workers``: with W workers and items claimed in list order, a hang means that some prefix of the
list is claimed, W of its items are unfinished, and each of those depends, through tickets and item
order, on an item behind the prefix. So min_workers = 1 + max over prefixes of the number of items in
it that depend on an item behind it. The tests check this against an exhaustive search.

``needs``, the last item that each item depends on, allows claiming ahead. A worker may claim an item X
while its own item B is unfinished if X is behind everything B depends on. Nothing changes for
min_workers: among the items that are claimed and wait for a worker that cannot move, let X be the first
of the list. What the worker runs depends on an item before X that nobody runs; it is claimed, because
items are claimed in order, so it waits for a worker that cannot move, and X was not the first.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop, heappush

import numpy as np

from ..errors import CoverageError, CycleError, PlacementError, PlanError, TicketError, TooFewWorkersError
from ..problem import IntArray
from .batch import Batch, Columns
from .head_groups import most_heads
from .plan import Claims, HeadPattern, Plan, Run, Verdict, named
from .tickets import MAX_HOLD

__all__ = ["check_workers", "examine", "prove"]


_MOST_ORDERS = 64
"""Orders kept per pattern: a plan has one or a few, a search over random placements any number."""


def prove(plan: Plan) -> Plan:
    """Prove a plan safe and return a copy with a verdict, whose arrays can no longer be written.

    Raises:
        CoverageError, TicketError, CycleError, PlacementError: what is wrong, with sequence, head, kv
            tile (item) and q tile.
    """
    verdict, verified = examine(plan), replace(plan)
    verified.__dict__.update(batch=plan.batch, listed=plan.listed)
    object.__setattr__(verified, "verdict", verdict)
    return verified


def examine(plan: Plan) -> Verdict:
    """The verdict of :func:`prove`. The plan's arrays can no longer be written."""
    problem = plan.problem
    if plan.patterns.keys() != problem.tile_grids.keys():
        raise PlanError(f"patterns for {sorted(plan.patterns)}, sequences of {sorted(problem.tile_grids)}")
    for shape, grid in problem.tile_grids.items():
        pattern = plan.patterns[shape]
        if pattern.grid is not grid and pattern.grid != grid:
            raise CoverageError(f"{_every_head(plan, shape)}: the pattern is for {pattern.grid}")
    for pattern in plan.batch.distinct:
        if not 1 <= pattern.head_groups <= problem.group:
            raise CoverageError(
                f"{_every_head(plan, pattern)}: {pattern.head_groups} head groups of {problem.group} q heads "
                "per kv head"
            )
        heads = most_heads(problem.group, pattern.head_groups)
        if pattern.passes not in (1, heads):
            raise CoverageError(
                f"{_every_head(plan, pattern)}: {pattern.passes} passes of an item of {heads} q heads"
            )
        if not pattern.proven.covers:
            _check_coverage(pattern, _every_head(plan, pattern))
            pattern.proven.covers = True
    needs = _last_needed(plan, *plan.listed)
    for own in (needs, plan.listed.codes):
        own.setflags(write=False)
    return Verdict(1 + _deepest_dependence(needs), plan.batch.task_count, needs)


def _every_head(plan: Plan, of: tuple[int, ...] | HeadPattern) -> str:
    """The first sequence of a shape or pattern, for messages."""
    sequence = plan.problem.shapes.index(of) if isinstance(of, tuple) else plan.batch.patterns.index(of)
    seqlen_q, seqlen_k = plan.problem.sequences[sequence]
    return f"sequence {sequence} ({seqlen_q} x {seqlen_k}), every head"


def check_workers(plan: Plan, workers: int) -> None:
    """Raise TooFewWorkersError if ``workers`` resident workers could deadlock."""
    if workers < plan.min_workers:
        raise TooFewWorkersError(
            f"{plan.policy} needs {plan.min_workers} resident workers to be free of deadlock, got {workers}; "
            "policy='descending' runs with any number, in another order of additions"
        )


def _places(batch: Batch, codes: IntArray) -> IntArray | None:
    """The place in the list of every item, by code; None unless every item of the batch stands there once."""
    count = batch.item_count
    if len(codes) != count:
        return None
    places = np.full(count, -1, dtype=np.int64)
    places[codes] = np.arange(len(codes))
    return places if not count or places.min() >= 0 else None


def _not_once(plan: Plan) -> PlacementError:
    """Names an item that does not stand once in the list."""
    codes = plan.codes
    times = np.bincount(codes, minlength=plan.batch.item_count)
    for at in np.flatnonzero(times[codes] > 1)[:1]:
        return PlacementError(f"item {at}: {named(*plan.items[at].tolist())} is listed twice")
    return PlacementError(f"{named(*plan.batch.where(int(np.flatnonzero(times == 0)[0])))} is in no item")


def _check_coverage(pattern: HeadPattern, where: str) -> None:
    """Every field of a run is within its bounds, and every kv tile's runs visit each of its q tiles once."""
    grid, runs = pattern.grid, pattern.runs
    counts = np.diff(pattern.offsets)
    offsets_fit = pattern.offsets[0] == 0 and pattern.offsets[-1] == len(runs)
    if len(counts) != grid.kv_tiles:
        raise CoverageError(f"{where}: runs for {len(counts)} kv tiles, the grid has {grid.kv_tiles}")
    if (counts < 0).any() or not offsets_fit:
        raise CoverageError(
            f"{where}: offsets {pattern.offsets.tolist()!r:.80} do not divide {len(runs)} runs"
        )
    item = np.repeat(np.arange(grid.kv_tiles), counts)
    q_first, q_step, count, t_first, t_step, t_hold = runs.T
    # Bounds on every field, so that nothing below can overflow or ask for more memory than a real plan. Two
    # comparisons and no np.abs: the absolute value of the smallest int64 is negative.
    bad_tasks = (q_first < 0) | (q_first >= grid.q_tiles) | (count < 1) | (count > grid.q_tiles)
    bad_tasks |= (q_step == 0) | (q_step < -grid.q_tiles) | (q_step > grid.q_tiles)
    bad_tickets = (t_first < 0) | (t_first > grid.kv_tiles) | (t_hold < 1) | (t_hold > MAX_HOLD)
    bad_tickets |= (t_step < -grid.kv_tiles) | (t_step > grid.kv_tiles)
    for error, bad in ((CoverageError, bad_tasks), (TicketError, bad_tickets)):
        for at in np.flatnonzero(bad)[:1]:
            raise error(f"{where}, kv tile {item[at]}: malformed {Run(*runs[at].tolist())}")
    ends = runs[:, 0] + runs[:, 1] * (runs[:, 2] - 1)
    low, high = np.minimum(runs[:, 0], ends), np.maximum(runs[:, 0], ends)
    order = np.lexsort((low, item))
    low, high, sorted_item = low[order], high[order], item[order]
    fresh = np.concatenate(([True], sorted_item[1:] != sorted_item[:-1]))[: len(order)]
    last = np.concatenate((sorted_item[1:] != sorted_item[:-1], [True]))[-len(order) or len(order) + 1 :]
    previous = np.concatenate(([0], high[:-1]))[: len(order)]
    expected = np.where(fresh, grid.q_first[sorted_item], previous + 1)
    wrong = (low != expected) | (last & (high != grid.q_last[sorted_item]))
    wrong |= ((np.abs(runs[:, 1]) != 1) & (runs[:, 2] > 1))[order]
    suspects = set(sorted_item[wrong].tolist())
    suspects |= set(np.flatnonzero((counts == 0) & (grid.q_last >= grid.q_first)).tolist())
    for kv in sorted(suspects):
        _check_item_coverage(pattern, kv, f"{where}, kv tile {kv}")


def _check_item_coverage(pattern: HeadPattern, kv: int, where: str) -> None:
    grid = pattern.grid
    q = pattern.tasks_of(kv)[0]
    first, last = int(grid.q_first[kv]), int(grid.q_last[kv])
    outside = q[(q < first) | (q > last)]
    if len(outside):
        raise CoverageError(f"{where}, q tile {outside[0]}: the mask leaves no such task")
    seen = np.bincount(q - first, minlength=max(last - first + 1, 0))
    for at in np.flatnonzero(seen > 1)[:1]:
        raise CoverageError(f"{where}, q tile {first + at}: the task is there {seen[at]} times")
    for at in np.flatnonzero(seen == 0)[:1]:
        raise CoverageError(f"{where}, q tile {first + at}: the task is missing")


def _last_needed(plan: Plan, batch: Batch, codes: IntArray) -> IntArray:
    """The place in the list of the last item that each item depends on, or its own; in order of the list.

    Nearly always the heads of a pattern claim their kv tiles in one order, and in the one of the plan before.
    So a guess is checked for all heads at once; only where it fails, heads are looked at one by one.
    """
    places, found = _places(batch, codes), None
    if places is None:
        raise _not_once(plan)
    if None not in batch.latest:
        found = _needed_if(codes, places, batch.columns)
    if found is None and batch is not plan.batch:  # in which heads are named
        return _last_needed(plan, plan.batch, plan.codes)
    if found is None:
        found = _needed_if(codes, places, batch.columns_with(_of_first_heads(plan, places)))
    if found is not None:
        return found
    groups = range(len(plan.batch.items_of_group))
    needed = np.concatenate([_claims(plan, group, places).needed for group in groups])
    last: IntArray = places[codes + needed[codes]]
    return last


def _needed_if(codes: IntArray, places: IntArray, columns: Columns) -> IntArray | None:
    """:func:`_last_needed` if heads claim their kv tiles as the columns say, or else None."""
    if not np.all(places[np.arange(len(places)) + columns.following] >= places):
        return None
    found: IntArray = places[codes + columns.needed[codes]]
    return found


def _of_first_heads(plan: Plan, places: IntArray) -> list[Claims]:
    """How the first head of each distinct pattern claims its items."""
    batch = plan.batch
    _, first = np.unique(batch.pattern_of, return_index=True)
    found = [_claims(plan, group, places) for group in batch.group_first[first].tolist()]
    for pattern, claims in zip(batch.distinct, found):
        pattern.proven.latest = claims
    return found


def _claims(plan: Plan, group: int, places: IntArray) -> Claims:
    """How one head group of the batch claims its items; proven once per pattern and order."""
    batch = plan.batch
    sequence = int(np.searchsorted(batch.group_first, group, side="right")) - 1
    pattern = batch.patterns[sequence]
    order = np.argsort(places[batch.code_first[group] : batch.code_first[group + 1]])
    known, key = pattern.proven.orders, order.tobytes()
    found: Claims | None = known.get(key)
    if found is None:
        reach = _dependences(
            pattern, order, f"sequence {sequence}, head group {group - batch.group_first[sequence]}"
        )
        following, needed = np.zeros_like(order), np.empty_like(order)
        following[order[:-1]] = order[1:] - order[:-1]
        needed[order] = order[reach] - order
        if len(known) >= _MOST_ORDERS:
            known.clear()
        found = known[key] = Claims(key, following, needed)
    return found


def _deepest_dependence(needs: IntArray) -> int:
    """Largest number of items of one prefix of the list that depend on an item behind that prefix."""
    ended = np.cumsum(np.bincount(needs, minlength=len(needs)))  # by each place, of those before it
    return int((np.arange(1, len(needs) + 1) - ended).max(initial=0))


def _dependences(pattern: HeadPattern, order: IntArray, where: str) -> IntArray:
    """For each item of one head group, in claim order, the rank of the last item it depends on.

    Where all items go through the q heads of a head group in the same order at every q tile, these count as
    one: what holds for blocks of q tiles (below) holds for them. With several passes, the q tiles of each are
    behind those of the one before. If one pass of all items ends, so do all: none waits for a later one. So
    one pass says what is wrong.
    """
    for block in (_block_of_q_tiles(pattern), 1):
        run = _PatternRun(pattern, order, block, pattern.passes)
        if run.finish():
            return np.array(run.reach, dtype=np.int64)
    run = _PatternRun(pattern, order, 1, 1)
    run.finish()
    raise run.error(where)


def _block_of_q_tiles(pattern: HeadPattern) -> int:
    """The largest number of q tiles that can be taken as one, so that large plans verify quickly.

    If every run goes the same way and begins and ends at block ends, and no ticket changes within a
    block, then running block by block is one legal way to run the plan, and the last task of a block
    depends on all that the block depends on: the verdict and the ranks are the same.
    """
    runs, q_tiles = pattern.runs, pattern.grid.q_tiles
    if not len(runs) or (runs[:, 1] != runs[0, 1]).any() or abs(runs[0, 1]) != 1:
        return 1
    ends = runs[:, 0] + runs[:, 1] * (runs[:, 2] - 1)
    low, high = np.minimum(runs[:, 0], ends), np.maximum(runs[:, 0], ends) + 1
    changing = runs[:, 4] != 0
    # The last block may be short, unless a run that changes its ticket starts there.
    closed = (high != q_tiles) | (changing & (runs[:, 1] < 0))
    return int(np.gcd.reduce(np.concatenate(([0], low, high[closed], runs[changing, 5])))) or q_tiles


def _in_blocks(run: Run, block: int) -> Run:
    """A run with blocks of q tiles in place of q tiles."""
    first, last = run.q_first // block, (run.q_first + run.q_step * (run.count - 1)) // block
    return Run(first, run.q_step, abs(last - first) + 1, run.t_first, run.t_step, -(-run.t_hold // block))


class _PatternRun:
    """Greedy execution of the items of one head group, in so many passes, task by task but in slices.

    Items go by their claim rank here. ``done[q]`` counts the contributions to a q tile. ``newest[q]`` is
    the largest rank among the items that the latest contribution to q depends on, ``reach[rank]`` the
    same for what that item has done so far.
    """

    def __init__(self, pattern: HeadPattern, order: IntArray, block: int, passes: int) -> None:
        self.pattern = pattern
        of_pass = -(-pattern.grid.q_tiles // block)
        q_tiles = passes * of_pass
        self.order: list[int] = order.tolist()
        self.runs = [pattern.runs_of(kv) for kv in self.order]
        if block > 1:
            self.runs = [[_in_blocks(run, block) for run in runs] for runs in self.runs]
        if passes > 1:
            firsts = [of_pass * n for n in range(passes)]
            self.runs = [
                [r._replace(q_first=q + r.q_first) for q in firsts for r in runs] for runs in self.runs
            ]
        self.reach = list(range(len(self.order)))
        self.at = [(0, 0)] * len(self.order)  # run, task within the run
        self.done = np.zeros(q_tiles, dtype=np.int32)
        self.newest = np.full(q_tiles, -1, dtype=np.int32)
        self.waiting: dict[int, list[tuple[int, int]]] = {}  # q: heap of (ticket, item) that stand there
        self.awaited = np.full(q_tiles, -1, dtype=np.int32)  # smallest ticket of that heap

    def finish(self) -> bool:
        """Run everything that can run; True if that is everything."""
        now, later, sign = [rank for rank, runs in enumerate(self.runs) if runs], list[int](), 1
        # Like a lift: in one direction as long as somebody can move there, then in the other. Chains of
        # dependences run one way or the other along the items, and so take few rides.
        while now or later:
            if not now:
                now, later, sign = sorted(-sign * rank for rank in later), [], -sign
            rank = sign * heappop(now)
            for woken in self._advance(rank):
                if (woken - rank) * sign > 0:
                    heappush(now, sign * woken)
                else:
                    later.append(woken)
        return not self._left()

    def _left(self) -> list[int]:
        return [rank for rank, runs in enumerate(self.runs) if self.at[rank][0] < len(runs)]

    def _advance(self, rank: int) -> list[int]:
        """Run an item until it has to wait or ends; the items that could move now."""
        runs = self.runs[rank]
        at, offset = self.at[rank]
        woken: list[int] = []
        chunk = 64  # look at a few first: an item often has to wait again soon
        while at < len(runs):
            run = runs[at]
            width = min(run.count - offset, chunk)
            tiles = _tiles(run, offset, width)
            steps: IntArray | int = 0
            if run.t_step:
                steps = np.arange(offset, offset + width)
                if run.t_hold > 1:
                    steps //= run.t_hold
            ready = self.done[tiles] == run.t_first + run.t_step * steps
            moved = int(ready.argmin())  # the first that is not ready, or 0
            if ready[moved]:
                moved = width
            if moved:
                woken += self._contribute(rank, tiles if moved == width else _tiles(run, offset, moved))
                offset += moved
            self.at[rank] = at, offset
            if moved < width:
                q, ticket = self._waits_for(rank)
                heappush(self.waiting.setdefault(q, []), (ticket, rank))
                self.awaited[q] = self.waiting[q][0][0]
                return woken
            chunk = run.count
            if offset == run.count:
                at, offset = at + 1, 0
        self.at[rank] = at, offset
        return woken

    def _contribute(self, rank: int, tiles: slice) -> list[int]:
        self.done[tiles] += 1
        newest = self.newest[tiles]
        if newest.max() > self.reach[rank]:
            np.maximum.accumulate(np.maximum(newest, self.reach[rank]), out=newest)
            self.reach[rank] = int(newest[-1])
        else:
            newest[:] = self.reach[rank]
        woken = []
        for at in (self.done[tiles] == self.awaited[tiles]).nonzero()[0].tolist():
            q = tiles.start + at * tiles.step
            here = self.waiting[q]
            while here and here[0][0] == self.awaited[q]:
                woken.append(heappop(here)[1])
            self.awaited[q] = here[0][0] if here else -1
        return woken

    def _waits_for(self, rank: int) -> tuple[int, int]:
        """(q tile, ticket) of the task at which an item stands."""
        at, offset = self.at[rank]
        run = self.runs[rank][at]
        return run.q_first + run.q_step * offset, run.t_first + run.t_step * (offset // run.t_hold)

    def error(self, where: str) -> TicketError | CycleError:
        """Why items are left over; only for a run with blocks of one q tile."""
        left = self._left()
        waits = {rank: self._waits_for(rank) for rank in left}
        owners = self._owners({(q, int(self.done[q])) for q, _ in waits.values()})
        for rank, (q, ticket) in waits.items():
            seen = int(self.done[q])
            spot = f"{where}, kv tile {self.order[rank]}, q tile {q}"
            if ticket < seen:
                return TicketError(f"{spot}: ticket {ticket} is used twice")
            if ticket >= (contributions := int(self.pattern.grid.contributions[q])):
                return TicketError(f"{spot}: ticket {ticket}, the tile has {contributions} contributions")
            if (q, seen) not in owners:
                return TicketError(f"{spot}: waits for ticket {ticket}, nobody has ticket {seen}")
        return CycleError(f"{where}: {self._cycle(left[0], waits, owners)}")

    def _owners(self, wanted: set[tuple[int, int]]) -> dict[tuple[int, int], int]:
        """Rank of the item that has each of these (q tile, ticket), where there is one."""
        owners = {}
        for rank, kv in enumerate(self.order):
            for task in zip(*(a.tolist() for a in self.pattern.tasks_of(kv)), strict=True):
                if task in wanted:
                    owners[task] = rank
        return owners

    def _cycle(self, rank: int, waits: dict[int, tuple[int, int]], owners: dict[tuple[int, int], int]) -> str:
        chain: list[int] = []
        steps = []
        while rank not in chain:
            chain.append(rank)
            q, ticket = waits[rank]
            owner = owners[q, int(self.done[q])]
            kv, other = self.order[rank], self.order[owner]
            steps.append(f"kv tile {kv} at q tile {q} (ticket {ticket}) waits for kv tile {other}")
            rank = owner
        return "; ".join(steps[chain.index(rank) :])


def _tiles(run: Run, offset: int, width: int) -> slice:
    """The q tiles of tasks offset .. offset + width - 1 of a run, as a slice."""
    start = run.q_first + run.q_step * offset
    end = start + run.q_step * width
    return slice(start, end if end >= 0 else None, run.q_step)

"""The executor: runs a plan on CPU tensors, tile by tile, exactly as the plan says.

It is the reference for every backward kernel, and the backward of the CPU backend.

What fixes a bit
    The tile shape, the order of q tiles in an item and the order of its head groups (dK, dV), and the
    tickets of a q tile (dQ). Which worker runs which item when does not: ``workers`` and ``rng`` choose one
    of the legal orders, and all of them give the same bytes. Nothing but its own rows enters a sequence's
    result: not the batch, not its neighbours, not its place among them.

    Each tile is copied to fresh memory before it is multiplied. A matrix product may take another path
    (and round otherwise) for operands that are aligned otherwise, and a slice's alignment depends on
    where its sequence lies.

Precision
    Products and sums in float32 (float64 for float64 tensors), as exact as PyTorch is told to make them.
    For bfloat16 and float16, P and dS are rounded to the tensors' dtype before their second products, as a
    GPU kernel must do; results are rounded once, at the end.

Layout: packed, (total, heads, head_dim), sequences one after the other in the order of the problem.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from ...errors import InputError
from ...problem import Problem
from ...schedule.interleave import Task, task_order
from ...schedule.plan import Plan
from ...schedule.proof import check_workers
from ...scores import Scores, scores_of
from ..base import NO_AUX, AuxTensors, Gradients, RowIntervals, Tensors
from .dropout import dropout_of
from .masks import outside_intervals
from .sinks import sink_gradient
from .tiles import TileMasks, TileRows, check_packed, copy_tile, distances, exact, slope_of

__all__ = ["backward", "dq_partials", "fold_partials"]

QTile = tuple[int, int, int]
"""(sequence, q head, q tile)"""


def backward(
    plan: Plan,
    tensors: Tensors,
    scores: Scores | float,
    aux: AuxTensors = NO_AUX,
    *,
    workers: int | None = None,
    rng: random.Random | None = None,
    ordered: bool = True,
    sums: Tensor | None = None,
    sink_sums: Tensor | None = None,
) -> Gradients:
    """Gradients, dQ summed in the order of the plan's tickets.

    Args:
        plan: a verified plan.
        tensors: in the layout of :func:`.forward.forward`; out and lse are what it returned.
        scores, aux: as in the forward.
        workers: resident workers, default ``plan.min_workers``; without order, one for each item.
        rng: picks a random legal interleaving of the workers instead of a fixed one.
        ordered: False adds to dQ in the order in which ``rng`` happens to run the tasks and ignores
            tickets, as atomic adds do: the negative control.
        sums: dK and dV are added to these, (tile_n, head_dim + head_dim_v) words per kv tile, and the ones
            that are returned are 0.
        sink_sums: (sequences, heads): with a sink, its gradient is added to these, and the one that is
            returned is None.

    Returns:
        dq, dk, dv in the shapes and dtype of q, k, v, and dsink of a sink. Bitwise equal for every placement,
        ``workers`` and ``rng``, as long as ``ordered`` holds.

    Raises:
        InputError: a tensor does not fit the problem.
        TooFewWorkersError: the plan could deadlock with so few workers.
    """
    if workers is None:
        workers = plan.min_workers if ordered else max(len(plan.items), 1)
    if ordered:
        check_workers(plan, workers)
    state = _Backward(plan.problem, tensors, scores_of(scores), aux)
    found: dict[QTile, Tensor] = {}
    with exact():
        for task in task_order(plan, workers, rng, ordered=ordered):
            partial, tile = state.run(task), _q_tile_of(task)
            if tile in found:
                found[tile].add_(partial)
            else:
                found[tile] = partial  # the first contribution is stored: dQ needs no zeroing
        if sums is not None:
            state.leave(sums)
        grads = Gradients(state.dq(found), *state.dk_dv())
        return grads._replace(dsink=sink_gradient(plan.problem, tensors, aux, sink_sums))


def dq_partials(plan: Plan, tensors: Tensors, scores: Scores | float) -> dict[QTile, list[Tensor]]:
    """Every task's contribution to dQ, unscaled: for each (sequence, q head, q tile), in ticket order.

    Arguments as in :func:`backward`. :func:`fold_partials` turns such a list into a tile of dQ.
    """
    state = _Backward(plan.problem, tensors, scores_of(scores))
    partials: dict[QTile, list[Tensor]] = {}
    with exact():
        for task in task_order(plan, plan.min_workers):
            partials.setdefault(_q_tile_of(task), []).append(state.run(task))
    return partials


def fold_partials(partials: Sequence[Tensor], softmax_scale: float, dtype: torch.dtype) -> Tensor:
    """One tile of dQ from its contributions in ticket order: add one after the other, scale, round once.

    >>> ones, tiny = torch.ones(1), torch.full((1,), 2.0**-24)
    >>> [float(fold_partials(p, 1.0, torch.float32)) for p in ([ones, tiny, tiny], [tiny, tiny, ones])]
    [1.0, 1.0000001192092896]
    """
    total = partials[0].clone()
    for partial in partials[1:]:
        total.add_(partial)
    return total.mul_(softmax_scale).to(dtype)


def _q_tile_of(task: Task) -> QTile:
    return task.sequence, task.q_head, task.q_tile


@dataclass(frozen=True)
class _QRows:
    """What tasks read of one q tile; lse and delta are columns."""

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor


@dataclass(frozen=True)
class _Item:
    """What one worker holds: a kv tile and the sums of its gradients."""

    sequence: int
    kv_tile: int
    rows: slice
    kv_head: int
    q_head_first: int
    k: Tensor
    v: Tensor
    dk: Tensor
    dv: Tensor


class _Backward:
    """The arithmetic of the tasks. It adds what it is told in the order it is told."""

    def __init__(self, problem: Problem, tensors: Tensors, scores: Scores, aux: AuxTensors = NO_AUX) -> None:
        x = tensors
        check_packed(problem, q=x.q, dout=x.dout, out=x.out, k=x.k, v=x.v)
        if x.lse.shape != (problem.heads, x.q.shape[0]):
            raise InputError(f"lse has shape {tuple(x.lse.shape)}, not {(problem.heads, x.q.shape[0])}")
        self.problem, self.tensors, self.aux = problem, tensors, aux
        self.scores, self.scale, self.cap = scores, scores.softmax_scale, scores.softcap
        self.rows, self.masks = TileRows(problem), TileMasks(problem.mask)
        self.q_rows: dict[QTile, _QRows] = {}
        self.items: dict[int, _Item] = {}

    def run(self, task: Task) -> Tensor:
        """One task: adds to its item's dK and dV and returns its contribution to dQ, unscaled."""
        rows, item = self._q_rows_of(task), self._item_of(task)
        dtype, wide = self.tensors.q.dtype, rows.q.dtype
        hidden = self._hidden(task, len(rows.q), item.rows)
        scores = torch.mm(rows.q, item.k.T)
        if self.cap:
            capped = scores.mul_(self.scale / self.cap).tanh_()
            scores = capped * self.cap
        else:
            scores.mul_(self.scale)
        if slope := slope_of(self.aux, task.sequence, task.q_head):
            scores.sub_(self._distances(task, scores).mul_(slope))
        p = scores.sub_(rows.lse).exp_()
        if hidden is not None:
            p.masked_fill_(hidden, 0.0)
        dp = torch.mm(rows.dout, item.v.T)
        weights = p
        if dropout := dropout_of(self.scores, self.aux, task.sequence, task.q_head):
            top, left = task.q_tile * self.problem.tile_m, task.kv_tile * self.problem.tile_n
            dropped = ~dropout.kept(top, left, len(p), p.shape[1])
            weights = p.masked_fill(dropped, 0.0)
            dp.mul_(dropout.rescale).masked_fill_(dropped, 0.0)
        ds = dp.sub_(rows.delta).mul_(p)
        if self.cap:
            ds.mul_(1.0 - capped * capped)
        ds = ds.to(dtype).to(wide)
        item.dv.addmm_(weights.to(dtype).to(wide).T, rows.dout)
        item.dk.addmm_(ds.T, rows.q)
        return torch.mm(ds, item.k)

    def _distances(self, task: Task, scores: Tensor) -> Tensor:
        """Of the rows and columns of a task."""
        grid = self.problem.grid(task.sequence)
        start = task.q_tile * grid.tile_m + grid.diagonal - task.kv_tile * grid.tile_n
        rows, columns = scores.shape
        return distances(start, rows, columns, scores.dtype)

    def _hidden(self, task: Task, rows: int, keys: slice) -> Tensor | None:
        """(rows, keys) bool: what the mask hides, and what the intervals of the keys do."""
        hidden = self.masks.hidden(self.problem.grid(task.sequence), task.kv_tile, task.q_tile)
        if self.aux.rows is None:
            return hidden
        of_keys = RowIntervals(*(x[keys] for x in self.aux.rows))
        outside = outside_intervals(of_keys, task.q_tile * self.problem.tile_m, rows)
        return outside if hidden is None else hidden | outside

    def dq(self, sums: dict[QTile, Tensor]) -> Tensor:
        """dQ from the sum of every q tile; a q tile without a task has none, and zero gradients."""
        dq = self.tensors.q.new_zeros(self.tensors.q.shape)
        for (sequence, head, q_tile), total in sums.items():
            dq[self.rows.q(sequence, q_tile), head] = total.mul_(self.scale).to(dq.dtype)
        return dq

    def dk_dv(self) -> tuple[Tensor, Tensor]:
        """dK and dV; zero for kv tiles without a task."""
        dk = self.tensors.k.new_zeros(self.tensors.k.shape)
        dv = self.tensors.v.new_zeros(self.tensors.v.shape)
        for parts in self._items_of_kv_tiles():
            whole = parts[0]
            for part in parts[1:]:
                whole.dk.add_(part.dk)
                whole.dv.add_(part.dv)
            dk[whole.rows, whole.kv_head] = whole.dk.mul_(self.scale).to(dk.dtype)
            dv[whole.rows, whole.kv_head] = whole.dv.mul_(self.scores.dropout_rescale).to(dv.dtype)
        return dk, dv

    def leave(self, sums: Tensor) -> None:
        """Add dK and dV, unscaled, to sums that several segments share, and forget them."""
        for parts in self._items_of_kv_tiles():
            for group, item in enumerate(parts):
                both = torch.cat([item.dk, item.dv], 1).flatten()
                sums[item.kv_tile, item.sequence, item.kv_head, group, : len(both)] += both
        self.items.clear()

    def _items_of_kv_tiles(self) -> list[list[_Item]]:
        """The items of every (kv tile, kv head), one for each head group, in ascending order."""
        found: dict[tuple[int, int], list[_Item]] = {}
        for item in sorted(self.items.values(), key=attrgetter("q_head_first")):
            found.setdefault((item.rows.start, item.kv_head), []).append(item)
        return list(found.values())

    def _q_rows_of(self, task: Task) -> _QRows:
        tile = _q_tile_of(task)
        if tile not in self.q_rows:
            x, r, head = self.tensors, self.rows.q(task.sequence, task.q_tile), task.q_head
            dout = copy_tile(x.dout, r, head)
            delta = (dout * copy_tile(x.out, r, head)).sum(1, keepdim=True)
            lse = x.lse[head, r].to(dout.dtype, copy=True)[:, None]
            self.q_rows[tile] = _QRows(copy_tile(x.q, r, head), dout, lse, delta)
        return self.q_rows[tile]

    def _item_of(self, task: Task) -> _Item:
        if task.item not in self.items:
            x, r = self.tensors, self.rows.kv(task.sequence, task.kv_tile)
            head = task.q_head // self.problem.group
            k, v = copy_tile(x.k, r, head), copy_tile(x.v, r, head)
            # An item runs its q heads in ascending order: the first one seen is its first.
            at = task.sequence, task.kv_tile, r, head, task.q_head
            item = _Item(*at, k, v, torch.zeros_like(k), torch.zeros_like(v))
            self.items[task.item] = item
        return self.items[task.item]

"""The forward and the backward of a call that the ranks of a group share.

Every rank gets the rows and heads that it works on (:func:`~dash_attn.schedule.sharing.deal`). It computes
them with the kernels of one GPU, and sends what it made to where it belongs. Out, LSE and dQ of a row are
complete where they are computed. dK and dV of a sequence whose segments are with several ranks are sums.
Those of each segment come to the rank where the keys lie. It adds them in ascending order, as one GPU does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..backends.base import AuxTensors, Gradients, SegmentTargets, Tensors, as_current, backend_named
from ..backends.sums import new_sink_sums
from ..schedule.sharing import Rows
from .leaving import Leaving, Made
from .meeting import Meeting
from .shared import Heads, Shared, finish, places

__all__ = ["Saved", "backward", "forward"]


class Saved(NamedTuple):
    """What the backward needs: q, out and lse of the rows that this rank computed, and k and v.

    These are the ones that lie on this rank, or with :meth:`.shared.Shared.keeps_keys` all that it needed.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


def forward(
    shared: Shared, meeting: Meeting, q: Tensor, k: Tensor, v: Tensor, aux: AuxTensors
) -> tuple[Tensor, Tensor, Saved]:
    """(out, lse) of the rows that lie on this rank, and what the backward needs.

    Args:
        shared: the call.
        meeting: of the ranks, for this.
        q: (batch, local rows, heads, head_dim).
        k, v: (batch, local rows, kv_heads, head_dim).
        aux: of all heads, and intervals of rows of the keys that lie on this rank, (batch, local rows).
    """
    mine, legs = shared.rows_in(q)
    coming = shared.begin_keys(k, v, 0, legs, meeting)
    aux = _with_all_keys(shared, aux)
    outs, lses = [], []
    steps = shared.steps(shared.team.rank)
    for step, heads in enumerate(steps):
        moving, keys, values = coming
        finish(moving)
        if step + 1 < len(steps):
            coming = shared.begin_keys(k, v, step + 1)
        given = mine[:, :, _q_heads(shared, heads)], keys, values
        out, lse = _forward_step(shared, given, heads, _of_heads(aux, heads, shared.group))
        outs.append(out)
        lses.append(lse)
    out, lse = _joined(outs, 2), _joined(lses, 1)
    if shared.keeps_keys:
        k, v = keys, values
    saved = Saved(mine, k, v, out, lse)
    if shared.in_place:
        return out, lse, saved
    homes = [shared.home(x) for x in (out, lse)]
    finish(shared.move([shared.rows_out(x, home) for x, home in zip((out, lse), homes)]))
    return homes[0], homes[1], saved


_QKV = tuple[Tensor, Tensor, Tensor]


def _forward_step(shared: Shared, given: _QKV, heads: Heads, aux: AuxTensors) -> tuple[Tensor, Tensor]:
    """Of the rows of this rank, and some heads."""
    q, k, v = given
    kv_heads = heads[1] - heads[0]
    if shared.whole:
        call, origin = shared.whole_call(kv_heads), shared.origin(heads)
        if not shared.given.packed:
            return call.forward(q, k, v, aux, origin)
        out, lse = call.forward(q[0], k[0], v[0], _packed(aux), origin)
        return out.unsqueeze(0), lse.unsqueeze(0)
    outs, lses = [], []
    for rows, place in zip(shared.rows, places(shared.rows)):
        keys = shared.seen(rows)
        at = _keys_at(shared, rows.sequence, keys)
        call = shared.dense_call(rows.last - rows.first, at.stop - at.start, kv_heads)
        origin = shared.origin(heads, rows.sequence, rows.first, keys[0])
        out, lse = call.forward(q[:, place], k[:, at], v[:, at], _of_keys(aux, at), origin)
        outs.append(out)
        lses.append(lse)
    if not outs:
        batch, _, q_heads, _ = q.shape
        outs = [q.new_empty((batch, 0, q_heads, v.shape[3]))]
        lses = [q.new_empty((batch, q_heads, 0), dtype=shared.wide)]
    return _joined(outs, 1), _joined(lses, 2)


def backward(shared: Shared, meeting: Meeting, dout: Tensor, saved: Saved, aux: AuxTensors) -> Gradients:
    """The gradients of what lies on this rank. dsink is that of the rows and heads that it computed.

    Args:
        shared, meeting, aux: as in the forward.
        dout: of the rows that lie on this rank.
        saved: what the forward returned.
    """
    dout, legs = shared.rows_in(dout)
    q, k, v, out, lse = saved
    if shared.keeps_keys:
        coming = shared.move(legs, meeting), k, v
    else:
        coming = shared.begin_keys(k, v, 0, legs, meeting)
    aux = _with_all_keys(shared, aux)
    local = dout.shape[0], shared.layout.local_rows, shared.given.kv_heads
    dk, dv = (x.new_empty((*local, x.shape[3])) for x in (k, v))
    home: Tensor | None = None
    sink = aux.learnable_sink
    dsink = None if sink is None else torch.zeros_like(sink)
    dqs: list[Tensor] = []
    leaving: Leaving | None = None
    steps = shared.steps(shared.team.rank)
    for step, heads in enumerate(steps):
        moving, keys, values = coming
        finish(moving)
        if step + 1 < len(steps):
            coming = shared.begin_keys(k, v, step + 1)
        of_q = _q_heads(shared, heads)
        mine = Tensors(dout[:, :, of_q], q[:, :, of_q], keys, values, out[:, :, of_q], lse[:, of_q])
        made = _backward_step(shared, mine, heads, _of_heads(aux, heads, shared.group))
        if shared.in_place:
            dqs.append(made.dq)
        elif home is None:  # only now: the kernels have given back what they needed for a while
            home = shared.home(q)
        if dsink is not None and made.dsink is not None:
            dsink[heads[0] * shared.group : heads[1] * shared.group] = made.dsink.to(dsink.dtype)
        if leaving is not None:  # what it moves has moved while this step was computed
            leaving.end()
        leaving = Leaving(shared, step, made, (home, dk, dv))
        del made
    assert leaving is not None
    leaving.end()
    return Gradients(_joined(dqs, 2) if home is None else home, dk, dv, dsink)


def _backward_step(shared: Shared, mine: Tensors, heads: Heads, aux: AuxTensors) -> Made:
    kv_heads = heads[1] - heads[0]
    if shared.whole:
        return _whole(shared, mine, heads, aux)
    sink = aux.learnable_sink
    wide = aux if sink is None else aux._replace(learnable_sink=sink.to(shared.wide))
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in mine[1:4])
    complete = shared.complete[shared.team.rank]
    sums: dict[tuple[int, int], Tensor] = {}
    lengths, batch = shared.given.lengths, shared.given.batch
    sink_sums = None if sink is None else new_sink_sums(len(lengths) * batch, sink.to(shared.wide))
    for rows, place in zip(shared.rows, places(shared.rows)):
        first_sequence = rows.sequence * batch
        of_sink = None if sink_sums is None else sink_sums[first_sequence : first_sequence + batch]
        if rows.sequence in complete:
            at = _keys_at(shared, rows.sequence, (0, rows.last))
            call = shared.dense_call(rows.last, rows.last, kv_heads)
            origin = shared.origin(heads, rows.sequence)
            grads = call.backward(mine.part(place, at), _of_keys(wide, at), origin, of_sink)
            dq[:, place], dk[:, at], dv[:, at] = grads[:3]
        else:
            sums |= _segments(shared, mine, heads, wide, (rows, place), dq, of_sink)
    dsink: Tensor | None = None
    if sink is not None and sink_sums is not None:
        with as_current(shared.device):
            dsink = backend_named(shared.backend).finish_sink(sink_sums, sink.dtype)
    return Made(dq, dsink, dk, dv, sums)


def _segments(
    shared: Shared,
    mine: Tensors,
    heads: Heads,
    aux: AuxTensors,
    part: tuple[Rows, slice],
    dq: Tensor,
    sink_sums: Tensor | None,
) -> dict[tuple[int, int], Tensor]:
    """The backward of the segments of a sequence that begin in some rows of this rank.

    Args:
        shared, mine, heads: as in :func:`_backward_step`.
        aux: of these heads, a sink in fp32 (fp64 for fp64).
        part: the rows, and where they lie among those of this rank.
        dq: (batch, rows of this rank, heads, head_dim): it is written at the rows of the segments.
        sink_sums: (batch, heads), of the sequence: they are added to. None without a sink.

    Returns:
        The sums of dK and dV of each segment, as :class:`.Made` has them.
    """
    rows, place = part
    cut = shared.cut_of(rows.sequence, heads[1] - heads[0])
    scores = shared.scores.at(shared.origin(heads, rows.sequence))
    row_0 = place.start - rows.first  # where row 0 of the sequence would lie among those of this rank
    sums = {}
    for index, segment in enumerate(cut.segments):
        if not rows.first <= segment.rows[0] < rows.last:
            continue
        at = slice(row_0 + segment.rows[0], row_0 + segment.rows[1])
        first_tile, last_tile = cut.tiles_of(index)
        made = sums[rows.sequence, index] = cut.new_sums(mine.k, last_tile - first_tile)
        tensors = mine.part(at, _keys_at(shared, rows.sequence, segment.keys))
        with as_current(shared.device):
            cut.backward(index, tensors, scores, aux, SegmentTargets(made, dq[:, at], sink_sums))
    return sums


def _whole(shared: Shared, mine: Tensors, heads: Heads, aux: AuxTensors) -> Made:
    call, origin = shared.whole_call(heads[1] - heads[0]), shared.origin(heads)
    if not shared.given.packed:
        grads = call.backward(mine, aux, origin)
        return Made(grads.dq, grads.dsink, grads.dk, grads.dv, {})
    grads = call.backward(Tensors(*(x[0] for x in mine)), _packed(aux), origin)
    dq, dk, dv = (x.unsqueeze(0) for x in grads[:3] if x is not None)
    return Made(dq, grads.dsink, dk, dv, {})


def _keys_at(shared: Shared, sequence: int, keys: tuple[int, int]) -> slice:
    """Where keys of a sequence lie among those that this rank has."""
    start = shared.key_starts[sequence]
    return slice(start + keys[0], start + keys[1])


def _q_heads(shared: Shared, heads: Heads) -> slice:
    """The q heads of a step, among those of this rank."""
    first = shared.work[shared.team.rank].heads[0]
    return slice((heads[0] - first) * shared.group, (heads[1] - first) * shared.group)


def _of_heads(aux: AuxTensors, heads: Heads, group: int) -> AuxTensors:
    mine = slice(heads[0] * group, heads[1] * group)
    sink, slopes = (None if x is None else x[..., mine] for x in (aux.learnable_sink, aux.alibi_slopes))
    return aux._replace(learnable_sink=sink, alibi_slopes=slopes)


def _with_all_keys(shared: Shared, aux: AuxTensors) -> AuxTensors:
    """With the intervals of rows of all keys that this rank needs."""
    if aux.rows is None:
        return aux
    starts, ends = shared.rows_of_keys(*aux.rows)
    return aux._replace(row_starts=starts, row_ends=ends)


def _of_keys(aux: AuxTensors, keys: slice) -> AuxTensors:
    return aux.map_rows(lambda x: x[:, keys].contiguous())


def _packed(aux: AuxTensors) -> AuxTensors:
    return aux.map_rows(lambda x: x[0])


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

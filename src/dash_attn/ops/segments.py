"""The backward of sequences that are cut into segments of q rows.

The segments of a sequence run one after the other and add to the same sums of dK and dV. How they are cut is
:mod:`dash_attn.schedule.segments`. What runs here is the order that several GPUs have, too.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends.base import AuxTensors, Backend, Gradients, Prepared, SegmentTargets, Tensors
from ..backends.sums import accumulator, new_key_sums, new_sink_sums
from ..problem import Problem
from ..schedule import Plan, build_plan, choose_policy
from ..schedule.build import check_covered
from ..schedule.defaults import choose_policy_of_segment
from ..schedule.segments import Segment, head_groups_of_segments, segments_of
from ..scores import Origin, Scores
from ..spec import AttentionSpec
from .policies import forget_with, schedule_named

__all__ = [
    "CutSequence", "Part", "check_covered_parts", "fingerprint_of_parts", "parts_of", "run_parts",
]  # fmt: skip


class CutSequence:
    """A dense batch of equal sequences that are cut, on a backend.

    Attributes:
        problem: of the whole sequences.
        segments: ascending.
        head_groups: of each kv head, in every segment.
    """

    def __init__(self, problem: Problem, spec: AttentionSpec, backend: Backend, device: torch.device) -> None:
        self.problem, self.backend, self.device, self._policy = problem, backend, device, spec.policy
        seqlen_q, seqlen_k = problem.sequences[0]
        rows = spec.rows_per_segment
        self.segments = segments_of(seqlen_q, seqlen_k, problem.mask, problem.tile_n, rows)
        self.head_groups = head_groups_of_segments(problem, rows)
        self._made: dict[int, tuple[Plan, Prepared]] = {}

    @property
    def kv_tiles(self) -> int:
        return -(-self.problem.sequences[0][1] // self.problem.tile_n)

    def plan(self, index: int) -> Plan | None:
        """The proven plan of a segment; None where its rows see no key."""
        return None if self.segments[index].keys == (0, 0) else self._of(index)[0]

    def _of(self, index: int) -> tuple[Plan, Prepared]:
        found = self._made.get(index)
        if found is None:
            problem = problem_of_segment(self.problem, self.segments[index])
            plan = _plan(problem, self._policy, self.head_groups)
            prepared = self.backend.prepare(problem, self.device, packed=False)
            found = self._made[index] = plan, prepared
        return found

    def new_sums(self, like: Tensor, kv_tiles: int | None = None) -> Tensor:
        """Zeros for the sums of dK and dV of some kv tiles, by default of the whole sequences."""
        tiles = self.kv_tiles if kv_tiles is None else kv_tiles
        return new_key_sums(self.backend, self.problem, tiles, self.head_groups, like)

    def tiles_of(self, index: int) -> tuple[int, int]:
        """The kv tiles that a segment adds to: the first one, and the one behind the last."""
        first, last = self.segments[index].keys
        return first // self.problem.tile_n, -(-last // self.problem.tile_n)

    def backward(
        self, index: int, tensors: Tensors, scores: Scores, aux: AuxTensors, into: SegmentTargets
    ) -> None:
        """The backward of one segment.

        Args:
            index: of the segment.
            tensors: dout, q, out and lse of the segment's rows; k and v of the keys that these see; dense.
            scores, aux: of these sequences; a sink in fp32.
            into: where the gradients go: sums of the segment's keys, :meth:`tiles_of`, and dQ of its rows.
        """
        if self.segments[index].keys == (0, 0):  # rows without an output: delta is 0 of a finite dout
            into.dq.zero_()
            return
        plan, prepared = self._of(index)
        (row, _), (column, _) = self.segments[index]
        scores = scores.at(Origin(row=row, column=column))
        prepared.backward_segment(plan, tensors, scores, aux, into)


def problem_of_segment(problem: Problem, segment: Segment) -> Problem:
    """What a segment computes, of all sequences of a problem of equal ones."""
    lengths = segment.rows[1] - segment.rows[0], segment.keys[1] - segment.keys[0]
    return replace(problem, sequences=(lengths,) * len(problem.sequences))


@lru_cache(256)
def _plan(problem: Problem, policy: str, head_groups: int) -> Plan:
    schedule = choose_policy_of_segment(problem) if policy == "auto" else schedule_named(policy)
    return build_plan(problem, schedule, head_groups=head_groups)


forget_with(_plan.cache_clear)


class Part(NamedTuple):
    """A part of a call: sequences that are cut, or packed sequences that are not.

    Attributes:
        first: the number of its first sequence.
        rows, keys: of packed tensors; of dense ones all.
        cut: the sequences, if they are cut.
        plan, prepared: of those that are not.
    """

    first: int
    rows: slice
    keys: slice
    cut: CutSequence | None
    plan: Plan | None = None
    prepared: Prepared | None = None

    @property
    def sequences(self) -> int:
        """How many it has."""
        made = self.cut or self.plan
        assert made is not None
        return len(made.problem.sequences)


def parts_of(
    problem: Problem, spec: AttentionSpec, backend: Backend, device: torch.device, packed: bool
) -> tuple[Part, ...]:
    """The parts of a call; () where no sequence is cut.

    Sequences that are cut are parts of their own. What lies between two of them is a part.
    """
    rows = spec.rows_per_segment
    if not rows or int(problem.lengths[:, 0].max()) <= rows:
        return ()
    cut = [len(segments_of(*pair, problem.mask, problem.tile_n, rows)) > 1 for pair in problem.sequences]
    if not any(cut):
        return ()
    everything = slice(0, None)
    if not packed:
        return (Part(0, everything, everything, CutSequence(problem, spec, backend, device)),)
    return _packed_parts(problem, cut, spec, backend, device)


def _packed_parts(
    problem: Problem, cut: list[bool], spec: AttentionSpec, backend: Backend, device: torch.device
) -> tuple[Part, ...]:
    parts: list[Part] = []
    run: list[tuple[int, int]] = []
    first = at = (0, 0)

    def end_run(behind: int) -> None:
        if run:
            between = replace(problem, sequences=tuple(run))
            schedule = choose_policy(between) if spec.policy == "auto" else schedule_named(spec.policy)
            prepared = backend.prepare(between, device, packed=True)
            plan = build_plan(between, schedule)
            places = slice(first[0], at[0]), slice(first[1], at[1])
            parts.append(Part(behind - len(run), *places, None, plan, prepared))
            run.clear()

    for number, (pair, is_cut) in enumerate(zip(problem.sequences, cut)):
        end = at[0] + pair[0], at[1] + pair[1]
        if is_cut:
            end_run(number)
            alone = CutSequence(replace(problem, sequences=(pair,)), spec, backend, device)
            parts.append(Part(number, slice(at[0], end[0]), slice(at[1], end[1]), alone))
            first = end
        else:
            run.append(pair)
        at = end
    end_run(len(cut))
    return tuple(parts)


def check_covered_parts(parts: tuple[Part, ...], policy: str) -> None:
    """Raise UnsupportedMaskError if a named policy does not cover a segment of a sequence that is cut."""
    numerics = schedule_named(policy).numerics
    for cut in [part.cut for part in parts if part.cut is not None]:
        for segment in cut.segments:
            if segment.keys != (0, 0):
                check_covered(problem_of_segment(cut.problem, segment), numerics)


def fingerprint_of_parts(parts: tuple[Part, ...]) -> str:
    """SHA-256 of the numerics of all parts, in their order."""
    digest = hashlib.sha256(b"segments of q, and whole sums of sinks")
    for part in parts:
        if part.cut is None:
            assert part.plan is not None
            digest.update(part.plan.fingerprint.encode())
            continue
        for index, segment in enumerate(part.cut.segments):
            plan = part.cut.plan(index)
            digest.update(repr((segment, plan and plan.fingerprint)).encode())
    return digest.hexdigest()


def run_parts(
    parts: tuple[Part, ...],
    backend: Backend,
    tensors: Tensors,
    scores: Scores,
    aux: AuxTensors,
    sink_sums: Tensor | None = None,
) -> Gradients:
    """The gradients of a call, part by part. ``sink_sums``: as in :meth:`.Prepared.backward`."""
    sink, q, k, v = aux.learnable_sink, tensors.q, tensors.k, tensors.v
    sums = sink_sums
    if sink is not None:
        wide = sink.to(accumulator(q.dtype))
        aux = aux._replace(learnable_sink=wide)
        sums = new_sink_sums(sum(part.sequences for part in parts), wide) if sums is None else sums
    grads = Gradients(*(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)))
    for part in parts:
        mine, of_part = _rows_of(tensors, part), scores.at(Origin(sequence=part.first))
        target = Gradients(grads.dq[part.rows], grads.dk[part.keys], grads.dv[part.keys])
        of_sink = None if sums is None else sums[part.first : part.first + part.sequences]
        if part.cut is None:
            assert part.plan is not None
            assert part.prepared is not None
            found = part.prepared.backward(part.plan, mine, of_part, aux, sink_sums=of_sink)
            for to, x in zip(target, found[:3]):
                assert to is not None
                to.copy_(x)
        else:
            _run_cut(part.cut, mine, target, of_part, aux, of_sink)
    if sink is None or sums is None or sink_sums is not None:
        return grads
    return grads._replace(dsink=backend.finish_sink(sums, sink.dtype))


def _rows_of(tensors: Tensors, part: Part) -> Tensors:
    """A part of packed tensors; dense ones are taken whole."""
    if tensors.q.ndim == 4:
        return tensors
    q, k = part.rows, part.keys
    dout, q_rows, out = (x[q] for x in (tensors.dout, tensors.q, tensors.out))
    return Tensors(dout, q_rows, tensors.k[k], tensors.v[k], out, tensors.lse[:, q].contiguous())


def _run_cut(
    cut: CutSequence,
    tensors: Tensors,
    target: Gradients,
    scores: Scores,
    aux: AuxTensors,
    sink_sums: Tensor | None,
) -> None:
    """Write the gradients of sequences that are cut."""
    if tensors.q.ndim == 3:
        tensors = Tensors._make(x.unsqueeze(0) for x in tensors)
        target = Gradients(*(x.unsqueeze(0) for x in target[:3] if x is not None))
    sums = cut.new_sums(tensors.k)
    for index, segment in enumerate(cut.segments):
        rows, keys, tiles = slice(*segment.rows), slice(*segment.keys), slice(*cut.tiles_of(index))
        mine = tensors.part(rows, keys)
        cut.backward(index, mine, scores, aux, SegmentTargets(sums[tiles], target.dq[:, rows], sink_sums))
    cut.backend.finish_keys(sums, scores, target.dk, target.dv)

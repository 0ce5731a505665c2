"""Launches for sequences that are cut into segments of q rows: between them, sums of dK and dV stay fp32."""

from __future__ import annotations

from torch import Tensor

from ...errors import InputError, PlanMismatchError
from ...problem import Problem
from ...schedule.plan import Plan
from ...scores import Scores, scores_of
from ..base import Gradients, SegmentTargets, Tensors, as_current
from ..cuda.upload import loadable
from .add_sums.config import AddSumsConfig
from .compile import program
from .key_sums.config import KeySumsConfig
from .launch import (
    NO_DEBUG,
    Debug,
    Demand,
    Workspace,
    check_hand_overs,
    check_tensors,
    launch,
    variant_of,
)
from .resident import on_device
from .sinks.launch import add_to_sink_sums
from .tiles import SHORT_DTYPES, kernel_of, tiles_of

__all__ = ["add_sums", "check_sums", "finish_keys", "run_segment", "words_of_sum"]


def run_segment(
    plan: Plan,
    tensors: Tensors,
    scores: Scores | float,
    into: SegmentTargets,
    *,
    sink: Tensor | None = None,
    debug: Debug | None = None,
) -> None:
    """The backward of a segment of q rows: :meth:`Prepared.backward_segment`.

    Args:
        plan, tensors, scores, sink, debug: as in :func:`run_backward`; tensors are dense. Neither
            contributions nor a trace can be asked for.
        into: where the gradients go; the sums are those of the plan's kv tiles.

    Raises:
        PlanMismatchError, TooFewWorkersError, HandOverError: as :func:`run_backward`.
    """
    debug, scores = debug or NO_DEBUG, scores_of(scores)
    if debug.trace or debug.contributions:
        raise InputError(
            "the backward of a sequence that is cut into segments keeps no trace: ask for "
            "DASH_ATTN_DEBUG=bounded, or give a larger q_segment"
        )
    sums, dq, sink_sums = into
    place = on_device(plan, dq.device, key_sums=True)
    check_tensors(place, plan, tensors)
    q = tensors.q
    if (dq.shape, dq.dtype, dq.device) != (q.shape, q.dtype, q.device) or loadable(dq) is not dq:
        raise PlanMismatchError(
            f"dq is {tuple(dq.shape)} {dq.dtype} on {dq.device}, strides {dq.stride()}; it must be like q, "
            f"{tuple(q.shape)} {q.dtype} on {q.device}, and the copy engine must be able to write it"
        )
    check_sums(plan, sums)
    asked = Demand(True, debug, key_sums=True, softcap=scores.softcap > 0)
    variant = place.variants.get(asked) or variant_of(place, plan, asked)
    work = Workspace(variant, place, dq.device, sums.view(-1))
    tensors = tensors._replace(k=loadable(tensors.k), v=loadable(tensors.v))
    grads = Gradients(dq, tensors.k, tensors.v)  # nothing is written to dK and dV
    launch(plan, (variant, place, work), tensors, grads, scores, None)
    if sink is not None and sink_sums is not None:
        add_to_sink_sums(sink_sums, work.statistics(len(plan.problem.sequences)), sink)
    if debug.bounded:
        check_hand_overs(work.errors, None)


def words_of_sum(problem: Problem) -> int:
    """fp32 numbers of an item's sums of dK and dV: both have the columns of the kernel's K."""
    head_dim, head_dim_v, _ = kernel_of(problem.head_dim, problem.head_dim_v)
    return 2 * tiles_of(head_dim, head_dim_v).tile_n * head_dim


def check_sums(plan: Plan, sums: Tensor) -> None:
    """Raise a PlanMismatchError unless there is a sum for every item of a plan: launches write them all."""
    words, items = words_of_sum(plan.problem), plan.batch.item_count
    if sums.numel() != items * words:
        raise PlanMismatchError(
            f"sums have {sums.numel()} numbers; the plan's {items} items have {words} each, {items * words}"
        )


def add_sums(sums: Tensor, more: Tensor) -> None:
    """Add sums to sums, by the instruction with which launches add to them: :meth:`Backend.add_sums`."""
    with as_current(sums.device):
        program(AddSumsConfig())(sums.view(-1), more.view(-1), sums.numel() // 4)


def finish_keys(sums: Tensor, softmax_scale: float, dk: Tensor, dv: Tensor) -> None:
    """Make dK and dV of complete sums: :meth:`Backend.finish_keys`."""
    head_dim, head_dim_v, _ = kernel_of(dk.shape[3], dv.shape[3])
    config = KeySumsConfig(head_dim, SHORT_DTYPES[str(dk.dtype).removeprefix("torch.")], head_dim_v)
    with as_current(dk.device):
        program(config)(sums.view(-1), dk, dv, softmax_scale, sums.shape[3])

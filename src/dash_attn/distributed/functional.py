"""The public functions: attention over the ranks of a group, with the bytes of one GPU."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..arguments import Asked, Packing, aux_of, check_call, completed
from ..backends.base import AuxTensors
from ..errors import InputError
from ..ops.autograd import empty_results, refuse_tracing, refuse_transforms
from ..ops.policies import forget_with
from ..schedule import Numerics, Schedule
from ..schedule.sharing import Layout, teams_of
from ..spec import AttentionSpec
from ..values import Window, check_flag
from .agreement import agree, telling
from .autograd import attend
from .covered import check_policy
from .exchange import of_first_rank
from .meeting import Meeting
from .opening import open_window
from .rows import lengths_of
from .shared import Given, Shared
from .team import Team, exchanging, team_of
from .windows import window_of

__all__ = ["attention", "attention_varlen"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    causal: bool = False,
    window: Window = None,
    softmax_scale: float | None = None,
    layout: str = "zigzag",
    mode: str = "auto",
    policy: str | Numerics | Schedule = "auto",
    return_lse: bool = False,
    backend: str = "auto",
    q_segment: int | None = None,
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    row_starts: Tensor | None = None,
    row_ends: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Self-attention of sequences that are spread over the ranks of a group (context parallelism).

    Out, lse and gradients of every row have the same bytes as :func:`dash_attn.attention` of the whole
    sequences on one GPU, for any number of ranks, layout and mode. Only bytes move, and nothing adds them.

    Args:
        q: (batch, seqlen / N, heads, head_dim): the rows of this rank, as :func:`shard` deals them.
        k, v: (batch, seqlen / N, kv_heads, head_dim); v may have another head_dim.
        group: a process group, a DeviceMesh of one dimension, or None for all processes.
        causal, window, softmax_scale, policy, backend, softcap: as in :func:`dash_attn.attention`.
        layout: "zigzag" (all ranks have the same work under a causal mask) or "contiguous".
        mode: what moves. It decides no bit.

            * "ulysses": every rank gets all rows of 1/N of the heads; N divides kv_heads.
            * "gather": every rank computes its rows; K and V of all keys come to it.
            * "ring": as "gather", one kv head after the other. The next one comes while one is computed, and
              no rank ever has more than two of them.
            * "ulysses+gather", "ulysses+ring": ranks in teams; heads are shared in a team, rows between
              teams.
            * "auto": "ulysses" where N divides kv_heads, else "ulysses+ring".
        return_lse: return the log-sum-exp too. It carries no gradient.
        q_segment: as in :func:`dash_attn.attention`: it decides bits. Rows are shared by segments of so many.
            Where a rank's rows are no whole segments, "gather" and "ring" deal segments to ranks anew.
        learnable_sink: (heads,), the same on all ranks. Its gradient is that of the rows and heads that this
            rank computed: add it up over the group, as gradients of other parameters.
        alibi_slopes: as in :func:`dash_attn.attention`, the same on all ranks.
        dropout_p: as in :func:`dash_attn.attention`; the same weights are dropped. As with windows, sequences
            are not cut unless ``q_segment`` is named, so "gather" and "ring" then give each to one rank.
        dropout_seed: as in :func:`dash_attn.attention`, the same on all ranks: others are an error the first
            time that a kind of call is seen, as other arguments are. None: every rank draws a number from
            its default generator, and that of the group's rank 0 counts. In every call this rank sends its
            seed, given or drawn, to all others; on a GPU the host does not wait for it.
        row_starts, row_ends: (batch, seqlen / N) int32, as in :func:`dash_attn.attention`, for the keys of
            this rank. Rows count from the first one of the whole sequence. As with slopes, a sequence is
            then not cut, so "gather" and "ring" give each to one rank.

    Returns:
        out: (batch, seqlen / N, heads, head_dim of v) of the rows of this rank; with ``return_lse`` also
            (batch, heads, seqlen / N), float32 (float64 for float64).

    Raises:
        InputError: an argument cannot be used; the message names it.
        CommunicationError: ranks were called with different arguments, another one has refused its own, or
            the exchange failed. docs/distributed.md says which rank raises when.
    """
    asked = Asked(
        causal=causal, window=window, softmax_scale=softmax_scale, policy=policy, backend=backend,
        softcap=softcap, dropout_p=dropout_p, q_segment=q_segment,
    )  # fmt: skip
    beside = _Beside(
        learnable_sink=learnable_sink, alibi_slopes=alibi_slopes, dropout_p=dropout_p,
        dropout_seed=dropout_seed, row_starts=row_starts, row_ends=row_ends,
    )  # fmt: skip
    found: Tensor | tuple[Tensor, Tensor]
    found = _run((q, k, v), None, beside, asked, _How(group, layout, mode, return_lse, packed=False))
    return found


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    group: Any = None,
    causal: bool = False,
    window: Window = None,
    softmax_scale: float | None = None,
    layout: str = "zigzag",
    mode: str = "auto",
    policy: str | Numerics | Schedule = "auto",
    return_lse: bool = False,
    backend: str = "auto",
    q_segment: int | None = None,
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    row_starts: Tensor | None = None,
    row_ends: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`attention` of a packed batch. Every sequence is spread evenly over the ranks.

    Args:
        q: (total / N, heads, head_dim): of every sequence the rows of this rank, one sequence after the
            other, as :func:`shard` deals them.
        k, v: (total / N, kv_heads, head_dim).
        cu_seqlens: (sequences + 1,) int32, of the whole sequences: 0, then the end of each. Every length is a
            multiple of N, or of 2 N under the layout "zigzag".
        group, causal, window, softmax_scale, layout, mode, policy, return_lse, backend, q_segment, softcap,
            learnable_sink, dropout_p, dropout_seed: as in :func:`attention`.
        alibi_slopes: (heads,) float32.
        row_starts, row_ends: (total / N,) int32; rows count from the first one of their sequence.

    Returns:
        out: (total / N, heads, head_dim of v); with ``return_lse`` also (heads, total / N).

    Raises:
        InputError, CommunicationError: as :func:`attention`.
    """
    asked = Asked(
        causal=causal, window=window, softmax_scale=softmax_scale, policy=policy, backend=backend,
        softcap=softcap, dropout_p=dropout_p, q_segment=q_segment,
    )  # fmt: skip
    beside = _Beside(
        learnable_sink=learnable_sink, alibi_slopes=alibi_slopes, dropout_p=dropout_p,
        dropout_seed=dropout_seed, row_starts=row_starts, row_ends=row_ends,
    )  # fmt: skip
    found: Tensor | tuple[Tensor, Tensor]
    found = _run((q, k, v), cu_seqlens, beside, asked, _How(group, layout, mode, return_lse, packed=True))
    return found


_QKV = tuple[Tensor, Tensor, Tensor]


class _Beside(NamedTuple):
    """What the tensors beside q, k and v are made of, as the caller gave it: see :func:`.aux_of`."""

    learnable_sink: Tensor | None
    alibi_slopes: Tensor | None
    dropout_p: float
    dropout_seed: int | Tensor | None
    row_starts: Tensor | None
    row_ends: Tensor | None


class _How(NamedTuple):
    group: Any
    layout: str
    mode: str
    return_lse: bool
    packed: bool


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run(
    qkv: _QKV, cu_seqlens: Tensor | None, beside: _Beside, asked: Asked, how: _How
) -> Tensor | tuple[Tensor, Tensor]:
    group, layout, mode, return_lse, packed = how
    team = team_of(group)
    with telling(team):
        if packed and cu_seqlens is None:
            raise InputError("cu_seqlens must be a torch.Tensor, got None; attention takes dense batches")
        refuse_transforms("distributed attention")
        refuse_tracing("distributed attention")
        check_flag("return_lse", return_lse)
        aux = aux_of(qkv[0], **beside._asdict())
        (q, k, v), aux, spec, given = checked = _checked(qkv, cu_seqlens, aux, asked, (layout, mode, team))
        window_of(team, q.device)  # it must not be of another one
        shared = None
        if given.lengths:  # without sequences a dense batch is refused for what it would be with them
            shared = _shared(given._replace(batch=given.batch or 1), spec, team, q.device)
    empty = shared is None or not given.batch
    step = agree(team, _said(qkv, checked, shared), given.lengths, lambda: _seed(aux), keep=not empty)
    if shared is None or empty:
        out, lse = empty_results(q, k, v, aux)
        return (out, lse) if return_lse else out
    # Modes of dispatch see none of this: a selective checkpoint would take what another call has met with.
    with exchanging(team), _disable_current_modes():
        if shared.through_windows:
            open_window(team, q.device)
        aux = completed(aux, spec.dropout_p, q)
        meeting = Meeting(team, step, q.device)
        if aux.dropout_seed is not None:
            meeting.end()
            aux = aux._replace(dropout_seed=of_first_rank(team, aux.dropout_seed))
    if given.packed:
        aux = aux.map_rows(lambda x: x.unsqueeze(0))
    out, lse = attend(shared, meeting, q, k, v, aux)
    if given.packed:
        out, lse = out.squeeze(0), lse.squeeze(0)
    return (out, lse) if return_lse else out


_ASKED_BY = {
    "left": "window", "right": "causal, window", "sink": "learnable_sink", "alibi": "alibi_slopes",
    "row_intervals": "row_starts, row_ends", "head_ranks": "mode", "in_turns": "mode",
}  # fmt: skip
"""Arguments that decide what has another name here."""

_Checked = tuple[_QKV, AuxTensors, AttentionSpec, Given]


def _checked(
    qkv: _QKV, cu_seqlens: Tensor | None, aux: AuxTensors, asked: Asked, where: tuple[str, str, Team]
) -> _Checked:
    """The arguments, looked at by this rank alone."""
    layout, mode, team = where
    q, k, v = qkv
    for name, x in (("q", q), ("k", k), ("v", v)):
        ndim = 4 if cu_seqlens is None else 3
        if not isinstance(x, Tensor) or x.ndim != ndim:
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InputError(f"{name} must have {ndim} dimensions, got {shape}")
        if not x.shape[-2]:
            raise InputError(f"{name} must have at least one head, got shape {tuple(x.shape)}")
    axis = -3
    if q.shape[axis] != k.shape[axis]:
        raise InputError(
            f"q has {q.shape[axis]} rows and k {k.shape[axis]}: only self-attention can be shared by ranks"
        )
    lengths = lengths_of(q.shape[axis] * team.size, cu_seqlens)
    Layout(lengths, team.size, layout)
    local = None
    slopes = aux.alibi_slopes
    if cu_seqlens is not None and slopes is not None and slopes.ndim != 1:
        raise InputError(
            f"alibi_slopes of packed sequences must have shape (heads,), got {tuple(slopes.shape)}"
        )
    if cu_seqlens is not None:  # as if the rows of this rank were one sequence
        one = torch.tensor([0, q.shape[0]], dtype=torch.int32, device="cpu")
        local = Packing(one, one, None, None)
    call = check_call(q, k, v, local, asked, aux)
    q, k, v = call.q, call.k, call.v
    teams = teams_of(mode, team.size, k.shape[-2])
    sizes = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    batch = q.shape[0] if cu_seqlens is None else 1
    given = Given(lengths, cu_seqlens is not None, batch, *sizes, q.dtype, layout, *teams)
    return (q, k, v), call.aux, call.spec, given


def _said(qkv: _QKV, checked: _Checked, shared: Shared | None) -> tuple[tuple[str, Any], ...]:
    """What must be equal on all ranks, by name. Lengths of packed sequences are new in every batch, and left
    out: to compare each batch would cost more than it finds. "auto" may be another backend on every machine,
    by what is installed there."""
    _, aux, spec, given = checked
    shapes = []
    for name, x in zip("qkv", qkv):
        shape = tuple(x.shape[-2:] if given.packed else x.shape)
        shapes.append((name, (shape, str(x.dtype), x.device.type)))
    same = given._asdict()
    if given.packed:
        del same["lengths"]
    wanted = (*qkv, aux.learnable_sink)
    gradients = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in wanted)
    seeded = ("a seed given", aux.dropout_seed is not None)
    runs_by = () if shared is None else (("the backend that runs it", shared.backend),)
    decided = (*spec._asdict().items(), *same.items())
    named = [(f"{name} ({_ASKED_BY[name]})" if name in _ASKED_BY else name, x) for name, x in decided]
    return (*shapes, *named, ("gradients", gradients), seeded, *runs_by)


def _seed(aux: AuxTensors) -> tuple[tuple[str, Any], ...]:
    """It may be new in every call."""
    seed = aux.dropout_seed
    return (("dropout_seed", None if seed is None else int(seed)),)


@lru_cache(64)
def _shared(given: Given, spec: AttentionSpec, team: Team, device: torch.device) -> Shared:
    shared = Shared(given, spec, team, device)
    check_policy(shared)
    return shared


forget_with(_shared.cache_clear)

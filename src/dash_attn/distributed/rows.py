"""Spreading tensors over ranks, bringing them together, and the positions of rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..arguments import dense
from ..errors import InputError
from ..ops.autograd import refuse_tracing
from ..ops.lengths import host_lengths
from ..schedule.sharing import Layout
from ..values import is_integer, short
from .agreement import agree, telling
from .meeting import Meeting
from .team import errors_of, exchanging, team_of
from .windows import window_of

__all__ = ["lengths_of", "positions", "shard", "unshard"]


def lengths_of(total: int, cu_seqlens: Tensor | None, dim: int | None = None) -> tuple[int, ...]:
    """The lengths of packed sequences; without ``cu_seqlens`` one of ``total`` rows.

    ``dim``: the dimension that has them, where a caller chose it.

    Raises:
        InputError: ``cu_seqlens`` is no (sequences + 1,) int32, or the sequences have not ``total`` rows.
    """
    if cu_seqlens is None:
        return (total,)
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1:
        raise InputError(f"cu_seqlens must be (sequences + 1,) torch.int32, got {_kind(cu_seqlens)}")
    if not len(cu_seqlens):
        raise InputError("cu_seqlens must have shape (sequences + 1,), got (0,)")
    if cu_seqlens.shape == (1,) and not total:
        return ()
    found = host_lengths("cu_seqlens", cu_seqlens)
    if found.total != total:
        where = "" if dim is None else f" in dimension {dim}, which dim says"
        raise InputError(f"cu_seqlens ends at {found.total}, all ranks together have {total} rows{where}")
    return found.seqlens


def _kind(x: object) -> str:
    return f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else short(x)


def _index(layout: Layout, rank: int, device: torch.device) -> Tensor:
    """Rows of all sequences, one after the other, that lie on a rank."""
    return torch.from_numpy(layout.held(rank)).to(device)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def shard(
    x: Tensor, group: Any = None, dim: int = 1, layout: str = "zigzag", *, cu_seqlens: Tensor | None = None
) -> Tensor:
    """The rows of x that lie on this rank.

    Args:
        x: of any dtype, with all rows in dimension ``dim``, the same on all ranks.
        group: a process group, a DeviceMesh of one dimension, or None for all processes.
        dim: the dimension of rows: 0 for packed tensors, (total, heads, head_dim).
        layout: "zigzag" or "contiguous".
        cu_seqlens: (sequences + 1,) int32, of packed rows: every sequence is spread evenly.

    Returns:
        A tensor of its own, with 1/N of the rows. Its gradient is that of these rows.

    Raises:
        InputError: rows, or those of a sequence, cannot be spread evenly.
    """
    team = team_of(group)
    dim = _dim_of(x, dim)
    spread = Layout(lengths_of(x.shape[dim], cu_seqlens, dim), team.size, layout)
    return x.index_select(dim, _index(spread, team.rank, x.device))


def _dim_of(x: Tensor, dim: int) -> int:
    if type(x).__name__ == "DTensor":
        raise InputError("x must be a torch.Tensor, got DTensor")
    if dense("x", x).device.type == "meta":
        raise InputError(f"x of shape {tuple(x.shape)} is a meta tensor: it has no rows")
    if not is_integer(dim) or not -x.ndim <= dim < x.ndim:
        raise InputError(f"dim must be one of the {x.ndim} dimensions of x, got {short(dim)}")
    return int(dim) % x.ndim


@torch.compiler.disable  # type: ignore[untyped-decorator]
def unshard(
    x: Tensor, group: Any = None, dim: int = 1, layout: str = "zigzag", *, cu_seqlens: Tensor | None = None
) -> Tensor:
    """All rows, of which x has those of this rank: what :func:`shard` undoes. It carries no gradient.

    Args:
        x: rows of this rank in dimension ``dim``.
        group, dim, layout, cu_seqlens: as for :func:`shard`; ``cu_seqlens`` is that of all rows.

    Returns:
        A tensor of x's dtype with N times its rows, in their order, on every rank.

    Raises:
        InputError: a gradient is wanted; or as :func:`shard`.
        CommunicationError: a rank does not answer.
    """
    team = team_of(group)
    with telling(team):
        dim = _dim_of(x, dim)
        if torch.is_grad_enabled() and x.requires_grad:
            raise InputError("unshard carries no gradient: give it x.detach()")
        spread = Layout(lengths_of(x.shape[dim] * team.size, cu_seqlens, dim), team.size, layout)
        window_of(team, x.device)  # it must not be of another one
        refuse_tracing("unshard")
        try:
            bytes_of_mine = _bytes(x.detach().movedim(dim, 0).contiguous())
        except RuntimeError as error:  # also of what PyTorch has not implemented
            raise InputError(f"unshard does not take tensors of {x.dtype}: {error}") from error
    others = tuple(x.shape[:dim] + x.shape[dim + 1 :])
    said = {"function": "unshard", "dtype": x.dtype, "device": x.device.type, "dim": dim, "layout": layout}
    said["other dimensions"] = others
    step = agree(team, tuple(said.items()), spread.lengths)
    # Modes of dispatch see none of this: a selective checkpoint would take what it has saved of another call.
    with exchanging(team), _disable_current_modes():
        Meeting(team, step, x.device).end()
        rows = torch.empty((spread.local_rows * team.size, *others), dtype=x.dtype, device=x.device)
        whole = torch.empty_like(rows)
        if not rows.numel():
            return whole.movedim(0, dim)
        with errors_of(team):  # bytes: not every dtype can be exchanged, or put at indices
            dist.all_gather(list(_bytes(rows).chunk(team.size)), bytes_of_mine, group=team.group)
        index = torch.cat([_index(spread, rank, x.device) for rank in range(team.size)])
        _units_of_rows(whole)[index] = _units_of_rows(rows)
        return whole.movedim(0, dim)


def _bytes(x: Tensor) -> Tensor:
    return x.flatten().view(torch.uint8)


def _units_of_rows(x: Tensor) -> Tensor:
    """The rows of a tensor that is contiguous, as integers that are as wide as can be."""
    rows = _bytes(x).view(len(x), -1)
    unit = next(
        dtype for dtype in (torch.int64, torch.int32, torch.uint8) if not rows.shape[1] % dtype.itemsize
    )
    return rows.view(unit)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def positions(
    seqlen: int,
    group: Any = None,
    layout: str = "zigzag",
    *,
    cu_seqlens: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The position of every row of this rank in its sequence, as rotary embeddings need it.

    Args:
        seqlen: rows of the whole sequence, or of all packed ones together.
        group, layout, cu_seqlens: as for :func:`shard`.
        device: of the result.

    Returns:
        (seqlen / N,) int64.

    Raises:
        InputError: ``seqlen`` is no integer >= 0; or as :func:`shard`.
    """
    if not is_integer(seqlen) or seqlen < 0:
        raise InputError(f"seqlen must be an integer >= 0, got {short(seqlen)}")
    team = team_of(group)
    spread = Layout(lengths_of(int(seqlen), cu_seqlens), team.size, layout)
    parts = [torch.arange(c.rows.first, c.rows.last, device=device) for c in spread.chunks[team.rank]]
    return torch.cat([*parts, torch.empty(0, dtype=torch.int64, device=device)])

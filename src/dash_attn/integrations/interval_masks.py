"""A mask of booleans, or of 0 and -inf, as a band and intervals of rows; all else is refused by its values.

A mask fits where each key is seen by the rows of one interval, and by all heads alike. So are causal masks,
windows, padding, documents, prefixes and trees in depth-first order. The values decide, so they are read:
the host waits for the device once per call, and the device goes over the mask a few times. Under
``torch.compile`` the graph breaks there, and a CUDA graph cannot be captured. Who has intervals already gives
them to :func:`dash_attn.attention`, which reads nothing.

What is found decides what runs. A band alone is that band, with its bytes, and runs on the Hopper kernels.
Intervals stand beside the causal band if no row of the whole batch sees a later key, otherwise beside none.
They run on the Hopper kernels, too, at head dims that these have them for, else by Triton.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from ..errors import InputError
from .kernels import Band

__all__ = ["Intervals", "Sizes", "intervals_of"]

_WHY_NOT_COMPILED = "dash-attn reads an attn_mask on the host; dash_attn.attention takes row_ends unread"


class Sizes(NamedTuple):
    """What a mask is broadcast to."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int


class Intervals(NamedTuple):
    """What a mask shows: of the band, to each key the rows from its start to before its end.

    Attributes:
        band: full, causal (aligned bottom-right) or a window.
        row_starts, row_ends: (batch, seqlen_k) int32; None where the band alone is the mask.
    """

    band: Band
    row_starts: Tensor | None = None
    row_ends: Tensor | None = None


class _Rows(NamedTuple):
    """(batch or 1, seqlen_k) int64: rows that see a key; both 0 where none does."""

    starts: Tensor
    ends: Tensor


@torch.compiler.disable(reason=_WHY_NOT_COMPILED)  # type: ignore[untyped-decorator, no-untyped-call]
def intervals_of(mask: Tensor, sizes: Sizes) -> Intervals:
    """The band and the intervals that are a mask; a band alone where that is enough.

    Args:
        mask: bool, True where a row sees a key; or floats, 0 there and -inf elsewhere. Two to four
            dimensions, broadcast to ``sizes``.
        sizes: (batch, heads, seqlen_q, seqlen_k) of the attention.

    Raises:
        InputError: the mask is no such intervals, differs among heads, needs a gradient or has another shape;
            the message names the first value that does not fit.
    """
    seen, known = _seen(mask, sizes)
    if 0 in sizes:
        return Intervals(Band(False))
    of_first = seen[:, 0]
    rows = _rows(of_first)
    shown = (seen == of_first[:, None]).all()
    fits = torch.stack([known.all(), shown, _as_mask(rows, of_first.shape[1]).eq(of_first).all()])
    rows = _Rows(*(_broadcast(x, seen.shape, sizes) for x in rows))
    sides, matches = _bands(rows, sizes)
    facts = [*fits, *matches, _causal(rows, sizes), *sides]
    values, alike, whole, *found = (int(x) for x in torch.stack([x.long() for x in facts]).tolist())
    if not (values and alike and whole):
        _refuse(mask.detach(), seen)
    return _chosen(rows, sizes, found)


def _seen(mask: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """(batch or 1, heads or 1, rows or 1, keys or 1) bool: what is seen; where values are allowed ones."""
    shape = tuple(mask.shape)
    whole = (1,) * (4 - len(shape)) + shape
    if not 2 <= len(shape) <= 4 or any(size not in (1, wanted) for size, wanted in zip(whole, sizes)):
        raise InputError(f"attn_mask has shape {shape}, the attention {tuple(sizes)}")
    if mask.requires_grad:
        raise InputError(f"attn_mask of shape {shape} needs a gradient, and dash-attn has none for masks")
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        raise InputError(
            "attn_mask cannot be read while a CUDA graph is captured: give row_starts and row_ends to "
            "dash_attn.attention"
        )
    mask = mask.detach().reshape(whole)
    for dim in range(4):  # what was expanded is looked at once
        if whole[dim] > 1 and mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    if mask.dtype == torch.bool:
        return mask, torch.ones((), dtype=torch.bool, device=mask.device)
    if not mask.is_floating_point():
        raise InputError(f"attn_mask must have booleans or floats, got {mask.dtype}")
    seen = mask == 0
    return seen, seen | (mask == -torch.inf)


def _rows(seen: Tensor) -> _Rows:
    """From the first row that sees a key, as many as see it; ``seen`` is (batch, rows, keys)."""
    count = seen.sum(1)
    first = seen.contiguous().view(torch.uint8).argmax(1)  # of equal values the first
    return _Rows(first, first + count)


def _as_mask(rows: _Rows, seqlen_q: int) -> Tensor:
    """(batch, seqlen_q, keys) bool."""
    row = torch.arange(seqlen_q, device=rows.starts.device)[:, None]
    return (row >= rows.starts[:, None]) & (row < rows.ends[:, None])


def _broadcast(x: Tensor, shape: torch.Size, sizes: Sizes) -> Tensor:
    """(batch or 1, seqlen_k) of (batch or 1, keys or 1); a mask of one row is that of all rows."""
    x = x * sizes.seqlen_q if shape[2] == 1 else x
    return x.expand(-1, sizes.seqlen_k)


def _band_rows(
    sizes: Sizes, left: Tensor | int | None, right: Tensor | int | None, device: torch.device
) -> _Rows:
    """(1, seqlen_k): rows that see each key in a band; None: unbounded."""
    diagonal = torch.arange(sizes.seqlen_k, device=device)[None] - (sizes.seqlen_k - sizes.seqlen_q)
    none = torch.zeros_like(diagonal)
    starts = none if right is None else (diagonal - right).clamp(min=0)
    ends = none + sizes.seqlen_q if left is None else (diagonal + left + 1).clamp(max=sizes.seqlen_q)
    return _Rows(starts, ends)


def _bands(rows: _Rows, sizes: Sizes) -> tuple[list[Tensor], list[Tensor]]:
    """The narrowest sides of a band that shows all that is seen; for each of _SIDES whether that band shows
    no more."""
    diagonal = torch.arange(sizes.seqlen_k, device=rows.starts.device) - (sizes.seqlen_k - sizes.seqlen_q)
    some = rows.ends > rows.starts
    nothing = torch.full_like(rows.starts, -1)
    left = torch.where(some, rows.ends - 1 - diagonal, nothing).amax()
    right = torch.where(some, diagonal - rows.starts, nothing).amax()
    sides = {"left": left, "right": right}
    matches = []
    for name_left, name_right in _SIDES:
        a, b = (sides[x] if isinstance(x, str) else x for x in (name_left, name_right))
        starts, ends = _band_rows(sizes, a, b, rows.starts.device)
        there = (ends > starts).expand(rows.starts.shape)
        same = (there == some) & (~some | ((starts == rows.starts) & (ends == rows.ends)))
        valid = torch.stack([x >= 0 for x in (a, b) if isinstance(x, Tensor)] or [some.new_ones(())]).all()
        matches.append(same.all() & valid)
    return [left, right], matches


_SIDES: tuple[tuple[str | None, str | int | None], ...] = (
    (None, None), (None, 0), ("left", 0), (None, "right"), ("left", None), ("left", "right"),
)  # fmt: skip
"""Left and right sides of bands, the first that fits is taken: "left" and "right" are those of the mask."""


def _causal(rows: _Rows, sizes: Sizes) -> Tensor:
    """No row sees a later key."""
    starts, _ = _band_rows(sizes, None, 0, rows.starts.device)
    return ((rows.ends <= rows.starts) | (rows.starts >= starts)).all()


def _chosen(rows: _Rows, sizes: Sizes, found: list[int]) -> Intervals:
    """A band that is the mask; or intervals, beside the causal band if no row sees a later key."""
    *matches, causal, left, right = found
    sides = {"left": left, "right": right}
    for match, (a, b) in zip(matches, _SIDES, strict=True):
        if match:
            window = [sides[x] if isinstance(x, str) else x for x in (a, b)]
            return Intervals(Band(b == 0, *window))
    starts, ends = (
        x.expand(sizes.batch, -1).to(torch.int32, memory_format=torch.contiguous_format) for x in rows
    )
    return Intervals(Band(bool(causal)), starts, ends)


def _refuse(mask: Tensor, seen: Tensor) -> NoReturn:
    """Name the first value that does not fit."""
    what = f"attn_mask of shape {tuple(mask.shape)}"
    if mask.is_floating_point() and len(wrong := mask[(mask != 0) & (mask != -torch.inf)]):
        raise InputError(
            f"{what} holds {float(wrong[0])}: of additive masks dash-attn takes those of 0 and -inf"
        )
    if len(other := (seen != seen[:, :1]).nonzero()):
        sequence, head, row, key = other[0].tolist()
        raise InputError(
            f"{what} differs between heads 0 and {head} at row {row} and key {key} of sequence {sequence}: "
            "dash-attn takes one mask for all heads"
        )
    between = seen[:, 0].cummax(1).values & seen[:, 0].flip(1).cummax(1).values.flip(1) & ~seen[:, 0]
    sequence, key, row = between.transpose(1, 2).nonzero()[0].tolist()
    rows = seen[sequence, 0, :, key].nonzero()
    raise InputError(
        f"{what} shows key {key} of sequence {sequence} to row {int(rows[0])} and to row {int(rows[-1])}, "
        f"but not to row {row} between them: dash-attn takes masks in which each key has one interval of rows"
    )

"""Lengths and page numbers of calls over a cache: those on the CPU are checked, others are not looked at."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..backends.cached import first_key
from ..errors import InputError
from .lengths import packed_lengths

__all__ = ["check_tokens", "rows_of_q"]


def check_tokens(
    name: str,
    lengths: Tensor,
    more: int,
    table: Tensor,
    cache: Tensor,
    *,
    contiguous: bool,
    rows: int | Sequence[int],
    left: int,
) -> None:
    """Lengths and the numbers of pages that are read or written must be in range.

    Args:
        name: of the lengths.
        lengths: (batch,) int32, tokens before the call.
        more: tokens that are to be appended.
        table: (batch, most_pages) int32.
        cache: (pages, page_size, kv_heads, head_dim).
        contiguous: the table has the places of sequences, which are looked at wherever the lengths are.
        rows: of q, of every sequence or the same for all.
        left: how many keys before its own a row sees; -1: all. Pages before may hold any number.

    Raises:
        InputError: one is not; the message names it.
    """
    pages, size = cache.shape[:2]
    if lengths.device.type != "cpu":
        if not contiguous or table.device.type != "cpu":
            return
        # At worst every sequence uses its place, and is written to.
        lengths = torch.full((table.shape[0],), max(size - more, 0), dtype=torch.int32, device="cpu")
    room, found = size * table.shape[1], lengths.tolist()
    for at, length in enumerate(found):
        if length < 0:
            raise InputError(f"{name} must not be negative, got {length} at {at}")
        if length + more > room:
            new = f" and {more} new ones" if more else ""
            raise InputError(f"{name} has {length} at {at}{new}, but sequence {at} has room for {room} keys")
    if table.device.type != "cpu" or not size:
        return
    what = "cache_batch_idx" if contiguous else "page_table"
    used = []
    for length, n in zip(found, [rows] * len(found) if isinstance(rows, int) else rows):
        first = min(length, first_key(length + more, n, left))
        used.append(range(first // size, -(-(length + more) // size)))
    for at, (row, columns) in enumerate(zip(table.tolist(), used)):
        for column in columns:
            if not 0 <= row[column] < pages:
                where = at if contiguous else (at, column)
                there = f"k_cache has {pages}" if contiguous else f"there are {pages} pages"
                raise InputError(f"{what} has {row[column]} at {where}, {there}")
    if more:
        written = [range(length // size, columns.stop) for length, columns in zip(found, used)]
        _check_written(what, table.tolist(), used, written)


def _check_written(
    what: str, table: list[list[int]], used: Sequence[range], written: Sequence[range]
) -> None:
    """A page that tokens are written to must be that of one sequence, and once."""
    owners: dict[int, list[str]] = {}
    for at, (row, columns) in enumerate(zip(table, used)):
        for column in columns:
            owners.setdefault(row[column], []).append(f"({at}, {column})" if len(row) > 1 else str(at))
    for row, columns in zip(table, written):
        for column in columns:
            if len(mine := owners[row[column]]) > 1:
                raise InputError(
                    f"{what} has {row[column]} at {mine[0]} and at {mine[1]}: no place may be given twice "
                    "where tokens are appended"
                )


def rows_of_q(q: Tensor, cu_seqlens_q: Tensor | None, longest_q: int) -> int | tuple[int, ...]:
    """Rows of q, of every sequence or the same for all; where bounds are not on the CPU, of all together.

    Raises:
        InputError: bounds on the CPU do not fit q, or a sequence has more rows than ``longest_q`` (-1: any).
    """
    if cu_seqlens_q is None:
        if 0 <= longest_q < q.shape[1]:
            raise InputError(f"max_seqlen_q is {longest_q}, q has {q.shape[1]} rows per sequence")
        return q.shape[1]
    if cu_seqlens_q.device.type != "cpu":
        return q.shape[0]
    return packed_lengths("q", q, cu_seqlens_q, longest_q).seqlens

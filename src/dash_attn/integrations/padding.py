"""From a mask over tokens to the rows and bounds of a packed batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError

__all__ = ["MaskPacking", "check_mask_of_tokens", "packing_of"]


class MaskPacking(NamedTuple):
    """Which rows of a padded batch are tokens, and where their sequences begin.

    Attributes:
        rows_q, rows_k: (total,) int64, rows of the flattened batch.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32, on the CPU, where plans are made.
        holes: there is padding between two tokens of a sequence, so that columns are not distances.
        used_k: (batch,) int32 on the CPU: a row's queries are all there and see its first keys, so many. None
            if that is not so.
    """

    rows_q: Tensor
    rows_k: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    holes: bool
    used_k: Tensor | None = None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def check_mask_of_tokens(mask: Tensor, seqlen_q: int) -> None:
    """Refuse a mask of two dimensions that may be meant to be added to scores, or to say which row sees what.

    Raises:
        InputError: it is floating and has other values than 0 and 1, or no 1; or it is bool, and its rows may
            be queries as well as sequences.
    """
    shape = tuple(mask.shape)
    if mask.dtype == torch.bool and shape[0] == seqlen_q > 1:
        raise InputError(
            f"attention_mask of shape {shape} is bool, and the batch is as large as the {seqlen_q} queries: "
            "give integers, 0 for padding, if its rows are sequences; masks of queries are not supported"
        )
    if not mask.is_floating_point() or not mask.numel():
        return
    ones = mask == 1
    others = mask[~ones & (mask != 0)]
    if others.numel():
        raise InputError(
            f"attention_mask of shape {shape} is floating and has {others[0].item()}: only 0 for padding and "
            "1 are supported, no mask that is added to scores"
        )
    if not bool(ones.any()):
        raise InputError(
            f"attention_mask of shape {shape} is floating and has zeros only, which are padding here: give "
            "None if nothing is hidden"
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def packing_of(
    mask: Tensor, seqlen_q: int, *, keep_queries: bool = False, device: torch.device | str | None = None
) -> MaskPacking:
    """The packing of a mask as it is now. A mask on a GPU is read each time, which waits for the device.

    Args:
        mask: (batch, seqlen_k) bool or integers; 0 is padding, another number names a sequence of its row.
        seqlen_q: number of queries of a row. They belong to its last columns: with a key cache they are
            fewer than the columns.
        keep_queries: queries have nothing to do with columns; all of a row's see all of its tokens.
        device: of the rows; by default the mask's.

    Raises:
        InputError: the mask is too short, or packed sequences meet ``keep_queries``.

    >>> packing = packing_of(torch.tensor([[0, 1, 1], [1, 1, 2]]), 3)
    >>> packing.rows_k.tolist(), packing.cu_seqlens_k.tolist()
    ([1, 2, 3, 4, 5], [0, 2, 4, 5])
    """
    numbers = mask.cpu().long()
    if keep_queries and numbers.numel():
        there = numbers != 0
        first = numbers.gather(1, there.int().argmax(1, keepdim=True))  # of each row
        if bool((there & (numbers != first)).any()):
            raise InputError(
                f"packed sequences of {mask.shape[1]} keys with {seqlen_q} queries that see all keys"
            )
    packing = _every_query(numbers, seqlen_q) if keep_queries else _tokens(numbers, seqlen_q)
    rows_q, rows_k = (rows.to(mask.device if device is None else device) for rows in packing[:2])
    return packing._replace(rows_q=rows_q, rows_k=rows_k)


def _tokens(numbers: Tensor, seqlen_q: int) -> MaskPacking:
    """Queries and keys of every token."""
    seqlen_k = numbers.shape[1]
    if seqlen_q > seqlen_k:
        raise InputError(f"attention_mask covers {seqlen_k} keys, fewer than the {seqlen_q} queries")
    row, column = numbers.nonzero(as_tuple=True)
    names = torch.stack([row, numbers[row, column]])
    _, sequence, counts_k = names.unique_consecutive(dim=1, return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
    has_query = column >= seqlen_k - seqlen_q
    counts_q = torch.bincount(sequence[has_query], minlength=len(counts_k))
    rows_q = row * seqlen_q + column - (seqlen_k - seqlen_q)
    gaps = (column.diff() != 1) & (sequence.diff() == 0)
    return MaskPacking(
        rows_q[has_query], row * seqlen_k + column, _bounds(counts_q), _bounds(counts_k), bool(gaps.any())
    )


def _every_query(numbers: Tensor, seqlen_q: int) -> MaskPacking:
    """Keys of every token, and all queries."""
    batch = len(numbers)
    rows_k = numbers.flatten().nonzero().squeeze(1)
    there = numbers != 0
    counts_q, counts_k = torch.full((batch,), seqlen_q, device=numbers.device), there.sum(1)
    rows_q = torch.arange(batch * seqlen_q, device=numbers.device)
    first_ones = not bool((there[:, 1:] & ~there[:, :-1]).any())
    used_k = counts_k.int() if first_ones else None
    return MaskPacking(rows_q, rows_k, _bounds(counts_q), _bounds(counts_k), False, used_k)


def _bounds(counts: Tensor) -> Tensor:
    counts = counts if len(counts) else counts.new_zeros(1)  # at least one sequence, if only an empty one
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()

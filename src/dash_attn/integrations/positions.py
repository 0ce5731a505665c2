"""Packed sequences told apart by ``position_ids``.

transformers looks for them when it makes a mask, but only without a key cache, and a model's cache is on
unless it is turned off. So the attention function looks again.

Positions on a GPU are read once for all layers of a forward, which waits for the device. Under
``torch.compile`` nothing can be read: the device checks that the mask has the sequences already.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..ops.host_reads import HostReads

__all__ = ["Sizes", "assert_separate", "host_positions", "separate"]


class Sizes(NamedTuple):
    """Rows of the batch, and queries and keys per row. The queries are the last columns of the keys."""

    batch: int
    seqlen_q: int
    seqlen_k: int


_READS = HostReads(lambda _, position_ids: position_ids.cpu().long())


def host_positions(position_ids: Tensor) -> Tensor:
    """As int64 on the CPU; what is on a GPU is read once, until it is written to."""
    return _READS.of("position_ids", position_ids)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def separate(position_ids: Tensor, numbers: Tensor | None, sizes: Sizes) -> Tensor | None:
    """The number of every key's sequence, if ``position_ids`` tell more sequences apart than ``numbers`` do.

    A sequence begins where positions fall, and at a 0 behind another one. Where they grow by more than 1, or
    stay what they are, the sequence goes on, as with transformers' FlashAttention.

    Args:
        position_ids: (batch or 1, seqlen_q) or (seqlen_q,) integers.
        numbers: (batch, seqlen_k) integers, on any device: 0 is padding, another number names a sequence of
            its row. None: every row is one sequence without padding.
        sizes: of the batch.

    Returns:
        (batch, seqlen_k) int64 on the CPU, in the meaning of ``numbers``; None if ``numbers`` stand.

    Raises:
        InputError: there are cached keys, and the queries are not all the continuation of them: which cached
            key belongs to which sequence is then unknown. Or positions on a GPU would have to be read while
            a CUDA graph is captured.

    >>> separate(torch.tensor([[0, 1, 2, 0, 1]]), None, Sizes(1, 5, 5)).diff().tolist()
    [[0, 0, 1, 0]]
    """
    positions = host_positions(position_ids).reshape(-1, sizes.seqlen_q)
    if numbers is None and sizes.seqlen_q == sizes.seqlen_k and not bool(_begins(positions).any()):
        return None
    positions = positions.expand(sizes.batch, -1)
    tokens = torch.ones(sizes.batch, sizes.seqlen_k, device="cpu") if numbers is None else numbers.cpu()
    tokens = tokens.long()
    cached = sizes.seqlen_k - sizes.seqlen_q
    row, column = tokens[:, cached:].nonzero(as_tuple=True)
    position = positions[row, column]
    begins = _begins(position) & (row.diff() == 0)
    if cached:
        _check_continued(tokens[:, :cached], row, position, begins)
        return None
    if not bool(begins.any()):
        return None
    sequence = torch.nn.functional.pad(begins.long().cumsum(0), (1, 0))
    found = torch.zeros_like(tokens)
    found[row, column] = tokens[row, column] * (len(row) + 1) + sequence
    return found


def _begins(positions: Tensor) -> Tensor:
    """Whether a sequence begins at each position but the first, along the last dimension."""
    before, position = positions[..., :-1], positions[..., 1:]
    return (position < before) | ((position == 0) & (before == 0))


def _check_continued(cached: Tensor, row: Tensor, position: Tensor, begins: Tensor) -> None:
    """Raise unless the queries of every row continue all the row's cached tokens."""
    if bool(begins.any()):
        at = int(begins.nonzero()[0])
        raise InputError(
            f"position_ids go from {int(position[at])} to {int(position[at + 1])} in row {int(row[at])}: "
            f"packed sequences beside {cached.shape[1]} cached keys are not supported by 'dash' attention"
        )
    before = (cached != 0).sum(1)[row]
    if bool((position < before).any()):
        at = int((position < before).nonzero()[0])
        raise InputError(
            f"position_ids have {int(position[at])} in row {int(row[at])} after {int(before[at])} cached "
            "tokens: not all of these belong to the sequence of the query, and 'dash' attention cannot know "
            "which do. The cache of packed sequences cannot be continued"
        )


def assert_separate(position_ids: Tensor, numbers: Tensor | None, sizes: Sizes) -> None:
    """Let the device check that ``numbers`` have all the sequences; arguments as for :func:`separate`.

    For compiled code, which cannot wait for an answer: a failed check is a RuntimeError on the CPU and a
    device-side assertion on a GPU.
    """
    cached = sizes.seqlen_k - sizes.seqlen_q
    positions = position_ids.reshape(-1, sizes.seqlen_q)
    continued, follows = ~_begins(positions), positions[:, :1] >= cached
    if numbers is not None:
        mine = numbers[:, cached:]
        continued = continued | (mine[:, 1:] == 0) | (mine[:, :-1] == 0)
        if not cached:
            continued = continued | (mine.diff(dim=1) != 0)
        before = (numbers[:, :cached] != 0).sum(1, keepdim=True)
        follows = (positions[:, :1] >= before) | (mine[:, :1] == 0)
    torch._assert_async(
        continued.all() & follows.all(),
        "position_ids pack sequences that the mask of 'dash' attention does not have, or beside cached keys; "
        "under torch.compile call the model with use_cache=False; one whose own mask joins such sequences "
        "(gpt-oss, OPT, BERT as a decoder) without torch.compile",
    )

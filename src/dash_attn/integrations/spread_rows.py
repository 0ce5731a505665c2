"""Attention of transformers inside ``dash_attn.distributed.context``: tensors are the rows of one rank.

What a model believes of its rows is wrong there: they are not all, and under the layout "zigzag" they do
not follow each other. transformers then takes the jump of ``position_ids`` for another packed sequence. So
only masks are taken that are exactly what rows of this rank look like.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..ops.spread import Spread
from .keywords import refuse_given
from .positions import Sizes, host_positions

__all__ = ["INSIDE", "Layer", "Read", "attend_spread", "check_read", "refuse_inside"]

INSIDE = "inside distributed.context"


class Read(NamedTuple):
    """What a mask function was found to say of the rows of this rank.

    Attributes:
        sizes: rows of the batch, queries, and keys that a layer passes.
        sequences: (batch, keys), the number of every key's sequence; None: there is one per row.
        padded: some token is padding.
        local_size: of a window or a chunk, or None.
        causal: no later columns are seen.
        config: of the model, or None.
    """

    sizes: Sizes
    sequences: Tensor | None
    padded: bool
    local_size: int | None
    causal: bool
    config: Any


def check_read(spread: Spread, read: Read) -> tuple[int, int]:
    """The window of whole sequences, -1: unbounded.

    Raises:
        InputError: the mask is another one than those that ranks can share.
    """
    sizes, local_size = read.sizes, read.local_size
    _check_lengths(sizes)
    if read.padded:
        raise InputError(
            f"attention_mask with padding cannot be shared by ranks: {INSIDE} all rows must be tokens"
        )
    if local_size is not None and not read.causal:
        raise InputError(f"a bidirectional mask with window {local_size} cannot be shared by ranks: {INSIDE}")
    if getattr(read.config, "attention_chunk_size", None) is not None:
        chunk = read.config.attention_chunk_size
        raise InputError(f"attention_chunk_size {chunk}: chunks cannot be shared by ranks, {INSIDE}")
    if read.sequences is not None:
        jumps = spread.positions(sizes.seqlen_q).diff() != 1
        expected = torch.nn.functional.pad(jumps.long().cumsum(0), (1, 0))
        found = read.sequences.cpu().long()
        if not torch.equal(found - found[:, :1], expected.expand_as(found)):
            raise InputError(
                "position_ids, or the model's mask, pack several sequences into a row: they cannot be shared "
                f"by ranks, {INSIDE}; use distributed.attention_varlen"
            )
    return _window(local_size, sizes.seqlen_q * spread.ranks)


class Layer(NamedTuple):
    """What a layer asks for.

    Attributes:
        mask: (causal, local_size) of the model's mask, None if it made none.
        causal: counts without a mask.
        sliding_window: tokens a row sees, itself included, or None.
        position_ids: of the rows, or None.
        how: softmax_scale, softcap, learnable_sink and dropout_p.
    """

    mask: tuple[bool, int | None] | None
    causal: bool
    sliding_window: int | None
    position_ids: Tensor | None
    how: dict[str, Any]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_spread(spread: Spread, q: Tensor, k: Tensor, v: Tensor, layer_of: Callable[[], Layer]) -> Tensor:
    """Attention over the group; tensors are (batch, rows of this rank, heads, head_dim).

    Raises:
        InputError: the call cannot be shared; or ``position_ids`` are not those of this rank.
    """
    sizes = Sizes(q.shape[0], q.shape[1], k.shape[1])
    with spread.telling():  # also where a mask says how rows are spread, and no context does
        layer = layer_of()
        _check_lengths(sizes)
        causal, local_size = layer.mask or (layer.causal, layer.sliding_window)
        if local_size != layer.sliding_window:
            raise InputError(
                f"sliding_window {layer.sliding_window}, but the model made this layer's mask with a window "
                f"or chunks of {local_size}: {INSIDE} both must be the same"
            )
        if local_size is not None and not causal:
            raise InputError(f"sliding_window {local_size} without a causal mask cannot be shared: {INSIDE}")
        if layer.position_ids is not None:
            _check_positions(spread, layer.position_ids, sizes)
        window = _window(local_size, sizes.seqlen_q * spread.ranks)
    return spread.attend(q, k, v, causal=causal, window=window, **layer.how)


refuse_inside = partial(refuse_given, INSIDE)
"""Of what cannot be shared."""


def _check_lengths(sizes: Sizes) -> None:
    if sizes.seqlen_q != sizes.seqlen_k:
        raise InputError(
            f"{sizes.seqlen_q} queries and {sizes.seqlen_k} keys on this rank: only self-attention of whole "
            f"sequences can be shared by ranks, {INSIDE} there is no key cache and no cross-attention"
        )


def _window(local_size: int | None, seqlen: int) -> tuple[int, int]:
    if local_size is None:
        return -1, -1
    if local_size < 1:
        raise InputError(f"sliding_window must be None or >= 1, got {local_size!r}")
    return (local_size - 1, 0) if local_size < seqlen else (-1, -1)


def _check_positions(spread: Spread, position_ids: Tensor, sizes: Sizes) -> None:
    """Raise unless they are those of this rank. On a GPU they are read once for all layers of a forward."""
    shape = tuple(position_ids.shape)
    if len(shape) > 2 or shape[-1:] != (sizes.seqlen_q,) or shape[:-1] not in ((), (1,), (sizes.batch,)):
        raise InputError(
            f"position_ids have shape {shape}, the rows of this rank (batch, seqlen) {tuple(sizes[:2])}: "
            f"{INSIDE} they must be positions(...), as distributed.positions gives them"
        )
    found = host_positions(position_ids).reshape(-1, sizes.seqlen_q)
    expected = spread.positions(sizes.seqlen_q).expand_as(found)
    wrong = (found != expected).nonzero()
    if len(wrong):
        row, at = wrong[0].tolist()
        raise InputError(
            f"position_ids have {int(found[row, at])} at row {at}, where the position on this rank is "
            f"{int(expected[row, at])}: {INSIDE} pass position_ids=distributed.positions(...) of the "
            "context's group and layout"
        )

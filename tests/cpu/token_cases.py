"""Padded and packed batches of 33 tokens."""

from __future__ import annotations

import torch

LENGTHS = (20, 1, 12)
PACKED = torch.cat([torch.arange(n) for n in LENGTHS])[None]


def padding_of(side):
    """A mask of rows of 33, 20 and 5 tokens; no mask without a side."""
    if side is None:
        return None
    mask = torch.zeros(3, 33, dtype=torch.long)
    for row, tokens in enumerate((33, 20, 5)):
        mask[row, slice(0, tokens) if side == "right" else slice(33 - tokens, None)] = 1
    return mask

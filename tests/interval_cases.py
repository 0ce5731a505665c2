"""Intervals of rows that see each key: documents, prefixes and trees, and the mask that they mean."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from dash_attn.backends.base import NO_AUX, AuxTensors, RowIntervals
from dash_attn.backends.cpu.masks import hidden_elements
from dash_attn.problem import Mask


def ends_of_documents(*lengths: int) -> Tensor:
    """``row_ends`` of documents that stand one after the other in a sequence; with a causal mask."""
    ends = torch.tensor(lengths).cumsum(0)
    return ends.repeat_interleave(torch.tensor(lengths)).int()


def starts_of_prefix(prefix: int, length: int) -> Tensor:
    """``row_starts`` of a prefix whose tokens all see one another, in front of causal ones; no mask."""
    starts = torch.arange(length, dtype=torch.int32)
    starts[:prefix] = 0
    return starts


def random_tree(length: int, seed: int) -> tuple[Tensor, Tensor]:
    """``row_ends`` of a random tree in depth-first order, and (length, length) bool: column is an ancestor of
    row, or row itself. Built from parents, one without the other."""
    rng = random.Random(seed)
    path, parents = [0], [-1]
    for node in range(1, length):
        del path[rng.randint(1, len(path)) :]
        parents.append(path[-1])
        path.append(node)
    seen = torch.zeros(length, length, dtype=torch.bool)
    ends = torch.arange(1, length + 1, dtype=torch.int32)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] = seen[parent]
        seen[node, node] = True
        while parent >= 0:
            ends[parent] = node + 1
            parent = parents[parent]
    return ends, seen


def random_intervals(keys: int, rows: int, seed: int) -> RowIntervals:
    """Also such that hold no row, and such that begin before the first row or end behind the last one."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-rows // 2 - 1, 2 * rows + 2, (2, keys), generator=generator)
    starts, ends = drawn.sort(0).values.int()
    flipped = torch.rand(keys, generator=generator) < 0.1
    starts, ends = torch.where(flipped, ends, starts), torch.where(flipped, starts, ends)
    ends[torch.rand(keys, generator=generator) < 0.2] = 2**31 - 1
    return RowIntervals(starts.contiguous(), ends.contiguous())


def seen_elements(rows: RowIntervals, mask: Mask, seqlen_q: int) -> Tensor:
    """(seqlen_q, seqlen_k) bool."""
    seqlen_k = len(rows.starts)
    row = torch.arange(seqlen_q)[:, None]
    band = ~hidden_elements(mask, torch.arange(seqlen_q) + seqlen_k - seqlen_q, seqlen_k)
    return band & (row >= rows.starts) & (row < rows.ends)


def beside(rows: RowIntervals, aux: AuxTensors = NO_AUX) -> AuxTensors:
    """The intervals as backends are given them."""
    return aux._replace(row_starts=rows.starts, row_ends=rows.ends)

"""Launching the forward: one program per tile of rows, or one per tile and segment of keys.

Which of both is placement: shapes and the number of SMs decide it, and it decides no bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...schedule import ForwardNumerics
from ..cuda.limits import MOST_GRID
from ..cuda.multiprocessors import multiprocessors
from .forward_kernel import forward_kernel
from .segments_kernel import fold_segments_kernel
from .strides import lse_strides, strides_of
from .tiles import FOLDED_ROWS, Shape

__all__ = ["Launch", "parts_of"]

MOST_WORDS = 2**26
"""Of the sums of single segments, in fp32: 268 MB."""


def processors(device: torch.device) -> int:
    """SMs. On a CPU the interpreter runs one program after the other: as if there were none."""
    return multiprocessors(device) if device.type == "cuda" else 0


def parts_of(programs: int, segments: int, words: int, device: torch.device) -> int:
    """How many programs share the segments of a tile of rows; 1: it has all of them to itself.

    Args:
        programs: tiles of rows, of all heads.
        segments: no tile sees keys of more.
        words: what one segment leaves of all rows.
        device: with more programs than half its SMs, a split would gain one round at most.
    """
    few = segments > 1 and 2 * programs <= processors(device)
    return segments if few and segments <= MOST_GRID and segments * words <= MOST_WORDS else 1


class Launch(NamedTuple):
    """What ``forward_kernel`` is given, but for where results go.

    Attributes:
        read: q, k and v.
        aux: sink, slopes, seed, and the intervals of rows.
        places: the table, and lengths and bounds on the device.
        tiles: of rows.
        group: q heads per kv head.
        sides: of the mask.
        batches: how far apart slopes and intervals of two sequences are.
        of_scores: factors, threshold, and the origin.
        cache: ``batch``, ``seqlen_cached``, ``total_q``, ``most``, ``size`` and ``number``.
        numerics, shape: tiles and segments.
        options: warps and stages.
        head: head dims.
        variant: flags of the compiler.
    """

    read: tuple[Tensor, Tensor, Tensor]
    aux: tuple[Tensor, ...]
    places: tuple[Tensor, Tensor, Tensor]
    tiles: int
    group: int
    sides: tuple[int, int]
    batches: tuple[int, int]
    of_scores: tuple[float, ...]
    cache: tuple[int, ...]
    numerics: ForwardNumerics
    shape: Shape
    options: dict[str, Any]
    head: dict[str, int]
    variant: dict[str, bool]

    def __call__(self, programs: int, segments: int, out: Tensor, lse: Tensor) -> None:
        """Write out and lse. See :func:`parts_of`."""
        parts = parts_of(programs, segments, out.numel() + 2 * lse.numel(), out.device)
        if parts == 1:
            self._forward((programs,), out, lse, lse, SPLIT=False, SINK=self.variant["SINK"])
            return
        *rows, columns = out.shape
        sums = torch.empty((*rows, parts, columns), dtype=torch.float32, device=out.device)
        stats = torch.empty((*lse.shape, parts, 2), dtype=torch.float32, device=out.device)
        self._forward((programs, parts), sums[..., 0, :], stats, lse, SPLIT=True, SINK=False)
        self._fold(programs, parts, sums[..., 0, :], stats, out, lse)

    def _forward(
        self, grid: tuple[int, ...], out: Tensor, stats: Tensor, lse: Tensor, **variant: bool
    ) -> None:
        """``stats`` is lse itself, or has room for all segments at each of its places."""
        numerics = self.numerics
        forward_kernel[grid](
            *self.read, out, stats, *self.aux, *self.places,
            *(stride for x in (*self.read, out) for stride in strides_of(x)), *lse_strides(lse),
            self.tiles, self.group, *self.sides, *self.batches, *self.of_scores, *self.cache,
            **self.head, **self.variant | variant,
            ROWS=self.shape.rows, TILE=numerics.tile, SEGMENT=numerics.segment, KEEP=numerics.keep,
            ROOM=numerics.room, **self.options,
        )  # fmt: skip

    def _fold(self, programs: int, parts: int, sums: Tensor, stats: Tensor, out: Tensor, lse: Tensor) -> None:
        batch, seqlen_cached, total_q, most, size, _ = self.cache
        variant = {name: self.variant[name] for name in ("SINK", "DROPOUT", "CACHED")}
        head = {name: self.head[name] for name in ("HEAD_DIM_V", "BLOCK_DV", "REST_DV")}
        rescale = self.of_scores[3]
        fold_segments_kernel[(programs, self.shape.rows // FOLDED_ROWS)](
            sums, stats, out, lse, self.aux[0], *self.places,
            *strides_of(sums), *strides_of(out), *lse_strides(lse),
            parts, self.tiles, self.group, *self.sides, rescale, batch, seqlen_cached, total_q, most * size,
            **variant, **head, TILE_ROWS=self.shape.rows, ROWS=FOLDED_ROWS, SEGMENT=self.numerics.segment,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip

"""What the blocks of all kernels find out about their sequence."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..device import plan_view, ptx
from ..device.ring import Ring
from .config import GROUP_TILES, SpreadConfig


class PowerRing(Ring):
    """A power of two of stages: half of the instructions, where their latency counts."""

    def stage(self, n):
        return n & self.stages - 1

    def phase(self, n):
        return n >> self.stages.bit_length() - 1 & 1


@dataclass(frozen=True)
class Rings:
    """v, p: V and P of groups of tiles; s: scores of tiles."""

    v: PowerRing
    s: PowerRing
    p: PowerRing


class Shared(NamedTuple):
    """Shared memory of a block of `Spread`. A place of P is that of a tile of a group.

    Attributes:
        v: tiles of V, 32 columns of them.
        scores: (word, slot), rows as the workspace has them.
        p: (4, lane, 8, place), words as a thread multiplies them.
        numbers: (4, lane, place), of a thread's two rows: what O is multiplied by before, and sums of P.
        rises: (place,), 0 if all rows are multiplied by 1.
        maxima: (16, tile), of rows after each tile, from the last tile of the segment on.
    """

    v: Any
    scores: Any
    p: Any
    numbers: Any
    rises: Any
    maxima: Any


def begin() -> None:
    """Wait for the kernel before, then let the next one come.

    In this order: whoever starts later finds everything done that came before the kernel before it. So no
    more than two kernels of a stream are under way, and none finds old values in its L1 cache.
    """
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def sequence_of(c: SpreadConfig, memory, numbers, sequence: Int32, head: Int32):
    """What a sequence's only q tile is: words as `CachedMma` has them, and segments."""
    group = numbers.group
    seqlen_q = cute.size(memory.q, mode=[1]) // group
    rows, keys = seqlen_q * group, numbers.most_pages * numbers.page_size
    seqlen_k = cutlass.min(cutlass.max(ptx.load_acquire(memory.lengths.iterator + sequence), 0), keys)
    shift = seqlen_k - seqlen_q
    low, high = Int32(-plan_view.UNBOUNDED), Int32(plan_view.UNBOUNDED)
    if numbers.left >= 0:
        low = shift - numbers.left
    if numbers.right >= 0:
        high = shift + numbers.right
    kv_first = cutlass.max(low, 0) // c.tile_n
    last = cutlass.min(seqlen_q - 1 + high, seqlen_k - 1)
    kv_last = Int32(-1)
    if last >= 0:
        kv_last = last // c.tile_n
    if kv_last < kv_first:
        kv_first, kv_last = Int32(0), Int32(-1)
    per_segment, zero = c.segment // c.tile_n, Int32(0)
    words = (
        Int32(1), head, kv_first, kv_last, low, high, seqlen_k, rows, zero, group, zero, zero, sequence, zero,
        zero,
    )  # fmt: skip
    return SimpleNamespace(
        words=words, seqlen_k=seqlen_k, rows=rows, kv_first=kv_first, kv_last=kv_last,
        segment_first=kv_first // per_segment, segment_last=cutlass.max(kv_last, 0) // per_segment,
        first_tile=(sequence * numbers.kv_heads + head) * numbers.tiles,
    )  # fmt: skip


def groups_of(tiles):
    """How many groups so many tiles are."""
    return (tiles + GROUP_TILES - 1) // GROUP_TILES


def place_in_scores(c: SpreadConfig, row, j: int):
    """Words before this thread's two of eight columns number j of a row. Rows are moved so that threads of
    four rows read from all banks."""
    return row * c.tile_n + (j ^ (row & 3)) * 8 + cute.arch.lane_idx() % 4 * 2

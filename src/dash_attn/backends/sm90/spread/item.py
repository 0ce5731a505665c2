"""What the blocks of all kernels find out about their sequence."""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..device import plan_view, ptx
from ..forward.config import WARP_ROWS
from .config import SpreadConfig


def begin() -> None:
    """Wait for the kernel before, then let the next one come.

    In this order: whoever starts later finds everything done that came before the kernel before it. So no
    more than two kernels of a stream are under way, and none finds old values in its L1 cache.
    """
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def sequence_of(c: SpreadConfig, memory, numbers, sequence: Int32, head: Int32):
    """What a sequence's only q tile is: words as `CachedMma` has them, segments, warps that have rows."""
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
        warps=(rows + WARP_ROWS - 1) // WARP_ROWS,
        first_tile=(sequence * numbers.kv_heads + head) * numbers.tiles,
    )  # fmt: skip


def threads_of(c: SpreadConfig, tensor, words_per_warp: int, place, warp):
    """(4, vectors): this lane's vectors of four words of a warp's part of a workspace."""
    start = cutlass.Int64(place) * words_per_warp + warp * words_per_warp + cute.arch.lane_idx() * 4
    layout = cute.make_layout((4, words_per_warp // 128), stride=(1, 128))
    return cute.make_tensor(tensor.iterator + cute.assume(start, divby=4), layout)

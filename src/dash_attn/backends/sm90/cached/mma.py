"""The MMA warpgroups of the forward over a cache: rows are those of all q heads of a kv head."""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..device import registers
from ..device.ring import arrive
from ..forward.config import ROWS
from ..forward.exact import inverse, lse_of, row_sum, with_sink, without_sign
from ..forward.item import Info
from ..forward.mma import MmaRole
from ..forward.softmax import Softmax
from .config import CachedConfig

GROUP = Info.tma_row
"""The word of an item that says how many q heads share a kv head."""


class CachedSoftmax(Softmax):
    def _position(self, words, row):
        return row // words[GROUP]


class CachedMma(MmaRole):
    def __init__(self, config: CachedConfig, dtype):
        super().__init__(config, dtype)
        self.softmax = CachedSoftmax(config, dtype)

    def _let_go(self, rings, group, n_item: Int32) -> None:
        arrive(rings.q.empty_of(n_item))

    def _item(self, words, group):
        c, heads = self.config, words[GROUP]
        top_row, last_key = words[Info.row] + ROWS * group, words[Info.seqlen_k] - 1
        bottom_row = cutlass.min(top_row + ROWS, words[Info.seqlen_q]) - 1
        top, bottom = top_row // heads, bottom_row // heads
        seen_to = cutlass.min(bottom + words[Info.high], last_key)
        last = cutlass.min(cutlass.max(seen_to + c.tile_n, 0) // c.tile_n - 1, words[Info.kv_last])
        whole_from = (top_row + ROWS - 1) // heads + words[Info.low]
        whole_to = cutlass.min(top + words[Info.high], last_key) - (c.tile_n - 1)
        return SimpleNamespace(
            first=cutlass.max(cutlass.max(top + words[Info.low], 0) // c.tile_n, words[Info.kv_first]),
            last=cutlass.select_(bottom_row < top_row, Int32(-1), last),
            first_whole=(cutlass.max(whole_from, 0) + c.tile_n - 1) // c.tile_n,
            last_whole=(cutlass.max(whole_to, -c.tile_n) + c.tile_n) // c.tile_n - 1,
        )  # fmt: skip

    @cute.jit
    def _finish(self, t, memory, shared, info, stage) -> None:
        """Divide, write LSE and O: rows lie apart in memory, so that registers are stored."""
        lane, vectors = t.tidx % 32, cute.size(t.acc_O) // 4
        batch, kv_head, rows = info[Info.batch], info[Info.q_head], info[Info.seqlen_q]
        for half in cutlass.range_constexpr(2):
            row = info[Info.row] + ROWS * t.group + t.tidx // 32 * 16 + lane // 4 + 8 * half
            score = memory.sink[kv_head, row % info[GROUP]]
            maximum, total, factor = with_sink(t.maximum[half], row_sum(t.total[half]), score)
            empty, lse = total == Float32(0.0), lse_of(maximum, total)
            at = info[Info.row_first] + cutlass.min(row, rows - 1)
            if (lane % 4 == 0) & (row < rows):
                memory.lse[batch, kv_head, at] = cutlass.select_(empty, -Float32.inf, lse)
            factor = factor * inverse(total)
            values = cute.make_rmem_tensor((2, vectors), Float32)
            for v in cutlass.range_constexpr(vectors):
                for e in cutlass.range_constexpr(2):
                    values[e, v] = without_sign(t.acc_O[4 * v + 2 * half + e], factor)
            converted = registers.converted_rows(values.load(), vectors, self.dtype)
            line = memory.out[batch, at, kv_head, None]
            registers.store_rows(converted, line, lane, row < rows, cute.size(memory.out, mode=[3]))

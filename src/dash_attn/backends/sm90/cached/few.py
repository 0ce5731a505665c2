"""The MMA warpgroup of blocks that have one, for tiles that mostly have few rows: in decoding, as many as q
heads share a kv head.

Of a tile's 64 rows a warp has 16, and a thread two, 8 apart. Rows that do not exist cost nothing where a warp
has no others, or all of its threads no other second row. No row looks at another, so no bit depends on it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..forward.config import WARP_ROWS
from ..forward.item import Info
from ..forward.mma import MmaRole
from .config import CachedConfig
from .mma import CachedMma, CachedSoftmax

APART = WARP_ROWS // 2


class FewSoftmax(CachedSoftmax):
    """`t.rows` is what `FewMma._rows` says."""

    @cute.jit
    def _probabilities(self, t, shifts, sums, pairs, rows: cutlass.Constexpr[int] = 2) -> None:
        """As in `Softmax`. The sums of rows that do not exist are 0, so nobody looks for their maxima."""
        sums.fill(0.0)
        if t.rows[0] > APART:
            CachedSoftmax._probabilities(self, t, shifts, sums, pairs, rows)
        elif t.rows[0] > 0:
            CachedSoftmax._probabilities(self, t, shifts, sums, pairs, 1)
        for half in cutlass.range_constexpr(rows):
            exists = t.tidx % 32 // 4 + APART * half < t.rows[0]
            sums[half] = cutlass.select_(exists, sums[half], Float32(0.0))

    def _first_maximum(self, t, tile, half, maximum):
        return maximum  # the sums of others are left out above

    @cute.jit
    def _largest(self, t, rows: cutlass.Constexpr[int] = 2):
        """As in `Softmax`, and 0 where nothing is computed."""
        found = cute.make_rmem_tensor(2, Float32)
        found.fill(0.0)
        if t.rows[0] > APART:
            self._put_largest(t, found, rows)
        elif t.rows[0] > 0:
            self._put_largest(t, found, 1)
        return found

    def _put_largest(self, t, found, rows: int) -> None:
        for half, value in enumerate(CachedSoftmax._largest(self, t, rows)):
            found[half] = value

    @cute.jit
    def _capped_probabilities(self, t, shifts, sums, pairs) -> None:
        """Of scores that have been capped: see `begin_cap`."""
        self._probabilities(t, shifts, sums, pairs)

    def begin_cap(self, t, cut) -> None:
        """tanh never waits: few rows wait for products, and not for instructions."""
        self.cap(t)

    @cute.jit
    def cap(self, t) -> None:
        if cutlass.const_expr(self.config.softcap):
            first_rows = [4 * j + e for j in range(self.config.tile_n // 8) for e in range(2)]
            if t.rows[0] > APART:
                self._cap(t, range(cute.size(t.acc_S)))
            elif t.rows[0] > 0:
                self._cap(t, first_rows)


class FewMma(CachedMma):
    def __init__(self, config: CachedConfig, dtype):
        super().__init__(config, dtype)
        self.softmax = FewSoftmax(config, dtype)

    def segment(self, t, rings, words, info, stage, n_first: Int32, begin: Int32, end: Int32) -> Int32:
        t.rows[0] = self._rows(t, words)
        return super().segment(t, rings, words, info, stage, n_first, begin, end)

    @cute.jit
    def _leave(self, t, partial, words) -> None:
        if self._rows(t, words) > 0:
            MmaRole._leave(self, t, partial, words)

    def _rows(self, t, words) -> Int32:
        """How many rows of an item exist from this warp's first one on; less than 1 if none does."""
        rows = words[Info.seqlen_q] - words[Info.row] - WARP_ROWS * (t.tidx // 32)
        return cute.arch.make_warp_uniform(rows)

"""P of a tile in registers, with maxima and sums of its rows: schedule/forward.py has the rule."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .config import ROWS, ForwardConfig
from .exact import finite, fma, packed
from .item import Info

CHAINS = [(half, e) for half in range(2) for e in range(2)]
"""Of sums and maxima: both rows of a thread, two each."""


def multiply_rows(acc, factors) -> None:
    """Multiply this thread's two rows of an accumulator."""
    rows = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, cute.size(acc) // 4)))
    for half in range(2):
        row = rows[None, half, None]
        row.store(row.load() * factors[half])


class Softmax:
    """Of one warpgroup, whose tensors `t` are those of `MmaRole`."""

    def __init__(self, config: ForwardConfig, dtype):
        self.config, self.dtype = config, dtype

    @cute.jit
    def next_tile(self, t) -> None:
        """P of another tile with the maxima that rows have, or with new ones where sums are large."""
        sums, shifts, factors = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
        shifts[0], shifts[1] = -t.maximum[0], -t.maximum[1]
        factors.fill(1.0)
        self._probabilities(t, shifts, sums)
        few = (sums[0] <= self.config.enough) & (sums[1] <= self.config.enough)  # no NaN, too
        if ~cute.arch.vote_all_sync(few):
            self._raise(t, sums, factors)
        self._add(t, sums, factors)

    def _add(self, t, sums, factors) -> None:
        for half in range(2):
            t.total[half] = fma(t.total[half], factors[half], sums[half])

    def _probabilities(self, t, shifts, sums) -> None:
        """P, and this thread's sums of a tile."""
        # Four chains, so that no instruction waits for the one before it.
        totals, pairs = dict.fromkeys(CHAINS, Float32(0.0)), cute.recast_tensor(t.p, Int32)
        for j in range(self.config.tile_n // 8):
            values = {}
            for half, e in CHAINS:
                exponent = fma(t.acc_S[4 * j + 2 * half + e], t.scale_log2, shifts[half])
                values[half, e] = cute.math.exp2(exponent, fastmath=True)
                totals[half, e] = totals[half, e] + values[half, e]
            for half in range(2):
                pairs[2 * j + half] = packed(values[half, 0], values[half, 1], self.dtype)
        for half in range(2):
            sums[half] = totals[half, 0] + totals[half, 1]

    @cute.jit
    def first_tile(self, t) -> None:
        """P of the first tile of a segment; the maxima are those of this tile."""
        sums, shifts = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        found = self._maxima(t)
        for half in cutlass.range_constexpr(2):
            t.maximum[half] = found[half]
            shifts[half] = -finite(found[half])
        self._probabilities(t, shifts, sums)
        for half in cutlass.range_constexpr(2):
            t.total[half] = sums[half]

    @cute.jit
    def _raise(self, t, sums, factors) -> None:
        """P with new maxima of those rows whose sums with the old ones are large; O multiplied by what
        this takes, which is left in `factors` for the sums."""
        shifts = cute.make_rmem_tensor(2, Float32)
        found = self._maxima(t)
        for half in cutlass.range_constexpr(2):
            rises = cutlass.select_(sums[half] <= self.config.enough, Int32(0), Int32(1))
            for distance in cutlass.range_constexpr(1, 3):
                rises = rises | cute.arch.shuffle_sync_bfly(rises, offset=distance)
            old = t.maximum[half]
            new = cutlass.select_(rises == 1, cute.arch.fmax(old, found[half]), old)
            shift = finite(new)
            factors[half] = cute.math.exp2(old - shift, fastmath=True)
            t.maximum[half] = new
            shifts[half] = -shift
        self._probabilities(t, shifts, sums)
        multiply_rows(t.acc_O, factors)

    def _maxima(self, t):
        """Largest scores of this thread's rows."""
        largest = {chain: t.acc_S[2 * chain[0] + chain[1]] for chain in CHAINS}
        for j in range(1, self.config.tile_n // 8):
            for half, e in CHAINS:
                largest[half, e] = cute.arch.fmax(largest[half, e], t.acc_S[4 * j + 2 * half + e])
        found = []
        for half in range(2):
            value = cute.arch.fmax(largest[half, 0], largest[half, 1])
            for distance in (1, 2):
                value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=distance))
            found.append(value * t.scale_log2)
        return found

    @cute.jit
    def mask(self, t, words, info, kv_tile: Int32) -> None:
        """Hide what rows do not see, where this is not nothing."""
        if kv_tile > info.last_whole:
            top, last_key = words[Info.row] + ROWS * t.group, words[Info.seqlen_k] - 1
            for half in cutlass.range_constexpr(2):
                row, column = top + self._row(t, half), self._column(t, kv_tile)
                last = cutlass.min(row + words[Info.high], last_key) - column
                self._hide(t, half, lambda c, last=last: c > last)
        if kv_tile < info.first_whole:
            for half in cutlass.range_constexpr(2):
                row = words[Info.row] + ROWS * t.group + self._row(t, half)
                first = row + words[Info.low] - self._column(t, kv_tile)
                self._hide(t, half, lambda c, first=first: c < first)

    def _row(self, t, half):
        """A thread's two rows of its warpgroup."""
        return t.tidx // 32 * 16 + t.tidx % 32 // 4 + 8 * half

    def _column(self, t, kv_tile):
        """A thread's first column of a tile."""
        return kv_tile * self.config.tile_n + t.tidx % 4 * 2

    def _hide(self, t, half, hidden) -> None:
        for j in range(self.config.tile_n // 8):
            for e in range(2):
                i = 4 * j + 2 * half + e
                t.acc_S[i] = cutlass.select_(hidden(8 * j + e), -Float32.inf, t.acc_S[i])

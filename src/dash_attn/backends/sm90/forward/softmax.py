"""P of a tile in registers, with maxima and sums of its rows: schedule/forward.py has the rule."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from ..device.operands import packed
from ..device.ring import arrive
from ..device.tanh import cap, scale_and_look, tanh_near
from .arguments import BOUNDS_WORDS
from .config import ROWS, ForwardConfig
from .exact import finite, fma, log2_below, polynomial_exp2
from .item import Info

CAREFUL = 16
"""Tiles; it changes no bit (docs/experiments/forward.md)."""

BEYOND = 1e30
"""The maximum of rows that do not exist. Any score is as good as -inf beside it."""

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
    def next_tile(self, t, tile, done) -> None:
        """P of another tile with the maxima that rows have, or with new ones where scores are much larger.

        Mostly none is: P with the old maxima is made first, and its sums tell. Where attention is peaked,
        maxima rise often: after each time a warp looks at the scores first, for CAREFUL tiles. Both ways
        make the same bits.

        tile: words of the item and the kv tile, for `_room`.
        done: where a warp arrives when P V of the tile before is done, if it has not arrived yet.
        """
        sums, shifts, factors = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
        shifts[0], shifts[1] = -t.maximum[0], -t.maximum[1]
        factors.fill(1.0)
        p = t.next_p if cutlass.const_expr(self.config.overlap == "softmax") else t.p
        pairs = cute.recast_tensor(p, Int32)
        look = t.careful[0]
        if look <= 0:
            if cutlass.const_expr(self.config.softcap):
                self._capped_probabilities(t, shifts, sums, pairs)
            else:
                self._probabilities(t, shifts, sums, pairs)
            few = (sums[0] <= self.config.few) & (sums[1] <= self.config.few)  # no NaN, too
            if ~cute.arch.vote_all_sync(few):
                look = Int32(1)
        if cutlass.const_expr(self.config.overlap == "softmax"):
            warpgroup.wait_group(0)
            arrive(done)
        if look > 0:
            self._raise(t, tile, sums, factors, pairs)
        if cutlass.const_expr(self.config.overlap == "softmax"):
            t.p.store(t.next_p.load())
        self._add(t, sums, factors)

    def _add(self, t, sums, factors) -> None:
        for half in range(2):
            t.total[half] = fma(t.total[half], factors[half], sums[half])

    @cute.jit
    def _capped_probabilities(self, t, shifts, sums, pairs) -> None:
        """`_probabilities`, with tanh where `begin_cap` has left it to be made here: 2^x has another unit."""
        if t.uncapped[0] == 1:
            self._probabilities(t, shifts, sums, pairs, caps=True)
        else:
            self._probabilities(t, shifts, sums, pairs)

    def _probabilities(self, t, shifts, sums, pairs, rows: int = 2, caps: bool = False) -> None:
        """P, two values a word, and this thread's sums of a tile; of its first row or of both.

        caps: scores become their tanh, which is near.
        """
        # Four chains, so that no instruction waits for the one before it.
        totals = dict.fromkeys(CHAINS[: 2 * rows], Float32(0.0))
        for j in range(self.config.tile_n // 8):
            values = {}
            for half, e in totals:
                i = 4 * j + 2 * half + e
                if caps:
                    t.acc_S[i] = tanh_near(t.acc_S[i])
                exponent = fma(t.acc_S[i], t.scale_log2, shifts[half])
                values[half, e] = self._exp2(exponent, j)
                totals[half, e] = totals[half, e] + values[half, e]
            for half in range(rows):
                pairs[2 * j + half] = packed(values[half, 0], values[half, 1], self.dtype)
        for half in range(rows):
            sums[half] = totals[half, 0] + totals[half, 1]

    def _exp2(self, exponent, j: int):
        """2^exponent, of eight columns number j of a tile."""
        share = self.config.exp2_share
        if j * share // 8 < (j + 1) * share // 8:
            return polynomial_exp2(exponent)
        return cute.math.exp2(exponent, fastmath=True)

    @cute.jit
    def first_tile(self, t, tile) -> None:
        """P of the first tile of a segment; the maxima are those of this tile."""
        sums, shifts = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        largest = self._largest(t)
        for half in cutlass.range_constexpr(2):
            maximum = fma(largest[half], t.scale_log2, self._room(t, tile, half))
            t.maximum[half] = self._first_maximum(t, tile, half, maximum)
            shifts[half] = -finite(t.maximum[half])
        self._probabilities(t, shifts, sums, cute.recast_tensor(t.p, Int32))
        for half in cutlass.range_constexpr(2):
            t.total[half] = sums[half]

    @cute.jit
    def _raise(self, t, tile, sums, factors, pairs) -> None:
        """New maxima of those rows whose scores are much larger, O multiplied by what this takes, which is
        left in `factors` for the sums, and P of the tile if it is not there or not right."""
        shifts, largest = cute.make_rmem_tensor(2, Float32), self._largest(t)
        rise, anew = cutlass.Boolean(False), t.careful[0] > 0
        for half in cutlass.range_constexpr(2):
            old = t.maximum[half]
            # Rounded once, as exponents are: then no sum is small where a row must rise.
            rises = fma(largest[half], t.scale_log2, -old) > self.config.keep
            fresh = old == -Float32.inf
            room = cutlass.select_(fresh, self._room(t, tile, half), Float32(0.0))
            new = cutlass.select_(rises, fma(largest[half], t.scale_log2, room), old)
            shift = finite(new)
            factors[half] = cute.math.exp2(old - shift, fastmath=True)
            t.maximum[half] = new
            shifts[half] = -shift
            rise, anew = rise | rises, anew | fresh
        rise = cute.arch.vote_any_sync(rise)
        if rise | cute.arch.vote_any_sync(anew):
            self._probabilities(t, shifts, sums, pairs)
        if rise:
            multiply_rows(t.acc_O, factors)
        t.careful[0] = cutlass.select_(rise, Int32(CAREFUL), t.careful[0] - 1)

    def _first_maximum(self, t, tile, half, maximum):
        """A row's first maximum. If the row is behind its sequence, one so large that its sums are 0. Its
        scores are 0, so its sums would look large, and its warp would look for maxima at every tile."""
        words, _ = tile
        exists = words[Info.row] + ROWS * t.group + self._row(t, half) < words[Info.seqlen_q]
        return cutlass.select_(exists, maximum, Float32(BEYOND))

    def _room(self, t, tile, half) -> Float32:
        """What the first maximum of a row has more than its largest score: a maximum of few keys is low."""
        words, kv_tile = tile
        if cutlass.const_expr(self.config.intervals):
            keys = self._seen_keys(t, half)
            return Float32(cutlass.max(self.config.room - log2_below(cutlass.max(keys, 1)), 0))
        row, left = words[Info.row] + ROWS * t.group + self._row(t, half), kv_tile * self.config.tile_n
        row = self._position(words, row)
        first = cutlass.max(row + words[Info.low], left)
        last = cutlass.min(row + words[Info.high], words[Info.seqlen_k] - 1)
        keys = cutlass.min(last, left + self.config.tile_n - 1) - first + 1
        return Float32(cutlass.max(self.config.room - log2_below(cutlass.max(keys, 1)), 0))

    def _seen_keys(self, t, half) -> Int32:
        """How many scores of a row in this tile are not hidden."""
        keys = Int32(0)
        for j in range(self.config.tile_n // 8):
            for e in range(2):
                keys += Int32(t.acc_S[4 * j + 2 * half + e] != -Float32.inf)
        for distance in (1, 2):
            keys += cute.arch.shuffle_sync_bfly(keys, offset=distance)
        return keys

    def _largest(self, t, rows: int = 2):
        """Largest scores of this thread's rows, before they are scaled; of the first one or of both."""
        largest = {chain: t.acc_S[2 * chain[0] + chain[1]] for chain in CHAINS[: 2 * rows]}
        for j in range(1, self.config.tile_n // 8):
            for half, e in largest:
                largest[half, e] = cute.arch.fmax(largest[half, e], t.acc_S[4 * j + 2 * half + e])
        found = []
        for half in range(rows):
            value = cute.arch.fmax(largest[half, 0], largest[half, 1])
            for distance in (1, 2):
                value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=distance))
            found.append(value)
        return found

    def cap(self, t) -> None:
        """tanh in place of the scores, before any is hidden. The factor on scores is then the softcap, and
        nothing else changes."""
        if self.config.softcap:
            self._cap(t, range(cute.size(t.acc_S)))

    def _cap(self, t, places) -> None:
        cap(t.acc_S, places, scale_and_look(t.acc_S, places, t.inner))

    @cute.jit
    def begin_cap(self, t, cut) -> None:
        """The same, or `t.uncapped` is 1: tanh waits for 2^x where no score is near the cap, and nothing has
        to look at scores before.

        At head dim 64 there are no registers for this beside P V of the tile before (`overlap`), and ptxas
        would serialise the products.
        """
        if cutlass.const_expr(self.config.softcap):
            places = range(cute.size(t.acc_S))
            far = scale_and_look(t.acc_S, places, t.inner)
            waits = ~(far | cut | (t.careful[0] > 0))
            t.uncapped[0] = Int32(waits)
            if ~waits:
                cap(t.acc_S, places, far)

    @cute.jit
    def mask(self, t, words, info, kv_tile: Int32) -> None:
        """Hide what rows do not see, where this is not nothing."""
        if kv_tile > info.last_whole:
            top, last_key = words[Info.row] + ROWS * t.group, words[Info.seqlen_k] - 1
            for half in cutlass.range_constexpr(2):
                row, column = top + self._row(t, half), self._column(t, kv_tile)
                row = self._position(words, row)
                last = cutlass.min(row + words[Info.high], last_key) - column
                self._hide(t, half, lambda c, last=last: c > last)
        if kv_tile < info.first_whole:
            for half in cutlass.range_constexpr(2):
                row = self._position(words, words[Info.row] + ROWS * t.group + self._row(t, half))
                first = row + words[Info.low] - self._column(t, kv_tile)
                self._hide(t, half, lambda c, first=first: c < first)
        if cutlass.const_expr(self.config.intervals):
            if self.is_cut_by_intervals(t, words, kv_tile):
                self._hide_by_intervals(t, words, kv_tile)

    def is_cut_by_intervals(self, t, words, kv_tile: Int32):
        """Whether any of the warpgroup's rows may be outside the interval of any key of a tile."""
        top, place = words[Info.row] + ROWS * t.group, (words[Info.first_bounds] + kv_tile) * BOUNDS_WORDS
        bounds = t.intervals.bounds
        return (bounds[place + 2] > top) | (bounds[place + 3] < top + ROWS)

    def _hide_by_intervals(self, t, words, kv_tile: Int32) -> None:
        rows = [words[Info.row] + ROWS * t.group + self._row(t, half) for half in range(2)]
        for j in range(self.config.tile_n // 8):
            for e in range(2):
                column = cutlass.min(self._column(t, kv_tile) + 8 * j + e, words[Info.seqlen_k] - 1)
                key = words[Info.first_key] + column
                start, end = t.intervals.starts[key], t.intervals.ends[key]
                for half, row in enumerate(rows):
                    i = 4 * j + 2 * half + e
                    outside = (row < start) | (row >= end)
                    t.acc_S[i] = cutlass.select_(outside, -Float32.inf, t.acc_S[i])

    def _position(self, words, row):
        """The number of a row's token among those of its sequence."""
        return row

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

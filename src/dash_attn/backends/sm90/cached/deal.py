"""The kernel before the main one: one block deals out items, from the lengths on the device.

The table begins with HEADER_WORDS: how many entries there are, how many folds, and how many kv heads a
section has. Items are numbered section by section, in it entry by entry, in it head by head. As in training,
K and V of a section fit half of L2. Where rows are few, K and V are mostly read once, and all heads are one
section: blocks then read at the same time what lies side by side. Then come records of RECORD_WORDS: entries,
then folds, from places that the launcher knows. An entry is (sequence, q tile, segment or -1, place, rows,
seqlen_k, first row, shift), a fold (sequence, q tile, first place, number of places, rows, seqlen_k, first
row, 0). Rows are those of all q heads of a kv head, token by token, and first rows count in q. ``shift`` is
the key that is aligned with the sequence's first token.

Suppose that all tiles are like this one. It is split into its segments if all segments, in rounds over all
blocks, are then done at least a tenth earlier than one whole tile. Which tiles that are, where segments go,
and which item comes first, is placement: it decides no bit. Numbers are handed out by integer atomics. Items
come by their length, the longest first: to within a 31st of the longest tile, and to within a power of two
where rows are few and every SM has many tiles. Memory gives more where blocks do not end in step. Where tiles
have the rows of one head, it is a 31st of what the longest tile has more than the shortest.
"""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from ....machine import L2_BYTES
from ..device import ptx
from ..forward.exact import log2_below
from .arguments import HEADER_WORDS, RECORD_WORDS
from .config import CachedConfig

THREADS = 512
BUCKETS = 32
TOTAL, PLACES, FOLDS, KEYS, LONGEST, SHORTEST, FIRST_BUCKET = 0, 1, 2, 3, 4, 5, BUCKETS
MANY = 1 << 24
"""More kv tiles than a tile has."""


class Deal:
    def __init__(self, config: CachedConfig):
        self.config = config

    @cute.jit
    def __call__(self, workspace, places, launch, sizes, stream):
        self.kernel(workspace.table, workspace.claimed, places.lengths, places.bounds, launch, sizes).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, table, claimed, lengths, bounds, launch, sizes) -> None:
        cute.arch.griddepcontrol_launch_dependents()  # they wait for the end of this kernel before they read
        cute.arch.griddepcontrol_wait()
        counts = SmemAllocator().allocate_tensor(Int32, cute.make_layout(BUCKETS * 2), byte_alignment=16)
        tidx = cute.arch.thread_idx()[0]
        if tidx < 2 * BUCKETS:
            counts[tidx] = Int32(0)
        cute.arch.sync_threads()
        finely = True
        if const_expr(self.config.warpgroups == 1):
            finely = launch.tiles * sizes[1] <= launch.share
        for t in cutlass.range(tidx, launch.tiles, THREADS, unroll=1):
            tile = self._tile(lengths, bounds, launch, sizes, t)
            if tile.kv_tiles > 0:
                ptx.add_shared(counts.iterator + TOTAL, tile.kv_tiles)
                if finely:
                    ptx.max_shared(counts.iterator + LONGEST, tile.kv_tiles)
                if const_expr(self.config.by_head):
                    ptx.max_shared(counts.iterator + SHORTEST, MANY - tile.kv_tiles)
                if tile.q_tile == 0:
                    ptx.add_shared(counts.iterator + KEYS, tile.seqlen_k // self.config.tile_n + 1)
        cute.arch.sync_threads()
        total = counts[TOTAL]
        for t in cutlass.range(tidx, launch.tiles, THREADS, unroll=1):
            self._decide(
                table, counts, launch, sizes, t, self._tile(lengths, bounds, launch, sizes, t), total
            )
        cute.arch.sync_threads()
        if tidx < BUCKETS:
            self._order(counts)
            cute.arch.sync_warp()
        if tidx == 0:
            table[0] = counts[TOTAL]
            table[1] = cutlass.min(counts[FOLDS], launch.folds)
            if const_expr(self.config.warpgroups == 1):
                table[2] = sizes[1]
            else:
                table[2] = self._section(counts[KEYS], sizes)
            claimed[0] = Int32(0)
        cute.arch.sync_threads()
        for t in cutlass.range(tidx, launch.tiles, THREADS, unroll=1):
            self._write(table, counts, launch, t, self._tile(lengths, bounds, launch, sizes, t))

    @cute.jit
    def _order(self, counts) -> None:
        """Where entries of each length begin, the longest first; their number in place of the total. By one
        warp, a length per lane."""
        lane = cute.arch.lane_idx()
        at = FIRST_BUCKET + BUCKETS - 1 - lane
        number = counts[at]
        end = number
        for distance in (1, 2, 4, 8, 16):
            before = cute.arch.shuffle_sync_up(end, offset=distance)
            end += cutlass.select_(lane >= distance, before, Int32(0))
        counts[at] = end - number
        if lane == BUCKETS - 1:
            counts[TOTAL] = end

    @cute.jit
    def _section(self, kv_tiles: Int32, sizes) -> Int32:
        """kv heads whose K and V fit half of L2, a divisor of their number."""
        c, kv_heads = self.config, sizes[1]
        if const_expr(c.by_head):
            kv_heads //= sizes[4]
        fit = L2_BYTES // 2 // (2 * c.tile_n * (c.head_dim + c.head_dim_v))
        section = cutlass.min(cutlass.max(fit // cutlass.max(kv_tiles, 1), 1), kv_heads)
        while kv_heads % section != 0:
            section -= 1
        if const_expr(c.by_head):
            section *= sizes[4]
        return section

    @cute.jit
    def _tile(self, lengths, bounds, launch, sizes, t: Int32):
        """What tile t of all that there may be is."""
        c, (group, _, total_q, keys, *_) = self.config, sizes
        sequence, first, seqlen_q, before = Int32(0), Int32(0), launch.seqlen_q, Int32(0)
        if launch.seqlen_q >= 0:
            per = (launch.seqlen_q * group + c.tile_m - 1) // c.tile_m
            sequence = t // per
            before = sequence * per
        else:
            # Tiles of sequence s are numbered from bounds[s] * group // tile_m + s on: there is room for all.
            low, high = Int32(0), launch.batch - 1
            while low < high:
                middle = (low + high + 1) // 2
                if self._first_tile(bounds, group, total_q, middle) <= t:
                    low = middle
                else:
                    high = middle - 1
            sequence = low
            before = self._first_tile(bounds, group, total_q, sequence)
            first = cutlass.min(cutlass.max(bounds[sequence], 0), total_q)
            seqlen_q = cutlass.min(cutlass.max(bounds[sequence + 1], first), total_q) - first
        seqlen_k = cutlass.min(cutlass.max(lengths[sequence], 0), keys)
        q_tile, rows = t - before, seqlen_q * group
        top = q_tile * c.tile_m
        bottom = cutlass.min(top + c.tile_m, rows) - 1
        shift = seqlen_k - seqlen_q
        low_key, high_key = Int32(0), seqlen_k - 1
        if launch.left >= 0:
            low_key = cutlass.max(top // group + shift - launch.left, 0)
        if launch.right >= 0:
            high_key = cutlass.min(bottom // group + shift + launch.right, seqlen_k - 1)
        kv_first, kv_tiles = low_key // c.tile_n, Int32(0)
        if (high_key >= 0) & (low_key <= high_key):
            kv_tiles = high_key // c.tile_n - kv_first + 1
        if (q_tile < 0) | (top >= rows):
            kv_tiles = Int32(-1)  # there is no such tile
        return SimpleNamespace(
            sequence=sequence, q_tile=q_tile, rows=rows, seqlen_k=seqlen_k, first=first, shift=shift,
            kv_first=kv_first, kv_tiles=kv_tiles,
        )  # fmt: skip

    @cute.jit
    def _first_tile(self, bounds, group, total_q, sequence: Int32) -> Int32:
        row = cutlass.min(cutlass.max(bounds[sequence], 0), total_q)
        return row * group // self.config.tile_m + sequence

    @cute.jit
    def _decide(self, table, counts, launch, sizes, t: Int32, tile, total: Int32) -> None:
        """Split a tile or not, keep that, and count its entries by their length."""
        kv_heads = sizes[1]
        first, segments = self._segments(tile)
        place = Int32(-1)
        if segments > 1:
            # If all tiles are like this one: how many there are, and rounds of their segments, rounded up.
            alike = Float32(total) * Float32(kv_heads) / Float32(tile.kv_tiles)
            rounds = Int32(alike * Float32(segments) / Float32(launch.share) * Float32(0.9999)) + 1
            if 10 * rounds <= 9 * segments:
                place = ptx.add_shared(counts.iterator + PLACES, segments)
                if place + segments > launch.places:
                    place = Int32(-1)
        if place >= 0:
            fold = ptx.add_shared(counts.iterator + FOLDS, Int32(1))
            if fold < launch.folds:
                places = (place, segments)
                record = (
                    tile.sequence, tile.q_tile, *places, tile.rows, tile.seqlen_k, tile.first, Int32(0)
                )  # fmt: skip
                self._put(table, launch.tiles + launch.places + fold, record)
            else:
                place = Int32(-1)
        self._decisions(table, launch)[t] = place
        if place >= 0:
            for s in cutlass.range(segments, unroll=1):
                ptx.add_shared(self._bucket(counts, self._within(tile, first + s)), Int32(1))
        elif tile.kv_tiles >= 0:
            ptx.add_shared(self._bucket(counts, tile.kv_tiles), Int32(1))

    @cute.jit
    def _write(self, table, counts, launch, t: Int32, tile) -> None:
        """The entries of a tile, in their places."""
        first, segments = self._segments(tile)
        place = self._decisions(table, launch)[t]
        if place >= 0:
            for s in cutlass.range(segments, unroll=1):
                bucket = self._bucket(counts, self._within(tile, first + s))
                self._entry(table, tile, bucket, first + s, place + s)
        elif tile.kv_tiles >= 0:
            self._entry(table, tile, self._bucket(counts, tile.kv_tiles), Int32(-1), Int32(0))

    @cute.jit
    def _entry(self, table, tile, bucket, segment: Int32, place: Int32) -> None:
        at = ptx.add_shared(bucket, Int32(1))
        record = (
            tile.sequence, tile.q_tile, segment, place, tile.rows, tile.seqlen_k, tile.first, tile.shift
        )  # fmt: skip
        self._put(table, at, record)

    def _bucket(self, counts, kv_tiles: Int32):
        """Where entries of a length are counted, and then numbered. Where the longest is not known, by powers
        of two."""
        longest = counts[LONGEST]
        if const_expr(self.config.by_head):
            shortest = MANY - counts[SHORTEST]
            kv_tiles, longest = cutlass.max(kv_tiles - shortest, 0), longest - shortest
        coarsely = log2_below(cutlass.max(kv_tiles, 1))
        finely = kv_tiles * (BUCKETS - 1) // cutlass.max(longest, 1)
        return counts.iterator + FIRST_BUCKET + cutlass.select_(longest == 0, coarsely, finely)

    def _put(self, table, index: Int32, record) -> None:
        for i, value in enumerate(record):
            table[HEADER_WORDS + index * RECORD_WORDS + i] = value

    def _decisions(self, table, launch):
        """The first place of each tile's segments, -1: it is whole. Only who wrote it reads it."""
        records = launch.tiles + launch.places + launch.folds
        start = table.iterator + HEADER_WORDS + records * RECORD_WORDS
        return cute.make_tensor(start, cute.make_layout(launch.tiles))

    def _segments(self, tile):
        """The first segment of a tile, and how many it has."""
        per_segment = self.config.segment // self.config.tile_n
        first = tile.kv_first // per_segment
        last = (tile.kv_first + cutlass.max(tile.kv_tiles, 1) - 1) // per_segment
        return first, last - first + 1

    def _within(self, tile, segment):
        """kv tiles of a tile that are in a segment."""
        per_segment = self.config.segment // self.config.tile_n
        end = cutlass.min(tile.kv_first + tile.kv_tiles, (segment + 1) * per_segment)
        return end - cutlass.max(tile.kv_first, segment * per_segment)

"""The PTX of the forward over a cache on the CPU: see ptx_machine.py. And what ``Deal`` hands out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import ptx_machine as base
from forward_machine import ForwardMachine
from ptx_machine import Thread, _as
from ptx_machine import main_kernel_ptx as cached_ptx

from dash_attn.backends.sm90.cached.arguments import HEADER_WORDS
from dash_attn.backends.sm90.cached.config import CachedConfig
from dash_attn.backends.sm90.tiles import row_bytes_of

__all__ = [
    "Batch",
    "CachedMachine",
    "CachedProgram",
    "DealMachine",
    "DealProgram",
    "Record",
    "cached_ptx",
]

TOTAL, FOLDS = 0, 2  # words of Deal's shared memory

TABLE, PAGES = 1 << 20, 1 << 24
Record = tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """Packed rows over a cache: (rows, keys) of each sequence, and the pages of each. ``of_kv``: so many
    heads of one kv head have tiles of their own."""

    sequences: tuple[tuple[int, int], ...]
    group: int
    kv_heads: int
    page_size: int
    most_pages: int
    sides: tuple[int, int] = (-1, 0)
    of_kv: int = 1

    def by_head(self) -> Batch:
        """As chunks have it: rows of a tile are those of one q head."""
        heads = self.group * self.kv_heads
        return replace(self, group=1, kv_heads=heads, of_kv=self.group)

    def page(self, sequence: int, column: int) -> int:
        """Sequences have their pages in turns."""
        return column * len(self.sequences) + sequence

    @property
    def pages(self) -> int:
        return self.most_pages * len(self.sequences)

    def kv_tiles(self, config: CachedConfig, sequence: int, q_tile: int) -> range:
        """That any row of a tile sees."""
        rows, keys = self.sequences[sequence]
        top, shift = q_tile * config.tile_m, keys - rows
        bottom = min(top + config.tile_m, rows * self.group) - 1
        left, right = self.sides
        first = max(top // self.group + shift - left, 0) if left >= 0 else 0
        last = min(bottom // self.group + shift + right, keys - 1) if right >= 0 else keys - 1
        return range(first // config.tile_n, last // config.tile_n + 1) if last >= max(first, 0) else range(0)

    def entries(self, config: CachedConfig, split: bool) -> list[Record]:
        """Records as ``Deal`` writes them, the longest first."""
        found: list[tuple[int, Record]] = []
        per, first, place = config.segment // config.tile_n, 0, 0
        for sequence, (rows, keys) in enumerate(self.sequences):
            for q_tile in range(-(-rows * self.group // config.tile_m)):
                tiles = self.kv_tiles(config, sequence, q_tile)
                of_sequence = (rows * self.group, keys, first, keys - rows)
                segments = sorted({tile // per for tile in tiles})
                if split and len(segments) > 1:
                    for segment in segments:
                        length = sum(tile // per == segment for tile in tiles)
                        found.append((length, (sequence, q_tile, segment, place, *of_sequence)))
                        place += 1
                else:
                    found.append((len(tiles), (sequence, q_tile, -1, 0, *of_sequence)))
            first += rows
        return [record for _, record in sorted(found, key=lambda each: -each[0])]


class CachedProgram(base.Program):
    kernel = "kernelCached"


class CachedMachine(ForwardMachine):
    """A launch of the main kernel with a table of entries in sections of ``section`` kv heads."""

    def __init__(
        self,
        config: CachedConfig,
        program: CachedProgram,
        batch: Batch,
        entries: list[Record],
        section: int,
        blocks: int,
        seed: int,
    ):
        self._begin(program, blocks, config.threads // 32, seed)
        self.config, self.batch = config, batch
        words = [len(entries), 0, section, *[0] * (HEADER_WORDS - 3)]
        words += [word for record in entries for word in record]
        self.memory = {TABLE + 4 * i: word & 0xFFFFFFFF for i, word in enumerate(words)}
        for sequence in range(len(batch.sequences)):
            for column in range(batch.most_pages):
                at = sequence * batch.most_pages + column
                self.memory[PAGES + 4 * at] = batch.page(sequence, column)

    def _parameter(self, number: int, offset: int) -> int:
        b = self.batch
        numbers = (
            *b.sides, b.group, b.kv_heads, b.pages, b.page_size, b.most_pages, b.page_size, b.page_size,
            self.config.eager * len(self.blocks),
        )  # fmt: skip
        known = {10: PAGES, 11: TABLE, **dict(enumerate(numbers, 16))}
        if number in known and offset == 0:
            return known[number]
        return (base.TENSORS << 2) + (number << 40) if offset == 0 else 1

    def _computed(self, thread: Thread, form: list[str], operands: list[str]) -> int:
        found = super()._computed(thread, form, operands)
        return max(found, 0) if "relu" in form else found

    def _cp(self, thread: Thread, operation: str, operands: list[str]) -> bool:
        if ".tensor." not in operation:
            return True  # of Q, whose contents are left out
        super()._cp(thread, operation, operands)
        barrier, _ = thread.block.copies.pop()
        thread.block.copies.append((barrier, row_bytes_of(self.config.head_dim) * self.config.piece))
        return True


LENGTHS, BOUNDS, CLAIMED = 1 << 25, 1 << 26, 1 << 27
DEAL_WARPS = 16


class DealProgram(base.Program):
    kernel = "dealDeal"


class DealMachine(CachedMachine):
    """A launch of ``Deal``, for at most 32 q tiles: the lanes of warp 0 have them all.

    Floating point is left out, so that every tile of several segments counts as long, and is split as long as
    there are places.
    """

    def __init__(
        self,
        config: CachedConfig,
        program: DealProgram,
        batch: Batch,
        capacity: tuple[int, int, int],
        seed: int,
        share: int,
    ):
        """``capacity``: q tiles, places and folds that there may be; ``share``: as in `Launch`."""
        self._begin(program, 1, DEAL_WARPS, seed)
        self.config, self.batch, self.capacity, self.share = config, batch, capacity, share
        rows, keys = zip(*batch.sequences)
        bounds = [sum(rows[:i]) for i in range(len(rows) + 1)]
        self.memory = {LENGTHS + 4 * i: value & 0xFFFFFFFF for i, value in enumerate(keys)}
        self.memory |= {BOUNDS + 4 * i: value for i, value in enumerate(bounds)}

    def _parameter(self, number: int, offset: int) -> int:
        b, (tiles, places, folds) = self.batch, self.capacity
        total = sum(rows for rows, _ in b.sequences)
        sizes = (b.group, b.kv_heads, total, b.most_pages * b.page_size, b.of_kv)
        launch = len(b.sequences), tiles, -1, b.most_pages, self.share, places, folds, 1, *b.sides
        known = {0: TABLE, 1: CLAIMED, 2: LENGTHS, 3: BOUNDS, **dict(enumerate((*launch, *sizes), 5))}
        return known.get(number, 0)

    def _atom(self, thread: Thread, operation: str, operands: list[str]) -> bool:
        assert ".shared" in operation
        address, memory = self._address(thread, operands[1]), thread.block.shared
        seen = memory.get(address, 0)
        given = self._value(thread, operands[2])
        if ".max" in operation:
            memory[address] = max(seen, given, key=lambda x: _as(x, "s32"))
        else:
            memory[address] = seen + given & 0xFFFFFFFF
        thread.registers[operands[0]] = seen
        self._notice()
        return True

    @property
    def counts(self) -> tuple[int, int]:
        """Of entries and folds; from shared memory, for wide stores are left out."""
        shared = self.blocks[0].shared
        return shared[4 * TOTAL], min(shared.get(4 * FOLDS, 0), self.capacity[2])

    def words(self, first: int, count: int) -> Record:
        """Of the table, signed."""
        found = (self.memory.get(TABLE + 4 * (first + i), 0) for i in range(count))
        return tuple(word - (1 << 32) if word >> 31 else word for word in found)

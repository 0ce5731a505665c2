"""The protocol of the forward over a cache: it ends, and loads the pages of each item in their order.

And what its first kernel deals out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cached_machine import (
    Batch,
    CachedMachine,
    CachedProgram,
    DealMachine,
    DealProgram,
    Record,
    cached_ptx,
)
from emulator.backend import emulated
from emulator.programs import Emulated
from ptx_machine import DeadlockError

from dash_attn import flash_attn_with_kvcache
from dash_attn.backends.sm90.cached import launch as cached_launch
from dash_attn.backends.sm90.cached.arguments import HEADER_WORDS
from dash_attn.backends.sm90.cached.config import CachedConfig, cached_config, chunk_config
from dash_attn.backends.sm90.tiles import row_bytes_of

pytest.importorskip("cutlass", reason="the kernel compiler is not installed: pip install 'dash-attn[cuda]'")
pytest.importorskip("tvm_ffi", reason="the kernel compiler is not installed: pip install 'dash-attn[cuda]'")

PACKED = 1 << 30
BATCHES = {
    "steps": Batch(((1, 700), (1, 3), (1, 0), (2, 129)), 4, 2, 64, 12),
    "chunks": Batch(((130, 300), (0, 50), (1, 640), (70, 70)), 3, 2, 128, 5),
    "window": Batch(((40, 600), (9, 90)), 2, 1, 32, 20, (100, 0)),
}


def loads_of(batch: Batch, config: CachedConfig, record: Record, head: int) -> list[tuple[int, ...]]:
    """(column, row, head, batch, shift) of the copies of K of an item, in order."""
    sequence, keys, per = record[0], record[5], config.segment // config.tile_n
    found, columns = [], range(0, config.head_dim, row_bytes_of(config.head_dim) // 2)
    for tile in sorted(_tiles_of(batch, config, record), key=lambda t: (t // per, -t)):
        for token in range(tile * config.tile_n, (tile + 1) * config.tile_n, config.piece):
            column = token // batch.page_size
            page = batch.page(sequence, min(column, batch.most_pages - 1))
            used = max(keys - column * batch.page_size, 0)
            row = PACKED - used + token % batch.page_size
            place = (row, head, PACKED, page * batch.page_size + used)
            found += [(chunk, *place) for chunk in columns]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(
    ("head_dim", "few", "piece"),
    [(64, True, 16), (128, False, 16), (96, True, 128), pytest.param(64, False, 16, marks=pytest.mark.slow)],
)
def test_it_ends_and_loads_what_it_should(head_dim: int, few: bool, piece: int, name: str) -> None:
    batch = BATCHES[name]
    config = replace(cached_config(head_dim, "bf16", few, piece), segment=256)
    program = CachedProgram(cached_ptx(config))
    for blocks, seed, split, section in ((1, 0, False, 1), (3, 1, True, batch.kv_heads), (40, 2, True, 1)):
        entries = batch.entries(config, split)
        machine = CachedMachine(config, program, batch, entries, section, blocks, seed)
        machine.run()
        heads = [range(i, i + section) for i in range(0, batch.kv_heads, section)]
        items = [(record, head) for each in heads for record in entries for head in each]
        wanted = [loads_of(batch, config, record, head) for record, head in items]
        left = [each for each in wanted if each]
        for block in machine.blocks:
            k, v = ([where for which, where in block.loads if which == tensor] for tensor in (0, 2))
            assert k == v
            while k:  # items follow one another, each one as a whole
                mine = next(each for each in left if k[: len(each)] == each)
                left.remove(mine)
                k = k[len(mine) :]
        assert not left


@pytest.mark.parametrize(("rows", "share"), [("few", 1), ("few", 1000), ("many", 1), ("chunk", 1)])
@pytest.mark.parametrize("places", [0, 3, 40])
@pytest.mark.parametrize("name", BATCHES)
def test_what_is_dealt_out(name: str, places: int, rows: str, share: int) -> None:
    """Every tile once, whole or in all of its segments, the longest first; folds find their places."""
    batch = BATCHES[name].by_head() if rows == "chunk" else BATCHES[name]
    config = chunk_config(64, "bf16", 16) if rows == "chunk" else cached_config(64, "bf16", rows == "few", 16)
    config = replace(config, segment=256)
    total = sum(rows for rows, _ in batch.sequences)
    tiles = total * batch.group // config.tile_m + len(batch.sequences)
    program, capacity = DealProgram(cached_ptx(config)), (tiles, places, places)
    machine = DealMachine(config, program, batch, capacity, places, share)
    machine.run()
    (count, folds), (section,) = machine.counts, machine.words(2, 1)
    assert section == batch.kv_heads
    entries = [machine.words(HEADER_WORDS + 8 * i, 8) for i in range(count)]
    whole = {record[:2]: record[4:] for record in batch.entries(config, False)}
    parts = [record for record in batch.entries(config, True) if record[2] >= 0]
    folded = [machine.words(HEADER_WORDS + 8 * (tiles + places + i), 8) for i in range(folds)]
    taken: list[int] = []
    for record in folded:
        first, segments = record[2:4]
        mine = sorted(each for each in entries if each[:2] == record[:2])
        assert [each[2] for each in mine] == sorted(each[2] for each in parts if each[:2] == record[:2])
        assert [each[3] for each in mine] == list(range(first, first + segments))
        assert record[4:7] == whole[record[:2]][:3]
        taken += range(first, first + segments)
    assert len(taken) == len(set(taken)) <= places
    assert {record[:2] for record in entries} == set(whole)
    assert sorted(each[:2] for each in entries if each[2] < 0) == sorted(
        set(whole) - {record[:2] for record in folded}
    )
    assert all(record[4:] == whole[record[:2]] for record in entries)
    if places == 40:
        assert {record[:2] for record in folded} == {record[:2] for record in parts}
    assert places or not folds
    of_tiles = [len(_tiles_of(batch, config, record)) for record in batch.entries(config, False)]
    lengths = [len(_tiles_of(batch, config, record)) for record in entries]
    ranks = [n * 31 // max(of_tiles) for n in lengths]
    if rows == "few" and tiles * batch.kv_heads > share:
        ranks = [max(n, 1).bit_length() for n in lengths]
    elif rows == "chunk":
        shortest = min(n for n in of_tiles if n)
        span = max(max(of_tiles) - shortest, 1)
        ranks = [max(n - shortest, 0) * 31 // span for n in lengths]
    assert ranks == sorted(ranks, reverse=True)


def _tiles_of(batch: Batch, config: CachedConfig, record: Record) -> list[int]:
    sequence, q_tile, segment = record[:3]
    per = config.segment // config.tile_n
    return [t for t in batch.kv_tiles(config, sequence, q_tile) if segment in (-1, t // per)]


def test_a_kernel_that_forgets_the_queries_hangs() -> None:
    """The machine can fail: nobody multiplies where Q never comes."""
    config = replace(cached_config(64, "bf16", True, 16), segment=256)
    program = CachedProgram(cached_ptx(config))
    batch = BATCHES["steps"]
    for at, instruction in enumerate(program.instructions):
        if instruction.form[0] == "cp" and "commit_group" in instruction.operation:
            rest = range(at, len(program.instructions))
            arrive = next(i for i in rest if program.instructions[i].operation.startswith("mbarrier.arrive"))
            program.instructions[arrive] = program.instructions[arrive]._replace(predicate="%p0", wanted=True)
    machine = CachedMachine(config, program, batch, batch.entries(config, False), 2, 1, 0)
    with pytest.raises(DeadlockError):
        machine.run()


class Dealt(Exception):
    """Only the first kernel of a program ran."""


class DealOnly(Emulated):
    def _launch(self, *launch: Any) -> None:
        super()._launch(*launch)
        raise Dealt


@pytest.mark.parametrize(
    ("sequences", "keys", "split"),
    [
        (16, 16_384, False),  # 128 tiles fill 132 SMs as well as 256 halves fill them twice
        (8, 16_384, True),
        (16, 65_536, False),  # 8 rounds of eighths
        (14, 65_536, True),  # 7
        (16, 4096, False),  # one segment
    ],
)
def test_tiles_are_split_where_that_saves_a_round(
    sequences: int, keys: int, split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 tokens of 4 q heads per kv head are one tile. All pages are one, for nothing reads them."""
    q, cache = torch.zeros(sequences, 32, 32, 128).bfloat16(), torch.zeros(1, 256, 8, 128).bfloat16()
    pages = torch.zeros(sequences, keys // 256, dtype=torch.int32)
    lengths = torch.full((sequences,), keys, dtype=torch.int32)
    tables: list[torch.Tensor] = []

    def kept(words: list[int], device: torch.device) -> list[torch.Tensor]:
        found = [torch.zeros(n) for n in words]
        tables.append(found[0].view(torch.int32))
        return found

    with emulated(blocks=132):
        monkeypatch.setattr(cached_launch, "program", DealOnly)
        monkeypatch.setattr(cached_launch, "allocate", kept)
        with pytest.raises(Dealt):
            flash_attn_with_kvcache(
                q, cache, cache, cache_seqlens=lengths, page_table=pages, causal=True, backend="sm90"
            )
    entries, folds = tables[0][:2].tolist()
    assert folds == (sequences if split else 0)
    assert entries == sequences * (keys // 8192 if split else 1)


def test_parts_of_a_workspace_begin_where_kernels_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator looks at what the compiler was told of alignment: sizes that are not rounded are found."""
    q, cache = torch.zeros(1, 1, 8, 64).bfloat16(), torch.zeros(1, 256, 2, 64).bfloat16()
    lengths = torch.tensor([200], dtype=torch.int32)

    def decode() -> None:
        with emulated(blocks=3):
            flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, causal=True, backend="sm90")

    decode()
    monkeypatch.setattr(cached_launch, "whole_lines", lambda words: [max(n, 1) for n in words])
    with pytest.raises(AssertionError, match="128 asked for"):
        decode()

"""Programs of the Hopper backend on CPU tensors, called like what the compiler makes of a variant."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module
from math import gcd
from typing import Any

import torch
from outputs import output_of
from torch import Tensor

from dash_attn.backends.sm90.backward import arguments as backward
from dash_attn.backends.sm90.backward.config import SEEN_WORDS
from dash_attn.backends.sm90.cached import arguments as cached
from dash_attn.backends.sm90.compile import Config
from dash_attn.backends.sm90.convert import arguments as convert
from dash_attn.backends.sm90.fold import arguments as fold
from dash_attn.backends.sm90.forward import arguments as forward
from dash_attn.backends.sm90.forward.config import ROWS, WARP_ROWS
from dash_attn.backends.sm90.places import Sizes, sizes_of
from dash_attn.backends.sm90.sinks.kernels import SinkTotals
from dash_attn.backends.sm90.spread import arguments as spread
from dash_attn.backends.sm90.spread.config import COLUMNS
from dash_attn.backends.sm90.tiles import row_bytes_of

from .machine import Machine
from .memory import Memory, TensorMap
from .program import Kernel, kernels_of
from .races import RaceError

Parameter = bytes | TensorMap
EXTENTS_BYTES = 20
DUMMY = b"\0"
"""A parameter that only tells the compiler something."""


@cache
def kernels(config: Config) -> list[Kernel]:
    """The kernels of a variant, in the order of their launches."""
    return kernels_of(output_of(config).ptx)


@cache
def alignments(config: Config) -> list[int]:
    """Multiples of how many bytes a variant's tensors must begin at, 1 for other arguments. What a program
    gets by address, and the emulator as tensors, comes behind the tensors and has 1."""
    made_by = import_module(f"dash_attn.backends.sm90.{config.direction}.program")
    return [getattr(x, "_assumed_align", 1) for x in made_by.fake_arguments(config, env_stream=True)]


class Emulated:
    """The program of a configuration. ``seed``, ``late`` and ``races``: see :class:`Machine`."""

    def __init__(self, config: Config, seed: int = 0, late: bool = True, races: bool = False):
        self.config, self.seed, self.late, self.races = config, seed, late, races

    def __call__(self, *arguments: Any) -> None:
        run = getattr(self, f"_{self.config.direction}")
        memory = Memory()
        for each in arguments:
            if isinstance(each, Tensor):
                memory.add_tensor(each)
        for each, align in zip(arguments, alignments(self.config)):
            if isinstance(each, Tensor):
                # An allocation begins everywhere at a multiple of enough; a part of one may not.
                place = each.storage_offset() * each.element_size()
                assert place % align == 0, f"byte {place} of an allocation, {align} asked for"
        run(memory, list(arguments))

    def _launch(
        self,
        kernel: Kernel,
        grid: tuple[int, ...],
        parameters: Iterable[Parameter],
        memory: Memory,
        awaited: Iterable[Tensor] = (),
    ) -> None:
        assert max(grid[1:]) <= 65_535, f"CUDA launches no grid of {grid} blocks"
        fitted = [_fitted(p, size) for p, size in zip(parameters, kernel.parameters, strict=True)]
        before = memory.copied() if self.races else []
        bytes_of = [(x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()) for x in awaited]
        machine = Machine(
            kernel, (*grid, 1)[:3], fitted, memory, self.seed, self.late, self.races, awaited=bytes_of
        )
        machine.run()
        if machine.watch is None or not machine.watch.doubtful:
            return
        after, doubtful = memory.copied(), machine.watch.doubtful
        memory.restore(before)
        Machine(kernel, machine.grid, fitted, memory, self.seed, self.late, True, doubtful).run()
        if memory.copied() != after:
            raise RaceError(f"{kernel.name}: values that nothing orders were used")

    def _forward(self, memory: Memory, given: list[Any]) -> None:
        c = self.config
        named, matrices, work, launch, cap = _given(forward, c, given)
        work["claimed"] = work["claimed"].view(torch.int32)
        workspace = forward.Workspace(named["table"], **work)
        tensors, scales = forward.Tensors(**matrices), cap or [launch.scale]
        extra = [x for name, x in named.items() if name not in ("table", "work")]
        claims, *bounds, main = kernels(c)
        heads, k = tensors.q.shape[2], tensors.k
        if launch.grid < launch.entries * heads:
            self._launch(claims, (1, 1), [_tensor(workspace.claimed)], memory)
        for kernel in bounds:
            parameters = [*map(_tensor, (workspace.table, *extra[-len(forward.Intervals._fields) :]))]
            self._launch(kernel, (launch.entries, 1), parameters, memory)
        tiles = [
            (tensors.q, ROWS, c.head_dim), (k, c.tile_n, c.kv_columns[0]),
            (tensors.v, c.tile_n, c.kv_columns[1]), (tensors.out, ROWS, c.head_dim_v),
        ]  # fmt: skip
        if c.rest:
            tiles += [(x, c.tile_n, c.rest) for x in (k, tensors.v)]
        maps = [(x, rows, row_bytes_of(columns)) for x, rows, columns in tiles]
        numbers = (
            launch.entries, launch.heads, launch.left, launch.right, heads // k.shape[2], tensors.q.shape[0],
            heads, k.shape[0],
        )  # fmt: skip
        named = [tensors.lse, *workspace, *extra]
        parameters = [*_maps(maps), *[DUMMY] * (4 if c.rest else 2), *map(_tensor, named)]
        self._launch(main, (launch.grid, 1), [*parameters, *map(_number, (*scales, *numbers))], memory)

    def _fold(self, memory: Memory, given: list[Any]) -> None:
        (table, *sink), flat = given[: 1 + self.config.sink], given[1 + self.config.sink :]
        out, sizes, launch = flat[0], Sizes._make(flat[1:9]), fold.Launch(*flat[9:])
        assert sizes.of_out == out.shape
        assert launch.partial_words == launch.partial.numel()
        parameters = [*map(_tensor, (out, launch.lse, table, launch.partial, *sink)), _number(launch.entries)]
        self._launch(kernels(self.config)[0], (launch.folds, sizes.heads), parameters, memory)

    def _cached(self, memory: Memory, given: list[Any]) -> None:
        c = self.config
        tensors, places = cached.Tensors(*given[:5]), cached.Places(*given[5:9])
        workspace, launch = cached.Workspace(*given[9:13]), cached.Launch(*given[13:24])
        scales = given[24:] or [launch.scale]
        deal, main, fold = kernels(c)
        (batches, total_q, q_heads), (pages, page_size, kv_heads) = tensors.q.shape[:3], tensors.k.shape[:3]
        of_kv = q_heads // kv_heads
        heads, group = (q_heads, 1) if c.by_head else (kv_heads, of_kv)
        sizes = (group, heads, total_q, launch.most_pages * page_size, *[of_kv] * c.by_head)
        named = [workspace.table, workspace.claimed, places.lengths, places.bounds]
        self._launch(deal, (1, 1), [*map(_tensor, named), *map(_number, (*launch, *sizes))], memory)
        extent = [group] * (not c.by_head)  # the compiler knows that 1 is one
        of_groups = [_of_groups(x, group, extent) for x in (tensors.q, tensors.out)]
        batch, row, _ = tensors.lse.stride()
        lse = _packed(tensors.lse, (len(tensors.lse), heads, *extent, total_q), (batch, row * group, row))
        sink = _packed(places.sink, (heads, *extent), extent)
        described = [*of_groups, lse, sink, *map(_tensor, (places.pages, *workspace))]
        ratios = (x.stride(0) // x.stride(1) for x in (tensors.k, tensors.v))
        of_pages = (pages, page_size, launch.most_pages, *ratios)
        row_bytes = row_bytes_of(gcd(c.head_dim, c.head_dim_v))
        maps = [(_as_rows(x), c.piece, row_bytes) for x in (tensors.k, tensors.v)]
        if c.by_head:
            numbers = (launch.left, launch.right, of_kv, q_heads, batches, *of_pages)
            maps.insert(0, (tensors.q, ROWS, row_bytes_of(c.head_dim)))
            maps.append((tensors.out, ROWS, row_bytes_of(c.head_dim_v)))
        else:
            numbers = (launch.left, launch.right, of_kv, kv_heads, *of_pages)
            numbers += (launch.share,) * (c.warpgroups == 1)
        parameters = [*_maps(maps), DUMMY, DUMMY, *described, *map(_number, (*scales, *numbers))]
        self._launch(main, (launch.grid, 1), parameters, memory)
        if launch.folds:
            parameters = [*described, _number(launch.tiles + launch.places)]
            self._launch(fold, (launch.folds, heads), parameters, memory)

    def _spread(self, memory: Memory, given: list[Any]) -> None:
        c = self.config
        tensors, places = cached.Tensors(*given[:5]), cached.Places(*given[5:9])
        workspace, launch = spread.Workspace(*given[9:12]), spread.Launch(*given[12:19])
        scales = given[19:] or [launch.scale]
        (total_q, heads), (pages, page_size, kv_heads) = tensors.q.shape[1:3], tensors.k.shape[:3]
        group = heads // kv_heads
        of_groups = [_of_groups(x, group, [group]) for x in (tensors.q, tensors.out)]
        batch, row, _ = tensors.lse.stride()
        lse = _packed(tensors.lse, (len(tensors.lse), kv_heads, group, total_q), (batch, row * group, row))
        sink = _packed(places.sink, (kv_heads, group), (group,))
        described = [*of_groups, lse, sink, *map(_tensor, (places.lengths, places.pages, *workspace))]
        ratios = (x.stride(0) // x.stride(1) for x in (tensors.k, tensors.v))
        numbers = spread.Numbers(
            launch.left, launch.right, group, kv_heads, launch.tiles, launch.segments, pages, page_size,
            launch.most_pages, *ratios,
        )  # fmt: skip
        named, scalars = [*described, *map(_number, numbers)], [*map(_number, scales)]
        k = _maps([(_as_rows(tensors.k), c.piece)])
        v = _maps([(_as_rows(tensors.v), c.piece, 2 * COLUMNS)])
        score, main, fold = kernels(c)
        tiles = (launch.tiles, kv_heads, launch.batch)
        self._launch(score, tiles, [*k, DUMMY, *named, *scalars], memory)
        units = -(-tensors.q.shape[1] * group // WARP_ROWS)
        blocks = (c.head_dim_v // COLUMNS * units * launch.segments, kv_heads, launch.batch)
        self._launch(main, blocks, [*v, *named, *scalars, _number(units)], memory)
        if launch.segments > 1:
            self._launch(fold, (kv_heads, launch.batch), named, memory)

    def _key_sums(self, memory: Memory, given: list[Any]) -> None:
        sums, dk, dv, scale, groups = given
        (batch, rows, kv_heads), (finish,) = dk.shape[:3], kernels(self.config)
        parameters = [*map(_tensor, (sums, dk, dv)), *map(_number, (scale, groups))]
        self._launch(finish, (-(-rows // self.config.tile_n) * kv_heads * batch, 2), parameters, memory)

    def _add_sums(self, memory: Memory, given: list[Any]) -> None:
        sums, more, vectors = given
        parameters = [*map(_tensor, (sums, more)), struct.pack("<q", vectors)]
        self._launch(kernels(self.config)[0], (1, 1), parameters, memory)

    def _sinks(self, memory: Memory, given: list[Any]) -> None:
        *tensors, sequences = given
        parameters = [*map(_tensor, tensors), _number(sequences)]
        for name, kernel in zip(self.config.kernels, kernels(self.config)):
            adds_rows = name == "SinkParts"
            heads = len(given[3] if adds_rows else given[-2])
            grid = (sequences, heads) if adds_rows else (-(-heads // SinkTotals.THREADS), 1)
            self._launch(kernel, grid, parameters, memory)

    def _backward(self, memory: Memory, given: list[Any]) -> None:
        c = self.config
        passed, matrices, work, launch, cap = _given(backward, c, given)
        table, _ = passed.pop("table"), passed.pop("work")
        work["control"] = work["control"].view(torch.int32)
        unused = {"errors": table, "dq_contributions": table.view(1, -1), "trace": table.view(1, -1)}
        rows = [passed.pop(name) for name in backward.Intervals._fields] if c.intervals else []
        workspace = backward.Workspace(table=table, **(unused | work | passed))
        tensors = backward.Tensors(**matrices)
        before, *marking, main = kernels(c)
        heads, named = tensors.q.shape[2], tensors._asdict() | workspace._asdict()

        def memory_of(fields: tuple[str, ...]) -> list[Parameter]:
            of_intervals = rows if "intervals" in fields else []
            return [
                *(_tensor(named[name]) for name in fields if name != "intervals"),
                *map(_tensor, of_intervals),
            ]

        everywhere = bytes([launch.complete == launch.q_tiles * heads])
        parameters = [*memory_of(backward.BeforeMemory._fields), everywhere]
        self._launch(before, (-(-launch.q_tiles // c.tiles_before), heads), parameters, memory)
        if c.intervals:
            parameters = [*map(_tensor, (table, *rows)), _number(tensors.k.shape[0])]
            self._launch(marking[0], (len(rows[2]) // SEEN_WORDS, 1), parameters, memory)
        if c.intervals and c.waits:
            of_unseen = (tensors.dq, table, workspace.control, workspace.dq_acc, rows[3])
            parameters = [*map(_tensor, of_unseen), _number(launch.complete), _number(launch.grid)]
            self._launch(marking[1], (launch.q_tiles, heads), parameters, memory)
        rows_of = {"q": c.tile_m, "dout": c.tile_m}
        columns = {"v": c.head_dim_v, "dv": c.head_dim_v, "dout": c.head_dim_v}
        row_bytes = {n: row_bytes_of(columns.get(n, c.head_dim)) for n in backward.Copies._fields}
        row_bytes["k"] = c.k_row_bytes
        maps = _maps((named[n], rows_of.get(n, c.tile_n), size) for n, size in row_bytes.items())
        numbers = [_number(n) for n in (launch.scale, launch.workers, launch.complete, *cap)]
        places = memory_of(backward.Memory._fields)
        products = [DUMMY] * (len(main.parameters) - len(maps) - len(places) - len(numbers))
        parameters = [*maps, *products, *places, *numbers]
        awaited = (workspace.lse2, workspace.delta)
        self._launch(main, (launch.grid, 1), parameters, memory, awaited)

    def _convert(self, memory: Memory, given: list[Any]) -> None:
        table, *matrices = given[: 1 + len(convert.MATRICES)]
        sizes, *flat = Sizes._make(given[4:12]), *given[12:]
        parts, launch = convert.Parts(*flat[:4]), convert.Launch(*flat[4:])
        assert [x.shape for x in matrices] == [sizes.of_q, sizes.of_k, sizes.of_v]
        assert [x.numel() for x in parts[:2]] == [*parts[2:]]
        parameters = [*map(_tensor, (*parts[:2], *matrices, table)), *map(_number, launch[:2])]
        q_blocks = kv_blocks = 1
        if self.config.apart:  # 8 warps have held a dQ tile, and 8 warps finish a kv tile
            q_blocks, kv_blocks = 8, {64: 4, 80: 8, 96: 4, 128: 4, 192: 2, 256: 2}[self.config.head_dim]
        blocks = launch.q_tiles * q_blocks + launch.kv_tiles * kv_blocks
        self._launch(kernels(self.config)[0], (blocks, sizes.heads), parameters, memory, parts[:2])


def _given(module: Any, config: Config, given: list[Any]) -> tuple[Any, ...]:
    """The arguments of a forward or backward by name: what is passed as tensors, ``Tensors``, the parts of
    the buffer, ``Launch``, and the numbers of a softcap."""
    names, flat = module.tensors_of(config), iter(given)
    passed = {name: next(flat) for name in names}
    matrices = {name: next(flat) for name in (*module.MATRICES, "lse")}
    sizes = Sizes._make(next(flat) for _ in Sizes._fields)
    q, k, v, out = (matrices[name] for name in ("q", "k", "v", "out"))
    assert sizes == sizes_of(q, k, v)
    assert (sizes.of_q, sizes.of_k, sizes.of_v, sizes.of_out) == (q.shape, k.shape, v.shape, out.shape)
    parts = {name: next(flat) for name in module.PARTS}
    assert [next(flat) for _ in parts] == [x.numel() for x in parts.values()]
    launch = module.Launch(*(next(flat) for _ in module.Launch._fields))
    return passed, matrices, parts, launch, list(flat)


def _maps(of: Iterable[tuple[Any, ...]]) -> list[Parameter]:
    """Of each tensor its map, as ``TensorMap.of`` makes it of these arguments, and the extents that come with
    it: (row, column, head, batch, shift)."""
    found: list[Parameter] = []
    for each in of:
        made = TensorMap.of(*each)
        column, row, *others = made.extents
        found += [made, b"".join(map(_number, (row, column, *others)))]
    return found


def _fitted(parameter: Parameter, size: int) -> Parameter:
    """A kernel for as many columns as its tiles have is not told how many a copied tensor has."""
    if isinstance(parameter, bytes) and len(parameter) == size + 4 == EXTENTS_BYTES:
        return parameter[:4] + parameter[8:]
    return parameter


def _number(value: float) -> bytes:
    return struct.pack("<f", value) if isinstance(value, float) else struct.pack("<i", value)


def _tensor(tensor: Tensor) -> bytes:
    """Pointer, extents, and strides but the last one, which is 1."""
    return _packed(tensor, tensor.shape, tensor.stride()[:-1])


def _packed(tensor: Tensor, extents: Sequence[int], strides: Sequence[int]) -> bytes:
    sizes = struct.pack(f"<{len(extents)}i", *extents)
    padded = sizes.ljust(-(-len(sizes) // 8) * 8, b"\0")
    return struct.pack("<Q", tensor.data_ptr()) + padded + struct.pack(f"<{len(strides)}q", *strides)


def _of_groups(x: Tensor, group: int, extent: Sequence[int]) -> bytes:
    """(B, S, H, D) as ``rows_of_groups`` of the kernel has it: (B, (group, S), H / group, D). ``extent``: of
    the group, where the compiler does not know it."""
    batch, tokens, heads, columns = x.shape
    of_batch, of_token, of_head, _ = x.stride()
    extents = (batch, *extent, tokens, heads // group, columns)
    return _packed(x, extents, (of_batch, of_head, of_token, of_head * group))


def _as_rows(x: Tensor) -> Tensor:
    """Pages as rows of one batch, as ``as_packed`` of the kernel has them; the last rows may not exist."""
    pages, rows, heads, columns = x.shape
    _, of_row, of_head, of_column = x.stride()
    return torch.empty(0, dtype=x.dtype).set_(
        x.untyped_storage(), x.storage_offset(), (1, pages * rows, heads, columns),
        (of_row, of_row, of_head, of_column),
    )  # fmt: skip

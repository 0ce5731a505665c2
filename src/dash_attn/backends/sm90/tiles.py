"""Tile shapes of the Hopper backward: the one table of what each supported head dim runs with."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "CACHED",
    "FORWARD",
    "HEAD_DIMS",
    "SHORT_DTYPES",
    "TILES",
    "ForwardKernel",
    "Kernel",
    "Registers",
    "Tiles",
    "cached_kernel_of",
    "covers",
    "forward_kernel_of",
    "has_intervals",
    "has_softcap",
    "has_softcap_apart",
    "kernel_of",
    "name_of",
    "row_bytes_of",
    "tiles_of",
]

SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}
"""Dtypes of the kernels, and what these are called in configurations and names of variants."""


class Registers(NamedTuple):
    """Registers per thread of the main kernel."""

    mma: int
    other: int  # of the warps that load, reduce, hand over and wait for tickets


# A block of 384 threads starts with 168 registers per thread. setmaxnreg can only move what the block was
# given: 2 * 240 + 24 = 3 * 168. One more would wait for ever.
_REGISTERS = Registers(mma=240, other=24)


class Tiles(NamedTuple):
    """Tile shape of a head dim, and how many tiles of each kind shared memory holds.

    Attributes:
        tile_m, tile_n: rows of a q tile and of a kv tile.
        q_stages, do_stages, ds_stages, dq_stages: buffers of Q, dO, dS and dQ.
        k_columns, v_columns: so many columns of K and of V, the first ones, are read once per item, and then
            kept in registers.
        registers: per thread.
    """

    tile_m: int
    tile_n: int
    q_stages: int
    do_stages: int
    ds_stages: int
    dq_stages: int
    k_columns: int = 0
    v_columns: int = 0
    registers: Registers = _REGISTERS


TILES = {
    # With two stages of Q, the next Q would have only half a task to arrive.
    (64, 64): Tiles(128, 128, q_stages=3, do_stages=2, ds_stages=2, dq_stages=1),
    # K comes in ten copies of 16 bytes per row, for which 24 registers are too few with intervals.
    (80, 80): Tiles(64, 128, q_stages=4, do_stages=2, ds_stages=2, dq_stages=2, k_columns=80, v_columns=80,
                    registers=Registers(232, 40)),
    # Room for a third tile of dO is left, here and at 80 columns: it gains nothing.
    (96, 96): Tiles(64, 128, q_stages=4, do_stages=2, ds_stages=2, dq_stages=2, k_columns=96),
    (128, 128): Tiles(64, 128, q_stages=3, do_stages=2, ds_stages=1, dq_stages=2, k_columns=16),
    # All of shared memory but 1 KB.
    (192, 128): Tiles(64, 128, q_stages=2, do_stages=2, ds_stages=1, dq_stages=1),
    # All of shared memory but 1 KB. The warpgroups share the columns of dK and dV: backward/split_columns.py.
    # The second buffer of dS holds P, a buffer of dQ a quarter of the tile.
    (256, 256): Tiles(64, 64, q_stages=2, do_stages=1, ds_stages=2, dq_stages=3, k_columns=16),
}  # fmt: skip
"""By (head dim of Q and K, head dim of V), smaller ones first: tensors run on the first that holds them."""


CACHED = tuple(head_dims for head_dims in TILES if head_dims != (80, 80))
"""Head dims of the forward kernels over a cache."""


class ForwardKernel(NamedTuple):
    """A forward kernel of training: its head dims, and how many columns of K and V, the last ones, it keeps
    in tiles of their own (0: none)."""

    head_dim: int
    head_dim_v: int
    rest: int = 0


FORWARD = (
    ForwardKernel(64, 64),
    ForwardKernel(80, 80),
    ForwardKernel(80, 80, rest=16),
    ForwardKernel(96, 96),
    ForwardKernel(96, 96, rest=32),
    ForwardKernel(128, 128),
    ForwardKernel(192, 128),
    ForwardKernel(256, 256),
)
"""The forward kernels of training."""

HEAD_DIMS = range(40, 257, 8)
"""Of tensors that the kernels take: the larger one of Q and V; the other one may be a smaller multiple of 8.
With less, more than half of every product would be zeros."""


def covers(head_dim: int, head_dim_v: int) -> bool:
    """Whether the kernels take tensors of these head dims.

    >>> covers(96, 96), covers(8, 120), covers(192, 128), covers(100, 100), covers(32, 32)
    (True, True, True, False, False)
    """
    both = head_dim, head_dim_v
    return max(both) in HEAD_DIMS and min(both) % HEAD_DIMS.step == 0


class Kernel(NamedTuple):
    """Head dims of a kernel, and whether tensors may have fewer columns."""

    head_dim: int
    head_dim_v: int
    padded: bool


def kernel_of(head_dim: int, head_dim_v: int) -> Kernel:
    """The kernel for tensors, padded where some of these have fewer columns. That of 80 columns is always
    padded, so that it has half as many variants.

    Raises:
        ValueError: there is none.

    >>> kernel_of(64, 64), kernel_of(64, 128)
    (Kernel(head_dim=64, head_dim_v=64, padded=False), Kernel(head_dim=128, head_dim_v=128, padded=True))
    """
    for kernel in TILES:
        if head_dim <= kernel[0] and head_dim_v <= kernel[1]:
            return Kernel(*kernel, padded=kernel == (80, 80) or (head_dim, head_dim_v) != kernel)
    raise ValueError(
        f"no kernel holds head_dim {name_of(head_dim, head_dim_v)}; the largest has {name_of(*kernel)}"
    )


def forward_kernel_of(head_dim: int, head_dim_v: int) -> ForwardKernel:
    """The forward kernel for tensors in training: one of `FORWARD`. Kernels of 80, 96 and 128 columns make
    the same bytes.

    80 and 96 columns fill swizzled rows of 32 and of 64 bytes, and come in as many copies per row. Where rows
    of tensors begin at odd multiples of 16 bytes, as those of 72 and 88 columns do, that costs more than the
    products of fewer columns save. Then 64 columns lie in rows of 128 bytes, and the rest apart
    (docs/experiments/head-dims.md).

    >>> forward_kernel_of(80, 80), forward_kernel_of(64, 88)
    (ForwardKernel(head_dim=80, head_dim_v=80, rest=0), ForwardKernel(head_dim=96, head_dim_v=96, rest=32))
    """
    columns, of_v, _ = kernel_of(head_dim, head_dim_v)
    return ForwardKernel(columns, of_v, columns - 64 if _is_slow_in_narrow_rows(head_dim, head_dim_v) else 0)


def _is_slow_in_narrow_rows(head_dim: int, head_dim_v: int) -> bool:
    """Whether tiles of 80 or 96 columns would come slowly: rows of tensors begin at odd multiples of 16
    bytes."""
    return 64 < max(head_dim, head_dim_v) <= 96 and (head_dim % 16 > 0 or head_dim_v % 16 > 0)


def cached_kernel_of(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Head dims of the forward kernel for tensors over a cache: one of `CACHED`, the same bytes.

    >>> cached_kernel_of(80, 80), cached_kernel_of(72, 72)
    ((96, 96), (128, 128))
    """
    fitting = (x for x in CACHED if head_dim <= x[0] and head_dim_v <= x[1])
    slow = (96, 96) if _is_slow_in_narrow_rows(head_dim, head_dim_v) else None
    return next(x for x in fitting if x != slow)


def tiles_of(head_dim: int, head_dim_v: int | None = None) -> Tiles:
    """What a head dim runs with. ``head_dim_v``: head dim of V, by default ``head_dim``.

    Raises:
        ValueError: there is no kernel for it.

    >>> tiles_of(128).tile_m
    64
    """
    pair = (head_dim, head_dim if head_dim_v is None else head_dim_v)
    if pair not in TILES:
        supported = ", ".join(name_of(*known) for known in TILES)
        raise ValueError(f"head_dim {name_of(*pair)} is not supported; supported: {supported}")
    return TILES[pair]


def row_bytes_of(columns: int) -> int:
    """Bytes of the rows in which shared memory keeps so many columns of 16 bits: the largest of 128, 64, 32
    and 16 that the columns fill. All but those of 16 are swizzled.

    >>> [row_bytes_of(columns) for columns in (128, 96, 64, 48, 40)]
    [128, 64, 128, 32, 16]
    """
    return next(size for size in (128, 64, 32, 16) if 2 * columns % size == 0)


def has_intervals(head_dim: int, head_dim_v: int) -> bool:
    """Whether the kernels for tensors of these head dims have variants with intervals of rows.

    >>> has_intervals(128, 64), has_intervals(192, 128)
    (True, False)
    """
    return max(head_dim, head_dim_v) <= 128


def has_softcap(head_dim: int, head_dim_v: int) -> bool:
    """Whether the kernel for tensors of these head dims has variants with a softcap.

    >>> has_softcap(128, 64), has_softcap(192, 128), has_softcap(256, 256)
    (True, False, True)
    """
    return kernel_of(head_dim, head_dim_v)[:2] != (192, 128)


def has_softcap_apart(head_dim: int, head_dim_v: int) -> bool:
    """Whether the kernel for tensors of these head dims has variants with a softcap that keep contributions
    to dQ apart.

    >>> has_softcap_apart(96, 96), has_softcap_apart(192, 128), has_softcap_apart(256, 256)
    (True, False, False)
    """
    return max(head_dim, head_dim_v) <= 128


def name_of(head_dim: int, head_dim_v: int) -> str:
    """
    >>> name_of(128, 128), name_of(192, 128)
    ('128', '192 (V: 128)')
    """
    return f"{head_dim}" if head_dim == head_dim_v else f"{head_dim} (V: {head_dim_v})"

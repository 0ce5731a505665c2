"""Tile shapes of the Hopper backward: the one table of what each supported head dim runs with."""

from __future__ import annotations

from typing import NamedTuple

from .untried import runs

__all__ = [
    "HEAD_DIMS",
    "LARGE",
    "TILES",
    "WIDE",
    "Kernel",
    "Registers",
    "Tiles",
    "covers",
    "has_softcap",
    "kernel_of",
    "may_run",
    "name_of",
    "tiles_of",
]


class Registers(NamedTuple):
    """Registers per thread of the main kernel."""

    mma: int
    other: int  # of the warps that load, reduce, hand over and wait for tickets


class Tiles(NamedTuple):
    """Tile shape of a head dim, and how many tiles of each kind shared memory holds.

    Attributes:
        tile_m, tile_n: rows of a q tile and of a kv tile.
        q_stages, do_stages, ds_stages, dq_stages: buffers of Q, dO, dS and dQ.
        registers: per thread.
    """

    tile_m: int
    tile_n: int
    q_stages: int
    do_stages: int
    ds_stages: int
    dq_stages: int
    registers: Registers


# A block of 384 threads starts with 168 registers per thread. setmaxnreg can only move what the block was
# given: 2 * 240 + 24 = 3 * 168. One more would wait for ever.
_REGISTERS = Registers(mma=240, other=24)

TILES = {
    # With two stages of Q, the next Q would have only half a task to arrive.
    (64, 64): Tiles(128, 128, q_stages=3, do_stages=2, ds_stages=2, dq_stages=1, registers=_REGISTERS),
    (128, 128): Tiles(64, 128, q_stages=3, do_stages=2, ds_stages=1, dq_stages=2, registers=_REGISTERS),
    # All of shared memory but 1 KB.
    (192, 128): Tiles(64, 128, q_stages=2, do_stages=2, ds_stages=1, dq_stages=1, registers=_REGISTERS),
    # All of shared memory but 1 KB. The warpgroups share the columns of dK and dV: backward/split_columns.py.
    # The second buffer of dS holds P, a buffer of dQ a quarter of the tile.
    (256, 256): Tiles(64, 64, q_stages=2, do_stages=1, ds_stages=2, dq_stages=3, registers=_REGISTERS),
}
"""By (head dim of Q and K, head dim of V)."""


HEAD_DIMS, WIDE, LARGE = range(40, 129, 8), range(136, 193, 8), range(200, 257, 8)
"""Of tensors that the kernels take: the larger one of Q and V; the other one may be a smaller multiple of 8.
With less, more than half of every product would be zeros. WIDE: of Q, beside a V of at most 128. LARGE: of
both, if these kernels may run."""


def covers(head_dim: int, head_dim_v: int) -> bool:
    """Whether the kernels take tensors of these head dims.

    >>> covers(96, 96), covers(8, 120), covers(192, 128), covers(100, 100), covers(192, 136)
    (True, True, True, False, False)
    """
    both = (head_dim, head_dim_v)
    fits = max(both) in HEAD_DIMS or (head_dim in WIDE and head_dim_v <= HEAD_DIMS[-1])
    if all(x in LARGE for x in both):
        return may_run(256)
    return fits and all(x % HEAD_DIMS.step == 0 for x in both)


def may_run(head_dim: int) -> bool:
    """Whether the kernels of a head dim of Q may run, see untried.py."""
    return runs(f"head_dim_{head_dim}")


class Kernel(NamedTuple):
    """Head dims of a kernel, and whether tensors may have fewer columns."""

    head_dim: int
    head_dim_v: int
    padded: bool


def kernel_of(head_dim: int, head_dim_v: int) -> Kernel:
    """The kernel for tensors, padded where some of these have fewer columns.

    Raises:
        ValueError: there is none.

    >>> kernel_of(64, 64), kernel_of(64, 128)
    (Kernel(head_dim=64, head_dim_v=64, padded=False), Kernel(head_dim=128, head_dim_v=128, padded=True))
    """
    for kernel in filter(lambda kernel: may_run(kernel[0]), TILES):
        if head_dim <= kernel[0] and head_dim_v <= kernel[1]:
            return Kernel(*kernel, padded=(head_dim, head_dim_v) != kernel)
    raise ValueError(
        f"no kernel holds head_dim {name_of(head_dim, head_dim_v)}; the largest has {name_of(*kernel)}"
    )


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


def has_softcap(head_dim: int, head_dim_v: int) -> bool:
    """Whether the kernel for tensors of these head dims has variants with a softcap.

    >>> has_softcap(128, 64), has_softcap(192, 128), has_softcap(256, 256)
    (True, False, False)
    """
    return max(head_dim, head_dim_v) <= HEAD_DIMS[-1]


def name_of(head_dim: int, head_dim_v: int) -> str:
    """
    >>> name_of(128, 128), name_of(192, 128)
    ('128', '192 (V: 128)')
    """
    return f"{head_dim}" if head_dim == head_dim_v else f"{head_dim} (V: {head_dim_v})"

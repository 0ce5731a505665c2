"""Which unit of a Hopper SM bounds a task: FlashAttention-4's analysis (section 3.2.1) for this kernel.

Cycles that one task, a (tile_m x tile_n) tile of S, keeps each unit busy if nothing else limits it. Left
out: floating-point arithmetic beside the products, register bandwidth, L2 reads, latencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ProblemError
from ..problem import Problem, default_tiles
from ..schedule.constants import FORWARD_TILE
from .cost import H200, H200_WORKERS

__all__ = [
    "CLOCK_GHZ",
    "ForwardRoofline",
    "Roofline",
    "forward_roofline",
    "measured_cycles",
    "roofline",
]

CLOCK_GHZ = 1.755
"""SM clock to turn times into cycles; an H200's under load varies between 1.63 and 1.98."""

TENSOR_FLOPS = 4096
"""bf16 FLOPs a cycle and SM: 989 TFLOP/s on 132 SMs at 1.83 GHz."""

SHARED_BYTES, EXPONENTIALS = 128, 16
"""Bytes of shared memory, and exponentials, a cycle and SM."""

REDUCED_TB_PER_S = 3.9
"""fp32 bulk additions into L2 by all SMs together, measured on an H200 with an L2-resident target."""

WARPGROUPS, ROWS = 2, 64
"""Warpgroups that multiply, and rows of S^T (kv) of each: a wgmma reads its B operand for itself."""

KEPT_COLUMNS = {64: 0, 128: 16}
"""Columns of K, by head dim, that stay in registers while an item is computed: S reads the others."""

FORWARD_WARPGROUPS = {64: 3, 128: 2}
"""Of the forward, by head dim; they own rows of S."""


@dataclass(frozen=True)
class Roofline:
    """Cycles of one task, by unit.

    Attributes:
        head_dim, tile_m, tile_n: the configuration.
        units: cycles a unit is busy. "tensor cores"; "shared memory", the sum of ``shared``; "exponential
            unit"; "L2 reduction", its share of what all SMs add together.
        shared: cycles of shared memory, by purpose.
        alone: cycles from the start of a reduction to its completion with the machine otherwise idle.
        hop: cycles from one contribution to the next one of the same dQ tile, reduction included: what
            binds if a schedule has no slack, and nothing if it has enough.
    """

    head_dim: int
    tile_m: int
    tile_n: int
    units: Mapping[str, float]
    shared: Mapping[str, float]
    alone: float
    hop: float

    @property
    def binding(self) -> str:
        """The unit that is busy longest."""
        return max(self.units, key=lambda unit: self.units[unit])

    @property
    def bound(self) -> float:
        """Cycles below which no task can be on average."""
        return self.units[self.binding]


def roofline(head_dim: int) -> Roofline:
    """The analysis of the kernel's configuration for a head dimension.

    S^T = K Q^T, dP^T = V dO^T and dQ = dS K read both operands from shared memory, but for the columns of K
    that S^T has in registers. dV += P^T dO and dK += dS^T Q read only the second. Each of the two warpgroups
    owns 64 kv rows and reads its own copy of what both need. For dQ they share the rows where there are 128,
    and the columns where there are 64.

    Raises:
        ProblemError: ``head_dim`` is neither 64 nor 128.

    >>> r = roofline(128)
    >>> r.units["tensor cores"], r.units["shared memory"], r.binding
    (2560.0, 2912.0, 'shared memory')
    """
    if head_dim not in (64, 128):
        raise ProblemError(f"head_dim must be 64 or 128, got {head_dim}")
    tile_m, tile_n = default_tiles(head_dim)
    q = tile_m * head_dim * 2.0  # bytes of a Q or dO tile; K and V tiles, dS and the fp32 dQ alike
    kv, ds, dq = tile_n * head_dim * 2.0, tile_m * tile_n * 2.0, tile_m * head_dim * 4.0
    split_rows = tile_m == WARPGROUPS * ROWS
    traffic = {
        "S and dP": (2 - KEPT_COLUMNS[head_dim] / head_dim) * kv + 2 * WARPGROUPS * q,
        "dV and dK": 2 * WARPGROUPS * q,
        "dQ": ds + WARPGROUPS * kv if split_rows else WARPGROUPS * ds + kv,
        "dS written": ds,
        "dQ written and read": 2 * dq,
        "Q and dO loaded": 2 * q,
    }
    shared = {what: size / SHARED_BYTES for what, size in traffic.items()}
    l2_bytes = REDUCED_TB_PER_S * 1e12 / (H200_WORKERS * CLOCK_GHZ * 1e9)
    units = {
        "tensor cores": 10.0 * tile_m * tile_n * head_dim / TENSOR_FLOPS,
        "shared memory": sum(shared.values()),
        "exponential unit": tile_m * tile_n / EXPONENTIALS,
        "L2 reduction": dq / l2_bytes,
    }
    return Roofline(
        head_dim, tile_m, tile_n, units, shared, alone=H200.reduce, hop=H200.reduce + H200.latency
    )


@dataclass(frozen=True)
class ForwardRoofline:
    """Cycles of one kv tile of a forward's item, by unit.

    Attributes:
        head_dim, tile_m, tile_n: the configuration.
        units: cycles a unit is busy: "tensor cores"; "shared memory", the sum of ``shared``; "exponential
            unit".
        shared: cycles of shared memory, by purpose.
    """

    head_dim: int
    tile_m: int
    tile_n: int
    units: Mapping[str, float]
    shared: Mapping[str, float]

    @property
    def bound(self) -> float:
        """Cycles below which no kv tile can be on average."""
        return max(self.units.values())


def forward_roofline(head_dim: int) -> ForwardRoofline:
    """The same for the forward's configuration, three warpgroups at head dim 64 and two at 128.

    S = Q K^T reads both operands from shared memory, O += P V only the second. Every warpgroup owns 64 rows,
    and reads its own copy of K and V.

    Raises:
        ProblemError: ``head_dim`` is neither 64 nor 128.

    >>> r = forward_roofline(64)
    >>> r.units["tensor cores"], r.units["exponential unit"], r.bound
    (1536.0, 1536.0, 1536.0)
    """
    if head_dim not in (64, 128):
        raise ProblemError(f"head_dim must be 64 or 128, got {head_dim}")
    warpgroups, tile_n = FORWARD_WARPGROUPS[head_dim], FORWARD_TILE
    tile_m = warpgroups * ROWS
    kv, q = tile_n * head_dim * 2.0, ROWS * head_dim * 2.0
    traffic = {"S": warpgroups * (kv + q), "O": warpgroups * kv, "K and V loaded": 2 * kv}
    shared = {what: size / SHARED_BYTES for what, size in traffic.items()}
    units = {
        "tensor cores": 4.0 * tile_m * tile_n * head_dim / TENSOR_FLOPS,
        "shared memory": sum(shared.values()),
        "exponential unit": tile_m * tile_n / EXPONENTIALS,
    }
    return ForwardRoofline(head_dim, tile_m, tile_n, units, shared)


def measured_cycles(
    problem: Problem, milliseconds: float, other_ms: float = 0.0, clock_ghz: float = CLOCK_GHZ
) -> float:
    """Cycles of an SM for each task, on average over a whole backward of ``milliseconds``.

    Args:
        problem: what was computed.
        milliseconds: of the whole backward.
        other_ms: of them not spent in the kernel that runs the tasks.
        clock_ghz: SM clock meanwhile.
    """
    return (milliseconds - other_ms) * 1e-3 * clock_ghz * 1e9 * H200_WORKERS / problem.tasks

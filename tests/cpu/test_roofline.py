"""The roofline against counts made another way, and against the kernel's configuration."""

from __future__ import annotations

import pytest

from dash_attn.backends.sm90.backward.config import BackwardConfig
from dash_attn.backends.sm90.forward.config import forward_config
from dash_attn.errors import ProblemError
from dash_attn.model.roofline import CLOCK_GHZ, forward_roofline, measured_cycles, roofline
from dash_attn.problem import Problem

BF16, FP32, BANDWIDTH = 2, 4, 128


def wgmma_bytes(rows: int, columns: int, depth: int, a_in_shared: bool) -> int:
    """Shared memory that one warpgroup reads for rows x columns, summed over depth, 64 rows at a time."""
    blocks = rows // 64
    return BF16 * blocks * (64 * depth * a_in_shared + depth * columns)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_shared_memory_against_a_count_of_instructions(head_dim: int) -> None:
    config, found = BackwardConfig(head_dim), roofline(head_dim)
    m, n, d = config.tile_m, config.tile_n, config.head_dim
    assert (found.tile_m, found.tile_n) == (m, n)
    both = 2 * wgmma_bytes(n // 2, m, d, a_in_shared=True)
    kept = BF16 * n // 2 * (config.k_columns + config.v_columns)
    grads = wgmma_bytes(n // 2, d, m, a_in_shared=False)
    dq = wgmma_bytes(64, d, n, True) if m == 128 else wgmma_bytes(64, d // 2, n, True)
    products = 2 * (both - kept + 2 * grads + dq)
    others = m * n * BF16 + 2 * m * d * FP32 + 2 * m * d * BF16
    assert found.units["shared memory"] * BANDWIDTH == products + others
    assert found.units["shared memory"] == sum(found.shared.values())


@pytest.mark.parametrize(("head_dim", "exponentials"), [(64, 1024), (128, 512)])
def test_the_other_units(head_dim: int, exponentials: int) -> None:
    found = roofline(head_dim)
    assert found.units["tensor cores"] == 2560
    assert found.units["exponential unit"] == exponentials
    assert found.alone < found.units["L2 reduction"] < found.hop
    assert found.binding == "shared memory"
    assert found.bound == max(found.units.values())


def test_other_head_dims_have_no_kernel() -> None:
    with pytest.raises(ProblemError, match="96"):
        roofline(96)


def test_measured_cycles() -> None:
    problem = Problem.dense(heads=132, seqlen=128, head_dim=64)  # one task per worker
    assert measured_cycles(problem, 3.0, 1.0) == pytest.approx(2e-3 * CLOCK_GHZ * 1e9)
    assert measured_cycles(problem, 3.0, 1.0, clock_ghz=1.5) == pytest.approx(3e6)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_forwards_roofline_is_of_its_configuration(head_dim: int) -> None:
    config, found = forward_config(head_dim, "bf16"), forward_roofline(head_dim)
    assert (found.tile_m, found.tile_n) == (config.tile_m, config.tile_n)
    # Instructions of 64 x 128 x 16, and of 64 x head_dim x 16, in the time that tensor cores need for them.
    flops = 2 * 64 * 16 * config.warpgroups * (128 * head_dim // 16 + head_dim * 128 // 16)
    assert found.units["tensor cores"] == flops / 4096
    scores, outputs = wgmma_bytes(64, 128, head_dim, True), wgmma_bytes(64, head_dim, 128, False)
    read, loaded = config.warpgroups * (scores + outputs), 2 * 128 * head_dim * BF16
    assert found.units["shared memory"] * BANDWIDTH == read + loaded
    assert found.bound == max(found.units.values())
    with pytest.raises(ProblemError, match="head_dim must be 64 or 128, got 96"):
        forward_roofline(96)

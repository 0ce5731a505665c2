"""The example that trains with FSDP2 and context parallelism, on two GPUs: the weights of one."""

from __future__ import annotations

import pytest
import torch

from example_runs import weights

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("seqlen", [512, 8192])
def test_two_gpus_have_the_weights_of_one(seqlen: int) -> None:
    size = f"--seqlen={seqlen}"
    assert weights(2, size, device="cuda") == weights(1, size, device="cuda")


def test_the_order_of_a_ring_has_other_weights() -> None:
    (one, losses), (two, other) = (weights(n, "--ring-order", device="cuda") for n in (1, 2))
    assert one != two
    assert losses[0] == other[0]  # the forward is the same

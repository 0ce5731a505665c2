"""All features at once on the CPU: compiled, checkpointed, on threads. ``test_gpu_api.py`` has more."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from contract_cases import ENDS, Way, all_same, attend, beside, gradients, leaves_of

torch.set_num_threads(1)

CPU = Way("cpu", everything=True)
LAYOUTS = pytest.mark.parametrize("layout", ["dense", "packed"])


def rest_of(layout: str, seqlen: int = 600) -> list[Tensor]:
    """What is beside the leaves, and bounds."""
    bounds = [torch.tensor(ENDS, dtype=torch.int32)] if layout == "packed" else []
    return [*beside(CPU, layout, "cpu", seqlen), *bounds]


def run(q: Tensor, *rest: Tensor) -> Tensor:
    return attend(CPU, 2 * q, *rest)


@LAYOUTS
def test_compiled_calls_have_the_same_bytes(layout: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for seqlen in (60, 70, 81) if layout == "dense" else (1, 2):
        tensors, rest = leaves_of(CPU, layout, "cpu", seqlen, seed=seqlen), rest_of(layout, seqlen)
        found, wanted = (gradients(function, tensors, *rest) for function in (compiled, run))
        assert all_same(found, wanted)
        assert len(wanted) == 5
        assert all(x.any() for x in wanted)


@LAYOUTS
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_have_the_same_bytes(layout: str, use_reentrant: bool) -> None:
    tensors, rest = leaves_of(CPU, layout, "cpu", 90), rest_of(layout, 90)
    found = gradients(lambda *x: checkpoint(run, *x, use_reentrant=use_reentrant), tensors, *rest)
    assert all_same(found, gradients(run, tensors, *rest))


def test_threads_share_nothing() -> None:
    rest = rest_of("dense", 90)
    each = [leaves_of(CPU, "dense", "cpu", 90, seed=seed) for seed in range(3)]
    call: Callable[[list[Tensor]], list[Tensor]] = lambda x: gradients(run, x, *rest)  # noqa: E731
    wanted = [call(x) for x in each]
    with ThreadPoolExecutor(3) as pool:
        for found, one in zip(pool.map(call, each * 3), wanted * 3):
            assert all_same(found, one)
    assert not all_same(wanted[0], wanted[1])

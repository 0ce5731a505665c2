"""Everything in this folder needs a Hopper GPU; without one it is skipped, with the reason.

The Triton kernels need any GPU that they run on.

Sizes, from the environment: ``DASH_ATTN_PROBLEMS`` random problems of the accuracy tests and of the fuzzer
(default 60), ``DASH_ATTN_REPLAYS`` replays of each policy and mask (default 200), ``DASH_ATTN_STEPS``
of a captured step over a cache (default 40).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fuzz_case import poisoned_memory

HERE = Path(__file__).parent
ANY_GPU = ("test_gpu_triton.py", "test_gpu_triton_functions.py", "test_gpu_triton_split.py")


def _why_skip(any_gpu: bool) -> str:
    if not torch.cuda.is_available():
        return "no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if any_gpu or (major, minor) == (9, 0):
        return ""
    return f"the GPU is sm_{major}{minor}, the kernels are for sm_90"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if HERE in item.path.parents]
    reasons = {any_gpu: _why_skip(any_gpu) for any_gpu in (False, True)} if mine else {}
    for item in mine:
        reason = reasons[item.path.name in ANY_GPU]
        item.add_marker(pytest.mark.gpu)
        for category in ("DeprecationWarning", "UserWarning"):  # of kernel compilers
            item.add_marker(pytest.mark.filterwarnings(f"ignore::{category}"))
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def replays() -> int:
    return int(os.environ.get("DASH_ATTN_REPLAYS", "200"))


@pytest.fixture(scope="session", autouse=True)
def _pytorch_knows_its_functions() -> None:
    """Dynamo, and ``with device:``, list PyTorch's functions at first use: before any test replaces one."""
    torch.compile(torch.neg, backend="eager")(torch.ones(1))
    with torch.device("cpu"):
        torch.empty(0)


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Uninitialised CUDA tensors hold NaN or -1, so that reading one shows."""
    with poisoned_memory():
        yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # an error of this test must not show up in the next one

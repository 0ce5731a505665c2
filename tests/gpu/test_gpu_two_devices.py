"""A process with two GPUs: calls on one while the other is the current one, and on both at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn import attention, flash_attn_varlen_func, flash_attn_with_kvcache
from dash_attn.testing import assert_same_bytes

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

DEVICES = ("cuda:0", "cuda:1")
ENDS = (0, 300, 300, 333, 1000)


def drawn(device: str, *sizes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).bfloat16().to(device) for size in sizes]


def trained(device: str, **how: Any) -> list[Tensor]:
    *qkv, dout = drawn(device, (2, 1000, 4, 64), (2, 1000, 2, 64), (2, 1000, 2, 64), (2, 1000, 4, 64))
    leaves = [x.requires_grad_() for x in qkv]
    for name, x in list(how.items()):
        if isinstance(x, Tensor):
            how[name] = x.to(device)
    if (sink := how.get("learnable_sink")) is not None:
        leaves.append(sink.requires_grad_())
    out = attention(*leaves[:3], causal=True, **how)
    assert isinstance(out, Tensor)
    return [out, *torch.autograd.grad(out, leaves, dout)]


def packed(device: str, where: str, **how: Any) -> list[Tensor]:
    *qkv, dout = drawn(device, (1000, 4, 128), (1000, 4, 128), (1000, 4, 128), (1000, 4, 128))
    leaves = [x.requires_grad_() for x in qkv]
    ends = torch.tensor(ENDS, dtype=torch.int32).to(device if where == "gpu" else "cpu")
    out = flash_attn_varlen_func(*leaves, ends, ends, causal=True, **how)
    return [out, *torch.autograd.grad(out, leaves, dout)]


def cached(device: str, rows: int, pages: bool) -> list[Tensor]:
    q, k, v, *new = drawn(device, (3, rows, 8, 128), *[(24, 128, 2, 128)] * 2, *[(3, rows, 2, 128)] * 2)
    used = torch.tensor([500, 0, 900], dtype=torch.int32, device=device)
    table = None
    if pages:
        table = torch.arange(24, dtype=torch.int32, device=device).view(3, 8)
    else:
        k, v = (x.view(3, 1024, 2, 128) for x in (k, v))
    out = flash_attn_with_kvcache(q, k, v, *new, cache_seqlens=used, page_table=table, causal=True)
    assert isinstance(out, Tensor)
    return [out, k, v]


CASES: dict[str, Callable[[str], list[Tensor]]] = {
    "dense": trained,
    "segments": lambda device: trained(device, q_segment=256),
    "triton": lambda device: trained(device, backend="triton"),
    "dropout": lambda device: trained(device, dropout_p=0.3, dropout_seed=7),
    "softcap and sink": lambda device: trained(device, softcap=20.0, learnable_sink=torch.linspace(-1, 1, 4)),
    "intervals": lambda device: trained(device, row_ends=torch.full((2, 1000), 700, dtype=torch.int32)),
    "slopes": lambda device: trained(device, alibi_slopes=torch.linspace(0.01, 0.3, 4)),
    "packed, lengths on the GPU": lambda device: packed(device, "gpu"),
    "packed, lengths on the CPU": lambda device: packed(device, "cpu"),
    "packed, triton": lambda device: packed(device, "gpu", backend="triton"),
    "decoding": lambda device: cached(device, 1, pages=False),
    "chunks of prompts": lambda device: cached(device, 70, pages=True),
}


@pytest.mark.parametrize("name", CASES)
def test_another_device_than_the_current_one(name: str) -> None:
    """By kernels that were loaded for the other device first."""
    wanted, found = (CASES[name](device) for device in DEVICES)
    assert torch.cuda.current_device() == 0
    for a, b in zip(found, wanted):
        assert a.device.index == 1
        assert_same_bytes(a.to("cuda:0"), b)


def test_two_devices_at_the_same_time() -> None:
    """A thread for each: kernels, plans and lengths are kept for both."""
    wanted = {name: [x.cpu() for x in case("cuda:0")] for name, case in CASES.items()}
    failed: list[BaseException] = []

    def run(device: str, names: list[str]) -> None:
        try:
            for name in 8 * names:
                for a, b in zip(CASES[name](device), wanted[name]):
                    assert_same_bytes(a.cpu(), b, name)
        except BaseException as error:
            failed.append(error)

    threads = [
        threading.Thread(target=run, args=(device, list(CASES)[:: 1 - 2 * number]))
        for number, device in enumerate(DEVICES)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed

"""Ranks at different calls, on a GPU: two processes share it, over gloo. NCCL wants a GPU per rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from dash_attn.distributed import attention

rank, order, place = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
x = torch.randn(1, 256, 4, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
losses = [attention(x, x, x, causal=True).sum() for _ in range(2)]
if order == "other" and rank:
    losses.reverse()
for loss in losses:
    loss.backward()
torch.cuda.synchronize()
print("done", flush=True)
dist.barrier()
"""


@pytest.mark.parametrize("order", ["same", "other"])
def test_backwards_in_another_order_stop_the_gpu(order: str, tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, f"{rank}", order, f"{tmp_path / 'store'}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    for rank, text in zip(ranks, said):
        if order == "same":
            assert rank.returncode == 0, text
            assert "done" in text
        else:
            assert rank.returncode != 0, text
            assert "done" not in text
            assert "device-side assert" in text
            assert "the ranks of a group are at different calls" in text

"""Time attention that several GPUs share: forward and backward, beside one GPU and beside other libraries.

Peers: PyTorch's ``context_parallel`` (its ring over SDPA's flash kernels), and an all-gather of K and V
around FlashAttention-4, dK and dV reduced by NCCL. Both under a zigzag layout. Neither has the bytes of one
GPU.

A block of calls begins on all GPUs together. Its time is that of the slowest one. Implementations come in
random order, each block behind one of its own that is not counted, as in forward.py.

    python benchmarks/context_parallel.py --output benchmarks/results/h200x2-context-parallel.json
    python benchmarks/context_parallel.py --only "65536, 16:4" --rounds 2
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from card import facts_of_run
from record import Row, write
from torch import Tensor

import dash_attn
from dash_attn.distributed import attention, shard, transport
from dash_attn.model.links import H200_LINKS, memory_gb, predict
from dash_attn.peers import fa4
from dash_attn.problem import Mask, Problem

LENGTHS, HEADS, HEAD_DIM = (32768, 65536, 131072), ((16, 4), (32, 8)), 128
BLOCK_MS, ROUNDS = 100.0, 5
MODES = ("ulysses", "gather", "ring")

Call = Callable[[], object]


def whole(seqlen: int, heads: int, kv_heads: int) -> list[Tensor]:
    """q, k, v and dout of the whole sequence, the same on every rank."""
    torch.manual_seed(0)
    shapes = [(1, seqlen, n, HEAD_DIM) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]


def with_gradients(call: Callable[..., Tensor], inputs: list[Tensor], dout: Tensor) -> Call:
    """A forward and a backward."""
    leaves = [x.detach().requires_grad_() for x in inputs]

    def run() -> object:
        return torch.autograd.grad(call(*leaves), leaves, dout)

    return run


def ours(tensors: list[Tensor], mode: str) -> Call:
    *qkv, dout = (shard(x) for x in tensors)
    return with_gradients(lambda q, k, v: attention(q, k, v, causal=True, mode=mode), qkv, dout)


def one_gpu(tensors: list[Tensor]) -> Call:
    *qkv, dout = tensors
    return with_gradients(lambda q, k, v: dash_attn.attention(q, k, v, causal=True), qkv, dout)


class _GatherFA4(torch.autograd.Function):
    """All keys on every rank, FlashAttention-4 for both chunks of rows, NCCL adds dK and dV."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, deterministic: bool, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        ctx.deterministic = deterministic
        keys, values = (_gathered(x) for x in (k, v))
        outs, lses = [], []
        for rows, end in _chunks(q.shape[1]):
            out, lse = fa4.forward(q[:, rows], keys[:, :end], values[:, :end], HEAD_DIM**-0.5, Mask.causal())
            outs.append(out)
            lses.append(lse)
        ctx.save_for_backward(q, k, v, *outs, *lses)
        return torch.cat(outs, 1)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, *saved = ctx.saved_tensors
        keys, values = (_gathered(x) for x in (k, v))
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(keys), torch.zeros_like(values)
        for i, (rows, end) in enumerate(_chunks(q.shape[1])):
            of_rows = saved[i], dout[:, rows].contiguous(), saved[2 + i]
            options = {"causal": True, "softmax_scale": HEAD_DIM**-0.5, "deterministic": ctx.deterministic}
            found = fa4.gradients((q[:, rows], keys[:, :end], values[:, :end], *of_rows), options)
            dq[:, rows], more_k, more_v = found
            dk[:, :end] += more_k
            dv[:, :end] += more_v
        return None, dq, _scattered(dk), _scattered(dv)


def _chunks(rows: int) -> list[tuple[slice, int]]:
    """The rows of a rank's two chunks, and how many keys they see."""
    rank, half = dist.get_rank(), rows // 2
    back = 2 * dist.get_world_size() - 1 - rank
    return [(slice(0, half), (rank + 1) * half), (slice(half, None), (back + 1) * half)]


def _gathered(x: Tensor) -> Tensor:
    ranks = dist.get_world_size()
    parts = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(parts, x.contiguous())
    halves = [part.chunk(2, 1) for part in parts]
    return torch.cat([h[0] for h in halves] + [h[1] for h in reversed(halves)], 1)


def _scattered(x: Tensor) -> Tensor:
    ranks = dist.get_world_size()
    chunks = x.chunk(2 * ranks, 1)
    mine = [torch.cat([chunks[r], chunks[2 * ranks - 1 - r]], 1) for r in range(ranks)]
    out = torch.empty_like(mine[0])
    dist.reduce_scatter(out, mine)
    return out


def gathered_fa4(tensors: list[Tensor], deterministic: bool) -> Call:
    *qkv, dout = (shard(x) for x in tensors)
    return with_gradients(partial(_GatherFA4.apply, deterministic), qkv, dout)


def torch_ring(tensors: list[Tensor]) -> Call:
    """PyTorch's ring; K and V get as many heads as Q where its kernels ask for that."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    group = tensors[0].shape[2] // tensors[1].shape[2]
    *qkv, dout = (shard(x).transpose(1, 2).contiguous() for x in tensors)
    qkv[1:] = [x.repeat_interleave(group, 1) for x in qkv[1:]]

    def run() -> object:
        leaves = [x.detach().requires_grad_() for x in qkv]
        device = torch.zeros(2 * dist.get_world_size(), device="cuda")  # it takes its device from a buffer
        how = {"buffers": [device], "buffer_seq_dims": [0], "no_restore_buffers": {device}}
        with context_parallel(mesh, **how), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
            return torch.autograd.grad(out, leaves, dout)

    return run


def block_ms(call: Call, count: int) -> float:
    """Milliseconds per call of the slowest rank."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    begin.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    slowest = torch.tensor(begin.elapsed_time(end) / count, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def peak_gb(call: Call) -> float:
    """10^9 bytes that a call allocates at the most, on the rank with the most."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    most = torch.tensor((torch.cuda.max_memory_allocated() - before) / 1e9, device="cuda")
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return round(float(most), 3)


def measured(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    counts = {}
    for name, call in list(calls.items()):
        try:
            call()
            counts[name] = max(1, round(BLOCK_MS / block_ms(call, 1)))
        except Exception as error:  # a peer that cannot do it
            if name.startswith("dash"):
                raise
            if dist.get_rank() == 0:
                print(f"{name} is left out: {type(error).__name__}: {str(error)[:150]}", file=sys.stderr)
            del calls[name]
    times: dict[str, list[float]] = {name: [] for name in calls}
    chance = random.Random(0)  # the same order on every rank
    for _ in range(rounds):
        for name in chance.sample(list(calls), len(calls)):
            block_ms(calls[name], counts[name])
            times[name].append(block_ms(calls[name], counts[name]))
    return times


def rows_of(seqlen: int, heads: int, kv_heads: int, rounds: int) -> list[Row]:
    tensors = whole(seqlen, heads, kv_heads)
    calls: dict[str, Call] = {"dash_attn, one GPU": one_gpu(tensors)}
    calls |= {f"dash_attn, {mode}": ours(tensors, mode) for mode in MODES}
    calls["all-gather, fa4 det"] = gathered_fa4(tensors, True)
    calls |= {"all-gather, fa4": gathered_fa4(tensors, False), "torch ring": torch_ring(tensors)}
    problem = Problem.dense(
        heads=heads, kv_heads=kv_heads, seqlen=seqlen, head_dim=HEAD_DIM, mask=Mask.causal()
    )
    found = []
    for name, all_ms in measured(calls, rounds).items():
        ms = statistics.median(all_ms)
        row: Row = {
            "case": f"{seqlen}, {heads}:{kv_heads}, {HEAD_DIM}, causal",
            "impl": name,
            "ms": round(ms, 3),
        }
        row["spread"] = round((max(all_ms) - min(all_ms)) / ms, 4)
        if name.startswith("dash"):
            mode = name.partition(", ")[2]
            ranks = 1 if mode == "one GPU" else dist.get_world_size()
            row["predicted_ms"] = round(predict(problem, ranks, mode, H200_LINKS).ms, 3)
            row |= {
                "peak_gb": peak_gb(calls[name]),
                "predicted_gb": round(memory_gb(problem, ranks, mode), 3),
            }
        found.append(row)
    return found


def run(rank: int, ranks: int, options: argparse.Namespace) -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29555")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    found: list[Row] = []
    for heads, kv_heads in HEADS:
        for seqlen in LENGTHS:
            name = f"{seqlen}, {heads}:{kv_heads}"
            if options.only and not any(only in name for only in options.only):
                continue
            mine = rows_of(seqlen, heads, kv_heads, options.rounds)
            found += mine
            torch.cuda.empty_cache()
            if rank == 0:
                show(mine)
            if rank == 0 and options.output:  # a run that is cut short leaves what it has
                facts = facts_of_run(options.rounds, "torch", "flash-attn-4")
                about = {"gpus": ranks, "timing": "sustained", "transport": transport()}
                write(options.output, facts | about, found)
    dist.destroy_process_group()


def show(rows: list[Row]) -> None:
    one = rows[0]["ms"]
    for row in rows:
        predicted = ""
        if "predicted_ms" in row:
            predicted = f"  predicted {row['predicted_ms']:8.2f}; GB {row['peak_gb']} ({row['predicted_gb']})"
        print(f"{row['case']:28} {row['impl']:20} {row['ms']:8.2f} ms  {one / row['ms']:.2f}x{predicted}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="write the rows to this JSON file")
    parser.add_argument("--only", nargs="+", help="cases whose name has one of these")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    ranks = torch.cuda.device_count()
    if ranks < 2:
        sys.exit(f"this needs two GPUs, found {ranks}")
    mp.spawn(run, (ranks, options), ranks)


if __name__ == "__main__":
    main()

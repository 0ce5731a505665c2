"""Train a small GPT whose sequences and weights are spread over several GPUs: the same bytes for any number.

    torchrun --nproc-per-node 2 examples/context_parallel.py

Sequences are spread by ``dash_attn.distributed`` (context parallelism), weights by FSDP2. It runs on GPUs if
there are any, else on CPUs. At the end it prints a SHA-256 of the weights. With 1, 2, 4 or 8 processes that
is the same one, on machines of one kind.

What is dash-attn's, and holds in any program: attention. ``F.scaled_dot_product_attention`` inside
``context`` has, for every row, the bytes of one GPU in out, dQ, dK and dV.

What this example does only for the proof, because PyTorch does not promise it:

* Rows are cut into 16 units, and everything but attention runs unit by unit. So the shapes of matrix
  products, and with them their bits, do not depend on how many rows a GPU has.
* The gradient of a weight is a sum over units. ``fork`` and ``FixedOrder`` add it up as one fixed tree,
  within a GPU and between GPUs. FSDP2's own reduce-scatter adds in an order that depends on their number.

``--fsdp-reductions`` leaves both out: an ordinary program. Then weights may have other bytes with another
number of GPUs, though attention has not. ``--ring-order`` takes another attention, which adds up dK and dV
from GPU to GPU, as rings of context parallelism do: then weights have other bytes, though all else is fixed.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F

from dash_attn.distributed import context, positions, shard, unshard
from dash_attn.integrations import sdpa

UNITS = 16
"""Of a sequence. Under the zigzag layout rank r of N has units r x 8 / N and following, and as many from the
back: unit i and unit 15 - i are always on the same rank."""

VOCABULARY, WIDTH, HEAD_DIM, LAYERS = 256, 256, 64, 2
Q_SEGMENT = 128  # rows; so few that these short sequences are cut, as long ones are


# Sums of fixed order


def tree(parts: Sequence[Tensor]) -> Tensor:
    """The sum of neighbours, then of neighbouring sums, and so on."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def tree_of_units(parts: Sequence[Tensor]) -> Tensor:
    """The sum over the units of this rank: from both ends inwards in pairs, then the pairs as a tree.

    The units of a rank are a branch of the tree over all units. The tree over the ranks' sums completes it.
    """
    half = len(parts) // 2
    return tree([parts[i] + parts[-1 - i] for i in range(half)])


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, count: int) -> tuple[Tensor, ...]:
        return tuple(weight.view_as(weight) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return tree_of_units(grads), None


def fork(weight: Tensor, count: int) -> Sequence[Tensor]:
    """The weight for every unit. Its gradient is the sum of theirs in fixed order."""
    return (weight,) if count == 1 else _Fork.apply(weight, count)


class FixedOrder:
    """In place of FSDP2's reduce-scatter: moves the gradients of all ranks, and adds them as a tree."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        output_tensor.copy_(tree(received.chunk(dist.get_world_size(group))))


# Model


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """Rotary embedding of x, (rows, heads, head_dim), by (2, rows, 1, head_dim / 2): cosines and sines."""
    cos, sin = turn
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Block(nn.Module):
    """Pre-norm transformer block. It takes and returns units: (rows, width) each."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.attend = attend
        self.norms = nn.ParameterList([torch.ones(WIDTH), torch.ones(WIDTH)])
        sizes = {"qkv": (3 * WIDTH, WIDTH), "out": (WIDTH, WIDTH), "up": (4 * WIDTH, WIDTH)}
        for name, size in {**sizes, "down": (WIDTH, 4 * WIDTH)}.items():
            setattr(self, name, nn.Parameter(torch.randn(size) * size[1] ** -0.5 / 2))

    def forward(self, units: list[Tensor], turns: list[Tensor]) -> list[Tensor]:
        count = len(units)
        first, second = (fork(weight, count) for weight in self.norms)
        qkv = [F.linear(normed(x, n), w) for x, n, w in zip(units, first, fork(self.qkv, count))]
        parts = [[], [], []]
        for x, turn in zip(qkv, turns):
            q, k, v = x.view(len(x), 3, -1, HEAD_DIM).unbind(1)
            for part, y in zip(parts, (rotated(q, turn), rotated(k, turn), v)):
                part.append(y.bfloat16())
        q, k, v = (torch.cat(part)[None].transpose(1, 2) for part in parts)
        seen = self.attend(q, k, v).transpose(1, 2)[0].flatten(1).float()
        mixed = seen.split(len(units[0]))
        units = [x + F.linear(y, w) for x, y, w in zip(units, mixed, fork(self.out, count))]
        up, down = fork(self.up, count), fork(self.down, count)
        return [
            x + F.linear(F.gelu(F.linear(normed(x, n), a)), b) for x, n, a, b in zip(units, second, up, down)
        ]


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,), weight, 1e-5)


class GPT(nn.Module):
    """Predicts the next token; weights come from the seed."""

    def __init__(self, attend: Any, seqlen: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.token = nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.5)
        self.blocks = nn.ModuleList(Block(attend) for _ in range(LAYERS))
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Parameter(torch.randn(VOCABULARY, WIDTH) * WIDTH**-0.5)
        self.seqlen = seqlen

    def forward(self, tokens: list[Tensor], targets: list[Tensor], turns: list[Tensor]) -> Tensor:
        """(units,): the part of each unit in the mean cross entropy of whole sequences."""
        count = len(tokens)
        weights = [fork(weight, count) for weight in (self.token, self.norm, self.head)]
        names = torch.arange(VOCABULARY, device=tokens[0].device)
        units = [(t[:, None] == names).float() @ w for t, w in zip(tokens, weights[0])]
        for block in self.blocks:
            units = block(units, turns)
        logits = [F.linear(normed(x, n), w) for x, n, w in zip(units, *weights[1:])]
        losses = [F.cross_entropy(x, y, reduction="sum") for x, y in zip(logits, targets)]
        return torch.stack(losses) / self.seqlen


# Attention


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of the rows of this rank, (1, heads, rows, head_dim): inside ``context`` it is attention over all."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class RingOrder(torch.autograd.Function):
    """The negative control: every rank sums dK and dV over its rows, and these sums go from rank to rank.

    Rows are taken unit by unit, so shapes are the same for any number of ranks: only the order is not.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.float() for x in (q, unshard(k, dim=2), unshard(v, dim=2)))
        ctx.save_for_backward(q, k, v)
        return torch.cat([p @ v for p, _ in _probabilities(q, k)], 2).bfloat16()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        q, k, v = ctx.saved_tensors
        dk, dv, dqs = torch.zeros_like(k), torch.zeros_like(v), []
        for p, at in _probabilities(q, k):
            do = dout[:, :, at].float().contiguous()
            dp = do @ v.mT
            ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * HEAD_DIM**-0.5
            dqs.append(ds @ k)
            dk += ds.mT @ q[:, :, at].contiguous()
            dv += p.mT @ do
        return torch.cat(dqs, 2).bfloat16(), *(_in_ring_order(x).bfloat16() for x in (dk, dv))


def _probabilities(q: Tensor, k: Tensor) -> Any:
    """Of each unit of rows: its probabilities, and where the rows are."""
    rows, columns = k.shape[2] // UNITS, torch.arange(k.shape[2], device=k.device)
    mine = positions(k.shape[2], device=k.device)
    for first in range(0, q.shape[2], rows):
        at = slice(first, first + rows)
        scores = q[:, :, at].contiguous() @ k.mT * HEAD_DIM**-0.5
        yield scores.masked_fill(mine[at, None] < columns, -math.inf).softmax(-1), at


def _in_ring_order(partial: Tensor) -> Tensor:
    """The sum over ranks of the rows that lie on this rank, from the next rank round to this one."""
    partial = partial.contiguous()
    parts = [torch.empty_like(partial) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, partial)
    start = dist.get_rank() + 1
    total = torch.zeros_like(partial)
    for part in parts[start:] + parts[:start]:
        total += part
    return shard(total, dim=2)


# Training


def sharded(model: nn.Module, mesh: DeviceMesh, own_reductions: bool) -> nn.Module:
    """The model under FSDP2. Gradients are sums over ranks, for a loss is a part of the mean."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if not own_reductions:
                module.set_custom_reduce_scatter(FixedOrder())
    return model


def units_of(x: Tensor, mesh: DeviceMesh, seqlen: int, whole: bool) -> list[Tensor]:
    """The rows of this rank, unit by unit, or as one."""
    mine = shard(x, mesh, dim=0)
    return [mine] if whole else list(mine.split(seqlen // UNITS))


def train(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> str:
    """Returns the SHA-256 of the weights."""
    torch.use_deterministic_algorithms(True)
    whole, data = args.fsdp_reductions, torch.Generator().manual_seed(args.seed)
    attend = RingOrder.apply if args.ring_order else attention
    model = sharded(GPT(attend, args.seqlen, args.seed).to(device), mesh, whole)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    angles = torch.outer(torch.arange(args.seqlen), 1e4 ** -torch.linspace(0, 1, HEAD_DIM // 2))
    table = torch.stack([angles.cos(), angles.sin()], 1)[positions(args.seqlen, mesh)].to(device)
    turns = [
        t.transpose(0, 1)[:, :, None] for t in (table.split(args.seqlen // UNITS) if not whole else [table])
    ]
    for step in range(args.steps):
        text = torch.randint(VOCABULARY, (args.seqlen + 1,), generator=data).to(device)
        tokens, targets = (units_of(x, mesh, args.seqlen, whole) for x in (text[:-1], text[1:]))
        with ExitStack() as inside:
            inside.enter_context(sdpa.enabled())
            inside.enter_context(context(mesh, q_segment=Q_SEGMENT))
            losses = model(tokens, targets, turns)
            losses.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        say(f"step {step + 1}  loss {loss_of(losses.detach())!r}")
    digest = hashlib.sha256()
    for weight in model.parameters():
        digest.update(weight.full_tensor().detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def loss_of(losses: Tensor) -> float:
    """Of all ranks; ``fsum`` rounds once, so the order of its terms is nothing."""
    parts = [torch.empty_like(losses) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, losses)
    return math.fsum(torch.cat(parts).tolist())


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seqlen", type=int, default=512, help=f"a multiple of {UNITS}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fsdp-reductions", action="store_true", help="FSDP2's own sums, and no units")
    parser.add_argument(
        "--ring-order", action="store_true", help="another attention: dK and dV from rank to rank"
    )
    args = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)  # or products would be cut by how many threads torchrun leaves
        dist.init_process_group("gloo")
    try:
        ranks = dist.get_world_size()
        if args.seqlen < UNITS or args.seqlen % UNITS or UNITS // 2 % ranks:
            raise SystemExit(
                f"--seqlen {args.seqlen} with {ranks} processes: take 1, 2, 4 or 8, and a multiple of {UNITS}"
            )
        sha256 = train(args, init_device_mesh(kind, (ranks,)), device)
        say(f"weights sha256 {sha256} with {ranks} processes on {kind}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Calls whose bytes must not depend on how they are run: by a backend, plain or with all features at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dash_attn import flash_attn_func, flash_attn_varlen_func
from dash_attn.testing import same_bytes
from interval_cases import random_intervals

ENDS = (0, 300, 300, 301, 700, 1200)
"""Of packed sequences."""


class Way(NamedTuple):
    """A backend; ``everything``: a softcap, a sink, ALiBi, dropout with a seed, and intervals of rows."""

    backend: str = "auto"
    everything: bool = False


WAYS = {"sm90": Way("sm90"), "triton": Way("triton"), "triton with everything": Way("triton", True)}


def leaves_of(
    way: Way,
    layout: str,
    device: str,
    seqlen: int = 600,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Tensor]:
    """q, k, v, and with everything a sink; packed ones have the rows of ENDS."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (ENDS[-1],) if layout == "packed" else (2, seqlen)
    tensors = [torch.randn(*shape, h, 64, generator=generator, device=device).to(dtype) for h in (4, 2, 2)]
    if way.everything:
        tensors.append(torch.randn(4, generator=generator, device=device))
    return [x.requires_grad_() for x in tensors]


def beside(way: Way, layout: str, device: str, seqlen: int = 600) -> list[Tensor]:
    """What :func:`attend` takes behind the leaves: slopes, the seed, and which rows see each key."""
    if not way.everything:
        return []
    each = [random_intervals(seqlen, seqlen, seed) for seed in (1, 2)]
    starts, ends = (torch.stack(side) for side in zip(*each))
    if layout == "packed":
        starts, ends = random_intervals(ENDS[-1], 400, 1)
    slopes, seed = torch.tensor([0.5, 0.1, 0.02, 0.0]), torch.tensor(7)
    return [x.to(device) for x in (slopes, seed, starts, ends)]


def attend(way: Way, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
    """Causal attention of leaves and what is beside them; bounds of packed sequences stand last."""
    how: dict[str, Any] = {"causal": True, "backend": way.backend}
    if way.everything:
        sink, slopes, seed, starts, ends, *rest = rest
        how["softcap"], how["dropout_p"], how["dropout_seed"] = 5.0, 0.2, seed
        how["learnable_sink"], how["alibi_slopes"] = sink, slopes
        how["row_starts"], how["row_ends"] = starts, ends
    if rest:
        return flash_attn_varlen_func(q, k, v, rest[0], rest[0], **how)
    return flash_attn_func(q, k, v, **how)


def gradients(function: Callable[..., Tensor], tensors: list[Tensor], *rest: object) -> list[Tensor]:
    """out and the gradients of the sum of squares."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves, *rest)
    out.float().square().sum().backward()
    return [out.detach(), *(x.grad for x in leaves)]


def all_same(results: list[Tensor], others: list[Tensor]) -> bool:
    return len(results) == len(others) and all(same_bytes(a, b) for a, b in zip(results, others))

"""What ``ablations.py`` finds out beside speed: errors, and how often a row's maximum rises."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dash_attn.peers import fa4
from dash_attn.problem import Mask
from dash_attn.schedule import ForwardNumerics

WARP = 16
"""Rows of a warp: it raises maxima of all its rows, or of none."""
COEFFICIENTS = (0x3D9DD554, 0x3E691BC4, 0x3F31F32D, 0x3F800000)
"""Of the kernel's cubic, the highest power first (backends/sm90/forward/exact.py)."""
SAMPLES = 2**22
PEAKED, LARGER, ONE_IN = 3.0, 30.0, 2000


class Inputs(NamedTuple):
    """q, k and v: (batch, seqlen, heads, head_dim)."""

    q: Tensor
    k: Tensor
    v: Tensor


# Inputs


def inputs(kind: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Inputs:
    """Random tensors, the same ones every time.

    Kinds: "normal"; "peaked", q and k PEAKED times larger; "outliers", one element in ONE_IN LARGER times
    larger; "fa3", the outliers of FlashAttention-3's section 4.3: N(0, 1) + N(0, 100) Bernoulli(0.001).
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(tuple(shape), generator=generator, device=device)

    def chosen(share: float) -> Tensor:
        return torch.rand(tuple(shape), generator=generator, device=device) < share

    def one(scaled: bool) -> Tensor:
        x = normal()
        if kind == "peaked" and scaled:
            x = PEAKED * x
        elif kind == "outliers":
            x = torch.where(chosen(1 / ONE_IN), LARGER * x, x)
        elif kind == "fa3":
            x = x + 10.0 * normal() * chosen(0.001)
        return x.to(dtype)

    return Inputs(one(True), one(True), one(False))


# Errors


def exact(x: Inputs, mask: Mask) -> Tensor:
    """Attention in float64, head by head."""
    q, k, v = (t.double().transpose(1, 2) for t in x)
    out = torch.empty_like(q)
    for at in np.ndindex(*q.shape[:2]):
        out[at] = _scores(q[at], k[at], mask).softmax(-1) @ v[at]
    return out.transpose(1, 2)


def _scores(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    """Scaled scores in the dtype of q and k, -inf where hidden; full and causal masks of equal lengths."""
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    if mask.is_causal:
        scores.masked_fill_(
            torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf
        )
    return scores


def rmse(out: Tensor, wanted: Tensor) -> float:
    """Root mean square error."""
    return float((out.double() - wanted).square().mean().sqrt())


def peers(x: Inputs, mask: Mask) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Attention by others. "standard" keeps scores and P in the tensors' dtype."""
    turned = [t.transpose(1, 2) for t in x]

    def sdpa(backend: SDPBackend) -> Tensor:
        function = torch.nn.functional.scaled_dot_product_attention
        with sdpa_kernel(backend):
            return function(*turned, is_causal=mask.is_causal).transpose(1, 2)

    def standard() -> Tensor:
        q, k, v = turned
        return (_scores(q, k, mask).softmax(-1) @ v).transpose(1, 2)

    if not fa4.why_not() and x.q.is_cuda:
        yield "fa4", lambda: fa4.forward(*x, x.q.shape[-1] ** -0.5, mask)[0]
    yield "sdpa flash", lambda: sdpa(SDPBackend.FLASH_ATTENTION)
    yield "sdpa math", lambda: sdpa(SDPBackend.MATH)
    yield "standard", standard


def polynomial_exp2(exponents: np.ndarray) -> np.ndarray:
    """2^x of float32 numbers as the kernel's polynomial makes it, instruction by instruction."""
    big = np.float32(1.5 * 2**23)
    x = np.clip(exponents.astype(np.float32), np.float32(-127), np.float32(127))
    floor = np.floor(x)
    rest = x - floor
    y = np.full_like(x, _float(COEFFICIENTS[0]))
    for coefficient in COEFFICIENTS[1:]:
        # A product of two float32 is exact in float64: this is an FMA but for sums that are rounded twice.
        y = (y.astype(np.float64) * rest + _float(coefficient)).astype(np.float32)
    power = (floor + big).view(np.uint32) << np.uint32(23)
    return (y.view(np.uint32) + power).view(np.float32)


def _float(bits: int) -> np.float32:
    return np.uint32(bits).view(np.float32)


def exp2_errors(found: np.ndarray, exponents: np.ndarray) -> dict[str, float]:
    """Relative errors against float64, as float32 and rounded to bfloat16 (FlashAttention-4, table 2)."""
    wanted = np.exp2(exponents.astype(np.float64))
    rounded = torch.from_numpy(found).bfloat16().double().numpy()
    errors = {}
    for name, values in (("fp32", found.astype(np.float64)), ("bf16", rounded)):
        relative = np.abs(values / wanted - 1)
        errors |= {f"{name}_max": float(relative.max()), f"{name}_mean": float(relative.mean())}
    return errors


def exponents() -> np.ndarray:
    """SAMPLES random numbers in [0, 1)."""
    return np.random.default_rng(0).random(SAMPLES, dtype=np.float32)


# How often a maximum rises


class Rises(NamedTuple):
    """Counted without the first tiles of segments: pairs of row and kv tile, those in which the row's maximum
    rises, pairs of warp and tile, and those in which the maximum of any row rises."""

    pairs: int
    rising: int
    warp_pairs: int
    warps_rising: int


def tile_maxima(q: Tensor, k: Tensor, mask: Mask, tile: int) -> tuple[Tensor, Tensor]:
    """The largest score in base 2 of every row and kv tile, and how many keys the row sees of it.

    q, k: (heads, seqlen, head_dim). Both results: (heads, seqlen, kv tiles).
    """
    scores = _scores(q.float(), k.float(), mask) * math.log2(math.e)
    scores = torch.nn.functional.pad(scores, (0, -k.shape[1] % tile), value=-torch.inf)
    scores = scores.unflatten(-1, (-1, tile))
    return scores.amax(-1), (scores > -torch.inf).sum(-1)


def rises(found: Tensor, keys: Tensor, numerics: ForwardNumerics) -> Rises:
    """Apply the rule of schedule/forward.py to what ``tile_maxima`` gives; rows are whole warps."""
    counts = torch.zeros(4, dtype=torch.int64, device=found.device)
    room = (numerics.room + 1 - torch.frexp(keys.float()).exponent).clamp(min=0)
    for tiles in numerics.segments(0, found.shape[-1] * numerics.tile - 1):
        maximum = torch.full_like(found[..., 0], -torch.inf)
        for tile in tiles:
            largest, fresh = found[..., tile], maximum == -torch.inf
            rise = largest > maximum + numerics.keep
            known = (keys[..., tile] > 0) & ~fresh
            maximum = torch.where(rise, largest + room[..., tile] * fresh, maximum)
            both = torch.stack([known, known & rise])
            warps = both.unflatten(-1, (-1, WARP)).any(-1)
            counts += torch.cat([both.flatten(1).sum(1), warps.flatten(1).sum(1)])
    return Rises(*counts.tolist())

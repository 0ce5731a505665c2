"""Random problems over all features, their results by plain PyTorch, and how far others may be from them.

What kernels are compiled for, head dims, dtype and features, is one of some variants per combination of
features: compiling takes longer than running. All else is drawn from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dash_attn
from dash_attn.backends.base import AuxTensors
from dash_attn.backends.cpu.dropout import dropout_of
from dash_attn.backends.cpu.oracle import Inputs
from dash_attn.problem import Mask
from dash_attn.scores import Scores
from dash_attn.tools.verify.accuracy import allowed_errors, error_norms
from fuzz_case import from_rounded_out
from interval_cases import random_intervals

VARIANTS = 4
"""Of each combination of features."""

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Variant(NamedTuple):
    """What kernels are compiled for, beside the features."""

    head_dim: int
    head_dim_v: int
    dtype: torch.dtype


FIRST = {
    (): Variant(192, 128, BF16),
    ("softcap",): Variant(64, 64, BF16),
    ("sink",): Variant(64, 64, BF16),
    ("softcap", "sink"): Variant(128, 128, FP16),
    ("alibi",): Variant(96, 96, BF16),
    ("softcap", "alibi"): Variant(64, 64, BF16),
    ("sink", "alibi"): Variant(120, 120, BF16),
    ("dropout",): Variant(64, 64, BF16),
    ("alibi", "dropout"): Variant(32, 32, FP32),
    ("sink", "dropout"): Variant(64, 64, FP16),
    ("intervals",): Variant(80, 80, FP16),
    ("sink", "intervals"): Variant(128, 64, FP16),
    ("softcap", "intervals"): Variant(256, 256, BF16),
    ("softcap", "sink", "intervals"): Variant(16, 48, FP32),
    ("intervals", "dropout"): Variant(192, 128, FP16),
    ("softcap", "sink", "alibi", "intervals", "dropout"): Variant(128, 128, BF16),
}
"""Combinations of features, and a variant that is met first. The others are drawn."""

WIDTHS = tuple(
    range(first, last + 1, 8)
    for first, last in ((8, 16), (24, 32), (40, 64), (72, 96), (104, 128), (136, 256))
)
"""Head dims that take the same columns in Triton's products."""


def variants_of(features: tuple[str, ...]) -> list[Variant]:
    """Every width is met by some of them; V has another head dim in a third."""
    found, at = [FIRST[features]], list(FIRST).index(features)
    for number in range(1, VARIANTS):
        rng, width = random.Random(f"{features} {number}"), WIDTHS[(3 * at + number) % len(WIDTHS)]
        head_dim = rng.choice(width)
        head_dim_v = rng.choice(rng.choice(WIDTHS)) if rng.random() < 1 / 3 else head_dim
        found.append(Variant(head_dim, head_dim_v, rng.choices((BF16, FP16, FP32), (6, 2, 2))[0]))
    return found


class Drawn(NamedTuple):
    """A problem.

    Attributes:
        lengths: (rows, keys) of every sequence.
        packed: whether it is called as a packed batch; otherwise all lengths are alike.
        leaves: q, k, v, packed, and a sink if there is one.
        dout: the gradient of out, packed.
        how: keywords of the call but for the sink; intervals (total keys,).
        kept: which weights dropout keeps, (heads, rows, keys) of every sequence.
    """

    lengths: list[tuple[int, int]]
    packed: bool
    leaves: list[Tensor]
    dout: Tensor
    how: dict[str, Any]
    kept: list[Tensor]

    @property
    def scores(self) -> Scores:
        how = self.how
        return Scores(
            self.leaves[0].shape[2] ** -0.5, how.get("softcap", 0.0), len(self.leaves) > 3,
            "alibi_slopes" in how, how.get("dropout_p", 0.0), "row_starts" in how,
        )  # fmt: skip

    @property
    def mask(self) -> Mask:
        left, right = self.how.get("window_size", (-1, -1))
        return Mask.of_sides(left, 0 if self.how.get("causal") else right)

    def sequences(self, leaves: list[Tensor]) -> Iterator[tuple[Inputs, AuxTensors]]:
        """dout and slices of leaves of every sequence, and what is beside them."""
        slopes, rows = self.how.get("alibi_slopes"), self.how.get("row_starts")
        for at, (q, k) in enumerate(zip(*(map(slice, *ends) for ends in self._ends()))):
            aux = AuxTensors(*leaves[3:])
            if slopes is not None:
                aux = aux._replace(alibi_slopes=slopes if slopes.ndim == 1 else slopes[at])
            if rows is not None:
                aux = aux._replace(row_starts=rows[k], row_ends=self.how["row_ends"][k])
            yield Inputs(self.dout[q], leaves[0][q], leaves[1][k], leaves[2][k]), aux

    def _ends(self) -> Iterator[tuple[list[int], list[int]]]:
        """Where the sequences begin and end, in q and in k."""
        for side in zip(*self.lengths):
            bounds = list(accumulate(side, initial=0))
            yield bounds[:-1], bounds[1:]

    def call(self, backend: str) -> tuple[list[Tensor], dict[str, Any]]:
        """Arguments and keywords of the public function."""
        how = self.how | {"backend": backend}
        if len(self.leaves) > 3:
            how["learnable_sink"] = self.leaves[3]
        tensors, batch = self.leaves[:3], len(self.lengths)
        if self.packed:
            bounds = [torch.tensor([0, *ends], dtype=torch.int32) for _, ends in self._ends()]
            return [*tensors, *(x.to(self.dout.device) for x in bounds)], how
        for name in ("row_starts", "row_ends"):
            if name in how:
                how[name] = how[name].view(batch, -1)
        return [x.unflatten(0, (batch, -1)) for x in tensors], how


def drawn(features: tuple[str, ...], variant: Variant, seed: int, device: str, longest: int = 500) -> Drawn:
    """A problem; sequences have about ``longest`` rows and keys at most."""
    rng, generator = random.Random(seed), torch.Generator(device).manual_seed(seed)
    dropout = "dropout" in features
    most = 2 if dropout else 3  # the CPU draws what is dropped, weight by weight
    kv_heads, group, count = rng.randint(1, most), rng.choice((1, 1, 2, most)), rng.randint(1, most)
    packed = rng.random() < 0.4
    lengths = [_lengths(rng, packed, longest) for _ in range(count)]
    if not packed:
        lengths = lengths[:1] * count
    heads, (rows, keys) = kv_heads * group, map(sum, zip(*lengths))

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(variant.dtype)

    q, dout = normal(rows, heads, variant.head_dim), normal(rows, heads, variant.head_dim_v)
    leaves = [q, normal(keys, kv_heads, variant.head_dim), normal(keys, kv_heads, variant.head_dim_v)]
    how: dict[str, Any] = rng.choice(
        ({}, {"causal": True}, {"causal": True, "window_size": (rng.randint(0, 200), -1)},
         {"window_size": (rng.randint(0, 100), rng.randint(0, 100))})
    )  # fmt: skip
    if "softcap" in features:
        how = how | {"softcap": rng.choice((1.0, 5.0, 30.0))}
    if "alibi" in features:
        per = rng.choice(((), (count,)))
        how = how | {"alibi_slopes": torch.rand(*per, heads, generator=generator, device=device) * 0.2 - 0.1}
    if "intervals" in features:
        each = [random_intervals(n, m, rng.randrange(2**30)) for m, n in lengths]
        starts, ends = (torch.cat(side).to(device) for side in zip(*each))
        how = how | {"row_starts": starts, "row_ends": ends}
    if "sink" in features:
        leaves.append(torch.randn(heads, generator=generator, device=device) * 2)
    if dropout:
        how = how | {"dropout_p": rng.choice((0.1, 0.5)), "dropout_seed": rng.randrange(2**62)}
    one = Drawn(lengths, packed, [x.requires_grad_() for x in leaves], dout, how, [])
    return one._replace(kept=list(_kept(one))) if dropout else one


def _lengths(rng: random.Random, packed: bool, longest: int) -> tuple[int, int]:
    """Of a sequence; packed ones may have no rows or no keys."""
    if packed and rng.random() < 0.1:
        return rng.choice(((0, 30), (30, 0), (0, 0)))
    short = longest // 4
    rows = rng.choice((1, rng.randint(2, short), rng.randint(short, longest)))
    if rows == 1:  # with few keys an error is one draw of rounding, which may be any multiple of another one
        return rows, rng.randint(16, longest)
    return rows, rng.choice((rows, rng.randint(1, longest)))


def _kept(one: Drawn) -> Iterator[Tensor]:
    seed, heads = torch.tensor(one.how["dropout_seed"]), one.dout.shape[1]
    for at, (rows, keys) in enumerate(one.lengths):
        each = [dropout_of(one.scores, AuxTensors(dropout_seed=seed), at, head) for head in range(heads)]
        yield torch.stack([x.kept(0, 0, rows, keys) for x in each if x]).to(one.dout.device)


# Results


class Plain(NamedTuple):
    """By plain PyTorch: out, dq, dk, dv, and the gradient of the sink row by row; lse of every sequence."""

    tensors: list[Tensor]
    lse: list[Tensor]


def plain(one: Drawn, dtype: torch.dtype) -> Plain:
    """Attention and its gradients in a dtype: products in it, the softmax in float32 at least."""
    wide = torch.promote_types(dtype, torch.float32)
    leaves = [x.detach().to(dtype).requires_grad_() for x in one.leaves[:3]]
    sinks = [x.detach().to(wide).expand(len(one.dout), -1).clone().requires_grad_() for x in one.leaves[3:]]
    outs, lse, row = [], [], 0
    for at, (sequence, aux) in enumerate(one.sequences(leaves)):
        rows = slice(row, row := row + len(sequence.q))
        s = plain_scores(one, sequence, aux, wide)
        if sinks:
            s = torch.cat([s, sinks[0][rows].T[..., None]], 2)
        lse.append(s.detach().logsumexp(2))
        p = s.softmax(2).nan_to_num(0.0).to(dtype)[..., : len(sequence.k)]
        if one.kept:
            p = p * one.kept[at] / (1 - one.how["dropout_p"])
        p = p.unflatten(0, (sequence.k.shape[1], -1))
        outs.append(torch.einsum("hgqk,khd->qhgd", p, sequence.v).flatten(1, 2))
    out = torch.cat(outs)
    return Plain([out.detach(), *torch.autograd.grad(out, [*leaves, *sinks], one.dout.to(dtype))], lse)


def plain_scores(one: Drawn, sequence: Inputs, aux: AuxTensors, wide: torch.dtype) -> Tensor:
    """(heads, rows, keys)."""
    _, q, k, _ = sequence
    how, q = one.how, q.unflatten(1, (k.shape[1], -1))
    s = torch.einsum("qhgd,khd->hgqk", q, k).flatten(0, 1).to(wide) * q.shape[3] ** -0.5
    if cap := how.get("softcap"):
        s = cap * torch.tanh(s / cap)
    row, column = (torch.arange(len(x), device=q.device) for x in (q, k))
    distance = row[:, None] + len(k) - len(q) - column
    if aux.alibi_slopes is not None:
        s = s - aux.alibi_slopes.to(wide)[:, None, None] * distance.abs()
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if how.get("causal"):
        hidden |= distance < 0
    left, right = how.get("window_size", (-1, -1))
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= distance < -right
    if aux.rows is not None:
        hidden |= (row[:, None] < aux.rows.starts) | (row[:, None] >= aux.rows.ends)
    return s.masked_fill(hidden, -torch.inf)


NAMES = ("out", "dq", "dk", "dv", "dsink")


def run(one: Drawn, backend: str) -> list[Tensor]:
    """out, dq, dk, dv, packed, and dsink by a backend."""
    tensors, how = one.call(backend)
    function = dash_attn.flash_attn_varlen_func if one.packed else dash_attn.flash_attn_func
    out = function(*tensors, **how)
    out = out if one.packed else out.flatten(0, 1)
    return [out.detach(), *torch.autograd.grad(out, one.leaves, one.dout)]


class Bound(NamedTuple):
    """What is exact, float64, and the largest norms of error that pass, tensor by tensor."""

    exact: list[Tensor]
    allowed: list[float]


def bound_of(one: Drawn) -> Bound:
    """Twice the errors of plain PyTorch in the dtype, rounding of sums, and what the rounding of out does.

    A backward reads delta from the rounded out, and plain PyTorch does not: that part of the errors of dq, dk
    and dsink is known exactly. The gradient of a sink is one number per head, and two draws of rounding noise
    differ by more than twice where there are few. So of plain PyTorch the errors of its rows count, which do
    not cancel, and of n of them 2 + 8 / sqrt(n) times, as in ``fuzz_case``.
    """
    exact, rounded = plain(one, torch.float64), plain(one, one.dout.dtype)
    dropped = one.dout / (1 - one.scores.dropout_p)
    allowed = allowed_errors(Inputs(dropped, *one.leaves[:3]), rounded.tensors, exact.tensors)
    for rows in rounded.tensors[4:]:
        allowed[4] *= 1 + 4 * max(rows.numel(), 1) ** -0.5
    allowed = [a + b for a, b in zip(allowed, effect_of_rounding_out(one, exact))]
    tensors = exact.tensors
    return Bound([*tensors[:4], *(x.sum(0) for x in tensors[4:])], allowed)


def effect_of_rounding_out(one: Drawn, exact: Plain) -> list[float]:
    """Norms, in the order of ``NAMES``."""
    found, row = [], 0
    for at, (sequence, aux) in enumerate(one.sequences([x.detach() for x in one.leaves])):
        out = exact.tensors[0][row : (row := row + len(sequence.q))]
        found.append(from_rounded_out(sequence, one.mask, one.scores, out, exact.lse[at], aux))
    dq, dk, dsink = zip(*found)
    norms = [0.0, *(float(torch.cat(x).norm()) for x in (dq, dk)), 0.0]
    return norms if dsink[0] is None else [*norms, float(torch.stack(dsink).sum(0).norm())]


def shares(found: list[Tensor], bound: Bound) -> dict[str, float]:
    """Errors as shares of what is allowed; infinite where a result is not finite."""
    norms = error_norms(found, bound.exact)
    return {name: error / most if error else 0.0 for name, error, most in zip(NAMES, norms, bound.allowed)}

"""Unusual numbers, and what gradients of them must be; for the kernels and for the CPU executor.

Where a number that is not finite must show: ``must_show`` is what depends on it through keys that a row sees,
computed row by row over those keys alone. ``may_show`` is what the oracle's formulas make of it, in which a
hidden key still counts, as 0 * NaN. An implementation works by tiles: a tile that the mask cuts is computed
whole. So ``must_show <= shown <= may_show``, and under a full mask all three are the same. The kernels hide a
score, not its P: exp(-inf - lse) is NaN in a row whose lse is NaN, where the oracle and the executor have 0,
so there dV of hidden keys may be NaN, too, in the kv tiles that have a task with the row's q tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dash_attn.backends.base import Tensors
from dash_attn.backends.cpu import plain_attention
from dash_attn.backends.cpu.masks import hidden_elements
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import build_plan, choose_policy
from dash_attn.testing import assert_same_bytes
from dash_attn.tools.verify.accuracy import error_norms
from fuzz_case import GRADS, Backend, Grads, How, Sequence

MASKS = (Mask.full(), Mask.causal(), Mask.window(70, 20))


def problem(mask: Mask, head_dim: int, dtype: str, seqlen_q: int = 300, seqlen_k: int = 300) -> Problem:
    """One sequence, two q heads on one kv head."""
    return Problem.dense(
        heads=2, kv_heads=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, mask=mask, dtype=dtype
    )


def normal(p: Problem, device: str, seed: int = 0) -> Sequence:
    """dout, q, k, v of a problem of one sequence, normal, float32."""
    generator = torch.Generator().manual_seed(seed)
    ((seqlen_q, seqlen_k),) = p.sequences
    sizes = [(seqlen_q, p.heads, p.head_dim)] * 2 + [(seqlen_k, p.kv_heads, p.head_dim)] * 2
    return Sequence(*(torch.randn(size, generator=generator).to(device) for size in sizes))


def rounded(x: Sequence, p: Problem) -> Sequence:
    return Sequence(*(t.to(getattr(torch, p.dtype)) for t in x))


def scale_of(p: Problem) -> float:
    return float(p.head_dim**-0.5)


def gradients(p: Problem, x: Sequence, out: Tensor, lse: Tensor, backend: Backend) -> Grads:
    """Of one sequence, by the plan of "auto"; out and lse in float64."""
    plan = build_plan(p, *choose_policy(p))
    wide = torch.float64 if p.dtype == "float64" else torch.float32
    batch = Tensors(*(t[None] for t in (*x, out.to(x.q.dtype), lse.to(wide))))
    dq, dk, dv = backend.launch(plan, batch, scale_of(p), How())
    return dq[0], dk[0], dv[0]


# Finite, but unusual


def _largest_score(x: Sequence) -> Tensor:
    return torch.einsum("ihd,jgd->hij", x.q, x.k).abs().amax() * x.q.shape[-1] ** -0.5


def large_scores(x: Sequence) -> Sequence:
    """Scores between -1e4 and 1e4."""
    return x._replace(q=x.q * (1e4 / _largest_score(x)))


def low_scores(x: Sequence) -> Sequence:
    """Scores near -1e4, as far apart as usual: one large element with one sign in q and the other in k."""
    large = torch.tensor(1e4 * x.q.shape[-1] ** 0.5).sqrt().to(torch.bfloat16).float()
    q, k = x.q.clone(), x.k.clone()
    q[..., 0], k[..., 0] = large, -large
    return x._replace(q=q, k=k)


def denormal(name: str) -> Callable[[Sequence], Sequence]:
    """One input below the smallest normal number of its dtype (and some of it zero)."""

    def change(x: Sequence) -> Sequence:
        return x._replace(**{name: getattr(x, name) * 2.0**-18})  # scaled again for bfloat16, below

    return change


def equal(*names: str) -> Callable[[Sequence], Sequence]:
    """All rows of some inputs are the first one."""
    return lambda x: x._replace(**{n: getattr(x, n)[:1].expand_as(getattr(x, n)).clone() for n in names})


def one_hot(x: Sequence) -> Sequence:
    """Row i attends to key i and to no other: q is k, 50 times as large."""
    return x._replace(q=50 * x.k.expand_as(x.q).clone())


UNUSUAL: dict[str, Callable[[Sequence], Sequence]] = {
    "scores_up_to_1e4": large_scores,
    "scores_near_-1e4": low_scores,
    "denormal_dout": denormal("dout"),
    "denormal_v": denormal("v"),
    "denormal_q": denormal("q"),
    "denormal_k": denormal("k"),
    "equal_keys": equal("k"),
    "equal_queries": equal("q"),
    "equal_values": equal("v"),
    "all_rows_equal": equal("dout", "q", "k", "v"),
    "one_hot": one_hot,
}


@dataclass(frozen=True)
class Errors:
    """Norm of the error of dq, dk and dv, and what is allowed."""

    found: list[float]
    allowed: list[float]

    def __str__(self) -> str:
        pairs = zip(GRADS, self.found, self.allowed)
        return ", ".join(f"{name} {error:.2e} of {allowed:.2e}" for name, error, allowed in pairs)


def _with_scores_off(p: Problem, x: Sequence, out: Tensor, lse: Tensor, signs: Tensor) -> Grads:
    """Gradients in float64 as if every score had a relative error of 2^-20, with out and lse as given.

    signs: (seqlen_q, seqlen_k), 1 or -1.
    """
    dout, q, k, v = (t.double().transpose(0, 1) for t in x)
    k, v = (t.repeat_interleave(p.group, 0) for t in (k, v))
    positions = torch.arange(q.shape[1], device=q.device) + p.grid(0).diagonal
    hidden = hidden_elements(p.mask, positions, k.shape[1])
    scores = (q @ k.mT) * scale_of(p) * (1 + signs * 2.0**-20)
    share = torch.exp(scores - lse[..., None]).masked_fill(hidden, 0.0)
    delta = (dout * out.transpose(0, 1)).sum(-1, keepdim=True)
    ds = share * (dout @ v.mT - delta) * scale_of(p)
    by_kv = (t.unflatten(0, (-1, p.group)).sum(1) for t in (ds.mT @ q, share.mT @ dout))
    return tuple(t.transpose(0, 1) for t in (ds @ k, *by_kv))


def errors(name: str, p: Problem, backend: Backend) -> tuple[Sequence, Grads, Errors]:
    """Inputs and gradients of an unusual case, and how far they are from float64.

    Allowed: three times the error of plain attention in the same dtype; what relative errors of 2^-20 in the
    scores make, all of one sign or of any (float32 sums, in tensor cores that truncate: at a score of 1e4 it
    is 1 % of P); rounding of the accumulator, in proportion to the largest products; a denormal result's
    spacing, and in bfloat16 the smallest normal number: it may be flushed to zero.
    """
    x = UNUSUAL[name](normal(p, backend.device))
    if name.startswith("denormal") and p.dtype == "bfloat16":
        x = x._replace(**{name[9:]: getattr(x, name[9:]) * 2.0**-110})
    x = rounded(x, p)
    exact = plain_attention(x, p.mask, scale_of(p), torch.float64)
    plain = error_norms(plain_attention(x, p.mask, scale_of(p), x.q.dtype), exact)[2:]
    ups = torch.ones(p.sequences[0], dtype=torch.float64)
    chance = torch.randn(ups.shape, generator=torch.Generator().manual_seed(1)).sign().double()
    off = [
        error_norms(_with_scores_off(p, x, *exact[:2], signs.to(x.q.device)), exact[2:])
        for signs in (ups, chance)
    ]
    found = gradients(p, x, exact[0], exact[1], backend)
    q, k, v = (float(t.double().norm(dim=-1).amax()) for t in (x.q, x.k, x.v))
    floor, scale = 4 * 2**-23 * float(x.dout.double().norm()), scale_of(p)
    spacing = torch.finfo(x.q.dtype).smallest_normal * (1.0 if p.dtype == "bfloat16" else 2.0**-10)
    allowed = [
        3 * error + max(sensitivity) + floor * products + 2 * spacing * t.numel() ** 0.5
        for error, sensitivity, products, t in zip(
            plain, zip(*off), (scale * k * v, scale * q * v, 1.0), found
        )
    ]
    return x, found, Errors(error_norms(found, exact[2:]), allowed)


# Not finite

POISONS = [
    (name, row, value)
    for name, row in (("dout", 77), ("q", 77), ("k", 330), ("v", 330))
    for value in (float("nan"), float("inf"), -float("inf"))
]
"""Input, row and value, of 150 queries and 420 keys: some keys are in tiles that row 77 has no task with."""


def poisoned(x: Sequence, name: str, value: float, row: int) -> Sequence:
    """One element of one input, of its first head."""
    tensor = getattr(x, name).clone()
    tensor[row, 0, 3] = value
    return x._replace(**{name: tensor})


@dataclass(frozen=True)
class Seen:
    """Attention by rows, over the keys each row sees and no others, float64."""

    out: Tensor
    lse: Tensor
    grads: Grads


def by_rows(p: Problem, x: Sequence) -> Seen:
    """out, lse, dq, dk, dv of one sequence, row by row."""
    dout, q, k, v = (t.double() for t in x)
    ((seqlen_q, seqlen_k),) = p.sequences
    scale, out, dq, dk, dv = scale_of(p), *(torch.zeros_like(t) for t in (q, q, k, v))
    lse = torch.full((p.heads, seqlen_q), -torch.inf, dtype=torch.float64, device=q.device)
    for row in range(seqlen_q):
        aligned = row + seqlen_k - seqlen_q
        first = 0 if p.mask.left is None else max(aligned - p.mask.left, 0)
        end = seqlen_k if p.mask.right is None else min(aligned + p.mask.right + 1, seqlen_k)
        for head in range(p.heads if first < end else 0):
            at, keys = (row, head), (slice(first, end), head // p.group)
            scores = k[keys] @ q[at] * scale
            lse[head, row] = torch.logsumexp(scores, 0)
            share = torch.exp(scores - lse[head, row])
            out[at] = share @ v[keys]
            ds = share * (v[keys] @ dout[at] - dout[at] @ out[at]) * scale
            dq[at] = ds @ k[keys]
            dk[keys] += ds[:, None] * q[at]
            dv[keys] += share[:, None] * dout[at]
    return Seen(out, lse, (dq, dk, dv))


def assert_as_plain_attention(name: str, p: Problem, backend: Backend) -> None:
    """The gradients of an unusual case are finite, and their errors what those of plain attention allow."""
    x, grads, found = errors(name, p, backend)
    assert all(error <= allowed for error, allowed in zip(found.found, found.allowed)), found
    assert all(grad.isfinite().all() for grad in grads)
    if name == "one_hot" and p.dtype == "bfloat16":  # every P rounds to exactly 1 or 0
        assert_same_bytes(grads[2][:, 0], x.dout.float().sum(1).to(x.dout.dtype), "dv")


def not_finite(grads: Grads) -> list[Tensor]:
    return [~x.isfinite() for x in grads]


def assert_shows(
    p: Problem, name: str, value: float, row: int, backend: Backend, *, hides_p: bool = True
) -> None:
    """A poisoned element shows where it must, and nowhere where it may not.

    ``hides_p``: P of a hidden key is 0 even in a row whose lse is NaN, as in the oracle.
    """
    x = poisoned(rounded(normal(p, backend.device), p), name, value, row)
    seen = by_rows(p, x)
    must = not_finite(seen.grads)
    may = not_finite(plain_attention(x, p.mask, scale_of(p), torch.float64)[2:])
    if not hides_p:
        for tile in (seen.lse.isnan().any(0).nonzero() // p.tile_m).unique().tolist():
            first, last = int(p.grid(0).kv_first[tile]), int(p.grid(0).kv_last[tile])
            may[2][first * p.tile_n : (last + 1) * p.tile_n] = True
    found = not_finite(gradients(p, x, seen.out, seen.lse, backend))
    assert any(bool(m.any()) for m in may)
    for grad, shown, least, most in zip(GRADS, found, must, may):
        assert not (least & ~shown).any(), (
            f"{grad} hides {value} in {name}: {int((least & ~shown).sum())} places"
        )
        assert not (shown & ~most).any(), (
            f"{grad} spreads {value} in {name}: {int((shown & ~most).sum())} places"
        )
        if p.mask.is_full:
            assert torch.equal(shown, least)

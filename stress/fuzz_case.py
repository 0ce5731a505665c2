"""One case of the fuzzer: what it is, how it is run, and what must hold.

This file needs dash_attn and torch and nothing else of the tests: a copy of it with one line more is the
script that reproduces a failure (``fuzz_draw.script_of``). The same checks run on the CPU executor, where
tests show that they catch what they should.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dash_attn.backends.base import NO_AUX, AuxTensors, Tensors
from dash_attn.backends.cpu import plain_attention
from dash_attn.backends.cpu.masks import hidden_elements, outside_intervals
from dash_attn.backends.cpu.oracle import Inputs as Sequence
from dash_attn.backends.sm90.tiles import has_softcap_apart
from dash_attn.errors import HandOverError
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import Numerics, Plan, Schedule, Shift, build_plan, choose_policy, prove
from dash_attn.scores import Scores
from dash_attn.testing import same_bytes
from dash_attn.tools.verify.accuracy import error_norms

GRADS = ("dq", "dk", "dv")
Grads = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class FuzzCase:
    """A problem and how it is run, as plain values: ``repr`` of it is Python.

    Attributes:
        lengths: (seqlen_q, seqlen_k) of every sequence.
        group, kv_heads, head_dim, dtype, left, right, tile_m, tile_n: the rest of the problem; ``group`` q
            heads per kv head.
        head_dim_v: columns of V, 0 for ``head_dim``.
        packed: tensors of rank 3, otherwise dense; then all lengths are the same.
        policy, ring, stride: "auto" or a policy's name, with its parameters.
        placement: "policy", "lpt" or "shuffled", of some of the launches.
        head_groups: of every kv head, None for the default.
        layouts: strides of dout, q, k, v, out: names in ``LAYOUTS``.
        scale: factor on the usual softmax scale.
        softcap: of the scores, 0 for none.
        outliers: one element in 2,000 is 30 times larger.
        streams: launches at the same time.
        extra_workers: workers of the limited launches beyond ``min_workers``, None for all.
        seed: of the tensors, shuffles and interleavings.
    """

    lengths: tuple[tuple[int, int], ...]
    group: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    dtype: str = "bfloat16"
    left: int | None = None
    right: int | None = None
    tile_m: int = 0
    tile_n: int = 0
    packed: bool = False
    policy: str = "fa3"
    ring: int | None = None
    stride: int | None = None
    placement: str = "policy"
    head_groups: int | None = None
    layouts: tuple[str, str, str, str, str] = ("plain",) * 5
    scale: float = 1.0
    softcap: float = 0.0
    outliers: bool = False
    streams: int = 1
    extra_workers: int | None = None
    head_dim_v: int = 0
    seed: int = 0

    @property
    def problem(self) -> Problem:
        return Problem(
            self.lengths, self.group * self.kv_heads, self.kv_heads, self.head_dim,
            Mask(self.left, self.right), self.dtype, self.tile_m, self.tile_n,
            head_dim_v=self.head_dim_v or self.head_dim,
        )  # fmt: skip

    @property
    def scores(self) -> Scores:
        return Scores(float(self.scale * self.head_dim**-0.5), self.softcap)

    def plan(self, placement: str, resident: int) -> Plan:
        """The plan in a placement; in the policy's own where so many resident workers are too few.

        Raises:
            UnsupportedMaskError: the policy does not cover the problem.
        """
        problem = self.problem
        policy, best = self._policy(problem)
        plan = build_plan(problem, policy, best, head_groups=self.head_groups)
        if placement == "lpt":
            other = build_plan(problem, policy, "lpt", head_groups=self.head_groups)
        elif placement == "shuffled":
            order = np.random.default_rng(self.seed).permutation(len(plan.items))
            other = prove(plan.with_items(plan.items[order]))
        else:
            return plan
        return other if other.min_workers <= resident else plan

    def _policy(self, problem: Problem) -> tuple[Numerics, Any]:
        if self.policy == "auto":
            return choose_policy(problem)
        if self.policy == "shift":
            return Shift(self.ring, self.stride), "policy"
        return Schedule.parse(self.policy)


# Tensors


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(-2, -3).contiguous().transpose(-2, -3)


def _sliced(x: Tensor) -> Tensor:
    """A third of a tensor with three times the head dimension, as of packed q, k, v; NaN around it."""
    width = x.shape[-1]
    view = x.new_full((*x.shape[:-1], 3 * width), float("nan"))[..., width : 2 * width]
    return view.copy_(x)


def _misaligned(x: Tensor) -> Tensor:
    """One element off."""
    return x.new_full((x.numel() + 1,), float("nan"))[1:].view(x.shape).copy_(x)


def _scattered(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=-1)[..., ::2]


def _one_head(x: Tensor) -> Tensor:
    """Every head is the first one: other values, and a stride of 0."""
    return x[..., :1, :].expand(x.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "transposed": _transposed,
    "sliced": _sliced,
    "misaligned": _misaligned,
    "scattered": _scattered,
    "one_head": _one_head,
}
"""The same values in other strides, but for the last one, which ``out`` cannot have."""


class Cut:
    """Where the sequences of a case lie in its tensors."""

    def __init__(self, case: FuzzCase) -> None:
        ends = [list(accumulate(lengths, initial=0)) for lengths in zip(*case.lengths)]
        self.packed, self.rows = case.packed, [[slice(*r) for r in pairwise(end)] for end in ends]

    def q_rows(self, x: Tensor, index: int) -> Tensor:
        return x[self.rows[0][index]] if self.packed else x[index]

    def k_rows(self, x: Tensor, index: int) -> Tensor:
        return x[self.rows[1][index]] if self.packed else x[index]

    def lse_of(self, lse: Tensor, index: int) -> Tensor:
        return lse[:, self.rows[0][index]] if self.packed else lse[index]

    def sequence(self, x: Tensors, index: int) -> Sequence:
        """dout, q, k, v of one sequence."""
        q_like, k_like = (
            [rows(t, index) for t in ts] for rows, ts in ((self.q_rows, x[:2]), (self.k_rows, x[2:4]))
        )
        return Sequence(*q_like, *k_like)

    def alone(self, x: Tensors, index: int) -> Tensors:
        """One sequence as a dense batch of one."""
        parts = [*self.sequence(x, index), self.q_rows(x.out, index), self.lse_of(x.lse, index)]
        return Tensors(*(t[None].contiguous() for t in parts))

    def grads(self, found: Grads, index: int) -> Grads:
        dq, dk, dv = found
        return self.q_rows(dq, index), self.k_rows(dk, index), self.k_rows(dv, index)


@dataclass(frozen=True)
class Expected:
    """What the gradients of one sequence must be close to, float64, and how close (norm of the error)."""

    grads: Grads
    allowed: list[float]


def make_tensors(case: FuzzCase, device: str) -> tuple[Tensors, list[Expected]]:
    """Random inputs; out and lse are the oracle's, rounded, so that no forward kernel is involved."""
    generator = torch.Generator(device).manual_seed(case.seed)
    dtype, heads = getattr(torch, case.dtype), case.group * case.kv_heads
    rows = [
        (sum(pair[side] for pair in case.lengths),)
        if case.packed
        else (len(case.lengths), case.lengths[0][side])
        for side in (0, 1)
    ]
    columns, of_v = case.head_dim, case.head_dim_v or case.head_dim
    sizes = [(*rows[0], heads, of_v), (*rows[0], heads, columns)]
    sizes += [(*rows[1], case.kv_heads, n) for n in (columns, of_v)]
    inputs = []
    for size, layout in zip(sizes, case.layouts):
        x = torch.randn(size, generator=generator, device=device)
        if case.outliers:
            rare = torch.rand(size, generator=generator, device=device) < 5e-4
            x = torch.where(rare, x * 30, x)
        inputs.append(LAYOUTS[layout](x.to(dtype)))
    out = torch.zeros(sizes[0], dtype=dtype, device=device)
    lse_size = (heads, rows[0][0]) if case.packed else (rows[0][0], heads, rows[0][1])
    lse = torch.zeros(
        lse_size, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=device
    )
    tensors, cut, expected = Tensors(*inputs, out, lse), Cut(case), []
    for index in range(len(case.lengths)):
        one = cut.sequence(tensors, index)
        exact = plain_attention(one, case.problem.mask, case.scores, torch.float64)
        cut.q_rows(out, index).copy_(exact[0])
        cut.lse_of(lse, index).copy_(exact[1])
        expected.append(Expected(exact[2:], _allowed(case, one, exact)))
    return tensors._replace(out=LAYOUTS[case.layouts[4]](out)), expected


def _allowed(case: FuzzCase, one: Sequence, exact: Any) -> list[float]:
    """Norms of error that pass: twice that of plain attention in the same dtype, and a floor.

    Two draws of rounding noise differ by more than that where there are few elements, so of n elements it is
    2 + 8 / sqrt(n) times, and 4 / sqrt(n) epsilons of the gradient's norm besides. A relative error of 2^-22
    in the largest score (tensor cores truncate) is an absolute one of the exponent; with a softcap it is
    2^-20, since tanh has an error of 2^-21. The floor is rounding of the accumulator: where a row attends to
    one key, dP - delta cancels and nothing else is left. It is in proportion to the products, not to their
    difference. Plain attention in float64 is what is exact, so there the floor is all. What the rounding of
    out does comes on top, for a backward reads delta from it, and plain attention does not.
    """
    dtype = getattr(torch, case.dtype)
    double, unit = dtype == torch.float64, torch.finfo(dtype).eps
    scale, mask = case.scores.softmax_scale, case.problem.mask
    plain = error_norms(plain_attention(one, mask, case.scores, dtype), exact)[2:]
    q, k, v = (float(x.double().norm(dim=-1).amax()) if x.numel() else 0.0 for x in (one.q, one.k, one.v))
    capped = 4.0 if case.softcap else 1.0
    floor = (64 * 2**-52 if double else 4 * capped * 2**-23) * float(one.dout.double().norm())
    score = scale * q * k
    allowed = []
    of_q, of_k, _ = from_rounded_out(one, mask, case.scores, *exact[:2])
    of_out = float(of_q.norm()), float(of_k.norm()), 0.0
    for error, by_out, x, products in zip(
        plain, of_out, exact[2:], (scale * k * v, scale * q * v, 1 + score)
    ):
        few = max(x.numel(), 1) ** -0.5
        relative = 4 * few * unit + (0.0 if double else capped * 2**-22 * score)
        allowed.append((2 + 8 * few) * error + by_out + relative * float(x.norm()) + floor * products)
    return allowed


def from_rounded_out(
    one: Sequence, mask: Mask, scores: Scores, out: Tensor, lse: Tensor, aux: AuxTensors = NO_AUX
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What dq, dk and the gradient of a sink miss because delta is dout . out with a rounded out, float64.

    delta is wrong by d per row, so dS by -P d, also where dropout drops a weight. ``out`` and ``lse`` are the
    exact ones of the sequence: (rows, heads, head dim of V) and (heads, rows).
    """
    dout, q, k, _ = (x.double() for x in one)
    d = (dout * (out.to(one.q.dtype).double() - out)).sum(-1).T
    at, columns = (torch.arange(len(x), device=x.device) for x in (q, k))
    at = at + len(k) - len(q)
    hidden = hidden_elements(mask, at, len(k))
    if aux.rows is not None:
        hidden |= outside_intervals(aux.rows, 0, len(q))
    dq, dk = torch.zeros_like(q), torch.zeros_like(k)
    for head in range(q.shape[1]):
        kv = head // (q.shape[1] // k.shape[1])
        s, slope = q[:, head] @ k[:, kv].T * scores.softmax_scale, 1.0
        if scores.softcap:
            capped = (s / scores.softcap).tanh()
            s, slope = scores.softcap * capped, 1.0 - capped * capped
        if aux.alibi_slopes is not None:
            s = s - aux.alibi_slopes[head].double() * (at[:, None] - columns).abs()
        p = (s - lse[head][:, None]).exp().masked_fill(hidden, 0.0)
        ds = p * d[head][:, None] * slope * scores.softmax_scale
        dq[:, head] = ds @ k[:, kv]
        dk[:, kv] += ds.T @ q[:, head]
    if aux.learnable_sink is None:
        return dq, dk, None
    return dq, dk, ((aux.learnable_sink.detach().double()[:, None] - lse).exp() * d).sum(1)


# Running


class How(NamedTuple):
    """Of one launch: workers (None for all), in ticket order or not, waits bounded, which interleaving, and
    contributions to dQ kept apart."""

    workers: int | None = None
    ordered: bool = True
    bounded: bool = False
    variant: int = 0
    apart: bool = False


@dataclass(frozen=True)
class Backend:
    """What runs a case.

    Attributes:
        device: "cuda" or "cpu".
        resident: workers there are.
        launch: gradients of one launch.
        together: results of launches that run at the same time, on streams of their own.
    """

    device: str
    resident: int
    launch: Callable[[Plan, Tensors, Scores, How], Grads]
    together: Callable[[list[Callable[[], Grads]]], list[Grads]]


def hopper() -> Backend:
    """The kernels on the current GPU."""
    from dash_attn.backends.sm90.launch import Debug, run_backward

    def launch(plan: Plan, tensors: Tensors, scores: Scores, how: How) -> Grads:
        debug = Debug(bounded=True) if how.bounded else None
        ways = {"ordered": how.ordered, "apart": how.apart, "workers": how.workers}
        found = run_backward(plan, tensors, scores, debug=debug, **ways)
        return found.dq, found.dk, found.dv

    def together(calls: list[Callable[[], Grads]]) -> list[Grads]:
        current, found = torch.cuda.current_stream(), []
        for stream, call in zip(_streams(len(calls)), calls):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                found.append(call())
        torch.cuda.synchronize()
        return found

    return Backend("cuda", torch.cuda.get_device_properties(0).multi_processor_count, launch, together)


_STREAMS: list[Any] = []


def _streams(count: int) -> list[Any]:
    while len(_STREAMS) < count:
        _STREAMS.append(torch.cuda.Stream())
    return _STREAMS[:count]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Uninitialised CUDA tensors hold NaN or -1, so that reading one shows."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(x: Tensor) -> Tensor:
        traced = torch.compiler.is_compiling() or type(x) is not Tensor  # by Dynamo, by AOTAutograd
        if not traced and x.is_cuda and x.numel():
            x.fill_(float("nan") if x.is_floating_point() else -1)
        return x

    torch.empty = lambda *a, **k: poison(empty(*a, **k))
    torch.empty_like = lambda *a, **k: poison(empty_like(*a, **k))
    try:
        yield
    finally:
        torch.empty, torch.empty_like = empty, empty_like


@dataclass
class Outcome:
    """What came of a case.

    Attributes:
        failures: what did not hold, in words; empty if all is well.
        worst: largest share of the allowed error that a gradient took.
        launches: how many there were.
        unordered_differs: whether dQ summed in no order had other bytes: the negative control.
    """

    failures: list[str] = field(default_factory=list)
    worst: float = 0.0
    launches: int = 0
    unordered_differs: bool = False


def check(case: FuzzCase, backend: Backend) -> Outcome:
    """Run a case in many ways and compare.

    The first launch has bounded waits, so that a plan that would hang is a failure with a message. Its bytes
    must be those of launches without a bound, with other numbers of workers, in other placements, on several
    streams, with contiguous inputs, and of a sequence alone. Errors are held against float64. Without order
    dK and dV must have the same bytes, and dQ the same accuracy.
    """
    with poisoned_memory():
        return _Checks(case, backend).run()


class _Checks:
    def __init__(self, case: FuzzCase, backend: Backend) -> None:
        self.case, self.backend, self.outcome = case, backend, Outcome()
        self.tensors, self.expected = make_tensors(case, backend.device)
        self.cut = Cut(case)
        self.rng = random.Random(case.seed)

    def run(self) -> Outcome:
        case, backend = self.case, self.backend
        usual, placed = (case.plan(name, backend.resident) for name in ("policy", case.placement))
        few = backend.resident
        if case.extra_workers is not None:
            few = min(placed.min_workers + case.extra_workers, few)
        try:
            first = self._launch(placed, How(few, bounded=True))
        except HandOverError as error:
            self.outcome.failures.append(f"a wait came to its end: {error}")
            return self.outcome
        self._accurate("dq, dk, dv", first)
        self._same(f"{few} workers and all", first, self._launch(usual, How()))
        if not case.scores.softcap or has_softcap_apart(case.head_dim, case.problem.head_dim_v):
            for workers in (few, None):
                self._same("waiting and apart", first, self._launch(usual, How(workers, apart=True)))
        calls = [lambda v=v: self._launch(placed, How(few, variant=v)) for v in range(2 * case.streams)]
        for half in (calls[: case.streams], calls[case.streams :]):
            for other in backend.together(half):
                self._same(f"replays, {case.streams} streams", first, other)
        if set(case.layouts) != {"plain"}:
            contiguous = Tensors(*(x.clone(memory_format=torch.contiguous_format) for x in self.tensors))
            other = self._launch(usual, How(), contiguous)
            self._same("these strides and contiguous inputs", first, other)
        if len(case.lengths) > 1:
            self._alone(first)
        self._unordered(usual, first)
        return self.outcome

    def _launch(self, plan: Plan, how: How, tensors: Tensors | None = None) -> Grads:
        self.outcome.launches += 1
        return self.backend.launch(plan, tensors or self.tensors, self.case.scores, how)

    def _same(self, what: str, first: Grads, other: Grads, names: tuple[str, ...] = GRADS) -> None:
        differ = [n for n, x, y in zip(GRADS, first, other) if n in names and not same_bytes(x, y)]
        if differ:
            self.outcome.failures.append(f"{what}: {', '.join(differ)} differ")

    def _accurate(self, what: str, found: Grads) -> None:
        for index, expected in enumerate(self.expected):
            errors = error_norms(self.cut.grads(found, index), expected.grads)
            for name, error, allowed in zip(GRADS, errors, expected.allowed):
                if not error <= allowed:
                    gap = f"{error:.3e} from float64, {allowed:.3e} allowed"
                    self.outcome.failures.append(f"{what}: {name} of sequence {index} is {gap}")
                elif allowed not in (0.0, float("inf")):
                    self.outcome.worst = max(self.outcome.worst, error / allowed)

    def _alone(self, first: Grads) -> None:
        index = self.rng.randrange(len(self.case.lengths))
        one = replace(self.case, lengths=(self.case.lengths[index],), packed=False)
        plan = one.plan("policy", self.backend.resident)
        single = self._launch(plan, How(), self.cut.alone(self.tensors, index))
        mine = tuple(x[None] for x in self.cut.grads(first, index))
        self._same(f"sequence {index} in the batch and alone", mine, single)

    def _unordered(self, plan: Plan, first: Grads) -> None:
        for variant in range(2):
            loose = self._launch(plan, How(ordered=False, variant=variant))
            self._same("with and without order", first, loose, ("dk", "dv"))
            self._accurate("without order", loose)
            self.outcome.unordered_differs |= not same_bytes(first[0], loose[0])


def report(case: FuzzCase) -> int:
    """Check a case on this machine's GPU and print what came of it; 1 if anything failed."""
    outcome = check(case, hopper())
    print(case, *outcome.failures or ["all is well"], sep="\n")
    return 1 if outcome.failures else 0

"""``attention``: bitwise-reproducible attention with autograd, and what it supports.

The same inputs give the same bytes, forward and backward, run after run. The bytes of one sequence do
not depend on the batch it is in. They do depend on the plan's numerics (``plan_for(...).fingerprint``),
on the backend, and on the CPU backend also on the PyTorch build and the kind of CPU.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import DashError, InputError, ProblemError
from .problem import DTYPES, Mask, Problem
from .reference import dense
from .schedule import POLICIES, Plan, Policy, build_plan, choose_policy, policy_by_name

__all__ = ["Support", "attention", "is_supported", "plan_for"]

_PLANS = 64
"""Plans kept for reuse; a model uses one for each of its attention shapes."""

_DTYPE_NAMES = {getattr(torch, name): name for name in DTYPES}

Window = Sequence[int | None] | None
"""(left, right) columns around the diagonal; -1 or None leaves a side unbounded."""


@dataclass(frozen=True)
class Support:
    """What :func:`is_supported` found; true in a condition if the call would work.

    Attributes:
        ok: True if :func:`attention` accepts these arguments.
        reason: the message of the error it raises otherwise, empty if ok.
        backend: what would run it ("cpu" or "sm90"), None if not ok.
    """

    ok: bool
    reason: str = ""
    backend: str | None = None

    def __bool__(self) -> bool:
        return self.ok


BackwardFunction = Callable[
    [Plan, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]
]


class Backend(NamedTuple):
    """What runs a plan. Tensors are dense, as in :mod:`dash_attn.reference.dense`.

    Attributes:
        name: "cpu" or "sm90".
        why_not: why a problem cannot run on a device, empty if it can.
        forward, backward: (plan, q, k, v, scale) and (plan, dout, q, k, v, out, lse, scale).
        unordered: makes a backward that adds to dQ in no fixed order; a simulated disorder draws from rng.
    """

    name: str
    why_not: Callable[[Problem, torch.device], str]
    forward: Callable[[Plan, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    backward: BackwardFunction
    unordered: Callable[[random.Random], BackwardFunction]


_CPU = Backend(
    "cpu",
    lambda problem, device: "",
    dense.forward,
    dense.backward,
    lambda rng: partial(dense.backward, rng=rng, ordered=False),
)


@cache
def _gpu() -> Backend:
    """The Hopper kernels, loaded when the first tensor is on a GPU."""
    launch = import_module(".kernels.launch", __package__)
    return Backend(
        "sm90", launch.why_not, launch.forward, launch.backward, lambda rng: launch.unordered_backward
    )


def backend_for(device: torch.device) -> Backend:
    """The backend of a device.

    Raises:
        InputError: there is none.
    """
    if device.type == "cpu":
        return _CPU
    if device.type == "cuda" and torch.cuda.is_available():
        return _gpu()
    raise InputError(f"device {str(device)!r} is not supported; supported: cpu, and cuda where there is one")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    softmax_scale: float | None = None,
    policy: str | Policy = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(Q K^T * softmax_scale) V under a mask, with gradients that are the same bytes every time.

    Args:
        q: (batch, seqlen_q, heads, head_dim), bfloat16, float16, float32 or float64.
        k, v: (batch, seqlen_k, kv_heads, head_dim); kv_heads divides heads.
        causal: row i sees columns up to ``i + seqlen_k - seqlen_q`` (aligned bottom-right).
        window: (left, right) columns around that diagonal, -1 or None: unbounded. With ``causal`` the
            right side is 0, as in FlashAttention.
        softmax_scale: default ``head_dim ** -0.5``.
        policy: "auto", a policy's name, or a Policy. It decides in which order gradients are summed:
            another policy may give other bytes, all of them equally accurate.
        return_lse: return the log-sum-exp too. It carries no gradient.

    Returns:
        out: (batch, seqlen_q, heads, head_dim), dtype of q; rows that see no column are zero.
        lse: with ``return_lse``, (batch, heads, seqlen_q) float32 (float64 for float64), natural
            logarithm; -inf in rows that see no column.

    Raises:
        InputError: an argument cannot be used; the message names it and its value.
        UnsupportedMaskError: the policy does not cover this mask.

    Example:
        >>> q = torch.randn(2, 300, 4, 64, requires_grad=True)
        >>> k = torch.randn(2, 300, 2, 64)
        >>> out = attention(q, k, k, causal=True)
        >>> out.backward(torch.ones_like(out))
        >>> out.shape == q.grad.shape == q.shape
        True
    """
    call = _prepare(q, k, v, causal, window, policy, softmax_scale)
    if not isinstance(return_lse, bool):
        raise InputError(f"return_lse must be True or False, got {return_lse!r}")
    out, lse = apply_plan(call.backend, call.plan, q, k, v, call.softmax_scale)
    return (out, lse) if return_lse else out


def is_supported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    softmax_scale: float | None = None,
    policy: str | Policy = "auto",
) -> Support:
    """Whether :func:`attention` accepts these arguments, with the reason if not; it does not raise.

    It builds the plan, which :func:`attention` then finds in the cache.

    >>> q = torch.zeros(1, 8, 4, 64)
    >>> is_supported(q, q[:, :, :3], q[:, :, :3]).reason
    'heads (4) must be a multiple of kv_heads (3)'
    """
    try:
        call = _prepare(q, k, v, causal, window, policy, softmax_scale)
    except DashError as error:
        return Support(False, str(error))
    return Support(True, backend=call.backend.name)


def plan_for(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    policy: str | Policy = "auto",
) -> Plan:
    """The plan that :func:`attention` follows for these arguments.

    Its ``fingerprint`` names the numerics: log it, and a later run can tell whether it sums alike.

    Raises:
        InputError, UnsupportedMaskError: as :func:`attention`.

    >>> q = torch.zeros(1, 512, 2, 64)
    >>> plan_for(q, q, q, causal=True)
    Plan(descending + lpt, 8 items, 20 tasks)
    """
    return _prepare(q, k, v, causal, window, policy, None).plan


def apply_plan(
    backend: Backend, plan: Plan, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """(out, lse) of checked, dense arguments on a backend, with autograd."""
    out, lse = _Attention.apply(q, k, v, plan, softmax_scale, backend)  # type: ignore[no-untyped-call]
    return out, lse


class _Attention(torch.autograd.Function):
    """Autograd around a backend."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan, softmax_scale: float, backend: Backend
    ) -> tuple[Tensor, Tensor]:
        out, lse = backend.forward(plan, q, k, v, softmax_scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.plan, ctx.softmax_scale, ctx.backend = plan, softmax_scale, backend
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grads = _Gradients.apply(  # type: ignore[no-untyped-call]
            dout, *ctx.saved_tensors, ctx.plan, ctx.softmax_scale, ctx.backend
        )
        wanted = [grad if need else None for grad, need in zip(grads, ctx.needs_input_grad)]
        return (*wanted, None, None, None)


class _Gradients(torch.autograd.Function):
    """dq, dk and dv. A node of its own, so that a second derivative is an error and not a missing term:
    ``once_differentiable`` says nothing when the gradient of the output is a constant."""

    @staticmethod
    def forward(
        ctx: Any,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        plan: Plan,
        softmax_scale: float,
        backend: Backend,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return backend.backward(plan, dout, q, k, v, out, lse, softmax_scale)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError("dash_attn.attention has no second derivative")


class _Call(NamedTuple):
    plan: Plan
    softmax_scale: float
    backend: Backend


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: Window, policy: str | Policy, scale: float | None
) -> _Call:
    """Check everything and find the plan; every DashError of this module starts here."""
    _check_tensors({"q": q, "k": k, "v": v})
    backend = backend_for(q.device)
    batch, seqlen_q, heads, head_dim = q.shape
    mask = _mask(causal, window)
    _check_policy(policy)
    softmax_scale = _scale(scale, head_dim)
    try:
        problem = Problem.dense(
            batch=batch,
            heads=heads,
            kv_heads=k.shape[2],
            seqlen_q=seqlen_q,
            seqlen_k=k.shape[1],
            head_dim=head_dim,
            mask=mask,
            dtype=_DTYPE_NAMES[q.dtype],
        )
    except ProblemError as error:
        raise InputError(str(error)) from error
    if reason := backend.why_not(problem, q.device):
        raise InputError(reason)
    return _Call(_plan(problem, policy), softmax_scale, backend)


@lru_cache(maxsize=_PLANS)
def _plan(problem: Problem, policy: str | Policy) -> Plan:
    if policy == "auto":
        return build_plan(problem, *choose_policy(problem))
    return build_plan(problem, policy_by_name(policy) if isinstance(policy, str) else policy)


def _check_tensors(tensors: dict[str, Tensor]) -> None:
    """Types, layouts, dtypes, devices and shapes, each error naming the tensor."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise InputError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.layout != torch.strided or x.is_nested:
            layout = "nested" if x.is_nested else x.layout
            raise InputError(f"{name} must be a dense tensor, got layout {layout}")
        if x.ndim != 4:
            raise InputError(
                f"{name} must have 4 dimensions (batch, seqlen, heads, head_dim), got shape {tuple(x.shape)}"
            )
    q, k, v = tensors.values()
    for name, x in tensors.items():
        if x.dtype not in _DTYPE_NAMES:
            raise InputError(f"{name} must be one of {', '.join(DTYPES)}, got {x.dtype}")
        if x.dtype != q.dtype:
            raise InputError(f"{name} has dtype {x.dtype}, q has {q.dtype}")
        if x.device != q.device:
            raise InputError(f"{name} is on {x.device}, q is on {q.device}")
        if x.shape[0] != q.shape[0] or x.shape[3] != q.shape[3]:
            raise InputError(
                f"{name} has batch {x.shape[0]} and head_dim {x.shape[3]}, "
                f"q has {q.shape[0]} and {q.shape[3]}"
            )
    if k.shape != v.shape:
        raise InputError(f"k has shape {tuple(k.shape)}, v has {tuple(v.shape)}")


def _mask(causal: bool, window: Window) -> Mask:
    if not isinstance(causal, bool):
        raise InputError(f"causal must be True or False, got {causal!r}")
    if window is None:
        return Mask.causal() if causal else Mask.full()
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise InputError(f"window must be None or (left, right), got {window!r}")
    left, right = (_side(name, value, window) for name, value in zip(("left", "right"), window))
    return Mask.window(left, 0 if causal else right)


def _side(name: str, value: int | None, window: Window) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value < 2**31:
        raise InputError(f"window {name} must be None, -1 or an integer in 0..2**31-1, got {window!r}")
    return None if value == -1 else value


def _scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return float(head_dim) ** -0.5 if head_dim else 1.0
    try:
        value = math.nan if isinstance(scale, bool) or not isinstance(scale, int | float) else float(scale)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise InputError(f"softmax_scale must be a finite number, got {scale!r:.40}")
    return value


def _check_policy(policy: str | Policy) -> None:
    if isinstance(policy, str):
        if policy != "auto" and policy not in POLICIES:
            raise InputError(f"unknown policy {policy!r}; known: auto, {', '.join(POLICIES)}")
    elif not isinstance(policy, Policy):
        raise InputError(f"policy must be a name or a Policy, got {policy!r}")
    else:
        try:
            hash(policy)
        except TypeError as error:
            raise InputError(f"policy {policy} cannot be hashed, give it immutable fields") from error

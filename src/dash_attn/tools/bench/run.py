"""One shape, measured: our modes and the peers in the same rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...api import plan_for
from ...backends.base import Tensors, backends_for
from ...backends.shapes import tensor_shapes
from ...errors import InputError, UnavailableError, UnsupportedMaskError
from ...peers.registry import PEERS, Backward, Inputs
from ...schedule import Plan
from ...schedule.constants import Q_SEGMENT
from ...schedule.segments import WHOLE
from ...scores import Scores
from ..shapes import Shape
from .timing import Contender, measure

__all__ = ["Result", "Row", "Settings", "bench_shape", "require_gpu_for", "require_hopper"]


@dataclass(frozen=True)
class Settings:
    """How much to measure.

    Attributes:
        rounds: timed calls of each implementation, >= 1.
        policies: further policies to measure, by name, beside the shape's own.
        peers: measure other libraries too.
    """

    rounds: int = 15
    policies: tuple[str, ...] = ()
    peers: bool = True

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise InputError(f"rounds must be >= 1, got {self.rounds}")


@dataclass(frozen=True)
class Row:
    """One implementation of a shape's backward.

    Attributes:
        impl: "dash_attn" or a peer.
        policy: of dash_attn, the plan's name; else empty.
        deterministic: what the implementation promises.
        reason: why there are no figures, empty if there are.
        repeatable: replays gave the same bytes.
        ms, spread: median, and distance of the quartiles as a share of it.
        tflops: FLOPs of the elements that the mask leaves, by the median.
        fingerprint: of the plan's order, as the backend runs it; of dash_attn's deterministic rows.
    """

    impl: str
    policy: str
    deterministic: bool
    reason: str = ""
    repeatable: bool | None = None
    ms: float | None = None
    spread: float | None = None
    tflops: float | None = None
    fingerprint: str = ""


@dataclass(frozen=True)
class Result:
    """What was measured of one shape; the first row is the shape's own policy.

    Attributes:
        shape: the shape.
        gpu: name of the device.
        rows: ours first, then the peers.
    """

    shape: Shape
    gpu: str
    rows: tuple[Row, ...]

    def as_json(self) -> dict[str, Any]:
        """Everything, with the shape as an object of its fields."""
        return {"shape": self.shape.as_json(), "gpu": self.gpu, "rows": [asdict(row) for row in self.rows]}


def require_gpu_for(shape: Shape) -> None:
    """Raise UnavailableError unless there is a Hopper GPU, or any GPU where the shape names a backend."""
    if shape.backend == "auto":
        require_hopper()
    else:
        _require_gpu()


def require_hopper() -> None:
    """Raise UnavailableError unless the current device is a Hopper GPU.

    The CPU backend is a reference: its times say nothing about anything.
    """
    _require_gpu()
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        raise UnavailableError(
            f"a benchmark needs a Hopper GPU (sm_90), got {torch.cuda.get_device_name()}, sm_{major}{minor}"
        )


def _require_gpu() -> None:
    if not torch.cuda.is_available():
        raise UnavailableError("a benchmark needs a GPU, and PyTorch sees no CUDA device")


def bench_shape(shape: Shape, settings: Settings, say: Callable[[str], None]) -> Result:
    """Measure the backward of a shape, all kernels of it included, the forward not.

    Args:
        shape: the call; its policy is the first row.
        settings: rounds, further policies, peers.
        say: takes a line of progress.

    Raises:
        InputError: the shape is not supported on this GPU, or a policy has no such name.
        UnsupportedMaskError: the shape's own policy does not cover its mask.
        UnavailableError: there is no Hopper GPU, and the shape names no other backend.
    """
    require_gpu_for(shape)
    plan, inputs = prepare(shape)
    entries = [_ours(shape, plan, inputs)]
    entries += [_further(shape, policy, inputs) for policy in settings.policies if policy != shape.policy]
    if shape.backend in ("auto", "sm90"):  # the others gain nothing without order
        unordered = Contender(call_of(plan, inputs, ordered=False))
        entries.append((Row("dash_attn", f"{plan.policy}, no order", False), unordered))
    for peer in PEERS if settings.peers else ():
        contender = Contender(partial(peer.make, inputs), reason=peer.why_not(inputs))
        entries.append((Row(peer.impl, "", peer.deterministic), contender))
    say(f"{shape}: {len(entries)} implementations, {settings.rounds} rounds")
    longest = max(seqlen_q for seqlen_q, _ in shape.problem.sequences)
    if longest > Q_SEGMENT:
        say(f"sequences are measured whole; attention() cuts {longest} rows into segments of {Q_SEGMENT}")
    measure([contender for _, contender in entries], settings.rounds)
    rows = tuple(_filled(row, contender, shape.problem.backward_flops) for row, contender in entries)
    return Result(shape, torch.cuda.get_device_name(), rows)


def prepare(shape: Shape) -> tuple[Plan, Inputs]:
    """The plan of the whole sequences, and random inputs with their forward's results.

    Raises: see :func:`bench_shape`.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    backend = backends_for(device, shape.backend)[0]
    if reason := backend.why_not(shape.problem, device, shape.packed):
        raise InputError(f"{shape}: {reason}")
    (dout, q, k, v), bounds = _tensors(shape, device)
    plan, scale = _plan(shape, shape.policy, q, k, v, bounds), float(shape.head_dim) ** -0.5
    out, lse = backend.prepare(plan.problem, device, shape.packed).forward(q, k, v, Scores(scale))
    return plan, Inputs(shape.problem, dout, q, k, v, out, lse, bounds, scale)


def call_of(plan: Plan, x: Inputs, ordered: bool, backend: str = "auto") -> Callable[[], Backward]:
    """Makes the backward of a plan, in its order or in none, by a backend, "auto": the device's first one."""
    chosen = backends_for(x.q.device, backend)[0]
    prepared = chosen.prepare(plan.problem, x.q.device, x.packed)
    tensors = Tensors(x.dout, x.q, x.k, x.v, x.out, x.lse)
    scores = Scores(x.scale)
    return lambda: lambda: prepared.backward(plan, tensors, scores, ordered=ordered)[:3]


def _plan(shape: Shape, policy: str, q: Tensor, k: Tensor, v: Tensor, bounds: tuple[Tensor, ...]) -> Plan:
    """A plan of whole sequences, also of those that a backward of :func:`attention` is cut for."""
    return plan_for(q, k, v, *bounds, **shape.options | {"policy": policy, "q_segment": WHOLE})


def _tensors(shape: Shape, device: torch.device) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Normal dout, q, k, v in the layout of the shape, and cu_seqlens of q and k if it is packed."""
    problem, dtype = shape.problem, getattr(torch, shape.dtype)
    generator = torch.Generator(device).manual_seed(shape.seed)
    sizes = tensor_shapes(problem)[3 if shape.packed else 4].of_tensors[:4]
    drawn = (torch.randn(size, generator=generator, device=device).to(dtype) for size in sizes)
    bounds = [torch.tensor([0, *side]).cumsum(0).int().to(device) for side in zip(*shape.sequences)]
    return tuple(drawn), tuple(bounds) if shape.packed else ()


Entry = tuple[Row, Contender]


def _ours(shape: Shape, plan: Plan, inputs: Inputs) -> Entry:
    backend = backends_for(inputs.q.device, shape.backend)[0]
    row = Row("dash_attn", plan.policy, True, fingerprint=backend.fingerprint_of(plan.fingerprint))
    return row, Contender(call_of(plan, inputs, ordered=True, backend=shape.backend))


def _further(shape: Shape, policy: str, x: Inputs) -> Entry:
    """A policy that need not cover the mask."""
    try:
        return _ours(shape, _plan(shape, policy, x.q, x.k, x.v, x.bounds), x)
    except UnsupportedMaskError as error:
        return Row("dash_attn", policy, True), Contender(lambda: tuple, reason=str(error))


def _filled(row: Row, contender: Contender, flops: float) -> Row:
    row = replace(row, reason=contender.reason, repeatable=contender.repeatable)
    if not contender.times:
        return row
    ms = contender.ms
    return replace(row, ms=round(ms, 5), spread=round(contender.spread, 4), tflops=round(flops / ms / 1e9, 1))

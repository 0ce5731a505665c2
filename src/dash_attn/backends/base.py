"""What a backend must supply, and which backends a device has.

A backend says what it covers, with reasons, and which tiles its kernels have. Both are asked before a plan is
made. It runs the forward of a problem, and the backward of a plan. A new one is a module with a ``BACKEND``
and a line in ``BACKENDS``; its name in ``AUTO`` lets it be chosen without being named.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..problem import Problem
from ..schedule import Plan
from ..scores import PLAIN, Scores
from .shapes import Keys

if TYPE_CHECKING:
    from .cached import CachedProblem, PreparedCached

__all__ = [
    "AUTO",
    "BACKENDS",
    "NOTHING",
    "NO_AUX",
    "NO_BACKWARD",
    "AuxTensors",
    "Backend",
    "Gradients",
    "Prepared",
    "RowIntervals",
    "SegmentTargets",
    "Tensors",
    "as_current",
    "backend_for",
    "backend_named",
    "backends_for",
    "check_backend",
    "check_device",
    "given_by",
    "refuse_backward",
]

BACKENDS = {"cpu": ".cpu.backend", "sm90": ".sm90.backend", "triton": ".triton.backend"}
"""Module of each backend, by its name. It is imported when it is first asked."""

AUTO = {"cpu": ("cpu",), "cuda": ("sm90", "triton")}
"""What ``backend="auto"`` asks on each type of device, in this order: the first one that covers a problem."""


class Tensors(NamedTuple):
    """What a backward reads, dense or packed. The last dimension of v, out and dout is the head dim of V.

    dout, q, out: (batch, seqlen_q, heads, head_dim), or packed (total_q, heads, head_dim).
    k, v: (batch, seqlen_k, kv_heads, head_dim), or packed (total_k, kv_heads, head_dim).
    lse: (batch, heads, seqlen_q), or packed (heads, total_q), fp32 (fp64 for fp64), natural logarithm.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor

    def part(self, rows: slice, keys: slice) -> Tensors:
        """Of dense tensors: some rows of all sequences, and some keys. Views."""
        return Tensors(
            self.dout[:, rows],
            self.q[:, rows],
            self.k[:, keys],
            self.v[:, keys],
            self.out[:, rows],
            self.lse[:, :, rows],
        )


class RowIntervals(NamedTuple):
    """Which rows see a key, beside the mask: those with ``starts <= row < ends``.

    Rows count from the first one of the sequence. int32, contiguous, on the tensors' device. Dense
    (batch, seqlen_k), or packed (total_k,). Any values: an interval may hold no row.
    """

    starts: Tensor
    ends: Tensor


class AuxTensors(NamedTuple):
    """What scores depend on besides q and k. The fields of :class:`Scores` say what there is.

    learnable_sink: (heads,), dtype of q or float32: natural logarithms, neither scaled nor capped.
    alibi_slopes: (heads,) or (batch, heads), float32, without a gradient.
    dropout_seed: (), int64.
    row_starts, row_ends: both or neither, as :class:`RowIntervals` has them.
    """

    learnable_sink: Tensor | None = None
    alibi_slopes: Tensor | None = None
    dropout_seed: Tensor | None = None
    row_starts: Tensor | None = None
    row_ends: Tensor | None = None

    @property
    def rows(self) -> RowIntervals | None:
        """Which rows see each key, beside the mask; None: all."""
        if self.row_starts is None or self.row_ends is None:
            return None
        return RowIntervals(self.row_starts, self.row_ends)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> AuxTensors:
        """With both sides of the intervals changed alike; itself without intervals."""
        if self.rows is None:
            return self
        starts, ends = map(change, self.rows)
        return self._replace(row_starts=starts, row_ends=ends)


NO_AUX = AuxTensors()


def given_by(aux: AuxTensors) -> dict[str, Any]:
    """What fields of :class:`Scores` say of it; the seed belongs to a probability."""
    return {
        "sink": aux.learnable_sink is not None,
        "alibi": aux.alibi_slopes is not None,
        "row_intervals": aux.row_starts is not None or aux.row_ends is not None,
    }


class Gradients(NamedTuple):
    """In the shapes and dtypes of q, k, v and of the sink, if there is one."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None = None


class SegmentTargets(NamedTuple):
    """Where the backward of a segment of q rows leaves what it makes.

    Attributes:
        key_sums: (kv_tiles, batch, kv_heads, head_groups, words), fp32 (fp64 for fp64): sums to which dK and
            dV are added (:func:`.new_key_sums`). The first kv tile is that of the first key.
        dq: (batch, rows, heads, head_dim), like q: it is written.
        sink_sums: (batch, heads), fp32 (fp64 for fp64): with a sink, sums to which its gradient is added
            (:func:`.new_sink_sums`); without one None.
    """

    key_sums: Tensor
    dq: Tensor
    sink_sums: Tensor | None = None


class Prepared(ABC):
    """A problem on a device: what shapes, dtype and mask decide is decided here, once."""

    @property
    @abstractmethod
    def forward_fingerprint(self) -> str:
        """What decides the bits of out and lse beside what is given: :class:`dash_attn.api.Fingerprints`."""

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, aux: AuxTensors = NO_AUX
    ) -> tuple[Tensor, Tensor]:
        """(out, lse). Rows that see no key: out 0, lse -inf, or the sink. The forward has no plan."""

    @abstractmethod
    def backward(
        self,
        plan: Plan,
        tensors: Tensors,
        scores: Scores,
        aux: AuxTensors = NO_AUX,
        *,
        ordered: bool = True,
        disorder: random.Random | None = None,
        sink_sums: Tensor | None = None,
    ) -> Gradients:
        """The gradients, summed in the plan's order.

        Args:
            plan: a proven plan of the problem. It is that of the mask, whatever rows of ``aux`` hide.
            tensors: in the layout of the forward.
            scores, aux: as in the forward.
            ordered: False permits dQ to be summed in no fixed order, where that gains anything.
            disorder: for negative controls: dQ is summed in no fixed order, which a simulation draws from it.
            sink_sums: with a sink, sums that its gradient is added to (:func:`.new_sink_sums`); dsink is then
                None.

        Raises:
            InputError: the problem was prepared with keys, which is for forwards.
            PlanMismatchError: the plan is not for these tensors or for this backend's tiles.
        """

    @abstractmethod
    def backward_segment(
        self, plan: Plan, tensors: Tensors, scores: Scores, aux: AuxTensors, into: SegmentTargets
    ) -> None:
        """The backward of a segment of q rows, in the plan's order. Every sum has one contribution per call.

        Args:
            plan, scores, aux: as in :meth:`backward`.
            tensors: dense, (batch, rows, heads, head_dim), of any strides.
            into: where the gradients go.
        """


class Backend(ABC):
    """What runs plans on one kind of device."""

    name: ClassVar[str]

    @abstractmethod
    def why_not(self, problem: Problem, device: torch.device, packed: bool, scores: Scores = PLAIN) -> str:
        """Why it cannot run a problem, given as packed or dense tensors; empty if it can."""

    @abstractmethod
    def tiles(self, head_dim: int, head_dim_v: int) -> tuple[int, int]:
        """(tile_m, tile_n) of its backward; any for head dims that it does not cover."""

    def fingerprint_of(self, numerics: str) -> str:
        """What names numerics as this backend runs them, by ``Plan.fingerprint`` or that of a forward.

        It is the same unless kernels have a version of their own, which is then in all its fingerprints.
        """
        return numerics

    def with_scores(self, fingerprint: str, scores: Scores) -> str:
        """What a fingerprint becomes for a call with such scores: where kernels have a version of how they
        make them, it names that, too."""
        return fingerprint

    def untried(self, device: torch.device) -> str:
        """What nobody knows of it on a device that it covers; empty if it was tested on such a one."""
        return ""

    @abstractmethod
    def prepare(
        self, problem: Problem, device: torch.device, packed: bool, keys: Keys | None = None
    ) -> Prepared:
        """The problem, which it covers, on a device.

        Args:
            problem: what to compute.
            device: of the tensors.
            packed: q is packed, and so are k and v unless ``keys`` says otherwise.
            keys: where keys lie, for a forward alone.
        """

    @abstractmethod
    def key_sums(self, problem: Problem, head_groups: int) -> tuple[int, int]:
        """(head groups, words): the sums of dK and dV that it keeps per kv tile and kv head.

        ``head_groups``: those of the plans.
        """

    def add_sums(self, sums: Tensor, more: Tensor) -> None:
        """Add to sums what another segment has left in sums of its own, as if it had added to these."""
        sums.add_(more)

    @abstractmethod
    def finish_keys(self, sums: Tensor, scores: Scores, dk: Tensor, dv: Tensor) -> None:
        """Make dK and dV of complete sums: add head groups in ascending order, scale, round once.

        Args:
            sums: their first kv tile is that of the first row of dk and dv. They may be overwritten.
            scores: as in the backward.
            dk, dv: (batch, rows, kv_heads, head_dim), of any strides; they are written.
        """

    @abstractmethod
    def finish_sink(self, sums: Tensor, dtype: torch.dtype) -> Tensor:
        """(heads,) of a dtype: complete sums of sequences, added in the order of the batch."""

    def why_not_cached(self, problem: CachedProblem, device: torch.device, scores: Scores = PLAIN) -> str:
        """Why it cannot run a forward over a cache of keys; empty if it can."""
        return self.why_not(problem.problem(), device, problem.packed, scores)

    @abstractmethod
    def prepare_cached(self, problem: CachedProblem, device: torch.device) -> PreparedCached:
        """A problem over a cache of keys, which it covers, on a device."""


def refuse_backward(keys: Keys | None) -> None:
    """Raise InputError if keys are placed: no backward knows places of keys."""
    if keys is not None:
        raise InputError(NO_BACKWARD)


NO_BACKWARD = (
    "the backward does not have seqused_k: call it under torch.no_grad(), or with q, k and v (and "
    "learnable_sink) that need no gradient"
)


def as_current(device: torch.device) -> Any:
    """The tensors' GPU as the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return NOTHING
    return torch.cuda.device(device)


NOTHING = nullcontext()
"""Made once: calls enter it at every launch."""


@cache
def backend_named(name: str) -> Backend:
    """The backend of a name in ``BACKENDS``."""
    backend: Backend = import_module(BACKENDS[name], __package__).BACKEND
    return backend


def check_backend(value: object) -> str:
    """Raise InputError unless it is "auto" or the name of a backend."""
    if not isinstance(value, str) or value not in ("auto", *BACKENDS):
        raise InputError(f"backend must be auto, {', '.join(BACKENDS)}, got {value!r}")
    return value


def check_device(device: torch.device) -> None:
    """Raise InputError if the device has no backend, or if a trace is recorded in which sizes are tensors.

    It loads nothing, so that torch.compile can trace it.
    """
    if not torch.compiler.is_compiling() and torch._C._is_tracing():
        raise InputError("torch.jit.trace is not supported: use torch.export")
    if device.type != "cpu" and not (device.type == "cuda" and torch.cuda.is_available()):
        raise InputError(
            f"device {str(device)!r} is not supported; supported: cpu, and cuda where there is one"
        )


def backends_for(device: torch.device, asked: str = "auto") -> list[Backend]:
    """The backends that may run a call, in the order in which they are asked.

    Args:
        device: of the tensors.
        asked: "auto", or the name of one.

    Raises:
        InputError: the device has none.
    """
    check_device(device)
    return [backend_named(name) for name in (AUTO[device.type] if asked == "auto" else (asked,))]


def backend_for(device: torch.device) -> Backend:
    """The backend that is asked first on a device.

    Raises:
        InputError: there is none.
    """
    return backends_for(device)[0]

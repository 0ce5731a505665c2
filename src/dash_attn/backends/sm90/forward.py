"""The forward on a GPU, for now: another library's kernel behind one function.

FlashAttention-4's where it is installed, cuDNN's through PyTorch otherwise. Both are deterministic and
neither splits a row's keys, so a sequence's bytes do not depend on its batch.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from ...errors import InputError
from ...peers import cudnn, fa4
from ...peers.base import PackedLengths
from ...problem import Problem
from ..cuda.upload import loadable

__all__ = ["Forward", "PackedLengths", "forward_fingerprint", "forward_name", "why_no_forward"]


def forward_name(problem: Problem, packed: bool = False) -> str:
    """Which kernel runs the forward of a problem, given as packed or dense tensors: "fa4" or "cudnn".

    Raises:
        InputError: neither can.
    """
    if _has_fa4():
        return "fa4"
    if reason := why_no_forward(problem, packed):
        raise InputError(reason)
    return "cudnn"


def forward_fingerprint(problem: Problem, packed: bool = False) -> str:
    """The name of the kernel with the version of its library, such as "fa4 4.0.0"."""
    if forward_name(problem, packed) == "fa4":
        try:
            return f"fa4 {version('flash-attn-4')}"
        except PackageNotFoundError:  # the module is there, its package is not: a checkout on the path
            return "fa4, unknown version"
    return f"cudnn {torch.backends.cudnn.version()}"  # type: ignore[no-untyped-call]


def why_no_forward(problem: Problem, packed: bool = False) -> str:
    """Why no installed forward covers a problem, given as packed or dense tensors; empty if one does."""
    if _has_fa4() or cudnn.covers(problem, packed):
        return ""
    what = "packed tensors" if packed else f"mask {problem.mask.name}"
    return f"the forward of {what} on a GPU needs FlashAttention-4: pip install flash-attn-4"


def _has_fa4() -> bool:
    return not fa4.why_not()


class Forward:
    """The forward of a problem, given as packed or dense tensors.

    Raises:
        InputError: no installed forward covers the problem.
    """

    def __init__(self, problem: Problem, packed: bool) -> None:
        self._problem = problem
        self._fa4 = fa4.Forward(problem.mask) if forward_name(problem, packed) == "fa4" else None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, lengths: PackedLengths | None = None
    ) -> tuple[Tensor, Tensor]:
        """out and lse (fp32, natural logarithm) of dense tensors, or with ``lengths`` of packed ones.

        Shapes: q and out (batch, seqlen_q, heads, head_dim), lse (batch, heads, seqlen_q); packed: q and out
        (total_q, heads, head_dim), lse (heads, total_q).
        """
        if self._fa4 is not None:
            return self._fa4(loadable(q), loadable(k), loadable(v), softmax_scale, lengths)
        return cudnn.forward(self._problem, q, k, v, softmax_scale)

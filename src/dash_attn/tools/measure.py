"""Running a plan on this machine's GPU to see what it does."""

from __future__ import annotations

import torch

from ..backends.base import Tensors, backend_for
from ..backends.sm90 import launch
from ..model import H200, H200_WORKERS, Timeline, simulate
from ..model.roofline import CLOCK_GHZ
from ..model.trace import measured_timeline
from ..schedule import Plan

__all__ = ["simulated_and_measured"]


def simulated_and_measured(plan: Plan) -> tuple[Timeline, Timeline]:
    """The timeline the model predicts for an H200, and one recorded on this GPU with random inputs.

    Raises:
        RuntimeError, DashError: there is no GPU, or it cannot run the plan.
    """
    problem = plan.problem
    (seqlen_q, seqlen_k), batch = problem.sequences[0], len(problem.sequences)
    dtype = getattr(torch, problem.dtype)

    def random(seqlen: int, heads: int) -> torch.Tensor:
        return torch.randn(batch, seqlen, heads, problem.head_dim, device="cuda").to(dtype)

    q, dout = random(seqlen_q, problem.heads), random(seqlen_q, problem.heads)
    k, v = random(seqlen_k, problem.kv_heads), random(seqlen_k, problem.kv_heads)
    scale = problem.head_dim**-0.5
    out, lse = backend_for(q.device).prepare(problem, q.device, False).forward(q, k, v, scale)
    tensors = Tensors(dout, q, k, v, out, lse)
    debug = launch.Debug(trace=True)
    for _ in range(3):  # the last one is warm
        result = launch.run_backward(plan, tensors, scale, debug=debug)
    assert result.trace is not None
    measured = measured_timeline(plan, result.trace.cpu().numpy(), CLOCK_GHZ)
    return simulate(plan, H200, H200_WORKERS), measured

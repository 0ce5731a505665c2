"""Running a plan on this machine's GPU to see what it does."""

from __future__ import annotations

import torch

from ..backends.base import Tensors, backend_for, backend_named
from ..backends.shapes import tensor_shapes
from ..backends.sm90 import launch
from ..backends.sm90.forward.traced import traced_forward
from ..backends.sm90.tiles import forward_kernel_of
from ..errors import InputError
from ..model import H200, H200_WORKERS, ForwardCosts, ForwardTimeline, Timeline, simulate, simulate_forward
from ..model.roofline import CLOCK_GHZ
from ..model.trace import measured_forward, measured_timeline
from ..problem import Problem
from ..schedule import Plan
from ..scores import Scores

__all__ = ["random_inputs", "simulated_and_measured", "simulated_and_measured_forward"]

RUNS = 3
"""The last one is warm."""


def simulated_and_measured(plan: Plan) -> tuple[Timeline, Timeline]:
    """The timeline the model predicts for an H200, and one recorded on this GPU with random inputs.

    Raises:
        InputError: the GPU or its kernel does not cover the problem, or there is nothing to do.
        RuntimeError, DashError: there is no GPU, or it cannot run the plan.
    """
    problem = plan.problem
    _check_traced(problem)
    if not plan.problem.tasks:
        raise InputError("there is nothing to trace: no row sees a key")
    q, k, v = random_inputs(problem)
    scale = problem.head_dim**-0.5
    out, lse = backend_for(q.device).prepare(problem, q.device, False).forward(q, k, v, Scores(scale))
    tensors = Tensors(torch.randn_like(out), q, k, v, out, lse)
    debug = launch.Debug(trace=True)
    for _ in range(RUNS):
        result = launch.run_backward(plan, tensors, scale, debug=debug)
    assert result.trace is not None
    measured = measured_timeline(plan, result.trace.cpu().numpy(), CLOCK_GHZ)
    return simulate(plan, H200, H200_WORKERS), measured


def simulated_and_measured_forward(problem: Problem) -> tuple[ForwardTimeline, ForwardTimeline]:
    """The same of the forward of a dense batch. The plan is the one that this GPU runs.

    Raises:
        InputError: the GPU or its kernel does not cover the problem, or there is nothing to do.
        RuntimeError: there is no GPU.
    """
    _check_traced(problem)
    costs = ForwardCosts.h200(forward_kernel_of(problem.head_dim, problem.head_dim_v)[0])
    traced = traced_forward(problem, random_inputs(problem), runs=RUNS)
    measured = measured_forward(traced.plan, traced.trace.cpu().numpy(), CLOCK_GHZ)
    return simulate_forward(traced.plan, costs, H200_WORKERS), measured


def _check_traced(problem: Problem) -> None:
    """Only the Hopper kernels can be traced."""
    device = torch.device("cuda", torch.cuda.current_device())
    if reason := backend_named("sm90").why_not(problem, device, packed=False):
        raise InputError(reason)


def random_inputs(
    problem: Problem, device: torch.device | str = "cuda"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normal q, k, v of a dense batch."""
    shapes, dtype = tensor_shapes(problem)[4], getattr(torch, problem.dtype)
    q, k, v = (torch.randn(size, device=device).to(dtype) for size in (shapes.q, shapes.k, shapes.v))
    return q, k, v

"""What ``forward.py`` times: our calls and those of the peers, on the same tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from forward_points import Point
from torch import Tensor

import dash_attn
from dash_attn.backends.base import backend_for
from dash_attn.backends.shapes import tensor_shapes
from dash_attn.peers import cudnn, fa4
from dash_attn.peers.registry import PEERS, Inputs
from dash_attn.scores import Scores

Call = Callable[[], Any]

OURS = "dash_attn"
BACKWARDS = {
    ("fa4", True): "fa4_det",
    ("fa4", False): "fa4",
    ("cudnn", True): "cudnn_det",
    ("cudnn (PyTorch)", False): "cudnn",
}
"""Short names of peers' backwards that are measured. FlashAttention-2's takes twice as long as the others."""


def without_gradients(function: Call) -> Call:
    def run() -> Any:
        with torch.no_grad():
            return function()

    return run


def contenders(point: Point, device: str = "cuda") -> dict[str, Call]:
    """What is timed at a point, by name; each was called once. A peer that fails is left out, with a line."""
    x = inputs(point, torch.device(device))
    calls = dict(_training(x) if point.set == "total" else _forwards(x))
    return {name: call for name, call in calls.items() if works(name, call, must=name == OURS)}


def inputs(point: Point, device: torch.device) -> Inputs:
    """Normal tensors, and the results of our forward on them."""
    problem, packed = point.problem, bool(point.packed)
    sizes = tensor_shapes(problem)[3 if packed else 4].of_tensors[:4]
    dtype = getattr(torch, problem.dtype)
    dout, q, k, v = (torch.randn(shape, device=device).to(dtype) for shape in sizes)
    bounds = [torch.tensor([0, *side]).cumsum(0).int().to(device) for side in zip(*problem.sequences)]
    scale = float(problem.head_dim) ** -0.5
    out, lse = backend_for(device).prepare(problem, device, packed).forward(q, k, v, Scores(scale))
    return Inputs(problem, dout, q, k, v, out, lse, tuple(bounds) if packed else (), scale)


def _forwards(x: Inputs) -> Iterator[tuple[str, Call]]:
    """Forwards with the log-sum-exp, without autograd."""
    ours = backend_for(x.q.device).prepare(x.problem, x.q.device, x.packed)
    yield OURS, lambda: ours.forward(x.q, x.k, x.v, Scores(x.scale))
    mask, lengths = x.problem.mask, x.lengths
    if not _left_out("fa4 forward", fa4.why_not()):
        yield "fa4", lambda: fa4.forward(x.q, x.k, x.v, x.scale, mask, lengths)
    if x.q.is_cuda and x.problem.group == 1 and cudnn.covers(x.problem, x.packed):
        turned = [t.transpose(1, 2) for t in (x.q, x.k, x.v)]
        function = torch.ops.aten._scaled_dot_product_cudnn_attention
        yield "cudnn", lambda: function(*turned, None, True, 0.0, mask.is_causal, False, scale=x.scale)


def _training(x: Inputs) -> Iterator[tuple[str, Call]]:
    """Our public function with its gradients, and those of the peers; then every forward and every backward
    of the peers by itself."""
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]

    def with_gradients(function: Callable[..., Tensor]) -> Call:
        return lambda: torch.autograd.grad(function(*leaves), leaves, x.dout)

    for name, function in _functions(x):
        yield name, with_gradients(function)
    for name, call in _forwards(x):
        if name != OURS:
            yield f"{name} forward", call
    for peer in PEERS:
        name = BACKWARDS.get((peer.impl, peer.deterministic))
        if name and not _left_out(f"{name} backward", peer.why_not(x)):
            try:
                call = peer.make(x)
            except Exception as error:  # a library that cannot do it
                _left_out(f"{name} backward", _reason(error))
                continue
            yield f"{name} backward", call


def _functions(x: Inputs) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """What users call, of dense tensors with as many kv heads as q heads."""
    causal = x.problem.mask.is_causal
    yield OURS, partial(dash_attn.flash_attn_func, causal=causal)
    if not _left_out("fa4 function", fa4.why_not()):
        for name, deterministic in (("fa4_det", True), ("fa4", False)):
            yield f"{name} function", partial(fa4.function, causal=causal, deterministic=deterministic)
    if x.q.is_cuda and cudnn.covers(x.problem, x.packed):

        def by_cudnn(*qkv: Tensor) -> Tensor:
            turned = [t.transpose(1, 2) for t in qkv]
            out, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*turned, None, True, 0.0, causal)
            return out.transpose(1, 2)

        yield "cudnn function", by_cudnn


def works(name: str, call: Call, *, must: bool) -> bool:
    """Call it once, which compiles it. What fails and need not work is named, with the reason."""
    try:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as error:
        if must:
            raise
        _left_out(name, _reason(error))
        return False
    return True


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _left_out(name: str, why: str) -> bool:
    """Whether there is a reason to leave a contender out; it is said."""
    if why:
        print(f"{name} is left out: {why}"[:300], file=sys.stderr, flush=True)
    return bool(why)

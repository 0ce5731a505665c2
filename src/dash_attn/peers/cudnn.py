"""cuDNN: its forward through PyTorch, and its deterministic backward, which only its own frontend offers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..problem import Problem
from . import torch_sdpa
from .base import Backward, Inputs

__all__ = ["covers", "deterministic_backward", "deterministic_graph", "forward", "why_not"]


def covers(problem: Problem, packed: bool = False) -> bool:
    """Whether :func:`forward` covers a problem: dense tensors, the full mask or the square causal one."""
    mask = problem.mask
    square = all(seqlen_q == seqlen_k for seqlen_q, seqlen_k in problem.sequences)
    return not packed and (mask.is_full or (mask.is_causal and square))


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """out (batch, seqlen_q, heads, head_dim) and lse (batch, heads, seqlen_q; fp32, natural logarithm)."""
    by_head = [x.transpose(1, 2) for x in (q, k, v)]
    by_head[1:] = [x.repeat_interleave(problem.group, dim=1) if problem.group > 1 else x for x in by_head[1:]]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *by_head, None, True, 0.0, problem.mask.is_causal, False, scale=softmax_scale
    )
    # cuDNN's log-sum-exp may come with a trailing dimension of one.
    return out.transpose(1, 2).contiguous(), lse.reshape(lse.shape[:3]).contiguous()


def why_not(x: Inputs) -> str:
    """Why the deterministic backward cannot run some inputs, as far as that is known without trying."""
    if torch_sdpa.why_not(x):
        return "only dense batches under the full or the square causal mask are measured"
    return "" if find_spec("cudnn") else "not installed: pip install nvidia-cudnn-frontend"


def deterministic_backward(x: Inputs) -> Backward:
    """cuDNN's backward in a fixed order."""
    run = deterministic_graph(x)
    return lambda: run(x)


def deterministic_graph(x: Inputs) -> Callable[[Inputs], tuple[Tensor, ...]]:
    """That backward for all inputs whose shapes, strides and scale are those of ``x``."""
    cudnn = _import_frontend()
    names = {torch.bfloat16: "BFLOAT16", torch.float16: "HALF"}
    dtype, fp32 = getattr(cudnn.data_type, names[x.q.dtype]), cudnn.data_type.FLOAT
    graph = cudnn.pygraph(io_data_type=dtype, intermediate_data_type=fp32, compute_data_type=fp32)

    def node(t: Tensor, kind: Any) -> Any:
        return graph.tensor(dim=list(t.shape), stride=list(t.stride()), data_type=kind)

    def tensors_of(x: Inputs) -> list[Tensor]:
        return [*(t.transpose(1, 2) for t in (x.q, x.k, x.v, x.out, x.dout)), x.lse[..., None]]

    *tensors, stats = tensors_of(x)
    nodes = [*(node(t, dtype) for t in tensors), node(stats, fp32)]
    outputs = graph.sdpa_backward(
        **dict(zip(("q", "k", "v", "o", "dO", "stats"), nodes)),
        attn_scale=x.scale,
        use_causal_mask=x.problem.mask.is_causal,
        use_deterministic_algorithm=True,
    )
    for output, t in zip(outputs, tensors):
        output.set_output(True).set_dim(list(t.shape)).set_stride(list(t.stride())).set_data_type(dtype)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    size = graph.get_workspace_size()

    def run(x: Inputs) -> tuple[Tensor, ...]:
        grads = [torch.empty_like(t) for t in (x.q, x.k, x.v)]
        workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=x.q.device)
        pack = dict(zip((*nodes, *outputs), (*tensors_of(x), *(g.transpose(1, 2) for g in grads))))
        graph.execute(pack, workspace)
        return tuple(grads)

    return run


def _import_frontend() -> Any:
    """The frontend, after the cuDNN that PyTorch uses was loaded for it."""
    spec = find_spec("nvidia.cudnn")
    for folder in spec.submodule_search_locations or () if spec else ():
        for library in Path(folder, "lib").glob("libcudnn.so.*"):
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    return import_module("cudnn")

"""The peers' backward passes, each as a call that does one whole backward on given tensors.

A function here takes :class:`Inputs` and returns a callable that returns (dq, dk, dv), all of them in
(batch, seqlen, heads, head_dim). It raises where the peer is not installed or does not support the case.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Backward = Callable[[], tuple[Tensor, ...]]


class Inputs(NamedTuple):
    """(batch, seqlen, heads, head_dim) tensors, and lse (batch, heads, seqlen) fp32, natural logarithm."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    causal: bool
    scale: float


class Peer(NamedTuple):
    impl: str
    policy: str
    deterministic: bool
    make: Callable[[Inputs], Backward]


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out and lse by cuDNN through PyTorch, contiguous in (batch, seqlen, heads, head_dim)."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), None, True, 0.0, causal, False, scale=scale
    )
    return out.transpose(1, 2).contiguous(), lse.reshape(lse.shape[:3]).contiguous()


def fa4(x: Inputs, deterministic: bool) -> Backward:
    """FlashAttention-4 (CuTe-DSL)."""
    from flash_attn.cute.interface import _flash_attn_bwd

    def run() -> tuple[Tensor, ...]:
        return _flash_attn_bwd(
            x.q, x.k, x.v, x.out, x.dout, x.lse, x.scale, x.causal, deterministic=deterministic
        )[:3]

    return run


def cudnn_of_torch(x: Inputs) -> Backward:
    """cuDNN as PyTorch calls it; there is no deterministic mode."""
    return _sdpa(x, SDPBackend.CUDNN_ATTENTION)


def fa2(x: Inputs) -> Backward:
    """FlashAttention-2 as PyTorch calls it under strict deterministic algorithms."""
    backward = _sdpa(x, SDPBackend.FLASH_ATTENTION)

    def run() -> tuple[Tensor, ...]:
        # Filling fresh memory is no part of the kernel's work.
        fill = torch.utils.deterministic.fill_uninitialized_memory
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(True)
        try:
            return backward()
        finally:
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = fill

    return run


def _sdpa(x: Inputs, backend: SDPBackend) -> Backward:
    """The backward of PyTorch's attention; its forward runs here, once."""
    leaves = [t.detach().transpose(1, 2).requires_grad_() for t in (x.q, x.k, x.v)]
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(*leaves, is_causal=x.causal, scale=x.scale)
    dout = x.dout.transpose(1, 2)

    def run() -> tuple[Tensor, ...]:
        grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        return tuple(grad.transpose(1, 2) for grad in grads)

    return run


def cudnn_frontend(x: Inputs) -> Backward:
    """cuDNN's deterministic backward, which only its own frontend offers."""
    cudnn = _import_cudnn()
    dtype = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[x.q.dtype]
    graph = cudnn.pygraph(
        io_data_type=dtype,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )

    def node(t: Tensor, kind: Any = dtype) -> Any:
        return graph.tensor(dim=list(t.shape), stride=list(t.stride()), data_type=kind)

    tensors = [t.transpose(1, 2) for t in (x.q, x.k, x.v, x.out, x.dout)]
    stats = x.lse[..., None]
    nodes = [*(node(t) for t in tensors), node(stats, cudnn.data_type.FLOAT)]
    outputs = graph.sdpa_backward(
        **dict(zip(("q", "k", "v", "o", "dO", "stats"), nodes)),
        attn_scale=x.scale,
        use_causal_mask=x.causal,
        use_deterministic_algorithm=True,
    )
    for output, t in zip(outputs, tensors):
        output.set_output(True).set_dim(list(t.shape)).set_stride(list(t.stride())).set_data_type(dtype)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    size = graph.get_workspace_size()

    def run() -> tuple[Tensor, ...]:
        grads = [torch.empty_like(t) for t in (x.q, x.k, x.v)]
        workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=x.q.device)
        pack = dict(zip((*nodes, *outputs), (*tensors, stats, *(g.transpose(1, 2) for g in grads))))
        graph.execute(pack, workspace)
        return tuple(grads)

    return run


def _import_cudnn() -> Any:
    """The frontend, after the cuDNN that PyTorch uses was loaded for it."""
    spec = find_spec("nvidia.cudnn")
    for folder in spec.submodule_search_locations or () if spec else ():
        for library in Path(folder, "lib").glob("libcudnn.so.*"):
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    import cudnn

    return cudnn


PEERS = (
    Peer("fa4", "spt", True, lambda x: fa4(x, True)),
    Peer("fa4", "none", False, lambda x: fa4(x, False)),
    Peer("cudnn", "none", False, cudnn_of_torch),
    Peer("cudnn", "unknown", True, cudnn_frontend),
    Peer("fa2", "split", True, fa2),
)

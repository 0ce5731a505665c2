"""Other libraries' backward passes, each as a call that does one whole backward on given tensors.

A peer that is not installed, or cannot run a case, says so: :attr:`Peer.why_not` gives the reasons that
are known beforehand, and whatever ``make`` or the call raises is a reason too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..problem import Problem

__all__ = ["PEERS", "Backward", "Inputs", "Peer"]

Backward = Callable[[], tuple[Tensor, ...]]
"""One whole backward; returns (dq, dk, dv) in the layout of q, k and v."""


@dataclass(frozen=True)
class Inputs:
    """Tensors of one backward on a GPU.

    Attributes:
        problem: sequences, heads, mask and dtype of the tensors.
        dout, q, k, v, out: dense (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim).
        lse: fp32, natural logarithm; dense (batch, heads, seqlen_q), packed (heads, total_q).
        bounds: int32 cu_seqlens of q and of k on the device, of packed tensors; else empty.
        scale: factor on Q K^T.
    """

    problem: Problem
    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    bounds: tuple[Tensor, ...]
    scale: float

    @property
    def packed(self) -> bool:
        """Sequences are packed, not a dense batch."""
        return bool(self.bounds)

    @property
    def causal(self) -> bool:
        """The mask is the causal one, without a window."""
        return self.problem.mask.name == "causal"


@dataclass(frozen=True)
class Peer:
    """One mode of another library.

    Attributes:
        impl: short name of the library.
        deterministic: what the mode promises.
        make: the backward of some inputs.
        why_not: why it cannot run them as far as that is known without trying, empty if it may.
    """

    impl: str
    deterministic: bool
    make: Callable[[Inputs], Backward]
    why_not: Callable[[Inputs], str]


def _fa4_why_not(x: Inputs) -> str:
    try:
        return "" if find_spec("flash_attn.cute") else "not installed: pip install flash-attn-4"
    except ImportError:
        return "not installed: pip install flash-attn-4"


def _fa4(x: Inputs, *, deterministic: bool) -> Backward:
    """FlashAttention-4's kernel for Hopper."""
    interface: Any = import_module("flash_attn.cute.interface")
    mask, options = x.problem.mask, dict[str, Any](deterministic=deterministic)
    if mask.name not in ("full", "causal"):
        options |= {"window_size_left": mask.left, "window_size_right": mask.right}
    if x.packed:
        longest_q, longest_k = (max(lengths) for lengths in zip(*x.problem.sequences))
        options |= {"cu_seqlens_q": x.bounds[0], "cu_seqlens_k": x.bounds[1]}
        options |= {"max_seqlen_q": longest_q, "max_seqlen_k": longest_k}

    def run() -> tuple[Tensor, ...]:
        grads = interface._flash_attn_bwd(x.q, x.k, x.v, x.out, x.dout, x.lse, x.scale, x.causal, **options)
        return tuple(grads[:3])

    return run


def _sdpa_why_not(x: Inputs) -> str:
    """What scaled_dot_product_attention has no argument for."""
    if x.packed:
        return "PyTorch's attention takes packed sequences as nested tensors only"
    if x.problem.mask.name not in ("full", "causal"):
        return f"PyTorch's fused attention has no mask {x.problem.mask.name}"
    if x.causal and x.q.shape[1] != x.k.shape[1]:
        return "PyTorch aligns the causal mask top-left where seqlen_q != seqlen_k"
    return ""


def _sdpa(x: Inputs, *, backend: SDPBackend) -> Backward:
    """The backward of one of PyTorch's kernels; its forward runs here, once."""
    q, k, v = leaves = [t.detach().transpose(1, 2).requires_grad_() for t in (x.q, x.k, x.v)]
    grouped = x.problem.group > 1
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(q, k, v, is_causal=x.causal, scale=x.scale, enable_gqa=grouped)
    dout = x.dout.transpose(1, 2)

    def run() -> tuple[Tensor, ...]:
        grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        return tuple(grad.transpose(1, 2) for grad in grads)

    return run


def _sdpa_flash_deterministic(x: Inputs) -> Backward:
    """FlashAttention-2 as PyTorch calls it under strict deterministic algorithms."""
    backward = _sdpa(x, backend=SDPBackend.FLASH_ATTENTION)
    settings: Any = torch.utils.deterministic

    def run() -> tuple[Tensor, ...]:
        fill, mode = settings.fill_uninitialized_memory, torch.get_deterministic_debug_mode()
        settings.fill_uninitialized_memory = False  # filling fresh memory is no part of the kernel's work
        torch.set_deterministic_debug_mode("error")
        try:
            return backward()
        finally:
            torch.set_deterministic_debug_mode(mode)
            settings.fill_uninitialized_memory = fill

    return run


def _cudnn_why_not(x: Inputs) -> str:
    if _sdpa_why_not(x):
        return "only dense batches under the full or the square causal mask are measured"
    return "" if find_spec("cudnn") else "not installed: pip install nvidia-cudnn-frontend"


def _cudnn_deterministic(x: Inputs) -> Backward:
    """cuDNN's deterministic backward, which only its own frontend offers."""
    cudnn = _import_cudnn()
    names = {torch.bfloat16: "BFLOAT16", torch.float16: "HALF"}
    dtype, fp32 = getattr(cudnn.data_type, names[x.q.dtype]), cudnn.data_type.FLOAT
    graph = cudnn.pygraph(io_data_type=dtype, intermediate_data_type=fp32, compute_data_type=fp32)

    def node(t: Tensor, kind: Any) -> Any:
        return graph.tensor(dim=list(t.shape), stride=list(t.stride()), data_type=kind)

    tensors = [t.transpose(1, 2) for t in (x.q, x.k, x.v, x.out, x.dout)]
    stats = x.lse[..., None]
    nodes = [*(node(t, dtype) for t in tensors), node(stats, fp32)]
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
    return import_module("cudnn")


PEERS = (
    Peer("fa4", True, partial(_fa4, deterministic=True), _fa4_why_not),
    Peer("fa4", False, partial(_fa4, deterministic=False), _fa4_why_not),
    Peer("fa2 (PyTorch)", True, _sdpa_flash_deterministic, _sdpa_why_not),
    Peer("fa2 (PyTorch)", False, partial(_sdpa, backend=SDPBackend.FLASH_ATTENTION), _sdpa_why_not),
    Peer("cudnn", True, _cudnn_deterministic, _cudnn_why_not),
    Peer("cudnn (PyTorch)", False, partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION), _sdpa_why_not),
)

"""Other libraries' backward passes, each as a call that does one whole backward on given tensors.

A peer that is not installed, or cannot run a case, says so: :attr:`Peer.why_not` gives the reasons that
are known beforehand, and whatever ``make`` or the call raises is a reason too.
"""

from __future__ import annotations

from functools import partial

from torch.nn.attention import SDPBackend

from . import cudnn, fa4, torch_sdpa
from .base import Backward, Inputs, PackedLengths, Peer

__all__ = ["PEERS", "Backward", "Inputs", "PackedLengths", "Peer"]

_FLASH, _CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION

PEERS = (
    Peer("fa4", True, partial(fa4.backward, deterministic=True), lambda x: fa4.why_not()),
    Peer("fa4", False, partial(fa4.backward, deterministic=False), lambda x: fa4.why_not()),
    Peer("fa2 (PyTorch)", True, torch_sdpa.flash_deterministic_backward, torch_sdpa.why_not),
    Peer("fa2 (PyTorch)", False, partial(torch_sdpa.backward, backend=_FLASH), torch_sdpa.why_not),
    Peer("cudnn", True, cudnn.deterministic_backward, cudnn.why_not),
    Peer("cudnn (PyTorch)", False, partial(torch_sdpa.backward, backend=_CUDNN), torch_sdpa.why_not),
)
"""Every mode that is measured beside ours."""

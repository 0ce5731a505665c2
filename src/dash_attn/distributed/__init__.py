"""Attention of sequences that are spread over several GPUs, with the bytes of one GPU.

>>> from dash_attn.distributed import attention, shard, unshard  # doctest: +SKIP
>>> q, k, v = (shard(x, group) for x in (q, k, v))               # doctest: +SKIP
>>> out = attention(q, k, v, group=group, causal=True)           # doctest: +SKIP

:func:`context` makes models of other libraries do so.
"""

from ..schedule.sharing import LAYOUTS, MODES
from .context import context
from .functional import attention, attention_varlen
from .rows import positions, shard, unshard
from .windows import transport

__all__ = [
    "LAYOUTS", "MODES", "attention", "attention_varlen", "context", "positions", "shard", "transport",
    "unshard",
]  # fmt: skip

"""Attention of sequences that are spread over several GPUs, with the bytes of one GPU.

>>> from dash_attn.distributed import attention, shard, unshard  # doctest: +SKIP
>>> q, k, v = (shard(x, group) for x in (q, k, v))               # doctest: +SKIP
>>> out = attention(q, k, v, group=group, causal=True)           # doctest: +SKIP
"""

from ..schedule.sharing import LAYOUTS
from .functional import MODES, attention, attention_varlen
from .rows import positions, shard, unshard

__all__ = ["LAYOUTS", "MODES", "attention", "attention_varlen", "positions", "shard", "unshard"]
